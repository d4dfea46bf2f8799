"""The queue of a model: what is joined, who runs it, and what happens to requests that fail or wait too long."""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from served_models import submit

from rlx_ort import Device, EngineError, InputError, ServingError
from rlx_ort.providers import registry
from rlx_ort.providers.base import DeviceGraphReport
from rlx_ort.serving import lanes, model_devices
from rlx_ort.serving import scheduler as scheduling
from rlx_ort.serving.lanes import Answer, Array, Lane, Padding, Rows, executed
from rlx_ort.serving.scheduler import BatchOptions, Scheduler

CUDA = Device("cuda")


class Fake:
    """A device that doubles its input, takes `ns(rows)`, and keeps the rows of each run."""

    def __init__(self, ns: Callable[[int], float] = lambda rows: 1e6, error: Exception | None = None) -> None:
        self.ns, self.error = ns, error
        self.runs: list[int] = []
        self.gate: threading.Event | None = None

    def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        self.runs.append(len(inputs["x"]))
        if self.gate is not None:
            self.gate.wait(10)
        time.sleep(self.ns(len(inputs["x"])) / 1e9)
        if self.error is not None:
            raise self.error
        return {"y": inputs["x"] * 2}


def lane(fake: Fake, device: Device = Device.CPU, most: int = 64) -> Lane:
    """Return a lane that predicts what the fake takes."""
    return Lane(device, fake, fake.ns, most)


