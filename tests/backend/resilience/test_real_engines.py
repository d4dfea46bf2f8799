"""Failover, limits and re-admission with ONNX Runtime on the CPU, WebGPU in software, and a device with faults."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_provider import LOST, NODE_OUT_OF_MEMORY, NODE_OVERFLOW, FaultProvider, until

from rlx_ort import DevicePolicy, Graph, GraphDevices, HealthState, Resilience, Session
from rlx_ort.errors import CancelledRunError, EngineError, RlxError, TimeLimitError
from rlx_ort.options.compile_options import CacheUse, CompileOptions
from rlx_ort.providers.engine import opening
from rlx_ort.resilience.limits import CancelToken, limited, limited_async

RNG = np.random.default_rng(3)
WEIGHTS = RNG.standard_normal((8, 8)).astype(np.float32)


def mlp() -> Graph:
    graph = Graph("mlp")
    x = graph.input("x", ["n", 8])
    graph.outputs = [graph.tanh(x @ graph.param("w", [8, 8], data=WEIGHTS))]
    return graph


def long(nodes: int) -> Graph:
    graph = Graph("long")
    first = value = graph.input("x", ["n", "n"])
    for _ in range(nodes):
        value = graph.tanh(value @ first)
    graph.outputs = [value]
    return graph


def test_a_real_run_is_stopped_at_its_limit_and_the_session_stays_usable() -> None:
    """By ONNX Runtime's terminate flag; the same session then runs to its end in time."""
    options = CompileOptions(intra_op_threads=1)
    runner = GraphDevices(long(300), DevicePolicy.only(["cpu"]), options, resilience=Resilience())
    small = {"x": np.eye(4, dtype=np.float32)}
    wanted = runner.run_fastest(small)[0]
    begun = time.perf_counter()
    with pytest.raises(TimeLimitError):
        runner.run_fastest({"x": np.eye(1024, dtype=np.float32)}, timeout_s=0.1)
    assert time.perf_counter() - begun < 2.0
    np.testing.assert_array_equal(runner.run_fastest(small, timeout_s=10.0)[0], wanted)
    assert runner.health()[0].state is HealthState.READY


LONG: dict[str, Any] = {
    "run": lambda compiled, x: compiled.run({"x": x}),
    "run_read_outputs": lambda compiled, x: compiled.run_read_outputs({"x": x}, [0]),
    "run_slots": lambda compiled, x: compiled.run_slots([x]),
    "handle": lambda compiled, x: (compiled.bind_handle("x", x), compiled.run({})),
    "handle on the device": lambda compiled, x: (
        compiled.bind_gpu_handle("x", x),
        compiled.run_feed_gpu_handle({}, "x", 0),
    ),
    "pipelined": lambda compiled, x: compiled.run_pipelined([{"x": x}] * 3),
    "committed": lambda compiled, x: (compiled.commit_no_wait({"x": x}, None), compiled.sync_pending()),
    "run_async": lambda compiled, x: asyncio.run(compiled.run_async({"x": x})),
}
"""Ways of running a compiled graph of one square input."""


@pytest.mark.parametrize(
    ("name", "ended_by"),
    [*((name, "limit") for name in LONG), ("run", "token"), ("committed", "token"), ("run", "task")],
)
def test_a_minute_of_work_ends_soon_after_it_is_stopped(name: str, ended_by: str) -> None:
    """However it is run and stopped; the same session then runs to its end."""
    way = LONG[name]
    compiled = Session("cpu", CompileOptions(intra_op_threads=1)).compile(long(3000))
    small, large = np.eye(4, dtype=np.float32), np.eye(1024, dtype=np.float32)  # 20 ms a node on a server core
    wanted = compiled.run({"x": small})[0]
    token = CancelToken()
    stopped_at: list[float] = []

    def stop() -> None:
        stopped_at.append(time.perf_counter())
        token.cancel()

    async def task() -> None:
        running = asyncio.ensure_future(limited_async(lambda: way(compiled, large), grace_s=30.0))
        await asyncio.sleep(0.3)
        stopped_at.append(time.perf_counter())
        running.cancel()
        await running

    if ended_by == "task":
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(task())
    elif ended_by == "token":
        threading.Timer(0.3, stop).start()
        with pytest.raises(CancelledRunError):
            limited(lambda: way(compiled, large), cancel=token, grace_s=30.0)
    else:
        stopped_at.append(time.perf_counter() + 0.3)
        with pytest.raises(TimeLimitError):
            limited(lambda: way(compiled, large), timeout_s=0.3, grace_s=30.0)
    assert time.perf_counter() - stopped_at[0] < 10.0  # 0.2 s on a quiet machine
    with contextlib.suppress(CancelledRunError):
        compiled.sync_pending()
    np.testing.assert_array_equal(limited(lambda: compiled.run({"x": small}))[0], wanted)


