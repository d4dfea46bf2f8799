"""A run that fails because of its device is answered by another one; what is the caller's fault is raised."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, OUT_OF_MEMORY, doubled, until

from rlx_ort import CancelToken, Device, DevicePolicy, GraphDevices, Resilience
from rlx_ort.errors import (
    CancelledRunError,
    DeviceFallbackError,
    EngineError,
    InputError,
    NoViableDeviceError,
    RunError,
    StateLossError,
    TimeLimitError,
)
from rlx_ort.providers.engine.binding import DeviceTensor

CPU, FAULT = Device.CPU, "fault"
X = np.arange(4, dtype=np.float32)
INPUTS = {"x": X}


def right(outputs: list[Any]) -> bool:
    return bool(np.array_equal(outputs[0], X + X))


def test_a_run_that_runs_out_of_memory_is_answered_by_the_next_device(make: Any, fault: Any) -> None:
    """The caller gets a result, and `last_run` names the device that failed and the reason."""
    fault.memory_bytes = 8
    runner = make()
    assert right(runner.run_fastest(INPUTS))
    (attempt,) = runner.last_run.attempts
    assert (runner.last_run.device, attempt.device.label) == (CPU, FAULT)
    assert attempt.reason == "out of memory: " + OUT_OF_MEMORY.format(16)


def test_a_device_that_fails_after_many_good_runs_is_left(make: Any, fault: Any) -> None:
    """The short way to the device that is kept between runs ends with its first failure."""
    fault.fail_at = {5: EngineError(LOST)}
    runner = make()
    for number in range(1, 8):
        assert right(runner.run_fastest(INPUTS))
        assert runner.last_run.device.label == (FAULT if number < 5 else "cpu")


@pytest.mark.parametrize(
    "run",
    [
        lambda runner: runner.run_fastest(INPUTS),
        lambda runner: runner.run_resolved(INPUTS),
        lambda runner: runner.run_resolved_with_inputs(INPUTS),
        lambda runner: runner.run_chosen(INPUTS)[1],
    ],
)
def test_every_automatic_run_fails_over(run: Any, make: Any, fault: Any) -> None:
    """Whatever makes the choice."""
    fault.dead = LOST
    runner = make()
    fault.dead = ""
    runner.run_fastest(INPUTS)
    fault.dead = LOST
    assert right(run(runner))
    assert runner.last_run.device == CPU


@pytest.mark.parametrize("runs", [1, 3], ids=["first run", "kept choice"])
def test_a_device_that_fails_another_run_meanwhile_is_not_believed(runs: int, make: Any, fault: Any) -> None:
    """The run in progress is repeated elsewhere: a device may come back with wrong memory."""
    runner = make()
    for _ in range(runs):
        runner.run_fastest(INPUTS)
    inside, go_on = threading.Event(), threading.Event()

    def script(number: int) -> EngineError | None:
        if number == runs + 1:
            inside.set()
            go_on.wait(10.0)
            return None
        return EngineError(LOST)

    fault.script = script
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(runner.run_fastest, INPUTS)
        assert inside.wait(10.0)
        assert right(runner.run_fastest(INPUTS))  # fails, and another device answers
        fault.factor = 3.0
        go_on.set()
        assert right(running.result(10.0))
    assert runner._failover.quarantine.is_out(Device(FAULT))  # which no run in progress ends


def test_an_answer_in_doubt_is_given_where_no_other_device_has_one(make: Any, fault: Any) -> None:
    """The policy leaves one device, which would be the last resort anyway."""
    runner = make()
    runner.set_policy(DevicePolicy.only([FAULT]))
    fault.script = lambda _: runner._failover.quarantine.fail(Device(FAULT), "lost", runner._failover._clock()) and None
    assert right(runner.run_fastest(INPUTS))
    assert [attempt.device.label for attempt in runner.last_run.attempts] == [FAULT]


def test_the_session_that_failed_is_closed_before_the_next_device_runs(
    make: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error, which is kept until a device has answered, keeps no memory of the device."""
    runner = make()
    runner.run_fastest(INPUTS)
    closed: list[int] = []
    opened = _cpu(runner).open
    monkeypatch.setattr(_cpu(runner), "open", lambda request: (closed.append(fault.closed), opened(request))[1])
    fault.dead = LOST
    assert right(runner.run_fastest(INPUTS))
    assert closed == [1]


def test_a_device_that_does_not_open_is_left(make: Any, fault: Any) -> None:
    """A device that is lost before its session opens is quarantined as well."""
    runner = make()
    runner.rank()  # probed while it worked
    fault.dead = LOST
    assert right(runner.run_fastest(INPUTS))
    assert runner._failover.quarantine.is_out(Device(FAULT))


