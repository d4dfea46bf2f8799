"""Time limits and cancellation end a run, also when the engine does not return; `RLX_RESILIENCE` sets limits."""

from __future__ import annotations

import _thread
import asyncio
import concurrent.futures
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fault_provider import Doubling, FaultProvider, doubled, until

from rlx_ort import Device, DevicePolicy, Graph, GraphDevices, HealthState, Resilience, environment
from rlx_ort.errors import (
    CancelledRunError,
    DeviceParseError,
    DeviceUnavailableError,
    StateLossError,
    TimeLimitError,
)
from rlx_ort.providers import registry
from rlx_ort.providers.workers import Workers
from rlx_ort.resilience.limits import CancelToken, in_background, limited, limited_async

X = np.arange(4, dtype=np.float32)
INPUTS = {"x": X}


@pytest.fixture
def runner(make: Any, fault: Any) -> Any:
    """Return a runner that has run once on the faulty device, with a short grace time."""
    made = make(grace_s=0.5)
    made.run_fastest(INPUTS)
    made.run("cpu", INPUTS)  # open, so that a short limit is enough for it
    return made


def state(runner: Any) -> HealthState:
    found: HealthState = runner._failover.quarantine.health(Device("fault")).state
    return found


def hang(fault: Any, *, stubborn: bool = False) -> None:
    """Make runs hang, including those that had begun before this was set."""
    fault.stubborn = stubborn
    fault.hang.set()


def test_a_run_that_hangs_is_answered_by_another_device(runner: Any, fault: Any) -> None:
    """After its time limit, not before."""
    hang(fault)
    begun = time.perf_counter()
    np.testing.assert_array_equal(runner.run_fastest(INPUTS, timeout_s=0.25)[0], X + X)
    assert 0.25 <= time.perf_counter() - begun < 5.0
    (attempt,) = runner.last_run.attempts
    assert (runner.last_run.device.label, attempt.device.label) == ("cpu", "fault")
    assert attempt.reason.startswith("time limit: the run took longer than 0.25 s and was stopped")


def test_a_run_that_was_stopped_leaves_the_session_usable(runner: Any, fault: Any) -> None:
    """The next run on the same session is right."""
    runner.set_policy(DevicePolicy.only(["fault"]))
    runner.run_fastest(INPUTS)
    opened = fault.opened
    hang(fault)
    with pytest.raises(TimeLimitError):
        runner.run_fastest(INPUTS, timeout_s=0.02)
    fault.recover()
    np.testing.assert_array_equal(runner.run_fastest(INPUTS, timeout_s=5.0)[0], X + X)
    assert fault.opened == opened


def test_a_limit_that_no_device_keeps_quarantines_none(runner: Any, fault: Any) -> None:
    """The limit may be too short for the graph; the error is that of the first device."""
    runner.set_policy(DevicePolicy.only(["fault"]))
    hang(fault)
    with pytest.raises(TimeLimitError, match=r"0\.02 s"):
        runner.run_fastest(INPUTS, timeout_s=0.02)
    assert state(runner) is HealthState.READY


def test_the_limit_of_the_options_counts_for_every_run(make: Any, fault: Any) -> None:
    """Without an argument in the call."""
    runner = make(timeout_s=0.25)
    runner.run_fastest(INPUTS)
    runner.run("cpu", INPUTS)
    hang(fault)
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], X + X)
    assert runner.last_run.device == Device.CPU


def test_an_engine_that_does_not_return_is_given_up(runner: Any, fault: Any) -> None:
    """The caller is answered after limit and grace; the device is stuck, and no check is made on it."""
    hang(fault, stubborn=True)
    begun = time.perf_counter()
    np.testing.assert_array_equal(runner.run_fastest(INPUTS, timeout_s=0.25)[0], X + X)
    assert time.perf_counter() - begun < 5.0
    assert state(runner) is HealthState.STUCK
    assert "did not return within 0.5 s" in runner._failover.quarantine.reason(Device("fault"))