def test_a_session_that_opens_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ONNX Runtime's cancellation of loading; the graph opens afterwards."""
    graph = Graph("deep")
    value = graph.input("x", ["n", 4])
    for _ in range(10_000):
        value = graph.tanh(value + 1.0)
    graph.outputs = [value]
    session, token, ends = Session("cpu"), CancelToken(), opening.stoppable

    def begins(end: Any) -> Any:
        threading.Timer(0.05, token.cancel).start()  # it takes 0.5 s
        return ends(end)

    monkeypatch.setattr(opening, "stoppable", begins)
    with pytest.raises(CancelledRunError, match=r"cancelled$"):
        limited(lambda: session.compile(graph), cancel=token, grace_s=30.0)
    monkeypatch.undo()
    assert session.compile(graph).run({"x": np.zeros((1, 4), np.float32)})


def test_a_real_run_is_cancelled_from_another_thread() -> None:
    """Within a node or two."""
    runner = GraphDevices(long(300), DevicePolicy.only(["cpu"]), resilience=Resilience())
    token = CancelToken()
    threading.Timer(0.1, token.cancel).start()
    begun = time.perf_counter()
    with pytest.raises(CancelledRunError):
        runner.run("cpu", {"x": np.eye(1024, dtype=np.float32)}, cancel=token)
    assert time.perf_counter() - begun < 5.0


def test_data_that_a_kernel_refuses_quarantines_nobody(fault: FaultProvider) -> None:
    """An index out of range is the caller's; it does not go from device to device."""
    graph = Graph("gather")
    graph.outputs = [graph.gather(graph.input("x", [4]), graph.input("i", [1], "i64"))]
    runner = GraphDevices(graph, DevicePolicy.only(["cpu", "fault"]), resilience=Resilience())
    inputs = {"x": np.ones(4, np.float32), "i": np.array([9])}
    with pytest.raises(RlxError, match="out of data bounds"):
        runner.run_fastest(inputs)
    assert {health.state for health in runner.health()} == {HealthState.READY}


@pytest.mark.parametrize(("shape", "what"), [(NODE_OUT_OF_MEMORY, "out of memory"), (NODE_OVERFLOW, "engine error")])
@pytest.mark.parametrize("number", [1, 2])
def test_a_node_that_fails_is_named_and_another_device_answers(
    number: int, shape: list[int], what: str, fault: FaultProvider
) -> None:
    """The engine's own kernel fails within the run; the nodes before it have run."""
    fault.by_node = True
    runner = GraphDevices(
        mlp(), DevicePolicy.only(["fault", "cpu"]), resilience=Resilience(bridge=False, backoff_s=60.0)
    )
    inputs = {"x": RNG.standard_normal((3, 8)).astype(np.float32)}
    wanted = np.tanh(inputs["x"] @ WEIGHTS)
    np.testing.assert_allclose(runner.run("fault", inputs)[0], wanted, rtol=1e-5, atol=1e-6)
    fault.node_shapes[number] = shape
    np.testing.assert_allclose(runner.run_fastest(inputs)[0], wanted, rtol=1e-5, atol=1e-6)
    (attempt,) = runner.last_run.attempts
    assert attempt.reason.startswith(f"{what}: the run on")
    assert f"Name:'{('matmul', 'tanh')[number - 1]}/expanded'" in attempt.reason
    assert next(row for row in runner.health() if row.device.kind == "fault").state is HealthState.QUARANTINED


def test_a_device_that_dies_and_recovers_is_used_again(fault: FaultProvider) -> None:
    """Within its back-off and one check, with results that are right throughout."""
    runner = GraphDevices(
        mlp(), DevicePolicy.only(["cpu", "fault"]), resilience=Resilience(bridge=False, backoff_s=0.05)
    )
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    wanted = np.tanh(x @ WEIGHTS)
    seen = []

    def ask() -> str:
        np.testing.assert_allclose(runner.run_fastest({"x": x})[0], wanted, rtol=1e-5, atol=1e-6)
        assert runner.last_run is not None
        assert runner.last_run.device is not None
        seen.append(runner.last_run.device.label)
        return seen[-1]

    assert ask() == "fault"
    fault.dead = LOST
    assert ask() == "cpu"
    fault.recover()
    recovered = time.perf_counter()
    until(lambda: ask() == "fault")
    assert time.perf_counter() - recovered < 2.0


