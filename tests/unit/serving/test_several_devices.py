"""Clients that each wait for their answer, in simulated time: no device stands still, and several harm none."""

from __future__ import annotations

import asyncio
import functools
import random
import selectors
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from served_models import submit

from rlx_ort import Device, EngineError
from rlx_ort.serving import lanes as lane_module
from rlx_ort.serving import scheduler as scheduling
from rlx_ort.serving.lanes import Array, Lane, Padding, Rooms, Rows
from rlx_ort.serving.scheduler import BatchOptions, Scheduler

CPU, CUDA, SECOND = Device.CPU, Device("cuda:0"), Device("cuda:1")
Cost = Callable[[int], float]


class Clock:
    """Simulated time, and how often the event loop has looked for work."""

    ns = 0
    looks = 0


class Skipping(selectors.SelectSelector):
    """Lets the time pass while the event loop has nothing to do."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Skip to the time that the event loop waits for."""
        found = super().select(0)
        self.clock.looks += 1
        if not found:
            assert timeout is not None, "everything waits for ever"
            self.clock.ns += max(round(timeout * 1e9), 10_000)  # an iteration takes some time
        return found


class Loop(asyncio.SelectorEventLoop):
    """An event loop of simulated time; what a run hands back arrives when the run ends."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        super().__init__(Skipping(clock))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Return simulated seconds."""
        return self.clock.ns / 1e9

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Any = None) -> Any:
        """Call at the simulated time of the caller."""
        return self.call_at(self.time(), callback, *args)