def test_a_stuck_device_is_not_waited_for_again(runner: Any, fault: Any, clock: Any) -> None:
    """Neither by requests, nor by checks, nor by callers who name it."""
    hang(fault, stubborn=True)
    runner.run_fastest(INPUTS, timeout_s=0.25)
    probes, runs = fault.probes, fault.runs
    clock.move(1000.0)
    runner.run_fastest(INPUTS)
    with pytest.raises(DeviceUnavailableError, match="did not return"):
        runner.run("fault", INPUTS)
    assert (fault.probes, fault.runs) == (probes, runs)


def test_a_stuck_device_that_returns_is_checked_and_used_with_a_new_session(make: Any, fault: Any, clock: Any) -> None:
    """The session that was stuck is not used again."""
    runner = make(grace_s=0.5, timeout_s=0.25)
    runner.run_fastest(INPUTS, timeout_s=10.0)
    runner.run("cpu", INPUTS, timeout_s=10.0)
    hang(fault, stubborn=True)
    runner.run_fastest(INPUTS)
    opened = fault.opened
    fault.recover()
    until(lambda: state(runner) is HealthState.QUARANTINED)
    clock.move(1000.0)
    runner.run_fastest(INPUTS)
    until(lambda: state(runner) is HealthState.READY)
    runner.run_fastest(INPUTS)
    assert (runner.last_run.device.label, fault.opened) == ("fault", opened + 1)


def test_the_caller_s_own_limit_says_nothing_against_a_device(runner: Any, fault: Any) -> None:
    """Another device answers within it, and other callers keep the one that was too slow for this one."""
    hang(fault)
    runner.run_fastest(INPUTS, timeout_s=0.25)
    assert runner.last_run.device == Device.CPU
    fault.recover()
    health = runner._failover.quarantine.health(Device("fault"))
    assert (health.state, health.failures) == (HealthState.READY, 0)
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "fault"


def test_a_limit_above_that_of_the_options_counts_against_a_device(make: Any, fault: Any) -> None:
    """The caller was more patient than the operator asks of a device."""
    runner = make(timeout_s=0.1)
    runner.run_fastest(INPUTS, timeout_s=10.0)
    runner.run("cpu", INPUTS, timeout_s=10.0)
    hang(fault)
    runner.run_fastest(INPUTS, timeout_s=0.25)
    assert state(runner) is HealthState.QUARANTINED


@pytest.mark.parametrize("ended_by", ["limit", "token"])
def test_a_device_that_returns_late_to_an_impatient_caller_is_used_at_once(
    ended_by: str, runner: Any, fault: Any
) -> None:
    """It is stuck while it does not return, and no failure is counted, so that no check and no back-off follow."""
    hang(fault, stubborn=True)
    if ended_by == "limit":
        runner.run_fastest(INPUTS, timeout_s=0.25)
    else:
        token = CancelToken()
        threading.Timer(0.02, token.cancel).start()
        with pytest.raises(CancelledRunError):
            runner.run_fastest(INPUTS, cancel=token)
    assert state(runner) is HealthState.STUCK
    fault.recover()
    until(lambda: state(runner) is HealthState.READY)
    assert runner._failover.quarantine.health(Device("fault")).failures == 0
    runner.run_fastest(INPUTS)
    assert runner.last_run.device.label == "fault"


