"""Batches and devices for the requests of one model, by the predicted time of each batch size on each device.

A device that becomes free takes what waits, up to the size beyond which a row gets no cheaper. A slower device takes
requests only if it ends before the fastest one would. Times that runs took correct the predictions.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import InputError, RlxError, ServingError, is_device_failure
from rlx_ort.execution.background import Workers

Array: TypeAlias = npt.NDArray[Any]
Run: TypeAlias = Callable[[Mapping[str, Array], Sequence[str] | None], dict[str, Array]]
"""Runs inputs on one device and returns the outputs with these names, or all."""

_FLATTER = 0.98  # a row of a batch twice as large must be this much cheaper for the batch to be worth it
_LEARNING = 0.2  # weight of a new time in the mean of those of a batch size
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 60.0
_LAST_PRIORITY = 1 << 62
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of a model's queue. The defaults need no tuning.

    Attributes:
        max_batch: the most rows of a batch; 1 for none.
        delay_s: how long a request may wait for others while a device is free, in seconds.
        queue_limit: the most requests that wait; more are refused with status 429.
        timeout_s: how long a request may wait, in seconds; None for no limit.
    """

    max_batch: int = 256
    delay_s: float = 0.0
    queue_limit: int = 1024
    timeout_s: float | None = None


@dataclass(slots=True)
class Times:
    """Where the time of a request went, in ns: waiting, joining inputs, running, and splitting outputs."""

    queue_ns: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


@dataclass(slots=True)
class Answer:
    """The outputs of a request, the device that made them, and where the time went."""

    outputs: dict[str, Array]
    device: Device
    times: Times


@dataclass(slots=True, eq=False)
class _Waiting:
    inputs: Mapping[str, Array]
    wanted: tuple[str, ...] | None
    rows: int
    arrived_ns: int
    answer: asyncio.Future[Answer]
    tried: set[Device] = field(default_factory=set)
    running: bool = False


class Lane:
    """One device that runs the batches of a model, one at a time, in a thread of its own.

    Args:
        device: the device.
        run: runs a batch on it.
        predict: rows -> the predicted time of a run in ns, or None where there is none.
        most: the most rows of a batch.
    """

    def __init__(self, device: Device, run: Run, predict: Callable[[int], float | None], most: int) -> None:
        self.device = device
        self.run = run
        self.busy_until_ns = 0
        self.idle = True
        self.out_until_ns = 0
        self._predict = predict
        self._most = most
        self._learned: dict[int, float] = {}  # power of two -> measured over predicted time of batches up to it
        self._backoff_s = _LEAST_BACKOFF_S
        self.worker = Workers(1, f"rlx_ort-serve-{device.label}")

    def expected_ns(self, rows: int) -> float:
        """Return the time of a run with so many rows; infinity before anything is known of it."""
        predicted = self._predict(rows)
        if predicted is None:
            return math.inf
        octave = rows.bit_length()
        return predicted * self._learned.get(octave, self._learned.get(octave - 1, 1.0))

    def cap(self) -> int:
        """Return the rows beyond which a row of a batch gets no cheaper."""
        rows = 1
        while rows * 2 <= self._most and self.expected_ns(2 * rows) < 2 * _FLATTER * self.expected_ns(rows):
            rows *= 2
        return rows

    def learn(self, rows: int, took_ns: int) -> None:
        """Correct the predictions by a run."""
        self._backoff_s = _LEAST_BACKOFF_S
        predicted = self._predict(rows)
        if predicted:
            octave = rows.bit_length()
            ratio = took_ns / predicted
            before = self._learned.get(octave, ratio)
            self._learned[octave] = before + _LEARNING * (min(ratio, 4 * before) - before)

    def fail(self, now_ns: int) -> None:
        """Keep the device out, twice as long as before."""
        self.out_until_ns = now_ns + round(self._backoff_s * 1e9)
        self._backoff_s = min(2 * self._backoff_s, _MOST_BACKOFF_S)