def rows(count: int, value: float = 1.0, width: int = 3) -> dict[str, Array]:
    """Return an input of so many rows."""
    return {"x": np.full((count, width), value, np.float32)}


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run a coroutine with a limit."""
    return asyncio.run(asyncio.wait_for(work(), 30))


@asynccontextmanager
async def busy(fake: Fake, scheduler: Scheduler) -> AsyncIterator[None]:
    """Keep the device busy with a request meanwhile; what was submitted inside begins to wait before it ends."""
    fake.gate = threading.Event()
    task = asyncio.create_task(submit(scheduler, rows(1)))
    while not fake.runs:
        await asyncio.sleep(0.001)
    yield
    await asyncio.sleep(0.01)
    fake.gate.set()
    await task


async def behind(fake: Fake, scheduler: Scheduler, *inputs: dict[str, Array]) -> list[Answer]:
    """Return the answers to requests that came while the device was busy."""
    async with busy(fake, scheduler):
        later = [asyncio.create_task(submit(scheduler, each)) for each in inputs]
    return await asyncio.gather(*later)


async def test_what_waits_runs_together() -> None:
    """Sixteen requests behind a busy device are one batch, and each gets its own rows."""
    fake = Fake()
    scheduler = Scheduler([lane(fake)], batched=True)
    answers = await behind(fake, scheduler, *(rows(1, at) for at in range(16)))
    assert fake.runs == [1, 16]
    assert [float(found.outputs["y"][0, 0]) for found in answers] == [2.0 * at for at in range(16)]
    assert all(found.outputs["y"].shape == (1, 3) for found in answers)
    await scheduler.close()


class _EarlyLoop(asyncio.SelectorEventLoop):
    """An event loop as uvloop: its timers fire a moment early, and their handles have no time."""

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        timer = super().call_at(when - 0.001, callback, *args, context=context)
        return SimpleNamespace(cancel=timer.cancel, cancelled=timer.cancelled, _source_traceback=None)


def test_requests_that_wait_for_others_run_on_every_event_loop() -> None:
    """A timer that fires early or has no time leaves no request behind."""

    async def work() -> None:
        scheduler = Scheduler([lane(Fake())], batched=True, options=BatchOptions(delay_s=0.004))
        for at in range(20):
            answers = await asyncio.gather(*(submit(scheduler, rows(1, at + row)) for row in range(at % 3 + 1)))
            for row, answer in enumerate(answers):
                np.testing.assert_array_equal(answer.outputs["y"], rows(1, 2 * (at + row))["x"])
            await asyncio.sleep(at % 4 / 1000)
        await scheduler.close()

    with asyncio.Runner(loop_factory=_EarlyLoop) as runner:
        runner.run(asyncio.wait_for(work(), 10))


def test_a_batch_ends_where_rows_get_no_cheaper() -> None:
    """A device whose time is proportional to the rows runs them one by one; one with a fixed time takes all."""
    assert lane(Fake(lambda rows: rows * 1e6)).cap() == 1
    assert lane(Fake(lambda rows: 1e6)).cap() == 64
    assert lane(Fake(lambda rows: 1e6 if rows <= 8 else rows * 125e3)).cap() == 8


@pytest.mark.parametrize(
    ("padding", "counts", "ran"),
    [
        ("never", [2, 1, 2], 5),
        ("joined", [2, 1, 2], 8),
        ("joined", [5], 5),
        ("always", [5], 8),
        ("always", [4], 4),
        ("always", [20, 20], 48),
    ],
)
def test_batches_are_padded_to_powers_of_two(padding: Padding, counts: list[int], ran: int) -> None:
    """Or to the largest batch; each request gets the rows that are its own, and the padding repeats real rows."""
    seen: list[Array] = []

    def doubled(inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        seen.append(inputs["x"])
        return {"y": inputs["x"] * 2}

    device = Lane(CUDA, doubled, lambda rows: 1e6, 48, padding=padding)
    given = [np.arange(count, dtype=np.float32)[:, None] + 100 * at for at, count in enumerate(counts)]
    answers = executed(device, [Rows({"x": array}, None, len(array), 0) for array in given])
    for array, answer in zip(given, answers, strict=True):
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.outputs["y"], 2 * array)
    [inputs] = seen
    assert len(inputs) == ran
    assert set(inputs[sum(counts) :, 0]) <= {given[-1][-1, 0]}


@pytest.mark.parametrize("counts", [[1] * 9, [3, 1, 5, 2], [16], [7]])
def test_large_batches_keep_their_order(counts: list[int]) -> None:
    """However many threads copy them; the padding repeats the last row."""
    seen: list[Array] = []
    device = Lane(CUDA, lambda inputs, _: {"y": seen.append(inputs["x"]) or inputs["x"]}, lambda rows: 1e6, 16)  # type: ignore[func-returns-value]
    device.padding = "always"
    whole = np.arange(sum(counts) << 18, dtype=np.float32).reshape(sum(counts), -1)
    parts = np.split(whole, np.cumsum(counts)[:-1])
    answers = executed(device, [Rows({"x": part}, None, len(part), 0) for part in parts])
    for part, answer in zip(parts, answers, strict=True):
        assert isinstance(answer, Answer)
        np.testing.assert_array_equal(answer.outputs["y"], part)
    np.testing.assert_array_equal(seen[0][len(whole) :], np.repeat(whole[-1:], len(seen[0]) - len(whole), axis=0))


def pair(value: float) -> list[Rows]:
    """Return two requests, which are joined."""
    return [Rows(rows(1, value + at), None, 1, 0) for at in range(2)]


def test_batches_are_joined_in_the_memory_of_earlier_ones() -> None:
    """Of the one before the last, since the last one may run while the next one is joined."""
    seen: list[Array] = []
    device = Lane(CUDA, lambda inputs, _: {"y": seen.append(inputs["x"]) or inputs["x"] * 2}, lambda rows: 1e6, 64)  # type: ignore[func-returns-value]
    for at in range(4):
        executed(device, pair(at))
    assert [np.shares_memory(seen[0], other) for other in seen[1:]] == [False, True, False]
    assert np.shares_memory(seen[1], seen[3])


def test_memory_that_is_still_read_is_not_used_again() -> None:
    """Inputs that are outputs as well, and those of a run that failed, as one that took too long and goes on."""
    seen: list[Array] = []

    def failing(inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
        seen.append(inputs["x"])
        if len(inputs["x"]) > 1:
            raise InputError("no")
        return {"y": inputs["x"]}

    device = Lane(CUDA, failing, lambda rows: 1e6, 64)
    for at in range(4):
        executed(device, pair(10 * at))
    joined = [array for array in seen if len(array) > 1]
    assert [array[:, 0].tolist() for array in joined] == [[10 * at, 10 * at + 1] for at in range(4)]

    device = Lane(CUDA, lambda inputs, _: {"y": inputs["x"]}, lambda rows: 1e6, 64)
    answers = [executed(device, pair(10 * at)) for at in range(4)]
    for at, (first, second) in enumerate(answers):
        assert isinstance(first, Answer)
        assert isinstance(second, Answer)
        assert (first.outputs["y"][0, 0], second.outputs["y"][0, 0]) == (10 * at, 10 * at + 1)


async def test_a_device_goes_on_with_the_next_batch_without_the_event_loop() -> None:
    """The batch is chosen and joined while the one before runs; each request gets its own rows."""
    fake = Fake(lambda rows: 1e6 + 1e6 * rows)
    scheduler = Scheduler([lane(fake, CUDA)], batched=True)
    scheduler._back_ns = 2e6  # clients come back so late that two batches take turns
    async with busy(fake, scheduler):
        later = [asyncio.create_task(submit(scheduler, rows(1, at))) for at in range(4)]
        while not scheduler.lanes[0].rows_ahead:
            await asyncio.sleep(0.001)
        assert fake.runs == [1]
        assert fake.gate is not None
        fake.gate.set()
        time.sleep(0.2)  # the event loop does nothing
        assert fake.runs == [1, 3]  # half of the clients
    for at, answer in enumerate(await asyncio.gather(*later)):
        np.testing.assert_array_equal(answer.outputs["y"], np.full((1, 3), 2 * at))
    await scheduler.close()


@pytest.mark.parametrize("count", [2, 1 << 20])
async def test_a_request_that_is_given_up_ends_with_its_batch(count: int) -> None:
    """Before, the device reads its inputs, and its outputs are placed; also where other threads place them."""
    fake, ended, placing = Fake(), list[object](), list[int]()
    scheduler = Scheduler([lane(fake, CUDA)], batched=True)

    class Place:
        memory = None

        def __call__(self, arrays: Sequence[Array], places: Sequence[Any]) -> list[Array]:
            placing.extend(len(ended) for _ in arrays)
            return [array.copy() for array in arrays]

    fake.gate = threading.Event()
    given = rows(1, width=count)
    pending = [scheduler.accept(given, None, ended.append, place=Place()) for _ in range(2)]
    while not fake.runs:
        await asyncio.sleep(0.001)
    pending[0].cancel()
    await asyncio.sleep(0.01)
    assert ended == []
    fake.gate.set()
    while len(ended) < 2:
        await asyncio.sleep(0.001)
    assert [type(each) for each in ended] == [asyncio.CancelledError, Answer]
    assert placing == [0, 0]
    await scheduler.close()


@pytest.mark.parametrize("count", [2, 1 << 20])
async def test_outputs_for_the_same_memory_are_placed_together(count: int) -> None:
    """Of requests that come in turns for two memories, each gets its own rows; also where several threads copy."""
    fake, ended, placed = Fake(), dict[int, Any](), list[set[str]]()

    class Place:
        def __init__(self, memory: str) -> None:
            self.memory = memory

        def __call__(self, arrays: Sequence[Array], places: Sequence[Any]) -> list[Array]:
            placed.append({place.memory for place in places})
            return [array.copy() for array in arrays]

    scheduler = Scheduler([lane(fake, CUDA)], batched=True)
    fake.gate = threading.Event()
    first = asyncio.create_task(submit(scheduler, rows(1, width=count)))
    while not fake.runs:
        await asyncio.sleep(0.001)
    memories = ["one", "other"]
    for at in range(8):
        ended_at = functools.partial(ended.__setitem__, at)
        scheduler.accept(rows(1, at, width=count), None, ended_at, place=Place(memories[at % 2]))
    fake.gate.set()
    await first
    while len(ended) < 8:
        await asyncio.sleep(0.001)
    for at, answer in ended.items():
        np.testing.assert_array_equal(answer.outputs["y"], np.full((1, count), 2 * at))
    assert all(len(each) == 1 for each in placed)
    assert len(placed) < 8
    await scheduler.close()


@pytest.mark.parametrize(
    ("compiles", "recorded", "replans", "wanted"),
    [(False, 0, False, "never"), (False, 1, False, "joined"), (False, 1, True, "joined"), (True, 0, False, "always")],
)
def test_devices_that_compile_or_record_each_size_get_few_sizes(
    monkeypatch: pytest.MonkeyPatch, compiles: bool, recorded: int, replans: bool, wanted: Padding
) -> None:
    """What the provider states counts, and whether the runs at loading were recorded; few get their own sessions."""
    provider = SimpleNamespace(compiles_per_shape=compiles, host_memory=lambda device, nbytes: np.empty(nbytes))
    monkeypatch.setattr(registry, "provider_of", lambda device: provider)
    report = DeviceGraphReport((None,) * recorded)  # type: ignore[arg-type]
    compiled = SimpleNamespace(device_graph_report=lambda: report, replans=replans)
    runner: Any = SimpleNamespace(compile=lambda device: compiled)
    found = lane(Fake(), CUDA)
    model_devices._fit(found, runner)
    assert (found.padding, found.opens is not None) == (wanted, replans)


async def test_sessions_for_larger_batches_are_opened_before_they_come() -> None:
    """For all sizes up to twice that of the first batch of several requests, in whose runs their times are learned."""
    fake, opened = Fake(lambda rows: 1e6), list[int]()
    device = lane(fake, CUDA, most=64)
    device.padding, device.opens = "joined", lambda inputs: opened.append(len(inputs["x"]))
    device.learn(1, 1_000_000)
    scheduler = Scheduler([device], batched=True)
    await submit(scheduler, rows(1))
    assert opened == []
    for at, answer in enumerate(await behind(fake, scheduler, *(rows(1, at) for at in range(3)))):
        np.testing.assert_array_equal(answer.outputs["y"], rows(1, 2 * at)["x"])
    while device.cap() < 16 or len(opened) < 4:
        await asyncio.sleep(0.001)
    assert sorted(opened) == [1, 2, 4, 8]
    assert {1, 2, 4, 8} <= set(fake.runs)
    await scheduler.close()


async def test_of_many_shapes_few_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each length of a text would cost runs of all batch sizes when it first comes twice at a time."""
    fake, opened = Fake(), list[tuple[int, ...]]()
    device = lane(fake, CUDA)
    monkeypatch.setattr(device, "learn", lambda *_: None)  # a slow machine would teach that batches do not pay
    device.padding, device.opens = "joined", lambda inputs: opened.append(inputs["x"].shape)
    scheduler = Scheduler([device], batched=True)
    for width in range(1, 11):
        for at, answer in enumerate(await behind(fake, scheduler, *(rows(1, at, width) for at in range(2)))):
            np.testing.assert_array_equal(answer.outputs["y"], rows(1, 2 * at, width)["x"])
        fake.runs.clear()
    while len(opened) < 12:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len({shape[1:] for shape in opened}) == 4
    await scheduler.close()


