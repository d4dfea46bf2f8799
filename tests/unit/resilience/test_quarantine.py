"""A device that failed is out for longer and longer, and comes back when it is right again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, until

from rlx_ort import CancelToken, Device, DevicePolicy, Graph, Resilience, limited
from rlx_ort.errors import CancelledRunError, DeviceFallbackError, DeviceUnavailableError, EngineError, RunError
from rlx_ort.resilience.quarantine import HealthState, Quarantine

CUDA = Device.CUDA
X = np.arange(4, dtype=np.float32)
INPUTS = {"x": X}


def fail_once(runner: Any, fault: Any) -> None:
    """Let the device fail one run."""
    runner.run_fastest(INPUTS)
    fault.dead = LOST
    runner.run_fastest(INPUTS)


def state(runner: Any) -> HealthState:
    """Return the state of the faulty device."""
    found: HealthState = runner._failover.quarantine.health(Device("fault")).state
    return found


def recovered(runner: Any, fault: Any, clock: Any, factor: float = 1.0, open_delay_s: float = 0.0) -> None:
    """Let the device fail and come back with results times a factor; the next run begins its check."""
    fail_once(runner, fault)
    fault.recover()
    fault.factor, fault.open_delay_s = factor, open_delay_s
    clock.move(1.0)


@pytest.fixture
def quarantine(clock: Any) -> Quarantine:
    """Return a quarantine by the clock of the test."""
    return Quarantine(Resilience(backoff_s=1.0), clock)


def test_a_device_in_quarantine_is_not_run(make: Any, fault: Any) -> None:
    """Later runs cost nothing on it."""
    runner = make()
    fail_once(runner, fault)
    before = fault.runs
    for _ in range(10):
        runner.run_fastest(INPUTS)
    assert fault.runs == before


def test_health_has_state_reason_and_next_check(make: Any, fault: Any, clock: Any) -> None:
    """The best device comes first, quarantined as it is."""
    runner = make(backoff_s=4.0)
    fail_once(runner, fault)
    clock.move(1.0)
    rows = {health.device.label: health for health in runner.health()}
    found = rows["fault"]
    assert (found.state, found.failures, found.since_s, found.next_try_s) == (HealthState.QUARANTINED, 1, 1.0, 3.0)
    assert found.reason.startswith("driver error: CUDA failure 719")
    assert rows["cpu"].state is HealthState.READY


def test_a_device_that_recovers_is_used_again_after_its_back_off(make: Any, fault: Any, clock: Any) -> None:
    """The run after the back-off starts the check, and the one after the check goes to the device."""
    runner = make(backoff_s=2.0)
    fail_once(runner, fault)
    fault.recover()
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "cpu"
    clock.move(2.0)
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "cpu"
    until(lambda: state(runner) is HealthState.READY)
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "fault"


def test_each_failed_check_doubles_the_back_off(make: Any, fault: Any, clock: Any) -> None:
    """1, 2, 4 seconds, up to the limit."""
    runner = make(backoff_s=1.0, backoff_max_s=3.0)
    fail_once(runner, fault)
    waits = []
    for failures in (1, 2, 3, 4):
        health = runner._failover.quarantine.health(Device("fault"))
        assert health.failures == failures
        waits.append(health.next_try_s)
        clock.move(health.next_try_s)
        runner.run_fastest(INPUTS)
        until(lambda: state(runner) is HealthState.QUARANTINED)
    assert waits == [1.0, 2.0, 3.0, 3.0]


def test_the_check_begins_with_a_probe(make: Any, fault: Any, clock: Any) -> None:
    """A device that cannot run one node is not given the graph."""
    runner = make(backoff_s=1.0)
    fail_once(runner, fault)
    probes, opened = fault.probes, fault.opened
    clock.move(1.0)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.QUARANTINED)
    assert (fault.probes, fault.opened) == (probes + 1, opened)


@pytest.mark.parametrize("factor", [1.01, float("nan")], ids=["1 % off", "NaN"])
def test_a_device_with_wrong_results_stays_out(factor: float, make: Any, fault: Any, clock: Any) -> None:
    """The reason has the figures."""
    runner = make(backoff_s=1.0)
    recovered(runner, fault, clock, factor)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.QUARANTINED)
    reason = runner._failover.quarantine.reason(Device("fault"))
    assert "differ from those of CPU: output 0" in reason
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "cpu"


def test_without_parity_the_probe_is_enough(make: Any, fault: Any, clock: Any) -> None:
    """For graphs whose results are random."""
    runner = make(backoff_s=1.0, parity=False)
    recovered(runner, fault, clock, 1.5)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.READY)


def test_the_caller_may_write_to_arrays_while_a_check_runs(make: Any, fault: Any, clock: Any) -> None:
    """The check has copies of the inputs and of the outputs."""
    runner = make(backoff_s=1.0)
    recovered(runner, fault, clock, open_delay_s=0.05)
    x = X.copy()
    outputs = runner.run_fastest({"x": x})
    x[:] = 7
    outputs[0][:] = 9
    until(lambda: state(runner) in (HealthState.READY, HealthState.QUARANTINED))
    assert state(runner) is HealthState.READY


def test_new_weights_during_a_check_do_not_count_against_the_device(make: Any, fault: Any, clock: Any) -> None:
    """The check is made again after the same back-off."""
    graph = Graph("weighted")
    graph.outputs = [graph.input("x", [4]) + graph.param("w", [4], data=X)]
    runner = make(graph, backoff_s=1.0)
    recovered(runner, fault, clock)
    begun, go_on = threading.Event(), threading.Event()
    fault.script = lambda _: begun.set() or (go_on.wait(10.0) and None)
    runner.run_fastest(INPUTS)
    assert begun.wait(10.0)
    runner.set_param("w", X + 1)
    go_on.set()
    until(lambda: state(runner) is HealthState.QUARANTINED)
    health = runner._failover.quarantine.health(Device("fault"))
    assert (health.failures, health.next_try_s) == (1, 1.0)


def test_all_runs_that_fail_in_one_outage_count_once(clock: Any, quarantine: Quarantine) -> None:
    """Sixteen threads that meet a lost device do not make it wait 2^16 times as long."""
    assert [quarantine.fail(CUDA, "lost", clock.ns) for _ in range(16)] == [True] + [False] * 15
    assert quarantine.health(CUDA).failures == 1


def test_a_run_that_began_before_the_re_admission_does_not_count(clock: Any, quarantine: Quarantine) -> None:
    """Its failure is that of the outage before."""
    began = clock.ns
    clock.move(0.1)
    quarantine.fail(CUDA, "lost", clock.ns)
    quarantine.readmit(CUDA)
    assert not quarantine.fail(CUDA, "late", began)
    assert not quarantine.is_out(CUDA)


def test_a_device_that_flaps_waits_longer_each_time(clock: Any, quarantine: Quarantine) -> None:
    """Re-admission alone does not make its record good."""
    waits = []
    for _ in range(4):
        clock.move(0.5)
        quarantine.fail(CUDA, "lost", clock.ns)
        waits.append(quarantine.health(CUDA).next_try_s)
        clock.move(waits[-1])
        assert quarantine.claim() == CUDA
        quarantine.readmit(CUDA)
    assert waits == [1.0, 2.0, 4.0, 8.0]


def test_a_device_that_was_well_for_long_begins_anew(clock: Any, quarantine: Quarantine) -> None:
    """Ten times its last back-off is long."""
    quarantine.fail(CUDA, "lost", clock.ns)
    quarantine.readmit(CUDA)
    clock.move(10.1)
    quarantine.fail(CUDA, "lost again", clock.ns)
    assert quarantine.health(CUDA).failures == 1


def test_an_opening_or_check_without_a_result_ends_unless_another_has_begun(clock: Any, quarantine: Quarantine) -> None:
    """A device does not stay out because a thread was stopped, or began for sessions that were closed already."""
    first, second = object(), object()
    assert quarantine.set_opening(CUDA, first)
    quarantine.abandon_openings()
    assert quarantine.set_opening(CUDA, second)
    quarantine.give_up(CUDA, first)
    assert quarantine.is_opening(CUDA)
    quarantine.give_up(CUDA, second)
    assert not quarantine.is_out(CUDA)
    quarantine.fail(CUDA, "lost", clock.ns)
    clock.move(1.0)
    assert quarantine.claim(first) == CUDA
    quarantine.give_up(CUDA, first)
    assert quarantine.health(CUDA).next_try_s == 1.0


def test_a_check_goes_on_when_the_run_that_found_it_due_is_stopped(make: Any, fault: Any, clock: Any) -> None:
    """A limit around several runs of the caller ends none of the runner's own."""
    runner = make(backoff_s=1.0)
    recovered(runner, fault, clock)
    begun, go_on = threading.Event(), threading.Event()
    fault.script = lambda _: begun.set() or (go_on.wait(10.0) and None)

    def several() -> None:
        runner.run_fastest(INPUTS)
        go_on.wait(10.0)

    token = CancelToken()
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(limited, several, cancel=token, grace_s=0.01)
        assert begun.wait(10.0)
        token.cancel()
        assert isinstance(stopped.exception(10.0), CancelledRunError)
    go_on.set()
    until(lambda: state(runner) is HealthState.READY)