def test_a_cpu_that_one_caller_gave_up_serves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another session on the CPU does not wait for the one that is lost, so the CPU is neither stuck nor out."""
    cpu = FaultProvider(Doubling())
    cpu.name, cpu.kinds = "cpu", ("cpu",)
    known = registry.ProviderRegistry((cpu,))
    monkeypatch.setattr(registry, "default_registry", lambda: known)
    with GraphDevices(doubled(), resilience=Resilience(grace_s=0.02)) as runner:
        runner.run_fastest(INPUTS)
        release = threading.Event()
        cpu.script = lambda number: (number == 2 and release.wait(10.0) and None) or None
        with pytest.raises(TimeLimitError, match="its session was given up"):
            runner.run_fastest(INPUTS, timeout_s=0.02)
        assert [row.state for row in runner.health()] == [HealthState.READY]
        np.testing.assert_array_equal(runner.run("cpu", INPUTS)[0], X + X)
        assert cpu.inside == 1
        release.set()
        until(lambda: not cpu.inside)
        assert [(row.state, row.failures) for row in runner.health()] == [(HealthState.READY, 0)]


def test_a_session_that_opens_slowly_counts_against_the_limit(make: Any, fault: Any) -> None:
    """The caller does not wait for it, and the device is used once it is open and was checked."""
    fault.open_delay_s = 1.0
    runner = make(timeout_s=0.25, grace_s=0.05)
    runner.run("cpu", INPUTS, timeout_s=10.0)
    np.testing.assert_array_equal(runner.run_fastest(INPUTS)[0], X + X)
    assert runner.last_run.total_seconds == 0.0  # by the clock of the test, which stands still
    assert runner.last_run.device == Device.CPU
    until(lambda: state(runner) is HealthState.QUARANTINED)


def test_a_check_that_hangs_ends_at_the_limit(make: Any, fault: Any, clock: Any) -> None:
    """The device stays out, and no thread stays in it."""
    runner = make(timeout_s=0.25, backoff_s=1.0)
    runner.run("cpu", INPUTS, timeout_s=10.0)
    fault.memory_bytes = 8
    runner.run_fastest(INPUTS)
    fault.recover()
    hang(fault)
    clock.move(1.0)
    runner.run_fastest(INPUTS)
    until(lambda: runner._failover.quarantine.health(Device("fault")).failures == 2)
    assert state(runner) is HealthState.QUARANTINED
    assert "took longer than 0.25 s" in runner._failover.quarantine.reason(Device("fault"))
    until(lambda: not fault.inside)


def test_a_run_that_is_cancelled_before_it_begins_does_not_begin(runner: Any, fault: Any) -> None:
    """A token stays cancelled."""
    token = CancelToken()
    token.cancel()
    runs = fault.runs
    with pytest.raises(CancelledRunError, match="before it began"):
        runner.run_fastest(INPUTS, cancel=token)
    assert (token.cancelled, fault.runs) == (True, runs)


def test_one_token_cancels_many_runs(runner: Any, fault: Any) -> None:
    """Those of all threads that it was given to."""
    hang(fault)
    token = CancelToken()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(runner.run_fastest, INPUTS, cancel=token) for _ in range(8)]
        until(lambda: fault.inside == 8)
        token.cancel()
        assert {type(future.exception(10)) for future in futures} == {CancelledRunError}


def test_cancelling_answers_although_the_engine_is_stuck(runner: Any, fault: Any) -> None:
    """After the grace time; the device is then stuck."""
    hang(fault, stubborn=True)
    token = CancelToken()
    threading.Timer(0.02, token.cancel).start()
    with pytest.raises(CancelledRunError, match="did not return"):
        runner.run_fastest(INPUTS, cancel=token)
    assert state(runner) is HealthState.STUCK


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise `KeyboardInterrupt`; a shell's background jobs inherit that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_stops_the_run(runner: Any, fault: Any) -> None:
    """Also where the signal does not end the wait, as on Windows; the run ends before the interrupt is raised."""
    hang(fault)
    threading.Timer(0.05, _thread.interrupt_main).start()
    begun = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        runner.run_fastest(INPUTS, timeout_s=30.0)
    assert time.perf_counter() - begun < 10.0
    assert fault.inside == 0
    assert state(runner) is HealthState.READY


def test_a_run_with_handles_that_takes_too_long_does_not_move(runner: Any, fault: Any) -> None:
    """It goes on to its end, so that its handles are whole, and the caller is answered."""
    runner.compile_fastest().bind_handle("x", X)
    hang(fault, stubborn=True)
    with pytest.raises(StateLossError, match="cannot move"):
        runner.run_fastest(INPUTS, timeout_s=0.02)


def test_workers_that_are_stuck_do_not_keep_others_waiting(fault: Any) -> None:
    """A call finds a thread although every other one is taken."""
    release = threading.Event()
    stuck = [in_background(lambda: release.wait(10)) for _ in range(20)]
    try:
        assert in_background(lambda: 7).result(5) == 7
    finally:
        release.set()
    assert all(future.result(5) for future in stuck)


def test_a_thread_that_is_idle_ends() -> None:
    """And a call after that gets a new one."""
    workers = Workers(1 << 30, "test-idle", 0.02)
    for _ in range(3):
        assert workers.submit(lambda: 7).result(5) == 7
        until(lambda: not any(thread.name == "test-idle" for thread in threading.enumerate()))


def test_a_job_never_waits_behind_one_that_hangs() -> None:
    """A thread that has taken a job is promised no other."""
    workers = Workers(1 << 30, "test-promise", 1.0)
    for _ in range(200):
        release = threading.Event()
        first = workers.submit(lambda release=release: release.wait(10))  # type: ignore[misc]
        second = workers.submit(lambda: 7)
        assert second.result(5) == 7
        release.set()
        assert first.result(5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_limits_work_in_a_forked_child(runner: Any) -> None:
    """Threads do not cross a fork; the child starts its own."""
    runner.run_fastest(INPUTS, timeout_s=5.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if in_background(lambda: 7).result(5) == 7 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _committed(compiled: Any) -> Any:
    compiled.commit_no_wait(INPUTS, None)
    return compiled.sync_pending()[0][0]


def _with_handle(compiled: Any) -> Any:
    compiled.bind_handle("x", X)
    compiled.set_handle_feed("x", 0)
    return compiled.run_read_outputs({}, [0])[0]


def _with_device_handle(compiled: Any) -> Any:
    compiled.bind_gpu_handle("x", X)
    return compiled.run_feed_gpu_handle({}, "x", 0)


WAYS = {
    "run": lambda compiled: compiled.run(INPUTS)[0],
    "run_read_outputs": lambda compiled: compiled.run_read_outputs(INPUTS, [0])[0],
    "run_slots": lambda compiled: compiled.run_slots([X])[0].copy(),
    "run_typed": lambda compiled: np.frombuffer(compiled.run_typed({"x": (X.tobytes(), "f32")})[0][0], np.float32),
    "handle": _with_handle,
    "handle on the device": _with_device_handle,
    "pipelined": lambda compiled: compiled.run_pipelined([INPUTS] * 4)[3][0],
    "committed": _committed,
    "run_async": lambda compiled: asyncio.run(compiled.run_async(INPUTS))[0],
}
"""Every way of running a compiled graph of `x + x`."""


@pytest.fixture(params=WAYS)
def way(request: Any) -> Any:
    """Return each way of running."""
    return WAYS[request.param]


def test_every_way_of_running_ends_at_its_limit(way: Any, runner: Any, fault: Any) -> None:
    """The session stays, no lock is held, handles keep their values, and the next run is right."""
    compiled = runner.compile_fastest()
    way(compiled)
    opened = fault.opened
    hang(fault)
    with pytest.raises(TimeLimitError, match=r"longer than 0\.1 s and was stopped$"):
        limited(lambda: way(compiled), timeout_s=0.1, grace_s=10.0)
    until(lambda: fault.inside == 0)
    fault.recover()
    _settle(compiled)
    np.testing.assert_array_equal(limited(lambda: way(compiled), timeout_s=10.0), X + X)
    assert fault.opened == opened


def test_every_way_of_running_can_be_cancelled(way: Any, runner: Any, fault: Any) -> None:
    """By a token, from another thread."""
    compiled = runner.compile_fastest()
    hang(fault)
    token = CancelToken()
    threading.Timer(0.05, token.cancel).start()
    begun = time.perf_counter()
    with pytest.raises(CancelledRunError):
        limited(lambda: way(compiled), cancel=token, grace_s=10.0)
    assert time.perf_counter() - begun < 5.0
    fault.recover()
    _settle(compiled)
    np.testing.assert_array_equal(way(compiled), X + X)


@pytest.mark.parametrize("name", [name for name in WAYS if name != "committed"])  # its caller is not in the engine
def test_an_engine_that_does_not_return_gives_up_session_and_locks(name: str, runner: Any, fault: Any) -> None:
    """The caller is answered, and the graph runs in another session while the thread is still in the first."""
    compiled, way, stuck = runner.compile_fastest(), WAYS[name], fault.hang
    hang(fault, stubborn=True)
    with pytest.raises(TimeLimitError, match=r"did not return within 0\.1 s"):
        limited(lambda: way(compiled), timeout_s=0.4, grace_s=0.1, graph=compiled)
    fault.hang = threading.Event()  # the thread inside waits for the old one
    np.testing.assert_array_equal(way(compiled), X + X)
    assert (fault.inside, fault.opened) == (1, 2)
    stuck.clear()


def test_cancelling_a_task_ends_the_call(runner: Any, fault: Any) -> None:
    """And leaves no thread in it."""
    compiled = runner.compile_fastest()
    hang(fault)

    async def cancelled() -> None:
        task = asyncio.ensure_future(limited_async(lambda: compiled.run_slots([X]), grace_s=10.0))
        while not fault.inside:
            await asyncio.sleep(0.001)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    until(lambda: not fault.inside)
    fault.recover()
    np.testing.assert_array_equal(compiled.run_slots([X])[0], X + X)


def test_a_thousand_cancellations_in_slots_and_handles_leave_nothing_behind(runner: Any, fault: Any) -> None:
    """Threads, sessions and locks are as before."""
    compiled = runner.compile_fastest()
    _with_handle(compiled)
    compiled.run_slots([X])
    hang(fault)
    opened, threads = fault.opened, threading.active_count()
    for number in range(1000):
        token = CancelToken()
        fault.script = lambda _, token=token: token.cancel()
        call = (lambda: compiled.run_slots([X])) if number % 2 else (lambda: compiled.run({}))
        with pytest.raises(CancelledRunError):
            limited(call, cancel=token, grace_s=10.0)
    assert threading.active_count() <= threads + 2
    fault.recover()
    np.testing.assert_array_equal(compiled.run_slots([X])[0], X + X)
    assert fault.opened == opened


def test_a_call_within_another_ends_with_it(runner: Any, fault: Any) -> None:
    """The outer limit counts for both."""
    compiled = runner.compile_fastest()
    hang(fault)
    with pytest.raises(TimeLimitError, match=r"0\.1 s"):
        limited(lambda: limited(lambda: compiled.run(INPUTS), timeout_s=30.0), timeout_s=0.1, grace_s=10.0)


def _settle(compiled: Any) -> None:
    """Take the errors of committed runs, which are raised once."""
    with contextlib.suppress(CancelledRunError):
        compiled.sync_pending()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("off", None),
        ("0", None),
        ("on", Resilience()),
        ("1", Resilience()),
        ("timeout_s=2", Resilience(timeout_s=2.0)),
        ("bridge=off, Tolerance=1e-2; failover=yes", Resilience(bridge=False, tolerance=0.01)),
    ],
)
def test_the_variable_has_a_switch_or_settings(text: str, wanted: Resilience | None) -> None:
    """Case and spaces do not matter."""
    with environment.override({"RESILIENCE": text}):
        assert Resilience.from_env() == wanted
        runner = GraphDevices.from_env(Graph("empty"))
        assert (None if runner._failover is None else runner._failover.options) == wanted


@pytest.mark.parametrize("text", ["maybe", "timeout=2", "timeout_s=-1", "timeout_s=soon", "bridge=2", "backoff_s"])
def test_a_typo_in_the_variable_is_an_error(text: str) -> None:
    """It is not ignored, because runs would have no limit then; the message has the names."""
    with (
        environment.override({"RESILIENCE": text}),
        pytest.raises(DeviceParseError, match=r"RLX_RESILIENCE=.*the settings are bridge, failover, backoff_s"),
    ):
        Resilience.from_env()
