"""Memory budgets: which sessions are closed, what is measured, and what happens when memory runs out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from fault_provider import FaultProvider, doubled, until

from rlx_ort import CompileOptions, Device, DType, Graph, GraphDevices, HealthState, Resilience, environment, memory_use
from rlx_ort.errors import (
    CancelledRunError,
    DeviceParseError,
    EngineError,
    MemoryBudgetError,
    NoViableDeviceError,
    TimeLimitError,
)
from rlx_ort.execution import residency
from rlx_ort.execution.residency import Residency, budget_of, parse_budgets
from rlx_ort.options.compile_options import CacheUse
from rlx_ort.resilience.failover import Failover
from rlx_ort.resilience.limits import CancelToken, limited
from rlx_ort.selection import graph_cache
from rlx_ort.selection.policy import DevicePolicy

INPUT = {"x": np.arange(4, dtype=np.float32)}


@pytest.fixture(autouse=True)
def sessions(monkeypatch: pytest.MonkeyPatch) -> Residency:
    """Replace the list of the process's sessions by an empty one that waits for 0.2 s at most."""
    made = Residency(longest_wait_s=0.2, idle_s=3600.0)
    monkeypatch.setattr(residency, "_residency", made)
    monkeypatch.delenv("RLX_CACHE", raising=False)
    return made


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the budgets."""
    return lambda text: monkeypatch.setenv("RLX_DEVICE_MEMORY", text)


def model(name: str) -> GraphDevices:
    """Return a runner of `x + x` with a name."""
    graph = doubled(("n",))
    graph.name = name
    return GraphDevices(graph)


def models(fault: FaultProvider, sizes: dict[str, tuple[int, int]]) -> dict[str, GraphDevices]:
    """Return a runner for each graph, whose sessions take these bytes at opening and in the first run."""
    fault.sizes = sizes
    return {name: model(name) for name in sizes}


def run(runner: GraphDevices) -> None:
    """Run on the faulty device and check the result."""
    np.testing.assert_array_equal(runner.run("fault", INPUT)[0], INPUT["x"] * 2)


def opened(fault: FaultProvider) -> list[str]:
    """Return the graphs in the order in which sessions were opened for them."""
    return [request.model.model.graph.name for request in fault.requests]


def test_budgets_are_sizes_by_device() -> None:
    """A kind, an index, and a size alone; units count in 1024."""
    assert parse_budgets("cuda=8GB, cuda:1=512M;cpu=1.5GiB 100") == {
        "cuda": 8 << 30,
        "cuda:1": 512 << 20,
        "cpu": 3 << 29,
        "": 100,
    }


@pytest.mark.parametrize("text", ["cuda=much", "gpux=8GB", "cuda:8GB", "="])
def test_a_budget_that_does_not_parse_is_an_error(text: str) -> None:
    """The message quotes the variable."""
    with pytest.raises(DeviceParseError, match="RLX_DEVICE_MEMORY"):
        parse_budgets(text)


@pytest.mark.parametrize(
    ("device", "nbytes"), [("cuda", 8), ("cuda:1", 4), ("cuda:2", 8), ("webgpu", 2), ("cpu", None), ("tensorrt", 2)]
)
def test_a_device_without_an_entry_has_that_of_its_kind(
    device: str, nbytes: int | None, budget: Callable[[str], None]
) -> None:
    """A size alone is for every device but the CPU."""
    budget("cuda=8,cuda:1=4,2")
    assert budget_of(Device(device)) == nbytes


def test_room_is_made_for_what_opening_takes_for_a_moment(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """Opening `b` takes 80 bytes more for a while, so nothing may be open beside it then."""
    runners = models(fault, dict.fromkeys("abc", (100, 0)))
    fault.whole, fault.spikes = True, {"b": 80}
    budget("fault=250")
    for name in "bacb":
        run(runners[name])
    assert opened(fault) == list("bacb")
    assert fault.peak <= 250


def test_what_a_first_run_takes_for_a_moment_stays_free_until_then(
    fault: FaultProvider, budget: Callable[[str], None]
) -> None:
    """The first run of `a` takes 80 bytes for a moment; while it is still to come, `b` finds no room beside it."""
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    fault.whole, fault.run_spikes = True, {"a": 80}
    budget("fault=250")
    run(runners["a"])
    run(runners["b"])
    runners["b"].compile("fault")._slot.release()
    compiled = runners["a"].compile("fault")
    compiled._slot.release()
    compiled.open()
    run(runners["b"])
    run(runners["a"])
    assert fault.peak <= 250


def test_room_is_made_for_work_space_that_a_run_may_take(
    fault: FaultProvider, budget: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries may take 60 bytes in one of the first runs, so `a` makes room for those of `b`, for no later one."""
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    fault.whole = True
    monkeypatch.setattr(fault, "work_space_bytes", 60)
    budget("fault=250")
    for name in ("a", *"bbbb"):
        run(runners[name])
    assert [each.sessions for each in memory_use()[0].models] == [1, 0]
    fault.sizes["a"] = (150, 0)  # beside `b`, nothing more would fit
    runners["a"].compile("fault").open()
    run(runners["b"])
    assert [each.sessions for each in memory_use()[0].models] == [1, 1]