def test_a_device_that_was_found_wrong_stays_out_although_the_sessions_were_closed(
    make: Any, fault: Any, clock: Any
) -> None:
    """`invalidate_cache` during the check makes no right result of a wrong one."""
    runner = make(backoff_s=1.0)
    recovered(runner, fault, clock, 1.01)
    fault.script = lambda _: runner.invalidate_cache()
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.QUARANTINED)
    found = runner._failover.quarantine
    assert "differ from those of CPU" in found.reason(Device("fault"))
    assert not found.is_last_resort(Device("fault"))


def test_a_device_that_could_not_be_probed_at_first_is_used_once_it_works(make: Any, fault: Any, clock: Any) -> None:
    """The registry takes over that the check has found it working."""
    runner = make(backoff_s=1.0)
    fault.dead = LOST
    runner.rank()
    with pytest.raises(DeviceUnavailableError):
        runner.run("fault", INPUTS)
    fault.recover()
    clock.move(1.0)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.READY)
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "fault"


def test_only_one_check_runs_at_a_time(clock: Any, quarantine: Quarantine) -> None:
    """A device on trial is not claimed again."""
    quarantine.fail(CUDA, "lost", clock.ns)
    assert quarantine.claim() is None
    clock.move(1.0)
    assert (quarantine.claim(), quarantine.claim()) == (CUDA, None)


