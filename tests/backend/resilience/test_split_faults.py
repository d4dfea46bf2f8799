"""A stage's device that fails: an error that names the stage, or with `resilience` another plan that answers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, OUT_OF_MEMORY, FaultProvider

from rlx_ort import (
    CompileOptions,
    Device,
    EngineError,
    Graph,
    GraphDevices,
    Resilience,
    RlxError,
    StageError,
)
from rlx_ort.options.split_plan import SplitPlan, Stage

SOURCE = np.random.default_rng(11)
WEIGHTS = [SOURCE.normal(size=(8, 8)).astype(np.float32) for _ in range(3)]
X = SOURCE.normal(size=(2, 8)).astype(np.float32)
ALL = ("cpu", "fault")
FAULTS = 2000


def layers() -> Graph:
    """Return three products."""
    graph = Graph("layers")
    value = graph.input("x", ["rows", 8])
    for number, weight in enumerate(WEIGHTS):
        value = graph.matmul(value, graph.param(f"w{number}", data=weight, shape=weight.shape), name=f"layer{number}")
    graph.outputs = [value]
    return graph


def expected(x: Any) -> Any:
    """Return the result in float64."""
    return np.linalg.multi_dot([np.asarray(x, np.float64), *(weight.astype(np.float64) for weight in WEIGHTS)])


def split(
    resilience: Resilience | None = None, devices: tuple[str, str] = ("cpu", "fault"), room: tuple[str, ...] = ALL
) -> GraphDevices:
    """Return a runner of two stages, of which one is on the device with faults."""
    stages = [Stage(Device(device), last) for device, last in zip(devices, ("layer0", "layer2"), strict=True)]
    plan = SplitPlan(tuple(stages), tuple((Device(device), 1 << 40) for device in room))
    return GraphDevices(layers(), options=CompileOptions(split=plan), resilience=resilience)


def test_an_error_names_the_stage_and_its_device(fault: FaultProvider) -> None:
    """The next run is an ordinary one."""
    runner = split()
    np.testing.assert_allclose(runner(x=X)[0], expected(X), rtol=1e-4)
    fault.fail_at = {fault.runs + 1: EngineError(LOST)}
    with pytest.raises(StageError, match=r"stage 2 of 2, on Fault: .*719") as caught:
        runner(x=X)
    assert caught.value.device == Device("fault")
    np.testing.assert_allclose(runner(x=X)[0], expected(X), rtol=1e-4)


def test_a_stage_that_cannot_be_opened_is_named(fault: FaultProvider) -> None:
    """With the reason."""
    fault.dead = LOST
    with pytest.raises(RlxError, match=r"719"):
        split()(x=X)


def test_wrong_inputs_are_no_fault_of_a_stage(fault: FaultProvider) -> None:
    """They raise what they raise without a plan."""
    with pytest.raises(ValueError, match="input 'x'"):
        split()(x=np.ones((2, 7), np.float32))


@pytest.mark.parametrize("devices", [("cpu", "fault"), ("fault", "cpu")], ids=["second stage", "first stage"])
def test_with_resilience_another_plan_answers(fault: FaultProvider, devices: tuple[str, str]) -> None:
    """Without the device that failed, within the budgets of the plan; the failure is on record."""
    runner = split(Resilience(bridge=False), devices)
    np.testing.assert_allclose(runner(x=X)[0], expected(X), rtol=1e-4)
    fault.dead = LOST
    outputs = runner(x=X)
    np.testing.assert_allclose(outputs, [expected(X)], rtol=1e-4)
    assert outputs.device == Device.CPU
    assert runner.last_run is not None
    assert [attempt.device.label for attempt in runner.last_run.attempts] == ["fault"]


def test_without_room_elsewhere_the_error_is_that_of_the_device(fault: FaultProvider) -> None:
    """There is no other plan within the budgets."""
    runner = split(Resilience(bridge=False), room=("fault",))
    fault.fail_at = {1: EngineError(LOST)}
    with pytest.raises(RlxError, match="719"):
        runner(x=X)


def test_no_answer_is_wrong_beside_faults(fault: FaultProvider) -> None:
    """Whatever fails, and when; the device comes back in between."""
    chance, failed = random.Random(3), 0

    def script(_: int) -> Exception | None:
        nonlocal failed
        if chance.random() < 0.5:
            return None
        failed += 1
        return EngineError(chance.choice([LOST, OUT_OF_MEMORY.format(1 << 40), "something else"]))

    fault.script = script
    runner = split(Resilience(bridge=False, backoff_s=0.001, backoff_max_s=0.001))
    asked = 0
    while failed < FAULTS:
        asked += 1
        x = SOURCE.normal(size=(1 + asked % 3, 8)).astype(np.float32)
        np.testing.assert_allclose(runner(x=x)[0], expected(x), rtol=1e-3, atol=1e-4)
        runner.readmit("fault")
    assert asked >= FAULTS / 4