class Scheduler:
    """The queue of one model and the devices that answer it. It belongs to one event loop.

    Args:
        lanes: the devices, at least one.
        batched: whether requests may be joined along their first dim.
        options: limits of the queue.
        on_batch: called with the device, the rows and the requests of each batch that was run.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        batched: bool,
        options: BatchOptions | None = None,
        on_batch: Callable[[Device, int, int, Times], object] = lambda *_: None,
    ) -> None:
        self.lanes = list(lanes)
        self.options = options or BatchOptions()
        self._batched = batched and self.options.max_batch > 1
        self._on_batch = on_batch
        self._groups: dict[object, list[tuple[int, int, _Waiting]]] = {}
        self._order = itertools.count()
        self._waiting = 0
        self._running = 0
        self._closed = False
        self._drained: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def depth(self) -> int:
        """The requests that wait."""
        return self._waiting

    async def submit(
        self,
        inputs: Mapping[str, Array],
        wanted: tuple[str, ...] | None = None,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Answer:
        """Wait for the outputs of one request. A cancelled call leaves the queue.

        Args:
            inputs: name -> data; with batches, the first dim counts the rows.
            wanted: names of outputs; None for all.
            priority: 1 runs first, larger ones later, 0 last.
            timeout_s: how long the request may wait in the queue, in seconds.

        Raises:
            ServingError: the queue is full (429), the wait took too long (504), or the model is unloaded (503).
            RlxError: the run failed.
        """
        if self._closed:
            raise ServingError("the model is being unloaded", 503)
        if self._waiting >= self.options.queue_limit:
            raise ServingError(f"{self._waiting} requests wait already; try again later", 429)
        loop = asyncio.get_running_loop()
        rows = next(iter(inputs.values())).shape[0] if self._batched else 1
        key = tuple((name, array.shape[1:], array.dtype) for name, array in inputs.items()) if self._batched else None
        request = _Waiting(inputs, wanted, rows, time.perf_counter_ns(), loop.create_future())
        self._push(key, priority or _LAST_PRIORITY, request)
        limits = [limit for limit in (timeout_s, self.options.timeout_s) if limit]
        timer = loop.call_later(min(limits), self._expire, request) if limits else None
        self._dispatch()
        try:
            return await request.answer
        finally:
            if timer is not None:
                timer.cancel()

    async def close(self) -> None:
        """Refuse new requests and wait until those that were accepted are answered."""
        self._closed = True
        while self._waiting or self._running:
            self._drained = asyncio.Event()
            self._dispatch()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._drained.wait(), 0.1)
        for lane in self.lanes:
            lane.worker.close()

    # --- the queue

    def _push(self, key: object, priority: int, request: _Waiting) -> None:
        heapq.heappush(self._groups.setdefault(key, []), (priority, next(self._order), request))
        self._waiting += 1

    def _expire(self, request: _Waiting) -> None:
        if not request.answer.done() and not request.running:
            waited_s = (time.perf_counter_ns() - request.arrived_ns) / 1e9
            request.answer.set_exception(ServingError(f"the request waited {waited_s:.3g} s and was given up", 504))

    def _heads(self) -> list[tuple[tuple[int, int], object]]:
        """Return the place in the order of each group's first request that is still wanted, and the group's key."""
        heads = []
        for key, heap in list(self._groups.items()):
            while heap and heap[0][2].answer.done():  # the client went away, or the time is over
                heapq.heappop(heap)
                self._waiting -= 1
            if heap:
                heads.append((heap[0][:2], key))
            else:
                del self._groups[key]
        return sorted(heads, key=lambda head: head[0])

    def _pop(self, key: object, most: int) -> list[_Waiting]:
        heap, batch, rows = self._groups[key], list[_Waiting](), 0
        while heap and (not batch or (self._batched and rows + heap[0][2].rows <= most)):
            *_, request = heapq.heappop(heap)
            self._waiting -= 1
            if not request.answer.done():
                batch.append(request)
                rows += request.rows
        return batch

    # --- choosing

    def _dispatch(self) -> None:
        """Give free devices what they should run now."""
        now_ns = time.perf_counter_ns()
        for _, key in self._heads():
            while self._groups.get(key):
                first = self._groups[key][0][2]
                queued = sum(entry[2].rows for entry in self._groups[key]) if self._batched else 1
                found = self._lane_for(first, queued, now_ns)
                if found is None:
                    break
                lane, rows = found
                wait_ns = self.options.delay_s * 1e9 - (now_ns - first.arrived_ns)
                if self._batched and queued < rows and wait_ns > 0 and not self._closed:
                    self._again_in(wait_ns / 1e9)
                    break
                batch = self._pop(key, rows)
                if batch:
                    self._start(lane, batch)
        if not self._waiting and not self._running and self._drained is not None:
            self._drained.set()

    def _lane_for(self, first: _Waiting, queued: int, now_ns: int) -> tuple[Lane, int] | None:
        """Return a free device and the rows that it should take, or None to wait for a device that ends sooner."""
        usable = [lane for lane in self.lanes if lane.out_until_ns <= now_ns and lane.device not in first.tried]
        if not usable:
            usable = [lane for lane in self.lanes if lane.device not in first.tried] or self.lanes
        if len(usable) == 1:
            (lane,) = usable
            return (lane, max(lane.cap(), first.rows)) if lane.idle else None
        ends = {}
        for lane in usable:
            rows = max(min(lane.cap(), queued), first.rows)
            ends[lane] = max(lane.busy_until_ns if not lane.idle else now_ns, now_ns) + lane.expected_ns(rows)
        best = min(usable, key=lambda lane: ends[lane])
        if best.idle:
            return best, max(best.cap(), first.rows)
        for lane in sorted((lane for lane in usable if lane.idle), key=lambda lane: ends[lane]):
            rows = max(lane.cap(), first.rows)
            while rows > first.rows and now_ns + lane.expected_ns(rows) > ends[best]:
                rows = max(rows // 2, first.rows)
            if now_ns + lane.expected_ns(rows) <= ends[best]:
                return lane, rows
        return None

    def _again_in(self, seconds: float) -> None:
        if self._timer is None or self._timer.cancelled() or self._timer.when() < asyncio.get_running_loop().time():
            self._timer = asyncio.get_running_loop().call_later(seconds, self._dispatch)

    # --- running

    def _start(self, lane: Lane, batch: list[_Waiting]) -> None:
        rows = sum(request.rows for request in batch)
        for request in batch:
            request.running = True
        lane.idle = False
        now_ns = time.perf_counter_ns()
        expected_ns = lane.expected_ns(rows)
        lane.busy_until_ns = now_ns + round(expected_ns if math.isfinite(expected_ns) else 1e9)
        self._running += 1
        loop = asyncio.get_running_loop()
        lane.worker.submit(lambda: loop.call_soon_threadsafe(self._finish, lane, batch, _executed(lane, batch)))

    def _finish(self, lane: Lane, batch: list[_Waiting], results: Sequence[Answer | Exception]) -> None:
        lane.idle = True
        self._running -= 1
        failed = []
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, Answer):
                if not request.answer.done():
                    request.answer.set_result(result)
            elif is_device_failure(result):
                failed.append((request, result))
            elif not request.answer.done():
                request.answer.set_exception(result)
        done = [result for result in results if isinstance(result, Answer)]
        if done and len(done) == len(batch):
            lane.learn(sum(request.rows for request in batch), done[0].times.infer_ns)
        if done:
            self._on_batch(lane.device, sum(request.rows for request in batch), len(done), done[0].times)
        if failed:
            self._move(lane, failed)
        self._dispatch()

    def _move(self, lane: Lane, failed: Sequence[tuple[_Waiting, Exception]]) -> None:
        """Queue requests that a device failed again, for the other devices; the last device's error is raised."""
        _log.warning("%s failed a batch and is left out for a while: %s", lane.device.display, failed[0][1])
        lane.fail(time.perf_counter_ns())
        for request, error in failed:
            request.tried.add(lane.device)
            request.running = False
            if request.answer.done():
                continue
            if all(other.device in request.tried for other in self.lanes):
                request.answer.set_exception(error)
            else:
                key = tuple((name, array.shape[1:], array.dtype) for name, array in request.inputs.items())
                self._push(key if self._batched else None, 0, request)