def test_wrong_inputs_are_raised_at_once(make: Any, fault: Any) -> None:
    """Every device would fail, and none is to blame."""
    runner = make()
    with pytest.raises(InputError, match="'x'"):
        runner.run_fastest({"x": X[:2]})
    assert [health.state.value for health in runner.health()] == ["ready", "ready"]


@pytest.mark.parametrize("wrong", [{}, {"y": X}, {"x": None}])
def test_wrong_inputs_of_a_graph_with_named_dims_are_raised_as_such(wrong: Any, make: Any, fault: Any) -> None:
    """Also where they have no shape, before a choice was made and after."""
    runner = make(doubled(["n"]))
    for _ in range(2):
        with pytest.raises(InputError):
            runner.run_fastest(wrong)
        assert right(runner.run_fastest(INPUTS))


def test_a_failure_of_unknown_reason_counts_once_another_device_has_answered(make: Any, fault: Any) -> None:
    """The answer of the CPU shows that the inputs were good."""
    fault.fail_at = {1: EngineError("something strange")}
    runner = make()
    assert right(runner.run_fastest(INPUTS))
    assert runner._failover.quarantine.is_out(Device(FAULT))


def test_a_failure_of_unknown_reason_that_all_devices_share_is_raised(make: Any, fault: Any) -> None:
    """It may be the model's: no device is quarantined, and the first error is the caller's."""
    fault.fail_at = {1: EngineError("something strange")}
    runner = make()
    runner.rank()
    cpu = _cpu(runner)
    cpu.run_failure = "something strange here too"
    with pytest.raises(EngineError, match=r"^something strange$"):
        runner.run_fastest(INPUTS)
    assert [health.state.value for health in runner.health()] == ["ready", "ready"]
    assert [attempt.device.label for attempt in runner.last_run.attempts] == [FAULT, "cpu"]


def test_when_every_device_fails_the_error_lists_each(make: Any, fault: Any) -> None:
    """Each device has its own reason."""
    runner = make()
    runner.rank()
    _cpu(runner).run_failure = "bad_alloc"
    fault.dead = LOST
    with pytest.raises(DeviceFallbackError) as caught:
        runner.run_fastest(INPUTS)
    assert [device.label for device, _ in caught.value.attempts] == [FAULT, "cpu"]


def test_without_failover_the_error_is_raised_and_the_next_run_goes_elsewhere(make: Any, fault: Any) -> None:
    """The device is quarantined all the same."""
    fault.fail_at = {1: EngineError(LOST)}
    runner = make(failover=False)
    with pytest.raises(EngineError, match="719"):
        runner.run_fastest(INPUTS)
    assert right(runner.run_fastest(INPUTS))
    assert runner.last_run.device == CPU


def test_a_device_that_the_policy_denies_never_answers(fault: Any, clock: Any) -> None:
    """Failover stays within the policy, also where that leaves nobody."""
    runner = GraphDevices(doubled(), DevicePolicy().with_deny(["cpu"]), resilience=Resilience())
    runner.run_fastest(INPUTS)
    fault.dead = LOST
    with pytest.raises(EngineError, match="719"):
        runner.run_fastest(INPUTS)
    with pytest.raises(NoViableDeviceError):
        runner.run("cpu", INPUTS)


def test_handles_do_not_move(make: Any, fault: Any) -> None:
    """Their state is on the device that failed; the caller gets an error of its own type."""
    runner = make()
    runner.run_fastest(INPUTS)
    runner.compile_fastest().bind_handle("x", X)
    fault.dead = LOST
    with pytest.raises(StateLossError, match="cannot move"):
        runner.run_fastest(INPUTS)
    with pytest.raises(StateLossError, match="cannot move"):
        runner.run_fastest(INPUTS)
    fault.dead = ""


def test_committed_runs_do_not_move(make: Any, fault: Any) -> None:
    """A run that was committed and not waited for belongs to its device."""
    runner = make()
    runner.compile_fastest().commit_no_wait(INPUTS, None)
    until(lambda: fault.runs == 1 and not fault.inside)
    fault.dead = LOST
    with pytest.raises(StateLossError):
        runner.run_fastest(INPUTS)
    fault.dead = ""
    ((committed,),) = runner.compile_fastest().sync_pending()
    assert right([committed])


def test_a_named_device_is_never_replaced(make: Any, fault: Any) -> None:
    """Its error is raised, and its health shows it."""
    fault.fail_at = {1: EngineError(LOST)}
    runner = make()
    with pytest.raises(EngineError, match="719"):
        runner.run(FAULT, INPUTS)
    assert runner.last_run.device is None
    assert runner.health()[0].reason.startswith("driver error")