async def test_a_size_that_cannot_be_opened_ends_the_preparation_alone() -> None:
    """Requests are answered as before."""
    fake, opened = Fake(), list[int]()

    def full(inputs: Mapping[str, Array]) -> None:
        opened.append(len(inputs["x"]))
        raise EngineError("no memory")

    device = lane(fake, CUDA)
    device.padding, device.opens = "joined", full
    scheduler = Scheduler([device], batched=True)
    for _ in range(2):
        for at, answer in enumerate(await behind(fake, scheduler, *(rows(1, at) for at in range(4)))):
            np.testing.assert_array_equal(answer.outputs["y"], rows(1, 2 * at)["x"])
        fake.runs.clear()
    while not opened:
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    assert len(opened) == 1
    await scheduler.close()


def test_texts_are_padded() -> None:
    """The last text is repeated; a model of texts takes no other filling."""
    device = Lane(CUDA, lambda inputs, _: {"y": inputs["x"]}, lambda rows: 1e6, 64, padding="always")
    [answer] = executed(device, [Rows({"x": np.array(["a", "b", "c"], object)}, None, 3, 0)])
    assert isinstance(answer, Answer)
    assert list(answer.outputs["y"]) == ["a", "b", "c"]


def test_padding_is_weighed_against_a_smaller_batch() -> None:
    """Of a cost of 1 ms and 0.1 ms a row, 6 rows run as 8, 33 rows as 32 and one later; without padding all run."""
    device = Lane(CUDA, Fake(), lambda rows: 1e6 + 1e5 * rows, 64, padding="joined")
    assert [device.taken(rows) for rows in (1, 5, 6, 8, 33, 60)] == [1, 4, 6, 8, 32, 60]
    device = Lane(CUDA, Fake(), lambda rows: 1e6 + 1e5 * rows, 64)
    assert device.taken(33) == 33


