"""While a device opens in the background another one answers, and it is used once its results are right."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, until

from rlx_ort import CompileOptions, Device, DeviceHealth, DevicePolicy, HealthState, Precision

X = np.arange(4, dtype=np.float32)
INPUTS = {"x": X}


@pytest.fixture
def runner(make: Any, fault: Any) -> Any:
    """Return a runner with a bridge whose best device takes 20 seconds to open."""
    fault.open_delay_s = 20.0
    made = make(bridge=True, backoff_s=1.0)
    yield made
    fault.open_now.set()
    until(lambda: not bridges())


def bridges() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rlx_ort-bridge"]


def health(runner: Any) -> DeviceHealth:
    found: DeviceHealth = runner._failover.quarantine.health(Device("fault"))
    return found


def answered_by(runner: Any, inputs: Any = None) -> str:
    inputs = inputs or INPUTS
    np.testing.assert_array_equal(runner.run_fastest(inputs)[0], inputs["x"] * 2)
    label: str = runner.last_run.device.label
    return label


def opening(runner: Any) -> None:
    """Make the first run, and wait until the device is chosen and opens."""
    assert answered_by(runner) == "cpu"
    until(lambda: health(runner).state is HealthState.OPENING)


def test_the_cpu_answers_while_the_best_device_opens(runner: Any) -> None:
    """From the first run on; and the device that opens is in the health."""
    begun = time.perf_counter()
    opening(runner)
    for _ in range(20):
        assert answered_by(runner) == "cpu"
    assert time.perf_counter() - begun < 10.0
    assert [(row.device.label, row.state.value) for row in runner.health()] == [("fault", "opening"), ("cpu", "ready")]


def test_the_swap_follows_as_soon_as_the_device_is_open_and_right(runner: Any, fault: Any) -> None:
    """The next run goes there, within a second; no run has waited."""
    opening(runner)
    fault.open_now.set()
    until(lambda: health(runner).state is HealthState.READY)
    assert answered_by(runner) == "fault"
    assert (fault.opened, fault.runs) == (1, 2)


def test_a_device_that_is_wrong_by_one_percent_is_never_used(runner: Any, fault: Any, clock: Any) -> None:
    """The health has the figures, and later checks refuse it too."""
    fault.factor = 1.01
    opening(runner)
    fault.open_now.set()
    for _ in range(3):
        until(lambda: health(runner).state is HealthState.QUARANTINED)
        assert health(runner).reason.startswith("check failed: its results differ from those of CPU: output 0: differs")
        clock.move(health(runner).next_try_s or 0.0)
        assert answered_by(runner) == "cpu"
    until(lambda: health(runner).state is HealthState.QUARANTINED)

    until(lambda: fault.closed == fault.opened)


def test_the_last_inputs_are_compared(runner: Any, fault: Any, clock: Any) -> None:
    """Those of a run while the device opened, not those of the first."""
    opening(runner)
    clock.move(2.0)
    answered_by(runner, {"x": X + 5})
    fault.open_now.set()
    until(lambda: health(runner).state is HealthState.READY)
    np.testing.assert_array_equal(fault.fed["x"], X + 5)


def test_a_device_that_does_not_open_is_quarantined(runner: Any, fault: Any) -> None:
    """With the reason, and the CPU goes on."""
    opening(runner)
    fault.dead = LOST
    fault.open_now.set()
    until(lambda: health(runner).state is HealthState.QUARANTINED)
    assert LOST in health(runner).reason
    assert answered_by(runner) == "cpu"


def test_a_runner_that_is_closed_leaves_no_session_and_no_thread(runner: Any, fault: Any) -> None:
    """`close` does not wait for the device; what it opens is closed by the thread that opened it, which ends."""
    opening(runner)
    begun = time.perf_counter()
    runner.close()
    assert time.perf_counter() - begun < 5.0
    assert health(runner).state is HealthState.READY
    fault.open_now.set()
    until(lambda: not bridges())
    assert fault.opened == fault.closed
    assert health(runner).state is HealthState.READY


def test_a_runner_is_usable_after_it_was_closed_while_a_device_opened(runner: Any, fault: Any) -> None:
    """The bridge begins anew."""
    opening(runner)
    runner.close()
    opening(runner)
    fault.open_now.set()
    until(lambda: health(runner).state is HealthState.READY and not bridges())
    assert answered_by(runner) == "fault"


def test_sixteen_first_runs_open_the_device_once(runner: Any, fault: Any) -> None:
    """Whichever is first begins it."""
    earlier = {*bridges()}  # of another test, about to end
    threads = [threading.Thread(target=answered_by, args=(runner,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: health(runner).state is HealthState.OPENING)
    assert len({*bridges()} - earlier) == 1
    fault.open_now.set()
    until(lambda: health(runner).state is HealthState.READY)
    assert fault.opened == 1


def test_a_session_that_is_open_is_used_at_once(runner: Any, fault: Any) -> None:
    """Whoever opened it."""
    fault.open_now.set()
    runner.compile_fastest()
    assert answered_by(runner) == "fault"


def test_a_device_whose_session_was_dropped_opens_behind_another_one(runner: Any, fault: Any) -> None:
    """The choice is known by then."""
    fault.open_now.set()
    runner.compile_fastest()
    runner._sessions.drop(Device("fault"))
    fault.open_now.clear()
    assert answered_by(runner) == "cpu"
    assert health(runner).state is HealthState.OPENING


def test_the_device_that_opens_answers_when_no_other_can(runner: Any, fault: Any) -> None:
    """The run waits for it then."""
    from rlx_ort.providers import registry

    opening(runner)
    cpu: Any = registry.default_registry().for_device(Device.CPU)
    cpu.run_failure = "bad_alloc"
    fault.open_now.set()
    assert answered_by(runner) == "fault"


def test_without_the_cpu_nothing_bridges(make: Any, fault: Any) -> None:
    """A denied device never answers."""
    runner = make(bridge=True)
    runner.set_policy(DevicePolicy().with_deny(["cpu"]))
    assert answered_by(runner) == "fault"


@pytest.mark.parametrize("policy", [DevicePolicy().with_adaptive_pick(), DevicePolicy().with_benchmark_pick(2)])
def test_a_choice_that_measures_is_made_in_the_background(policy: DevicePolicy, runner: Any, fault: Any) -> None:
    """The first run does not wait for the race, which opens the device."""
    runner.set_policy(policy)
    np.testing.assert_array_equal(runner.run_chosen(INPUTS)[1][0], X * 2)
    assert runner.last_run.device == Device.CPU
    fault.open_now.set()
    until(lambda: not bridges())
    runner.run_chosen(INPUTS)
    assert fault.runs > 0


def test_handles_bound_on_the_cpu_keep_it_from_bridging(runner: Any, fault: Any) -> None:
    """Their state would change the results."""
    runner.compile("cpu").bind_handle("x", X)
    fault.open_now.set()
    assert answered_by(runner) == "fault"


def test_arithmetic_that_rounds_more_is_allowed_more(make: Any, fault: Any) -> None:
    """A device that was asked for f16 may be 0.5 % off, and is refused in f32."""
    for options, wanted in ((CompileOptions(precisions={"fault": Precision.F16}), "ready"), (None, "quarantined")):
        runner = make(bridge=True, options=options)
        fault.factor = 1.005
        assert answered_by(runner) == "cpu"
        until(lambda: fault.opened > 0 and not bridges())
        assert health(runner).state.value == wanted
        fault.opened = 0


def test_graphs_that_draw_random_numbers_are_not_compared(make: Any, fault: Any) -> None:
    """Every run has others."""
    import onnx.parser

    from rlx_ort.converters.from_onnx import from_onnx

    text = """<ir_version: 8, opset_import: ["": 18]>
    noise (float[4] x) => (float[4] y) { noise = RandomNormalLike (x)  y = Add (x, noise) }"""
    runner = make(from_onnx(onnx.parser.parse_model(text)), bridge=True)
    fault.factor = 2.0
    runner.run_fastest(INPUTS)
    until(lambda: fault.opened > 0 and not bridges())
    assert health(runner).state is HealthState.READY