class Fake:
    """A device that takes `cost(rows)` ns of simulated time, and fails until a time."""

    def __init__(self, clock: Clock, cost: Cost) -> None:
        self.clock, self.cost = clock, cost
        self.rows = 0
        self.broken_until_ns = self.until_ns = 0

    def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        count = len(inputs["x"])
        self.clock.ns += round(self.cost(count))
        if self.clock.ns < self.broken_until_ns:
            raise EngineError("lost")
        self.rows += count
        return {"y": inputs["x"]}

    def submit(self, call: Callable[[], object]) -> SimpleNamespace:
        """Run as a worker does, one call after the other: the time of the run passes for the run alone."""
        began = self.clock.ns
        self.clock.ns = max(began, self.until_ns)
        value = call()
        ended_ns = self.until_ns = self.clock.ns
        self.clock.ns = began

        def result() -> object:
            self.clock.ns = max(self.clock.ns, ended_ns)
            return value

        return SimpleNamespace(result=result)

    def close(self) -> None:
        """End."""


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the time that the scheduler reads."""
    found = Clock()
    for module in (scheduling, lane_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter_ns=lambda: found.ns))
    return found


def served(
    clock: Clock,
    devices: Mapping[Device, Cost],
    clients: int,
    *,
    seconds: float = 1.0,
    predicted: Callable[[Device, int], float] | None = None,
    batched: bool = True,
    think_ns: float = 20_000,
    host_ns: int = 0,
    leaving: int = 0,
    broken_s: float = 0.0,
    padding: Padding = "never",
    spread_ns: float = 0.0,
    join_ns: int = 0,
) -> tuple[float, dict[Device, Fake]]:
    """Return the requests a second of clients that each wait for their answer, and the devices.

    The server takes `host_ns` to read a request and to send its answer, and `join_ns` to put a row into a batch.
    Clients ask again after `think_ns` on average, of which `spread_ns` vary, or all if it is 0. `leaving` more clients
    ask only once.
    """

    def joined(lane: Lane, batch: Sequence[Rows], rooms: Rooms) -> Mapping[str, Array]:
        inputs = lane_module.joined(lane, batch, rooms)
        clock.ns += join_ns * len(batch)
        lane.joined_in(len(batch), join_ns * len(batch))
        return inputs

    fakes = {device: Fake(clock, cost) for device, cost in devices.items()}
    lanes = []
    for device, fake in fakes.items():
        guess = fake.cost if predicted is None else (lambda rows, of=device: predicted(of, rows))
        lane = Lane(device, fake, guess, 64, padding=padding)
        lane.worker = fake  # type: ignore[assignment]
        lane.helper = Fake(clock, fake.cost)  # type: ignore[assignment]
        lane._inline_from_ns = 1 << 62
        lane.learn(1, round(fake.cost(1)))  # as the run that warms a device does
        if broken_s and device == CUDA:
            fake.broken_until_ns = clock.ns + round(broken_s * 1e9)
            lane.probe = functools.partial(fake, {"x": np.zeros((1, 1), np.float32)}, None)
        lanes.append(lane)
    scheduler = Scheduler(lanes, batched=batched, options=BatchOptions(max_batch=64))
    until_ns = clock.ns + round(seconds * 1e9)
    done = 0
    data = np.zeros((1, 1), np.float32)

    async def client(number: int) -> None:
        nonlocal done
        draw = random.Random(number)
        while clock.ns < until_ns:
            clock.ns += host_ns // 2
            await submit(scheduler, {"x": data})
            clock.ns += host_ns // 2
            done += clock.ns < until_ns
            varying_ns = spread_ns or think_ns
            await asyncio.sleep((think_ns - varying_ns) / 1e9 + draw.expovariate(1e9 / varying_ns))

    async def work() -> None:
        once = [submit(scheduler, {"x": data}) for _ in range(leaving)]
        await asyncio.gather(*once, *(client(number) for number in range(clients)))
        await scheduler.close()

    loop = Loop(clock)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduling, "joined", joined)
            loop.run_until_complete(work())
    finally:
        loop.close()
    return done / seconds, fakes


def proportional(ns: float) -> Cost:
    """Return the cost of a device that gains nothing by batches."""
    return lambda rows: ns * rows


def gpu(base_ns: float, row_ns: float) -> Cost:
    """Return the cost of a device with a fixed part."""
    return lambda rows: base_ns + row_ns * rows


@pytest.mark.parametrize(
    ("clients", "base_ns", "row_ns", "host_ns"),
    [(16, 1e6, 6e4, 100_000), (64, 1e6, 1e4, 50_000), (64, 1e6, 6.2e4, 60_000), (64, 5e6, 5e4, 100_000)],
)
def test_a_device_does_not_stand_still_until_all_clients_are_back(
    clock: Clock, clients: int, base_ns: float, row_ns: float, host_ns: int
) -> None:
    """Two batches that take turns are faster than one of all clients, if these take longer than a run's fixed part.

    Then either the device or the server is always busy, whichever takes longer for a turn of all clients.
    """
    turn_ns = max(2 * base_ns + clients * row_ns, clients * host_ns)
    found = served(clock, {CUDA: gpu(base_ns, row_ns)}, clients, host_ns=host_ns)[0]
    assert found >= 0.92 * clients / turn_ns * 1e9


def test_a_device_waits_for_clients_that_are_back_within_the_fixed_part(clock: Clock) -> None:
    """One batch of all clients is then faster than two; the device stands still while they come back."""
    clients, base_ns, row_ns, host_ns = 64, 20e6, 3e5, 100_000
    turn_ns = base_ns + clients * (row_ns + host_ns)
    found = served(clock, {CUDA: gpu(base_ns, row_ns)}, clients, host_ns=host_ns, seconds=4)[0]
    assert found >= 0.92 * clients / turn_ns * 1e9


@pytest.mark.parametrize("padding", ["never", "joined"])
@pytest.mark.parametrize(
    ("clients", "row_ns", "host_ns"), [(16, 6e4, 100_000), (48, 6e4, 100_000), (64, 6e4, 40_000), (64, 6e4, 200_000)]
)
def test_half_of_the_clients_wait_while_the_others_are_answered(
    clock: Clock, clients: int, row_ns: float, host_ns: int, padding: Padding
) -> None:
    """At least 0.93 of the rate of two halves in turns, from clients that all begin at the same time."""
    cost = gpu(1e6, row_ns)
    half = 1 << (clients // 2 - 1).bit_length() if padding == "joined" else clients // 2
    turn_ns = max(2 * cost(half), clients * host_ns)
    found = served(clock, {CUDA: cost}, clients, host_ns=host_ns, padding=padding)[0]
    assert found >= 0.93 * clients / turn_ns * 1e9


def test_clients_that_are_back_just_before_a_run_ends_are_in_the_next_batch(clock: Clock) -> None:
    """At least 0.92 of the rate of two halves in turns, where the last one of 32 is back after about one run."""
    cost = gpu(1e6, 6e4)
    found = served(clock, {CUDA: cost}, 64, host_ns=60_000, think_ns=1e6, padding="joined", seconds=3)[0]
    assert found >= 0.92 * 64 / max(2 * cost(32), 64 * 60_000) * 1e9


def test_runs_that_take_longer_than_the_quickest_ones_do_not_cost_whole_batches(clock: Clock) -> None:
    """At least 0.94 of the rate of two halves in turns: the next batch is put together when the run really ends."""
    usual, draw = gpu(0.55e6, 0.302e6), random.Random(5)
    slower = {CUDA: lambda rows: usual(rows) * (1 + 0.3 * draw.random())}
    found = served(
        clock,
        slower,
        64,
        host_ns=60_000,
        think_ns=5e6,
        spread_ns=1e6,
        padding="joined",
        predicted=lambda _, n: usual(n),
    )[0]
    assert found >= 0.94 * 32 / (1.15 * usual(32)) * 1e9


def test_the_event_loop_does_not_poll_for_the_end_of_a_gpus_run(clock: Clock) -> None:
    """It would keep the lock of Python from the threads that copy: it looks for work some times a request."""
    found = served(clock, {CUDA: gpu(1e6, 3e5)}, 64, host_ns=60_000, think_ns=5e6, padding="joined")[0]
    assert clock.looks < 8 * found


def test_a_device_that_records_each_size_sees_few_sizes(clock: Clock) -> None:
    """Of 50 clients that come back at random, batches have at most seven sizes, the powers of two."""
    sizes = set()

    def cost(rows: int) -> float:
        sizes.add(rows)
        return 1e6 + 6e4 * rows

    guess = gpu(1e6, 6e4)
    served(clock, {CUDA: cost}, 50, think_ns=2e6, padding="joined", predicted=lambda _, rows: guess(rows))
    assert sizes <= {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("leaving", [8, 64])
def test_clients_that_leave_are_not_waited_for(clock: Clock, leaving: int) -> None:
    """The others get the rate that they would have alone."""
    costs = {CUDA: gpu(2e6, 2e4)}
    alone = served(clock, costs, 8, host_ns=40_000)[0]
    assert served(clock, costs, 8, host_ns=40_000, leaving=leaving)[0] >= 0.97 * alone


@pytest.mark.parametrize("clients", [1, 4, 16, 64])
@pytest.mark.parametrize("cpu_ns", [2e6, 5e6, 30e6, 200e6])
def test_a_slower_device_beside_does_no_harm(clock: Clock, cpu_ns: float, clients: int) -> None:
    """At least 0.98 of the better one alone, for a CPU from as fast as the GPU to a hundred times as slow."""
    costs = {CUDA: gpu(2e6, 2e4), CPU: proportional(cpu_ns)}
    alone = max(served(clock, {device: cost}, clients)[0] for device, cost in costs.items())
    assert served(clock, costs, clients)[0] >= 0.98 * alone


@pytest.mark.parametrize("clients", [4, 64])
def test_wrong_predictions_of_the_slower_device_do_little_harm(clock: Clock, clients: int) -> None:
    """A CPU that is predicted ten times too fast for batches is found out."""
    costs = {CUDA: gpu(2e6, 2e4), CPU: proportional(20e6)}
    alone = served(clock, {CUDA: costs[CUDA]}, clients)[0]
    both = served(
        clock, costs, clients, predicted=lambda device, rows: costs[device](rows) / (10 if device == CPU else 1)
    )
    assert both[0] >= 0.98 * alone


@pytest.mark.parametrize("batched", [True, False])
def test_two_equal_devices_do_twice_the_work(clock: Clock, batched: bool) -> None:
    """At least 1.9 times one, with batches and without."""
    cost = gpu(1e6, 4e5)
    one = served(clock, {CUDA: cost}, 128, batched=batched)[0]
    two, fakes = served(clock, {CUDA: cost, SECOND: cost}, 128, batched=batched)
    assert two >= 1.9 * one
    assert 0.8 < fakes[CUDA].rows / fakes[SECOND].rows < 1.25


@pytest.mark.parametrize(("think_ns", "spread_ns"), [(4e6, 1e6), (8e6, 3e6), (9e6, 1e6)])
def test_no_device_of_two_waits_until_its_batch_is_joined(clock: Clock, think_ns: float, spread_ns: float) -> None:
    """Joining 32 rows takes an eighth of a run; at least 1.85 times one device, whose clients make larger batches."""
    cost, asked = gpu(1.6e6, 3.28e5), {"host_ns": 30_000, "join_ns": 50_000, "padding": "joined"}
    rates = [
        served(clock, devices, 128, think_ns=think_ns, spread_ns=spread_ns, **asked)[0]  # type: ignore[arg-type]
        for devices in ({CUDA: cost}, {CUDA: cost, SECOND: cost})
    ]
    assert rates[1] >= 1.85 * rates[0]


def test_predictions_that_are_missing_are_learned(clock: Clock) -> None:
    """Without predictions the sizes are tried, and the rate comes close to that with them."""
    cost = gpu(2e6, 2e4)
    known = served(clock, {CUDA: cost}, 64)[0]
    assert served(clock, {CUDA: cost}, 64, predicted=lambda *_: None)[0] >= 0.95 * known  # type: ignore[arg-type,return-value]


def test_a_slower_device_helps_where_it_can(clock: Clock) -> None:
    """A CPU of half the speed of a GPU that gains little by batches adds a good part of that half."""
    costs = {CUDA: gpu(2e5, 1e6), CPU: proportional(2e6)}
    alone = served(clock, {CUDA: costs[CUDA]}, 64)[0]
    assert served(clock, costs, 64)[0] >= 1.3 * alone


def test_a_device_that_would_add_little_is_left_alone(clock: Clock) -> None:
    """A CPU with 4 % of the GPU's rate runs what arrives while the GPU is out, and nothing beside it."""
    costs = {CUDA: gpu(1e6, 2e5), CPU: proportional(5e6)}
    _, fakes = served(clock, costs, 64)
    assert (fakes[CPU].rows, fakes[CUDA].rows > 3000) == (0, True)
    _, fakes = served(clock, costs, 64, broken_s=0.5)
    assert fakes[CPU].rows > 50


