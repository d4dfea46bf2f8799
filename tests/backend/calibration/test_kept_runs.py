"""The cost model chooses for the kept runs as well as when it was merged; nothing is measured.

`tests/data/replay/` has the rows of six calibrations of an H200 with 16 cores, and what up to 78 graphs took there on
each device; `graphs.json.gz` has the graphs by name, without their weights.
"""

from __future__ import annotations

import functools
import gzip
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rlx_ort import CompileOptions, Device, Graph
from rlx_ort.calibration.features import Workload, workload_of
from rlx_ort.calibration.model import MeasuredCostModel
from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.ir.serde import from_json
from rlx_ort.providers import cpu
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.hardware import CoreShare
from rlx_ort.providers.registry import provider_of
from rlx_ort.selection.cost import BackendCostModel, ProfileCostModel, total_ns
from rlx_ort.selection.support import model_for

KEPT = Path(__file__).parents[2] / "data" / "replay"
CORES = 16  # of the machines of the kept runs
WIDTHS = {"AddRow": (256,), "TransposeRows": (64,)}  # of their rows, which are kept without one


@functools.cache
def graphs() -> dict[str, Graph]:
    """Return the graphs of the kept runs by name."""
    texts = json.loads(gzip.decompress((KEPT / "graphs.json.gz").read_bytes()))
    return {name: from_json(json.dumps(document)) for name, document in texts.items()}


@functools.cache
def workload(name: str, label: str) -> Workload | None:
    """Return the work of a graph as a device gets it, or None where it cannot run."""
    provider, device = provider_of(Device(label)), Device(label)
    exported = None if provider is None else model_for(provider, graphs()[name], CompileOptions().on(device))
    return None if exported is None else workload_of(exported)


def shipped(label: str) -> CostProfile:
    """Return a device's figures without a calibration; those of the CPU for the machine of the runs."""
    provider = provider_of(Device(label))
    with mock.patch.object(cpu, "core_share", return_value=CoreShare(CORES, CORES, CORES, None)):
        profile = None if provider is None else provider.default_profile(Device(label))
    assert profile is not None  # the devices of the kept runs have one
    return profile


def measured_costs(run: Mapping[str, Any]) -> dict[str, BackendCostModel]:
    """Return the cost model of each device after a run's calibration."""
    costs: dict[str, BackendCostModel] = {}
    for label, rows in run["rows"].items():
        kept = tuple(Row(name, (*size, *WIDTHS.get(name, ())), ns, dtype) for name, size, dtype, ns in rows)
        profile = CalibrationProfile(ProfileKey(label, f"{label}EP", "kept"), kept)
        costs[label] = MeasuredCostModel(Device(label), profile, shipped=shipped(label))
    return costs


def shipped_costs(run: Mapping[str, Any]) -> dict[str, BackendCostModel]:
    """Return the cost model of each device without a calibration."""
    return {label: ProfileCostModel(Device(label), shipped(label)) for label in run["rows"]}


def predictions(
    costs: Mapping[str, BackendCostModel], run: Mapping[str, Any]
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Return, for each graph of a run, the predicted and the measured nanoseconds by device."""
    made = []
    for case in run["cases"]:
        predicted = {
            label: total_ns(work, cost if work.host_decides else getattr(cost, "replayed", cost))
            for label, cost in costs.items()
            if (work := workload(case["name"], label)) is not None
        }
        made.append((predicted, case["measured"]))
    return made


@pytest.mark.parametrize(
    ("costs", "regret", "error", "largest"), [(measured_costs, 1.023, 0.125, 0.44), (shipped_costs, 1.11, 0.34, 1.6)]
)
def test_the_model_chooses_for_the_kept_runs_within_the_limits(
    costs: Callable[[Mapping[str, Any]], dict[str, BackendCostModel]], regret: float, error: float, largest: float
) -> None:
    """The limits are the figures with which the model was merged, and what they vary between runs.

    The errors leave out what is shipped for WebGPU: it depends on the adapter of the test's machine.
    """
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(KEPT.glob("*.json"))]
    pairs = [pair for run in runs for pair in predictions(costs(run), run)]
    errors = sorted(
        abs(predicted[label] / ns - 1)
        for predicted, measured in pairs
        for label, ns in measured.items()
        if costs is measured_costs or label != "webgpu"
    )
    regrets = []
    for predicted, measured in (pair for pair in pairs if len(pair[1]) > 1):
        chosen = min(predicted, key=lambda label: predicted[label])
        regrets.append(measured.get(chosen, max(measured.values())) / min(measured.values()))
    assert len(regrets) == 422
    assert statistics.geometric_mean(regrets) <= regret
    assert statistics.median(errors) <= error
    assert errors[int(0.9 * (len(errors) - 1))] <= largest