@pytest.mark.parametrize("whole", [False, True])
def test_the_least_recently_used_session_is_closed(
    whole: bool, fault: FaultProvider, budget: Callable[[str], None]
) -> None:
    """Its next run opens it again, from the compile cache."""
    fault.whole = whole
    budget("fault=250")
    runners = models(fault, dict.fromkeys("abc", (100, 0)))
    for name in "abacb":
        run(runners[name])
    assert opened(fault) == ["a", "b", "c", "b"]  # c takes the place of b, and b that of a
    assert [request.options.cache for request in fault.requests] == [None, None, None, CacheUse.ON]
    assert fault.peak == sum(fault.taken.values()) == 200
    (found,) = memory_use()
    assert (found.budget_bytes, found.used_bytes) == (250, 200)
    assert [(each.model, each.nbytes, each.sessions, each.openings, each.evictions) for each in found.models] == [
        ("b", 100, 1, 2, 1),
        ("c", 100, 1, 1, 0),
        ("a", 100, 0, 1, 1),
    ]


def test_the_cache_is_used_as_the_options_say(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """A choice of the caller holds for sessions that are opened again."""
    budget("fault=100")
    fault.sizes = dict.fromkeys("ab", (100, 0))
    graph = doubled(("n",))
    graph.name = "a"
    first = GraphDevices(graph, options=CompileOptions(cache=CacheUse.FOUND))
    for runner in (first, model("b"), first):
        run(runner)
    assert [request.options.cache for request in fault.requests] == [CacheUse.FOUND, None, CacheUse.FOUND]


def test_a_session_in_use_is_not_closed(
    fault: FaultProvider, sessions: Residency, budget: Callable[[str], None]
) -> None:
    """Another one waits for it, and is refused if that takes too long."""
    budget("fault=150")
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    run(runners["a"])
    fault.hang.set()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, runners["a"])
        until(lambda: fault.inside == 1)
        with pytest.raises(MemoryBudgetError, match=r"'b' does not fit.*in use: a \(100 bytes\)"):
            run(runners["b"])
        sessions.longest_wait_s = 30.0
        second = pool.submit(run, runners["b"])
        until(lambda: bool(runners["b"]._sessions.current.devices))
        assert not second.done()
        fault.hang.clear()
        first.result(10)
        second.result(10)
    assert opened(fault) == ["a", "b"]
    assert fault.peak == 100