def test_the_last_device_is_tried_although_it_is_out(make: Any, fault: Any) -> None:
    """An automatic choice answers while one device can, and an answer lets it in again."""
    runner = make()
    runner.set_policy(DevicePolicy.only(["fault"]))
    fault.fail_at = {1: EngineError(LOST)}
    with pytest.raises(EngineError):
        runner.run_fastest(INPUTS)
    assert state(runner) is HealthState.QUARANTINED
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], X + X)
    assert state(runner) is HealthState.READY


def test_a_device_with_wrong_results_is_no_last_resort(make: Any, fault: Any, clock: Any) -> None:
    """No answer is better than a wrong one."""
    from rlx_ort.providers import registry

    runner = make(backoff_s=1.0)
    recovered(runner, fault, clock, 1.01)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.QUARANTINED)
    cpu: Any = registry.default_registry().for_device(Device.CPU)
    cpu.run_failure = "bad_alloc"
    for _ in range(2):
        with pytest.raises((DeviceFallbackError, RunError)):
            runner.run_fastest(INPUTS)


def test_the_cpu_is_a_last_resort_although_a_run_on_it_does_not_come_back(quarantine: Quarantine) -> None:
    """Its other sessions work; an accelerator may hang as a whole."""
    for device in (Device.CPU, CUDA):
        quarantine.enter_stuck(device, "it did not return")
        quarantine.readmit(device)
        assert quarantine.is_out(device)
    assert quarantine.is_last_resort(Device.CPU)
    assert not quarantine.is_last_resort(CUDA)