async def test_requests_of_other_shapes_are_not_joined() -> None:
    """Rows of 3 and rows of 5 run in two batches."""
    fake = Fake()
    scheduler = Scheduler([lane(fake)], batched=True)
    answers = await behind(fake, scheduler, *(rows(1, width=3 + 2 * (at % 2)) for at in range(6)))
    assert fake.runs == [1, 3, 3]
    assert [found.outputs["y"].shape[1] for found in answers] == [3, 5] * 3
    await scheduler.close()


async def test_a_failed_batch_runs_again_one_by_one() -> None:
    """Only the request at fault gets the error."""

    class Picky(Fake):
        def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
            found = super().__call__(inputs, wanted)
            if (inputs["x"] == 13).any():
                raise InputError("13 is refused")
            return found

    fake = Picky()
    scheduler = Scheduler([lane(fake)], batched=True)
    async with busy(fake, scheduler):
        later = [asyncio.create_task(submit(scheduler, rows(1, at))) for at in (1, 13, 2)]
    answers = await asyncio.gather(*later, return_exceptions=True)
    assert [type(found) for found in answers] == [Answer, InputError, Answer]
    assert fake.runs == [1, 3, 1, 1, 1]
    await scheduler.close()


async def test_a_device_that_fails_hands_its_requests_on() -> None:
    """The other device answers, and the failed one is left out."""
    broken, sound = Fake(lambda rows: 1e5, EngineError("lost")), Fake(lambda rows: 5e6)
    scheduler = Scheduler([lane(broken, CUDA), lane(sound)], batched=True)
    for _ in range(3):
        assert (await submit(scheduler, rows(1))).device == Device.CPU
    assert len(broken.runs) == 1
    await scheduler.close()