@pytest.mark.webgpu
def test_random_faults_lose_no_request_and_give_no_wrong_answer(fault: FaultProvider) -> None:
    """Eight threads, faults of every kind, each result checked; half of them may not be answered by the CPU."""
    fault.by_node = True
    options = Resilience(backoff_s=0.02, backoff_max_s=0.1, timeout_s=5.0, grace_s=0.05)
    allowed = (["cpu", "fault"], ["webgpu", "fault"])
    runners = [GraphDevices(mlp(), DevicePolicy.only(names), resilience=options) for names in allowed]
    cases = []
    for rows in (1, 2, 3, 5):
        x = RNG.standard_normal((rows, 8)).astype(np.float32)
        cases.append(({"x": x}, np.tanh(x @ WEIGHTS)))
    for runner, names in zip(runners, allowed, strict=True):
        for inputs, _ in cases:
            for name in names:
                runner.run(name, inputs, timeout_s=30.0)  # the first run of a shape compiles its shaders
    before = threading.active_count()
    chance = random.Random(11)
    errors = ["Failed to allocate memory for requested buffer of size 1", LOST, "something strange"]

    def script(number: int) -> Exception | None:
        return EngineError(chance.choice(errors)) if chance.random() < 0.01 else None

    fault.script = script
    answered: list[Counter[str]] = [Counter(), Counter()]
    problems: list[str] = []
    end = time.perf_counter() + 4.0

    def client(number: int) -> None:
        order = random.Random(number)
        while time.perf_counter() < end:
            inputs, wanted = order.choice(cases)
            try:
                device, (found,) = runners[number % 2].run_chosen(inputs)
            except Exception as err:
                problems.append(f"lost: {err!r}")
                continue
            answered[number % 2][device.label] += 1
            if not np.allclose(found, wanted, rtol=1e-3, atol=1e-3):
                problems.append(f"wrong on {device.label}")

    def trouble() -> None:
        order = random.Random(5)
        while time.perf_counter() < end:
            time.sleep(0.1)
            kind = order.randrange(6)
            fault.dead = LOST if kind == 0 else ""
            fault.stubborn = kind == 2
            fault.open_delay_s = 0.1 if kind == 3 else 0.0
            fault.memory_bytes = 64 if kind == 4 else None
            if kind in (1, 2):
                fault.hang.set()
            if kind == 5:
                fault.node_shapes = {order.choice((1, 2)): order.choice((NODE_OUT_OF_MEMORY, NODE_OVERFLOW))}
            time.sleep(0.1)
            fault.recover()
            fault.script = script

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    threads.append(threading.Thread(target=trouble))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert problems == []
    assert [set(counts) for counts in answered] == [set(names) for names in allowed]
    assert sum(answered[0].values()) > 200
    fault.recover()
    until(lambda: fault.inside == 0)
    until(lambda: threading.active_count() <= before, 20.0)


@pytest.mark.webgpu
def test_webgpu_opens_behind_the_cpu_and_at_once_from_the_compile_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run is the CPU's, later ones WebGPU's once it agrees; the next runner finds its session compiled."""
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("RLX_DEVICE", "webgpu")
    x = RNG.standard_normal((3, 8)).astype(np.float32)
    seen = []

    def ask(runner: GraphDevices) -> str:
        np.testing.assert_allclose(runner.run_resolved({"x": x})[0], np.tanh(x @ WEIGHTS), rtol=1e-3, atol=1e-4)
        assert runner.last_run is not None
        assert runner.last_run.device is not None
        seen.append(runner.last_run.device.label)
        return seen[-1]

    for _ in range(2):
        options = CompileOptions(cache=CacheUse.ON)
        with GraphDevices(mlp(), DevicePolicy.only(["cpu", "webgpu"]), options, resilience=Resilience()) as runner:
            if seen:
                runner.fastest({"x": x})  # the choice was made before
            until(lambda runner=runner: ask(runner) == "webgpu", 60.0)  # type: ignore[misc]
    assert len(seen) > 2
    assert seen == ["cpu"] * (len(seen) - 2) + ["webgpu"] * 2


def test_a_session_that_opens_behind_ends_with_the_runner(
    fault: FaultProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime stops loading, and the thread ends, long before the session would have been open."""
    graph = Graph("deep")
    value = graph.input("x", ["n", 4])
    for _ in range(10_000):
        value = graph.tanh(value + 1.0)
    graph.outputs = [value]
    runner = GraphDevices(graph, DevicePolicy.only(["cpu", "fault"]), resilience=Resilience())
    runner.run_fastest({"x": np.zeros((1, 4), np.float32)})
    begins = threading.Event()
    ends = opening.stoppable
    monkeypatch.setattr(opening, "stoppable", lambda end: (begins.set(), ends(end))[1])
    assert begins.wait(60)
    runner.close()
    until(lambda: not any(thread.name == "rlx_ort-bridge" for thread in threading.enumerate()))
    assert fault.opened == 0
