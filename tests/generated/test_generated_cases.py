"""Generated graphs run right, or are refused, in every way of running; and the generator finds the faults it is for.

`scripts/generate_cases.py` runs them for longer.
"""

from __future__ import annotations

import os
import time

import pytest
from generated.faults import FAULTS, found_at
from generated.runs import KNOWN, Report, kept_seeds, never_equal, run_cases

from rlx_ort.device import Device

SECONDS = {"cpu": 12.0, "webgpu": 12.0}
WAYS_OF_A_KEPT_SEED = 10
JUDGED = {
    "webgpu": 0.25,
    "openvino": 0.2,
    "qnn": 0.1,
}  # many kernels and dtypes are not there; their graphs are refused
FEW_SEEDS = {"openvino": 6, "qnn": 6}  # devices that compile each graph
DAY_S, SEEDS_A_DAY = 86_400, 1_000_000
FRESH = "GENERATED_FRESH"
FAULT_S = 60.0
FIRST = 20
NEEDS_A_LIBRARY = ["Custom"]  # of custom ops


def assert_clean(report: Report, judged_at_least: float) -> None:
    assert not report.failures, str(report)
    assert report.counts["equal"] > report.cases * judged_at_least, str(report)


@pytest.mark.slow
def test_fresh_graphs_run_right_in_every_way(device: Device) -> None:
    """The seeds of the day, for a bounded time: no wrong answer, no crash, no error without a type."""
    if device.kind in FEW_SEEDS:
        pytest.skip("a graph takes seconds; run scripts/generate_cases.py for longer")
    first = int(time.time() // DAY_S) * SEEDS_A_DAY
    seeds, seconds = range(first, first + SEEDS_A_DAY), SECONDS.get(device.kind, 16.0)
    report = run_cases(device.label, seeds, seconds=seconds)
    if report.failures and os.environ.get(FRESH) == "report":
        pytest.xfail(str(report))
    assert_clean(report, JUDGED.get(device.kind, 0.5))


@pytest.mark.slow
def test_kept_graphs_run_right_in_every_way(device: Device) -> None:
    """Kept seeds stay right, and on the CPU they cover every op, dtype and way."""
    seeds = kept_seeds()[: FEW_SEEDS.get(device.kind)]
    report = run_cases(device.label, seeds, most=WAYS_OF_A_KEPT_SEED)
    assert report.graphs == len(seeds)
    assert_clean(report, JUDGED.get(device.kind, 0.5))
    if device == Device.CPU:
        assert never_equal(report.covered) == {"op kinds": NEEDS_A_LIBRARY, "dtypes": [], "ways": []}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """A graph of the first ones is wrong with the fault, and right without it, in the same way."""
    assert found_at(fault, FIRST, FAULT_S, [FAULTS[fault][1]]) is not None


def test_a_known_failure_has_a_reason() -> None:
    """Nothing is excused without a word."""
    assert all(entry["reason"] and entry["devices"] and entry["verdicts"] for entry in KNOWN)
