"""Models that users exported from frameworks: the outputs are the frameworks', or the device refuses as is known."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from typing import Any

import pytest
from model_corpus import FOLDER, UserModel, corpus

import rlx_ort
from rlx_ort import Device, PlacementError, supports_graph

BOUND = 1e-4
REFUSALS = tomllib.loads((FOLDER / "refusals.toml").read_text(encoding="utf-8"))["refusals"]
SLOW = ("webgpu",)
"""Devices in software, on which the first run of each size takes seconds.

One export of an architecture runs there, at another size as well if more than the batch is free."""
MODELS = pytest.mark.parametrize("model", corpus(), ids=lambda model: model.name)


def refusal(device: Device, name: str) -> dict[str, Any] | None:
    """Return what a device is known not to take of a model."""
    listed = (entry for entry in REFUSALS if entry["device"] == device.kind)
    return next((entry for entry in listed if any(fnmatch(name, each) for each in entry["models"])), None)


def newest(device: Device, architecture: str) -> UserModel:
    """Return the last export of an architecture that a device takes."""
    exports = [each for each in corpus() if each.architecture == architecture]
    return [each for each in exports if refusal(device, each.name) is None][-1]


def check(model: UserModel, run: Any, cases: int = 2) -> None:
    """Compare a function of inputs with the framework, at batch 1 and at another batch and length."""
    for case, sizes in enumerate(model.cases[:cases]):
        for found, expected in zip(run(model.feeds(sizes)), model.expected(case), strict=True):
            assert expected.error(found) < BOUND, sizes


@MODELS
def test_a_named_device_gives_what_the_framework_gives(device: Device, model: UserModel) -> None:
    """Every node is on the device; or it refuses for the operators that are known, as its capability says."""
    known = refusal(device, model.name)
    with rlx_ort.load(model.model()) as runner:
        assert supports_graph(device, runner.graph) == (known is None)
        if known is None and (device.kind not in SLOW or model == newest(device, model.architecture)):
            once = device.kind in SLOW and list(model.cases[0]) == ["batch"]
            check(model, lambda feeds: runner.run(device, feeds), 1 if once else 2)
            return
        if known is None:
            assert not runner.compile(device).placement.strays
            return
        with pytest.raises(PlacementError) as refused:
            runner.run(device, model.feeds(model.cases[0]))
    assert {node.op_type for node in refused.value.placement.strays} & set(known["operators"]), str(refused.value)


@MODELS
def test_the_device_that_is_chosen_gives_what_the_framework_gives(model: UserModel) -> None:
    """Whatever is predicted to be fastest here."""
    with rlx_ort.load(model.model()) as runner:
        check(model, runner.run_fastest)