def test_a_device_without_room_for_a_graph_is_tried_again_later(
    fault: FaultProvider, budget: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have freed their memory by then; until then an automatic choice passes it over."""
    budget("fault=150")
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    run(runners["a"])
    runners["b"].set_policy(DevicePolicy.only(["fault"]))
    fault.hang.set()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(run, runners["a"])
        until(lambda: fault.inside == 1)
        with pytest.raises(NoViableDeviceError, match="does not fit"):
            runners["b"].run_fastest(INPUT)
        fault.hang.clear()
        first.result(10)
    with pytest.raises(NoViableDeviceError, match="does not fit"):
        runners["b"].run_fastest(INPUT)
    now_s = time.monotonic
    monkeypatch.setattr(graph_cache.time, "monotonic", lambda: now_s() + 60.0)
    np.testing.assert_array_equal(runners["b"].run_fastest(INPUT)[0], INPUT["x"] * 2)


class Gate(threading.Event):
    """An event that notes when a thread begins to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as any event does."""
        self.begun.set()
        return super().wait(timeout)


def test_a_session_closed_while_it_opens_is_not_waited_for(
    fault: FaultProvider, sessions: Residency, budget: Callable[[str], None], make: Callable[..., GraphDevices]
) -> None:
    """The error of the run that opened it keeps no session, so the run finds room when it is made again."""
    budget("fault=150")
    fault.sizes = {"doubled": (100, 0)}
    sessions.longest_wait_s = 30.0
    runner = make(doubled(("n",)))
    for _ in range(3):
        runner.run_fastest(INPUT)
    runner.compile_fastest()._slot.release()
    fault.open_now = gate = Gate()
    fault.open_delay_s = 10.0
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        running = pool.submit(runner.run_fastest, INPUT)
        assert gate.begun.wait(10.0)
        runner.invalidate_cache()
        gate.set()
        np.testing.assert_array_equal(running.result(60.0)[0], INPUT["x"] * 2)
    assert time.monotonic() - begun < 10.0
    runner.run_fastest(INPUT)
    assert runner.last_run is not None
    assert (runner.last_run.device, runner.last_run.attempts) == (Device("fault"), ())


def test_a_wait_for_memory_keeps_the_limits_of_the_run(
    fault: FaultProvider, sessions: Residency, budget: Callable[[str], None]
) -> None:
    """Its time limit and its token, also of runs that wait behind it; the session in use goes on."""
    budget("fault=150")
    sessions.longest_wait_s = 30.0
    runners = models(fault, dict.fromkeys("abc", (100, 0)))
    run(runners["a"])
    fault.hang.set()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(run, runners["a"])
        until(lambda: fault.inside == 1)
        token = CancelToken()
        begun = time.monotonic()
        second = pool.submit(limited, lambda: run(runners["b"]), timeout_s=0.3)
        until(lambda: bool(runners["b"]._sessions.current.devices))
        third = pool.submit(limited, lambda: run(runners["c"]), cancel=token)
        until(lambda: bool(runners["c"]._sessions.current.devices))
        token.cancel()
        assert isinstance(third.exception(10), CancelledRunError)
        assert isinstance(second.exception(10), TimeLimitError)
        assert time.monotonic() - begun < 5.0
        fault.hang.clear()
        first.result(10)
    run(runners["b"])
    run(runners["c"])
    assert opened(fault) == ["a", "b", "c"]


def test_a_model_beyond_the_budget_is_refused_and_another_device_answers(
    fault: FaultProvider, budget: Callable[[str], None]
) -> None:
    """The device is not at fault, so it stays ready. After two measurements the session is not opened to find out."""
    budget("fault=50")
    runner = models(fault, {"a": (100, 0)})["a"]
    for _ in range(4):
        with pytest.raises(MemoryBudgetError, match="of 50 bytes"):
            runner.run("fault", INPUT)
    assert fault.opened == 2
    assert not fault.taken
    runner._failover = Failover(runner._sessions, Resilience(bridge=False))
    np.testing.assert_array_equal(runner.run_fastest(INPUT)[0], INPUT["x"] * 2)
    assert runner.last_run is not None
    assert runner.last_run.device == Device.CPU
    assert {health.state for health in runner.health()} == {HealthState.READY}


def test_what_the_first_run_adds_counts(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """Arenas are shrunk before sessions are closed."""
    budget("fault=250")
    runners = models(fault, {"a": (100, 100), "b": (100, 0)})
    run(runners["b"])
    run(runners["a"])  # its arena takes the place of b
    assert memory_use()[0].used_bytes == 200
    run(runners["b"])
    assert opened(fault) == ["b", "a", "b"]
    assert [each.nbytes for each in memory_use()[0].models] == [100, 100]  # a is open still, without its arena
    assert sum(fault.taken.values()) == 200


def test_an_idle_arena_is_shrunk(fault: FaultProvider, sessions: Residency, budget: Callable[[str], None]) -> None:
    """The session stays open, and its next run is measured again."""
    sessions.idle_s = 0.02
    budget("fault=250")
    runner = models(fault, {"a": (100, 100)})["a"]
    for _ in range(2):
        run(runner)
        until(lambda: memory_use()[0].used_bytes == 100)
        assert sum(fault.taken.values()) == 100
    assert fault.opened == 1
    until(lambda: sessions._sweeper is None)


def test_without_a_reading_weights_are_counted(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """Their bytes are known, and the source says so."""
    budget("fault=60")

    def weighted(name: str) -> GraphDevices:
        graph = Graph(name)
        x = graph.input("x", (4,), DType.F32)
        graph.outputs = [x + graph.param("w", (4,), DType.F32)]
        runner = GraphDevices(graph)
        runner.set_param("w", np.ones(4, np.float32))
        return runner

    for runner in (runners := [weighted(name) for name in "abcd"]):
        runner.run("fault", INPUT)
    (found,) = memory_use()
    assert (found.used_bytes, found.source) == (48, "weights of the open sessions")
    assert [each.sessions for each in found.models] == [1, 1, 1, 0]
    assert len(runners) == 4


def test_running_out_of_memory_frees_idle_sessions_and_tries_again(fault: FaultProvider) -> None:
    """That takes no budget. The device answers, and is not quarantined."""
    fault.capacity = 250
    runners = models(fault, {"a": (100, 50), "b": (50, 0), "c": (100, 100)})
    for runner in runners.values():
        runner._failover = Failover(runner._sessions, Resilience(bridge=False))
        np.testing.assert_array_equal(runner.run_fastest(INPUT)[0], INPUT["x"] * 2)
        assert runner.last_run is not None
        assert (runner.last_run.device, runner.last_run.attempts) == (Device("fault"), ())
    assert opened(fault) == ["a", "b", "c"]
    np.testing.assert_array_equal(runners["b"].run_fastest(INPUT)[0], INPUT["x"] * 2)
    assert opened(fault) == ["a", "b", "c", "b"]


def test_out_of_memory_with_nothing_to_free_fails_over(fault: FaultProvider) -> None:
    """One attempt, then the next device; a device named in the call raises."""
    fault.capacity = 50
    runner = models(fault, {"a": (100, 0)})["a"]
    runner._failover = Failover(runner._sessions, Resilience(bridge=False))
    with pytest.raises(EngineError, match="Failed to allocate"):
        runner.run("fault", INPUT)
    runner.run_fastest(INPUT)
    assert runner.last_run is not None
    assert runner.last_run.device == Device.CPU


def test_a_device_handle_keeps_its_session(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """State on the device cannot be made again, so another model waits for it."""
    budget("fault=150")
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    compiled = runners["a"].compile("fault")
    compiled.bind_gpu_handle("x", INPUT["x"])
    compiled.run({})
    with pytest.raises(MemoryBudgetError):
        run(runners["b"])
    compiled.close()
    run(runners["b"])


def test_fixed_buffers_do_not_keep_a_session(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """The buffers of earlier calls stay whole, and the next call binds new ones."""
    budget("fault=150")
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    compiled = runners["a"].compile("fault")
    for _ in range(3):
        (kept,) = compiled.run_slots([INPUT["x"]])
    run(runners["b"])
    np.testing.assert_array_equal(kept, INPUT["x"] * 2)
    np.testing.assert_array_equal(compiled.run_slots([INPUT["x"] + 1])[0], INPUT["x"] * 2 + 2)
    assert opened(fault) == ["a", "b", "a"]


def test_a_clone_shares_the_session_that_was_opened_again(fault: FaultProvider, budget: Callable[[str], None]) -> None:
    """One session serves both, before and after."""
    budget("fault=150")
    runners = models(fault, dict.fromkeys("ab", (100, 0)))
    compiled = runners["a"].compile("fault")
    clone = compiled.clone()
    for runs in (compiled, clone, runners["b"], clone, compiled):
        run(runs) if isinstance(runs, GraphDevices) else runs.run(INPUT)
    assert opened(fault) == ["a", "b", "a"]
    assert fault.peak == 100


def test_stale_weights_are_dropped_before_new_ones_are_loaded(
    fault: FaultProvider, budget: Callable[[str], None]
) -> None:
    """Both would not fit."""
    budget("fault=150")
    fault.sizes = {"a": (100, 0)}
    graph = Graph("a")
    x = graph.input("x", (4,), DType.F32)
    graph.outputs = [x + graph.param("w", (4,), DType.F32)]
    runner = GraphDevices(graph)
    for value in range(3):
        runner.set_param("w", np.full(4, value, np.float32))
        runner.run("fault", INPUT)
    assert (fault.opened, fault.peak) == (3, 100)


def test_health_has_the_memory_of_each_device(fault: FaultProvider, make: Callable[..., GraphDevices]) -> None:
    """The option sets the budgets of the process."""
    fault.sizes = {"doubled": (100, 20)}
    try:
        runner = make(device_memory="fault=1K")
        runner.run_fastest({"x": np.ones(4, np.float32)})
        first, *_ = runner.health()
    finally:
        environment.clear_overrides()
    assert first.memory is not None
    assert (first.device, first.memory.budget_bytes, first.memory.used_bytes) == (Device("fault"), 1024, 120)
    assert [each.model for each in first.memory.models] == ["doubled"]
