"""Send requests to resilient runners while their devices fail in every way, and check each result.

    python scripts/soak.py                                        the CPU, WebGPU and a device with made-up faults
    python scripts/soak.py --requests 2000 --devices cpu,fault
    python scripts/soak.py --devices cuda,webgpu,cpu --minutes 2  a GPU whose memory runs out, for its inputs and for
                                                                  another process that takes it

One runner may use every device; the other denies the second one of the list. A lost or wrong answer, an answer of a
denied device, a thread or a session that stays is a problem; the exit code is 1 when there was one.
"""

from __future__ import annotations

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

from fault_provider import LOST, NODE_OUT_OF_MEMORY, NODE_OVERFLOW, OUT_OF_MEMORY, FaultProvider, until

from figures.record import sampled
from rlx_ort import environment
from rlx_ort.device import Device, parse_device_list
from rlx_ort.errors import CancelledRunError, EngineError
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.engine.process import watched_sessions
from rlx_ort.providers.engine.recipe import SessionRecipe
from rlx_ort.providers.engine.session import OrtEngineSession
from rlx_ort.providers.registry import register_provider
from rlx_ort.providers.webgpu import WebGpuProvider
from rlx_ort.resilience.limits import CancelToken
from rlx_ort.resilience.options import Resilience
from rlx_ort.selection.policy import DevicePolicy

WIDTH, NODES = 64, 3
PAUSE_S = 0.1  # at most, between two requests of a thread
SIZES = (1, 2, 7, 32)
GPU_LIMIT_BYTES = 128 << 20
TOO_MANY_ROWS = GPU_LIMIT_BYTES // (WIDTH * 4)  # an input of the limit's size
TAKER = """
import ctypes, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
context, free, total, place = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0) == 0
cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
share = free.value
while cuda.cuMemAlloc_v2(ctypes.byref(place), ctypes.c_size_t(share)) and share > 1 << 20:
    share -= 16 << 20
time.sleep(float(sys.argv[1]))
"""


class SmallCuda(CudaProvider):
    """CUDA whose sessions have a limit of memory that real inputs exceed."""

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return CUDA's recipe with the limit."""
        recipe = super().recipe(device, options)
        return replace(recipe, options={**recipe.options, "gpu_mem_limit": str(GPU_LIMIT_BYTES)})

    def default_profile(self, device: Device) -> CostProfile:
        """Return a profile that makes it the automatic choice."""
        return CostProfile(1e6, 1e6, 1e6, 1.0, 1.0, 1e6, 1e6)


class QuickWebGpu(WebGpuProvider):
    """WebGPU that predictions prefer to the CPU, also where it is software."""

    def default_profile(self, device: Device) -> CostProfile:
        """Return a profile better than the CPU's, and worse than those of CUDA and of the faulty device."""
        return CostProfile(1e5, 1e5, 1e5, 10.0, 10.0, 1e5, 1e5)