async def test_the_last_device_raises_its_error() -> None:
    """A request that every device failed gets the error of the engine."""
    scheduler = Scheduler([lane(Fake(error=EngineError("lost")))], batched=True)
    with pytest.raises(EngineError, match="lost"):
        await submit(scheduler, rows(1))
    await scheduler.close()


def test_a_slow_device_takes_only_what_it_ends_sooner() -> None:
    """With the fast device busy for 0.4 s, one that needs 2 s leaves the request to it; one of 0.42 s takes it."""

    async def work(slow_ns: float) -> list[int]:
        fast, slow = Fake(lambda rows: 400e6), Fake(lambda rows: slow_ns)
        scheduler = Scheduler([lane(fast, CUDA, most=1), lane(slow, most=1)], batched=True)
        first = asyncio.create_task(submit(scheduler, rows(1)))
        await asyncio.sleep(0)
        await submit(scheduler, rows(1))
        await first
        await scheduler.close()
        return slow.runs

    assert run(lambda: work(2e9)) == []
    assert run(lambda: work(420e6)) == [1]


async def test_a_request_that_waits_too_long_or_is_cancelled_never_runs() -> None:
    """Status 504 for one, and the other leaves the queue."""
    fake = Fake()
    scheduler = Scheduler([lane(fake)], batched=True)
    async with busy(fake, scheduler):
        gone = asyncio.create_task(submit(scheduler, rows(1)))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(ServingError) as caught:
            await submit(scheduler, rows(1), timeout_s=0.02)
    assert caught.value.status == 504
    await submit(scheduler, rows(1))
    assert fake.runs == [1, 1]
    await scheduler.close()