@pytest.mark.parametrize("clients", [16, 64])
def test_a_device_is_judged_by_the_batches_of_all_clients(clock: Clock, clients: int) -> None:
    """A CPU that takes twice a GPU's time for one row and 13 times for many runs nothing, however few rows wait."""
    costs = {CUDA: gpu(2.1e6, 3.5e5), CPU: proportional(5e6)}
    alone = served(clock, {CUDA: costs[CUDA]}, clients, host_ns=200_000, padding="joined")[0]
    rate, fakes = served(clock, costs, clients, host_ns=200_000, padding="joined")
    assert fakes[CPU].rows == 0
    assert rate >= 0.99 * alone


def test_a_device_that_comes_back_is_used_again(clock: Clock) -> None:
    """While it fails the other one answers everything; after its probe it answers most."""
    costs = {CUDA: gpu(1e6, 2e4), CPU: proportional(4e6)}
    rate, fakes = served(clock, costs, 16, seconds=4.0, broken_s=1.5)
    assert fakes[CUDA].rows > fakes[CPU].rows > 0
    assert rate > 2 * served(clock, {CPU: costs[CPU]}, 16)[0]


@pytest.mark.parametrize("off", [0.5, 2.0])
def test_the_only_client_does_not_wait_for_others(clock: Clock, off: float) -> None:
    """At least 0.95 of the rate without batches, with predictions of a batch that are off by half and twice."""
    cost = gpu(2e6, 2e4)
    wrong = served(clock, {CUDA: cost}, 1, predicted=lambda _, rows: cost(rows) * (1.0 if rows == 1 else off))
    assert wrong[0] >= 0.95 * served(clock, {CUDA: cost}, 1, batched=False)[0]