@dataclass
class Tally:
    """The outcomes of one runner's requests."""

    denied: set[str]
    answers: Counter[str] = field(default_factory=Counter)
    cancelled: int = 0
    failed_attempts: int = 0
    times_ns: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def main() -> int:
    """Run the soak, without the calibrations of this machine, and return 1 when something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu,webgpu,fault")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, help="run for this long in place of a number of requests")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, environment.override({"CACHE_DIR": folder}):
        return _soak(asked)


def _soak(asked: argparse.Namespace) -> int:
    fault = FaultProvider(CpuProvider(), by_node=True)
    register_provider(fault)
    register_provider(SmallCuda())
    register_provider(QuickWebGpu())
    devices = parse_device_list(asked.devices)
    rng = np.random.default_rng(asked.seed)
    first, second = (rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8 for _ in range(2))
    graph = Graph("soak")
    hidden = graph.tanh(graph.input("x", ["n", WIDTH]) @ graph.param("a", [WIDTH, WIDTH], data=first))
    graph.outputs = [hidden @ graph.param("b", [WIDTH, WIDTH], data=second)]
    cases = []
    for size in [*SIZES, TOO_MANY_ROWS] if "cuda" in asked.devices else SIZES:
        x = rng.standard_normal((size, WIDTH)).astype(np.float32)
        cases.append((x, np.tanh(x @ first) @ second))
    before, sessions = threading.active_count(), _open_sessions()
    denied = devices[1].label if len(devices) > 1 else ""
    tallies = [Tally(set()), Tally({denied})]
    limit_s = 20.0 if len(cases) > len(SIZES) else 1.0
    settings = Resilience(backoff_s=0.1, backoff_max_s=1.0, timeout_s=limit_s, grace_s=0.2)
    runners = [
        GraphDevices(graph, DevicePolicy.only([d for d in devices if d.label not in tally.denied]), resilience=settings)
        for tally in tallies
    ]
    done = threading.Event()
    left = iter(range(asked.requests if asked.minutes is None else sys.maxsize))
    begun = time.perf_counter()
    ends = None if asked.minutes is None else begun + 60 * asked.minutes

    def client(number: int) -> None:
        order = random.Random(asked.seed * 1000 + number)  # noqa: S311  # no secrets here
        tally, runner = tallies[number % 2], runners[number % 2]
        while next(left, None) is not None and (ends is None or time.perf_counter() < ends):
            large = len(cases) > len(SIZES) and order.random() < 0.001
            time.sleep(order.random() * PAUSE_S)
            _request(runner, tally, cases[-1] if large else order.choice(cases[: len(SIZES)]), order)

    troubles = [partial(_faults, fault, runners, done, asked.seed)] if "fault" in asked.devices else []
    troubles += [partial(_take_memory, done)] if "cuda" in asked.devices else []
    with (
        ThreadPoolExecutor(asked.threads + len(troubles)) as pool,
        sampled(lambda: psutil.Process().memory_info().rss, 1.0) as memory,
    ):
        running = [pool.submit(trouble) for trouble in troubles]
        try:
            list(pool.map(client, range(asked.threads)))
        finally:
            done.set()
        took_s = time.perf_counter() - begun
    for each in running:
        each.result()
    health = [[f"{row.device.label} {row.state.value} {row.failures}" for row in runner.health()] for runner in runners]
    for runner in runners:
        runner.close()
    runners.clear()
    problems = [problem for tally in tallies for problem in tally.problems]
    problems += _leaks(before, sessions, fault)
    for tally, states in zip(tallies, health, strict=True):
        times = np.array(tally.times_ns) / 1e6
        p50, p99, most = np.percentile(times, [50, 99, 100])
        print(
            f"denied {sorted(tally.denied) or 'none'}: {len(times)} requests, answered by {dict(tally.answers)}, "
            f"{tally.cancelled} cancelled; p50 {p50:.2f} ms, p99 {p99:.1f} ms, longest {most:.0f} ms; "
            f"{tally.failed_attempts} attempts failed; {states}"
        )
    quarter = memory[len(memory) // 4]
    print(f"memory {quarter >> 20} MiB after a quarter of the time, {memory[-1] >> 20} MiB at the end")
    print(f"{asked.threads} threads, {took_s:.0f} s, {len(problems)} problems")
    for problem in problems[:20]:
        print("PROBLEM:", problem)
    return 1 if problems else 0


def _request(runner: GraphDevices, tally: Tally, case: tuple[Any, Any], order: random.Random) -> None:
    x, wanted = case
    token = CancelToken() if order.random() < 0.02 else None
    if token is not None:
        threading.Timer(order.random() * 0.005, token.cancel).start()
    begun = time.perf_counter_ns()
    try:
        (got,) = runner.run_fastest({"x": x}, cancel=token)
    except CancelledRunError:
        tally.cancelled += 1
        return
    except Exception as err:  # the runner promises an answer
        tally.problems.append(f"lost: {type(err).__name__}: {err}")
        return
    finally:
        tally.times_ns.append(time.perf_counter_ns() - begun)
    last = runner.last_run
    assert last is not None
    assert last.device is not None
    tally.answers[last.device.label] += 1
    tally.failed_attempts += len(last.attempts)
    if last.device.label in tally.denied:
        tally.problems.append(f"answered by {last.device.label}, which is denied")
    if got.shape != wanted.shape or not np.allclose(got, wanted, rtol=1e-3, atol=1e-3):
        tally.problems.append(f"wrong on {last.device.label}, {len(x)} rows")


def _faults(fault: FaultProvider, runners: list[GraphDevices], done: threading.Event, seed: int) -> None:
    """Give the device one kind of fault after the other, with a time without any between them."""
    order = random.Random(seed)  # noqa: S311
    errors = [OUT_OF_MEMORY.format(1), LOST, "something strange"]

    def now_and_then(number: int) -> Exception | None:
        return EngineError(order.choice(errors)) if order.random() < 0.02 else None

    while not done.wait(0.15):
        kind = order.choice(("runs", "node", "memory", "hangs", "stuck", "dead", "slow to open", "wrong", "NaN"))
        if kind == "runs":
            fault.script = now_and_then
        elif kind == "node":
            fault.node_shapes = {order.randint(1, NODES): order.choice((NODE_OUT_OF_MEMORY, NODE_OVERFLOW))}
        elif kind == "memory":
            fault.memory_bytes = 2 * WIDTH * 4
        elif kind in ("hangs", "stuck"):
            fault.stubborn = kind == "stuck"
            fault.hang.set()
        elif kind == "slow to open":
            fault.open_delay_s = 0.5
        else:
            fault.dead = LOST
            done.wait(0.05)
            if kind != "dead":
                # A device is compared before it is used, not in each run: its results are wrong only while it is out.
                until(lambda: fault.inside == 0 and not any(_is_used(runner) for runner in runners), 20.0)
                fault.factor = 1.01 if kind == "wrong" else float("nan")
                fault.dead = ""
        done.wait(3.0 if kind == "stuck" else 0.3)
        if fault.factor != 1.0:
            fault.dead = LOST  # no check that has begun ends with right results of this time
            done.wait(0.1)
        fault.recover()
    fault.recover()


def _is_used(runner: GraphDevices) -> bool:
    return any(row.device.kind == "fault" and row.state.value == "ready" for row in runner.health())


def _take_memory(done: threading.Event) -> None:
    """Let another process hold the GPU's free memory, now and then."""
    while not done.wait(5.0):
        subprocess.run([sys.executable, "-c", TAKER, "5"], check=False)


def _open_sessions() -> int:
    gc.collect()
    sessions = [each for each in watched_sessions() if isinstance(each, OrtEngineSession)]
    return sum(session._core is not None for session in sessions)


def _leaks(threads: int, sessions: int, fault: FaultProvider) -> list[str]:
    """Wait until idle threads and sessions have ended, and return those that stay."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        stays = {
            "threads": threading.active_count() - threads,
            "sessions": _open_sessions() - sessions,
            "sessions of the faulty device": fault.opened - fault.closed,
            "runs inside of it": fault.inside,
        }
        if not any(count > 0 for count in stays.values()):
            return []
        time.sleep(0.2)
    return [f"{count} {name} stay" for name, count in stays.items() if count > 0]


if __name__ == "__main__":
    sys.exit(main())