def _executed(lane: Lane, batch: Sequence[_Waiting]) -> Sequence[Answer | Exception]:
    """Run a batch and return an answer or an error for each request; a batch that fails is run again one by one."""
    try:
        return _run_joined(lane, batch)
    except Exception as err:  # it belongs to the requests
        if len(batch) == 1:
            return [err if isinstance(err, RlxError | MemoryError) else _wrapped(err)]
    singly: list[Answer | Exception] = []
    for request in batch:
        singly += _executed(lane, [request])
    return singly


def _run_joined(lane: Lane, batch: Sequence[_Waiting]) -> list[Answer]:
    begun_ns = time.perf_counter_ns()
    inputs: Mapping[str, Array] = batch[0].inputs
    if len(batch) > 1:
        inputs = {name: np.concatenate([request.inputs[name] for request in batch]) for name in inputs}
    wanted = _all_wanted(batch)
    joined_ns = time.perf_counter_ns()
    outputs = lane.run(inputs, wanted)
    ran_ns = time.perf_counter_ns()
    pieces = _split(outputs, [request.rows for request in batch])
    ended_ns = time.perf_counter_ns()
    spans = (joined_ns - begun_ns, ran_ns - joined_ns, ended_ns - ran_ns)
    return [
        Answer(piece, lane.device, Times(begun_ns - request.arrived_ns, *spans))
        for request, piece in zip(batch, pieces, strict=True)
    ]


def _all_wanted(batch: Sequence[_Waiting]) -> tuple[str, ...] | None:
    if any(request.wanted is None for request in batch):
        return None
    return tuple(dict.fromkeys(name for request in batch for name in request.wanted or ()))


def _split(outputs: dict[str, Array], rows: Sequence[int]) -> list[dict[str, Array]]:
    if len(rows) == 1:
        return [outputs]
    total = sum(rows)
    for name, array in outputs.items():
        if array.shape[:1] != (total,):
            raise InputError(f"output {name!r} has shape {array.shape} for {total} rows; the model cannot be batched")
    ends = list(itertools.accumulate(rows))
    return [
        {name: array[end - count : end] for name, array in outputs.items()}
        for end, count in zip(ends, rows, strict=True)
    ]


def _wrapped(error: Exception) -> ServingError:
    _log.exception("a run failed unexpectedly", exc_info=error)
    return ServingError(f"the run failed: {type(error).__name__}", 500)