@pytest.mark.parametrize(
    ("age_ns", "priorities", "wait_s", "wanted"),
    [
        pytest.param(1_000_000_000, (0, 2, 1), 0.0, [1, 2, 0], id="1 before 2 and 0, the default, last"),
        # longer than the 30 ms that are between the first and the last priority here
        pytest.param(1_000_000, (0, 1), 0.1, [0, 1], id="after what has waited for long, so that it does not for ever"),
    ],
)
async def test_priorities_come_first(
    monkeypatch: pytest.MonkeyPatch, age_ns: int, priorities: tuple[int, ...], wait_s: float, wanted: list[int]
) -> None:
    """The lowest number runs first, unless a request has waited for long."""
    monkeypatch.setattr("rlx_ort.serving.scheduler._AGE_NS", age_ns)
    fake = Fake()
    scheduler = Scheduler([lane(fake, most=1)], batched=True)
    order: list[int] = []

    async def ask(priority: int) -> None:
        await submit(scheduler, rows(1), priority=priority)
        order.append(priority)

    async with busy(fake, scheduler):
        later = []
        for priority in priorities:
            later.append(asyncio.create_task(ask(priority)))
            await asyncio.sleep(wait_s)
    await asyncio.gather(*later)
    assert order == wanted
    await scheduler.close()