def test_a_named_device_may_be_used_in_quarantine(make: Any, fault: Any) -> None:
    """The caller may know better."""
    fault.fail_at = {1: EngineError(LOST)}
    runner = make()
    runner.run_fastest(INPUTS)
    assert right(runner.run(FAULT, INPUTS))


def test_sizes_have_choices_of_their_own(make: Any, fault: Any) -> None:
    """A graph with named dims runs right on every size, before and after a failure."""
    runner = make(doubled(["n"]))
    fault.fail_at = {3: EngineError(LOST)}
    for size in (1, 2, 1, 2, 3, 1):
        x = np.ones(size, np.float32)
        assert runner.run_fastest({"x": x})[0].tolist() == [2.0] * size


def test_a_compiled_graph_that_the_caller_closed_is_lent_anew(make: Any, fault: Any) -> None:
    """The choice that is kept does not outlive it, and no device is to blame."""
    runner = make()
    runner.run_fastest(INPUTS)
    runner.compile_fastest().close()
    assert right(runner.run_fastest(INPUTS))
    assert (runner.last_run.device.label, runner.last_run.attempts) == (FAULT, ())


def test_each_thread_has_its_own_last_run(make: Any, fault: Any) -> None:
    """A thread that ran nothing has none."""
    runner = make()
    runner.run_fastest(INPUTS)
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append(runner.last_run))
    thread.start()
    thread.join()
    assert seen == [None]


def test_a_runner_without_resilience_is_as_before(fault: Any) -> None:
    """Errors are raised, limits hold, and health is refused with the remedy."""
    fault.fail_at = {1: EngineError(LOST)}
    runner = GraphDevices(doubled())
    with pytest.raises(EngineError, match="719"):
        runner.run_fastest(INPUTS)
    assert runner.last_run is None
    np.testing.assert_array_equal(runner.run_fastest(INPUTS, timeout_s=10.0)[0], X + X)
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledRunError):
        runner.run_fastest(INPUTS, cancel=token)
    fault.hang.set()
    for run in (runner.run_fastest, runner.run_resolved, runner.run_chosen, lambda x, **kw: runner.run(FAULT, x, **kw)):
        with pytest.raises(TimeLimitError):
            run(INPUTS, timeout_s=0.02)
    fault.hang.clear()
    with pytest.raises(RunError, match="resilience=Resilience"):
        runner.health()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout_s": 0.0},
        {"timeout_s": float("nan")},
        {"backoff_s": -1.0},
        {"grace_s": float("inf")},
        {"backoff_s": 500.0},
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any) -> None:
    """Limits are positive, back-offs in order."""
    with pytest.raises(ValueError, match=r"give a|less than"):
        Resilience(**options)


def _cpu(runner: GraphDevices) -> Any:
    from rlx_ort.providers import registry

    return registry.default_registry().for_device(CPU)


class _Resident(DeviceTensor):
    """A tensor that is not in host memory."""

    on_host, shape, dtype = False, (4,), X.dtype  # type: ignore[assignment]

    def numpy(self) -> Any:
        return X

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError

    def __dlpack_device__(self) -> tuple[int, int]:
        raise BufferError


def test_inputs_in_the_memory_of_a_device_do_not_move(make: Any, fault: Any) -> None:
    """They are results that the caller already has; the device that failed has them, and no other is blamed."""
    runner = make(bridge=True)
    runner.compile_fastest()
    fault.dead = LOST
    for _ in range(2):
        with pytest.raises(StateLossError, match="in its memory"):
            runner.run_fastest({"x": _Resident()})
    assert [row.state.value for row in runner.health()] == ["quarantined", "ready"]
    assert right(runner.run_fastest(INPUTS))


def test_a_device_that_flaps_costs_few_requests(make: Any, fault: Any, clock: Any) -> None:
    """It fails its third run after each re-admission; in 100 seconds of 100 requests each, 7 meet a failure."""
    runner = make(backoff_s=1.0)
    since = 0

    def script(number: int) -> EngineError | None:
        nonlocal since
        since += 1
        return EngineError(LOST) if since % 3 == 0 else None

    fault.script = script
    failed = 0
    for _ in range(10_000):
        assert right(runner.run_fastest(INPUTS))
        failed += bool(runner.last_run.attempts)
        clock.move(0.01)
        until(lambda: not any(row.state.value == "on trial" for row in runner.health()))
    assert 5 <= failed <= 8