async def test_closing_answers_what_was_accepted_and_refuses_the_rest() -> None:
    """Status 503 for what comes after."""
    fake = Fake()
    scheduler = Scheduler([lane(fake, most=1)], batched=True)
    accepted = [asyncio.create_task(submit(scheduler, rows(1))) for _ in range(5)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(scheduler.close())
    await asyncio.sleep(0)
    with pytest.raises(ServingError) as caught:
        await submit(scheduler, rows(1))
    assert caught.value.status == 503
    assert len(await asyncio.gather(*accepted)) == 5
    await closing


def test_what_runs_took_corrects_the_predictions() -> None:
    """A device that takes ten times its prediction is expected to."""
    slow = Lane(Device.CPU, Fake(), lambda rows: 1e6, 64)
    for _ in range(30):
        slow.learn(4, 10_000_000)
    assert slow.expected_ns(4) == pytest.approx(10e6, rel=0.05)
    assert slow.expected_ns(8) == pytest.approx(10e6, rel=0.05)


def test_a_single_run_that_took_long_does_not_change_the_batch_size() -> None:
    """Others disturb a run at times; five in a row do change it."""
    one = Lane(CUDA, Fake(), lambda rows: 1e6 + 1e5 * rows, 64)
    for rows in (1, 2, 4, 8, 16, 32, 64) * 5:
        one.learn(rows, 1_000_000 + 100_000 * rows)
    cap = one.cap()
    for _ in range(2):
        one.learn(cap, 100_000_000)
        assert one.cap() == cap
    for _ in range(20):
        one.learn(cap, 100_000_000)
    assert one.cap() < cap


def test_a_slow_first_run_of_a_size_does_not_keep_its_batches_from_a_device() -> None:
    """It plans kernels for the size, and again after each batch of another size, as CUDA does for convolutions."""
    one = Lane(CUDA, Fake(), lambda rows: 1e6 + 1e5 * rows, 64)
    one.learn(1, 1_100_000)
    for rows in (2, 4, 8, 16, 32, 64):
        for took_ns in (500_000_000, 1_000_000 + 100_000 * rows, 500_000_000, 500_000_000):
            one.learn(rows, took_ns)
            assert one.cap() == 64
    for _ in range(20):
        one.learn(64, 500_000_000)
    assert one.cap() < 64


async def test_a_request_with_more_rows_than_a_batch_runs_in_pieces() -> None:
    """Its answer is whole; no run has more rows than a batch may have."""
    fake = Fake()
    scheduler = Scheduler([lane(fake, most=4)], batched=True, options=BatchOptions(max_batch=4))
    given = {"x": np.arange(30, dtype=np.float32).reshape(10, 3)}
    found = await submit(scheduler, given)
    np.testing.assert_array_equal(found.outputs["y"], given["x"] * 2)
    assert sum(fake.runs) == 10
    assert max(fake.runs) <= 4
    await scheduler.close()


async def test_a_large_request_neither_fills_the_queue_nor_is_refused_for_its_size() -> None:
    """Forty pieces count as one request: others are accepted beside them, and closing waits for all of them."""
    fake = Fake()
    scheduler = Scheduler([lane(fake, most=2)], batched=True, options=BatchOptions(max_batch=2, queue_limit=4))
    large = asyncio.create_task(submit(scheduler, rows(80)))
    await asyncio.sleep(0.003)
    assert (await submit(scheduler, rows(1))).outputs["y"].shape == (1, 3)
    assert sum(fake.runs) < 40
    await scheduler.close()
    assert (await large).outputs["y"].shape == (80, 3)


async def test_a_full_queue_names_the_time_of_its_backlog() -> None:
    """Four rows behind a device of 2 s a row."""
    fake = Fake(lambda rows: 2e9 * rows)
    scheduler = Scheduler([lane(fake)], batched=True, options=BatchOptions(queue_limit=4))
    scheduler.lanes[0].idle = False
    later = [asyncio.create_task(submit(scheduler, rows(1))) for _ in range(4)]
    await asyncio.sleep(0)
    with pytest.raises(ServingError) as caught:
        await submit(scheduler, rows(1))
    assert (caught.value.status, caught.value.retry_after_s) == (429, pytest.approx(8.0, rel=0.05))
    for task in later:
        task.cancel()
    await asyncio.gather(*later, return_exceptions=True)
    assert scheduler.depth == 0
    await scheduler.close()


def test_a_batch_shorter_than_a_hand_over_runs_on_the_event_loop() -> None:
    """A learned run of 10 us does; one of 1 ms and one on another device do not."""
    threads: list[str] = []

    class Named(Fake):
        def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
            threads.append(threading.current_thread().name)
            return super().__call__(inputs, wanted)

    async def work(device: Device, ns: int) -> bool:
        one = Lane(device, Named(lambda rows: 0), lambda rows: 1e4, 64)
        one.learn(1, ns)
        scheduler = Scheduler([one], batched=True)
        await submit(scheduler, rows(1))
        await scheduler.close()
        return threads.pop() == "MainThread"

    assert run(lambda: work(Device.CPU, 10_000))
    assert not run(lambda: work(Device.CPU, 1_000_000))
    assert not run(lambda: work(CUDA, 10_000))


@pytest.mark.parametrize("models", [1, 2])
def test_one_client_of_a_gpu_is_answered_without_a_thread_if_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, models: int
) -> None:
    """Of this model or of another one; a run that may take long is left to the thread."""
    monkeypatch.setattr(scheduling, "_ONE_MODEL_NS", 0)  # any time is long enough, however slow the machine
    monkeypatch.setattr(scheduling, "_asked", scheduling._Asked())  # no scheduler of before was asked last
    monkeypatch.setattr(lanes, "_NOBODY_ELSE_NS", 1_000_000_000)  # a busy machine makes short runs long
    threads: list[str] = []

    class Named(Fake):
        def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
            threads.append(threading.current_thread().name)
            return super().__call__(inputs, wanted)

    async def work(ns: int) -> bool:
        one, other = (
            Scheduler([Lane(CUDA, Named(lambda rows: ns), lambda rows: ns + 1e5, 64)], batched=True) for _ in "12"
        )
        for each in (one, other):
            each.lanes[0].learn(1, ns + 100_000)
        for turn in range(30):
            await submit(one if turn % models == 0 else other, rows(1))
            await asyncio.sleep(0.01)
        for each in (one, other):
            await each.close()
        return "MainThread" in threads

    assert run(lambda: work(0)) is (models == 1)
    threads.clear()
    monkeypatch.setattr(lanes, "_NOBODY_ELSE_NS", 5_000_000)
    assert not run(lambda: work(10_000_000))


def test_clients_that_have_gone_are_not_expected_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is left is answered as an only client again."""
    monkeypatch.setattr(scheduling, "_ONE_MODEL_NS", -1)
    monkeypatch.setattr(lanes, "_NOBODY_ELSE_NS", 1_000_000_000)
    threads: list[str] = []

    class Named(Fake):
        def __call__(self, inputs: Mapping[str, Array], wanted: Sequence[str] | None) -> dict[str, Array]:
            threads.append(threading.current_thread().name)
            return super().__call__(inputs, wanted)

    async def work() -> None:
        scheduler = Scheduler([Lane(CUDA, Named(lambda rows: 0), lambda rows: 1e6 * rows, 64)], batched=True)
        scheduler.lanes[0].learn(1, 1_000_000)
        await asyncio.gather(*(submit(scheduler, rows(1)) for _ in range(4)))
        for _ in range(40):
            await submit(scheduler, rows(1))
            await asyncio.sleep(0.001)
        await scheduler.close()

    run(work)
    assert "MainThread" in threads[4:]


@pytest.mark.parametrize(("within_ns", "runs"), [(10_000_000_000, [1, 3]), (-1, [1, 1, 1, 1])])
def test_requests_close_behind_each_other_have_one_run(
    monkeypatch: pytest.MonkeyPatch, within_ns: int, runs: list[int]
) -> None:
    """On the event loop too, where each run would be over before the next request is read."""
    monkeypatch.setattr(scheduling, "_CROWD_NS", within_ns)
    fake = Fake(lambda rows: 0)
    one = Lane(Device.CPU, fake, lambda rows: 1e4, 64)
    for count in (1, 2, 4):
        one.learn(count, 10_000)

    async def work() -> None:
        scheduler = Scheduler([one], batched=True)
        scheduler._arrived_ns -= 20_000_000_000
        await asyncio.gather(*(submit(scheduler, rows(1)) for _ in range(4)))
        await scheduler.close()

    run(work)
    assert fake.runs == runs


def test_a_run_on_the_event_loop_that_takes_long_is_the_last_for_a_while() -> None:
    """The next ones run in the thread."""
    one = Lane(Device.CPU, Fake(), lambda rows: 1e4, 64)
    one.learn(1, 10_000)
    assert one.runs_inline(1, 0, 0)
    one.ran_inline(0, 50_000_000)
    assert not one.runs_inline(1, 60_000_000, 0)
    assert one.runs_inline(1, 2_000_000_000, 0)


@pytest.mark.parametrize(
    ("took_ns", "gap_ns", "inline"), [(200_000, 1e6, True), (200_000, 3e5, False), (4e5, 1e9, False)]
)
def test_longer_runs_are_on_the_event_loop_while_requests_are_rare(took_ns: int, gap_ns: float, inline: bool) -> None:
    """The event loop could read other requests meanwhile, if there were any."""
    one = Lane(Device.CPU, Fake(), lambda rows: 1e4, 64)
    one.learn(1, took_ns)
    assert one.runs_inline(1, 0, gap_ns) is inline


async def test_what_waits_moves_to_the_lanes_that_replace_others() -> None:
    """What runs ends on the old one; requests that waited one by one are joined, those of other shapes apart."""
    old, new = Fake(), Fake()
    scheduler = Scheduler([lane(old)], batched=False)
    async with busy(old, scheduler):
        gone = asyncio.create_task(submit(scheduler, rows(1, 9)))
        later = [asyncio.create_task(submit(scheduler, rows(2, at, 3 + at % 2))) for at in range(8)]
        await asyncio.sleep(0.01)
        gone.cancel()
        scheduler.replace([lane(new)], batched=True)
        answers = await asyncio.gather(*later)
    assert (old.runs, new.runs) == ([1], [8, 8])
    assert [float(found.outputs["y"][1, 0]) for found in answers] == [2.0 * at for at in range(8)]
    assert scheduler.depth == 0
    await scheduler.close()
    scheduler.replace([lane(old)], batched=True)
    assert scheduler.lanes[0].run is new
