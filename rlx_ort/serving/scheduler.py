"""Batches and devices for the requests of one model, by the predicted time of each batch size on each device.

A device that becomes free takes the waiting rows, up to the size at which a row is cheapest. A GPU leaves half of them
for its next run if this keeps it busy while the clients of the other half are answered. A slower device takes requests
only if it ends before the fastest one would. Measured times correct the predictions. Batches that take less time than
handing them to a thread run on the event loop, and so do those of an only client that take a few ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import heapq
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlx_ort.device import Device
from rlx_ort.errors import ServingError
from rlx_ort.faults import is_device_failure
from rlx_ort.serving.lanes import (
    BESIDE_BYTES,
    Answer,
    Array,
    Lane,
    Place,
    Rows,
    Times,
    executed,
    joined,
    place_order,
    placed,
    placed_bytes,
    ran,
)
from rlx_ort.serving.pending import Ended, Pending, Pieces

_GAP_WEIGHT = 0.125  # weight of a new interval between arrivals in their mean
_GAPS = 3  # a free device waits for so many mean intervals without an arrival
_GONE = 16  # so many clients as were expected behind each of so many batches have gone
_TIMER_NS = 2_000_000  # shorter waits are not left to timers of the event loop
_LATE_NS = 1_000_000  # by which those are late
_CROWD_NS = 150_000  # requests within this time come from several clients: one waits for its answer for longer
_ONE_MODEL_NS = 1_000_000_000  # all requests were for one model for so long: the event loop serves no other
_INLINE_TURN_NS = 300_000  # after such runs took this time, the event loop serves its connections
_LEAST_SHARE = 0.1  # a device with less than this share of the fastest one's rate answers where that one fails only
_WORTH = 0.9  # two batches of half the clients must take less than this share of the time for one of all
_HANDED_OVER_NS = 300_000  # a batch is put together so long before the one that runs ends, besides the time for it
_LAST_PRIORITY = 30  # of requests without one, and of larger ones
_AGE_NS = 1_000_000_000  # a request that waited for so long counts as one of the next priority
_PIECES_A_LANE = 2  # of a large request that wait or run at a time: one runs while the next one waits
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """Limits of a model's queue. The defaults need no tuning.

    Attributes:
        max_batch: the most rows of a batch; 1 for none.
        delay_s: how long a request waits for others while a device is free, in seconds, also where that is predicted
            not to pay.
        queue_limit: the most requests that wait; more are refused with status 429.
        timeout_s: how long a request may wait, in seconds; None for no limit.
    """

    max_batch: int = 256
    delay_s: float = 0.0
    queue_limit: int = 1024
    timeout_s: float | None = None


@dataclass(slots=True, eq=False)
class _Waiting(Rows):
    owner: Scheduler
    ended: Ended
    deadline_ns: float = math.inf
    timer: asyncio.TimerHandle | None = None
    tried: set[Device] = field(default_factory=set)
    running: bool = False
    dropped: BaseException | None = None
    is_over: bool = False
    group: _Group | None = None

    def cancel(self) -> None:
        self.owner._drop(self, asyncio.CancelledError())


@dataclass(slots=True)
class _Group:
    """Requests that may be joined, in their order, and the rows of those that still wait."""

    heap: list[tuple[int, int, _Waiting]] = field(default_factory=list)
    rows: int = 0


class _Asked:
    """The model that requests are for, and since when they are for no other; one for all schedulers of a process."""

    scheduler, since_ns = 0, 0

    def note(self, scheduler: Scheduler, now_ns: int) -> None:
        if self.scheduler != id(scheduler):
            self.scheduler, self.since_ns = id(scheduler), now_ns


_asked = _Asked()


class Scheduler:
    """The queue of one model and the devices that answer it. It belongs to one event loop.

    Args:
        lanes: the devices, at least one.
        batched: whether requests may be joined along their first dim.
        options: limits of the queue.
        on_batch: called with the device, the rows and the requests of each batch that was run.
        on_failover: called with a device that failed, and how many requests other devices get.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        *,
        batched: bool,
        options: BatchOptions | None = None,
        on_batch: Callable[[Device, int, int, Times], object] = lambda *_: None,
        on_failover: Callable[[Device, int], object] = lambda *_: None,
    ) -> None:
        self.lanes = list(lanes)
        self.options = options or BatchOptions()
        self._batched = batched and self.options.max_batch > 1
        self._on_batch, self._on_failover = on_batch, on_failover
        self._groups: dict[object, _Group] = {}
        self._order = itertools.count()
        self._waiting = 0
        self._running = 0

        self._closed = False
        self._drained: asyncio.Event | None = None
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self._dispatching = False
        self._arrived_ns = time.perf_counter_ns()
        self._answered_ns = 0
        self._gap_ns = self._return_ns = self._back_ns = math.inf
        self._returning = self._returned = self._answered = self._batches = self._least_left = 0

    @property
    def depth(self) -> int:
        """The requests that wait."""
        return self._waiting

    def accept(
        self,
        inputs: Mapping[str, Array],
        wanted: tuple[str, ...] | None,
        ended: Ended,
        *,
        priority: int = 0,
        timeout_s: float | None = None,
        place: Place | None = None,
    ) -> Pending:
        """Queue a request.

        Args:
            inputs: name -> data; with batches, the first dim counts the rows.
            wanted: names of outputs; None for all.
            ended: called once with the answer or the error, on the event loop; with `place`, after this has returned.
            priority: 1 runs first, larger ones later, 0 and those from 30 on last. Each second of waiting counts as
                one priority, so that no request waits without end behind earlier ones.
            timeout_s: how long the request may wait in the queue, in seconds; its error then has status 504.
            place: where outputs are copied to; without it, outputs of several requests share memory.

        Raises:
            ServingError: the queue is full (429), or the model is unloaded (503).
        """
        if self._closed:
            raise ServingError("the model is being unloaded", 503)
        if self._waiting >= self.options.queue_limit:
            raise ServingError(
                f"{self._waiting} requests wait already; try again later", 429, retry_after_s=self.backlog_s()
            )
        rows = next(iter(inputs.values())).shape[0] if self._batched else 1
        queue = functools.partial(self._queue, wanted=wanted, priority=priority, timeout_s=timeout_s)
        if self._batched and rows > self.options.max_batch:
            self._running += 1  # until it ends, the model is not closed
            at_a_time, whole_ended = _PIECES_A_LANE * len(self.lanes), functools.partial(self._end_whole, ended)
            return Pieces(inputs, rows, self.options.max_batch, at_a_time, queue, whole_ended)
        return queue(inputs, rows, ended, place=place)

    def _end_whole(self, ended: Ended, result: Answer | BaseException) -> None:
        """End a request that ran in pieces."""
        self._running -= 1
        self._soon()
        ended(result)

    def _queue(
        self,
        inputs: Mapping[str, Array],
        rows: int,
        ended: Ended,
        wanted: tuple[str, ...] | None,
        priority: int,
        timeout_s: float | None,
        place: Place | None = None,
    ) -> _Waiting:
        """Queue an accepted request, or a piece of one."""
        request = _Waiting(inputs, wanted, rows, time.perf_counter_ns(), self, ended, place=place)
        alone = request.arrived_ns - self._arrived_ns > _CROWD_NS
        self._note_arrival(request.arrived_ns, rows)
        _asked.note(self, request.arrived_ns)
        if timeout_s or self.options.timeout_s:
            limit_s = min(limit for limit in (timeout_s, self.options.timeout_s) if limit)
            request.deadline_ns = request.arrived_ns + limit_s * 1e9
            request.timer = asyncio.get_running_loop().call_later(limit_s, self._expire, request)
        level = min(priority or _LAST_PRIORITY, _LAST_PRIORITY)
        self._push(request.arrived_ns + level * _AGE_NS, request)
        if place is None and alone and self._waiting == 1 and not (self._returning or self._running):
            # Nobody else is expected, so that a turn of the event loop would be lost.
            self._dispatch(nobody_else=request.arrived_ns - _asked.since_ns > _ONE_MODEL_NS)
        else:
            self._soon()
        return request

    def _drop(self, request: _Waiting, reason: BaseException) -> None:
        """Give a request up; one that runs ends with its batch, which reads its inputs."""
        if request.dropped is None and not request.is_over:
            request.dropped = reason
            if not request.running and request.group is not None:  # it waits
                self._waiting -= 1
                request.group.rows -= request.rows
                self._end(request, reason)
                if self._drained is not None:
                    self._soon()

    def _end(self, request: _Waiting, result: Answer | BaseException) -> None:
        request.is_over = True
        request.inputs = {}
        if request.timer is not None:
            request.timer.cancel()
        request.ended(request.dropped or result)

    def backlog_s(self) -> float:
        """Return the predicted seconds until the queue of now has run."""
        now_ns = time.perf_counter_ns()
        rows = sum(group.rows for group in self._groups.values())
        usable = [lane for lane in self.lanes if lane.out_until_ns <= now_ns] or self.lanes
        caps = [(lane, self._cap(lane)) for lane in usable]
        rows_per_ns = sum(cap / lane.expected_ns(cap) for lane, cap in caps)
        return rows / rows_per_ns / 1e9 if rows_per_ns else 1.0

    def replace(self, lanes: Sequence[Lane], *, batched: bool) -> None:
        """Move queued and future requests to other lanes; batches that run on the old ones end there."""
        for lane in lanes if self._closed else self.lanes:
            lane.worker.close()
        if self._closed:
            return
        self.lanes = list(lanes)
        self._batched = batched and self.options.max_batch > 1
        waiting = sorted(entry for group in self._groups.values() for entry in group.heap)
        self._groups = {}
        for due_ns, _, request in waiting:
            if request.dropped is None:  # else it has left the queue
                self._waiting -= 1
                request.rows = next(iter(request.inputs.values())).shape[0] if self._batched else 1
                self._push(due_ns, request)
        self._soon()

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

    def _push(self, due_ns: int, request: _Waiting) -> None:
        key = None
        if self._batched:
            key = tuple([(name, array.shape[1:], array.dtype) for name, array in request.inputs.items()])
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
        heapq.heappush(group.heap, (due_ns, next(self._order), request))
        group.rows += request.rows
        request.group = group
        self._waiting += 1

    def _expire(self, request: _Waiting) -> None:
        if not request.running:
            waited_s = (time.perf_counter_ns() - request.arrived_ns) / 1e9
            self._drop(request, ServingError(f"the request waited {waited_s:.3g} s and was abandoned", 504))

    def _heads(self, now_ns: int) -> list[_Group]:
        """Return the groups by their first request that is still wanted."""
        heads = []
        for key, group in list(self._groups.items()):
            heap = group.heap
            while heap and not self._is_wanted(heap[0][2], now_ns):
                heapq.heappop(heap)
            if heap:
                heads.append(group)
            else:
                del self._groups[key]
        if len(heads) > 1:
            heads.sort(key=lambda group: group.heap[0][:2])
        return heads

    def _is_wanted(self, request: _Waiting, now_ns: int) -> bool:
        """Return whether the client still waits and its time is not over."""
        if now_ns > request.deadline_ns:
            self._expire(request)
        return request.dropped is None

    def _pop(self, group: _Group, most: int, now_ns: int) -> list[_Waiting]:
        heap, batch, rows = group.heap, list[_Waiting](), 0
        while heap and (not batch or (self._batched and rows + heap[0][2].rows <= most)):
            *_, request = heapq.heappop(heap)
            if self._is_wanted(request, now_ns):
                request.running = True
                self._waiting -= 1
                rows += request.rows
                batch.append(request)
        group.rows -= rows
        batch.sort(key=place_order)
        return batch

    # --- choosing

    def _soon(self) -> None:
        """Dispatch once the event loop has read its connections, so that their requests are joined."""
        if not self._dispatching:
            self._dispatching = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self, *, nobody_else: bool = False) -> None:
        """Give free devices their next batches; the event loop may run one itself if it serves nobody else."""
        self._dispatching = False
        begun_ns = now_ns = time.perf_counter_ns()
        for group in self._heads(now_ns):
            while group.heap:
                first = group.heap[0][2]
                if not self._is_wanted(first, now_ns):
                    heapq.heappop(group.heap)
                    continue
                queued = max(group.rows, first.rows) if self._batched else 1
                chosen = self._lane_for(first, queued, now_ns) or self._lane_ahead(first, queued, now_ns)
                if chosen is None:
                    break
                lane, rows = chosen
                if self._batched and queued < rows and lane.idle and not self._closed:
                    wait_ns = self._wait_ns(lane, first, queued, now_ns)
                    if wait_ns > 0:
                        self._again_in(lane, wait_ns)
                        break
                most = lane.taken(min(rows, self._share(lane, queued)))
                self._start(lane, self._pop(group, most, now_ns), nobody_else)
                now_ns = time.perf_counter_ns()
                if now_ns - begun_ns > _INLINE_TURN_NS:
                    self._soon()
                    return
        if not self._waiting and not self._running and self._drained is not None:
            self._drained.set()

    def _lane_for(self, first: _Waiting, queued: int, now_ns: int) -> tuple[Lane, int] | None:
        """Return a free device and the rows that it should take, or None to wait for a device that ends sooner."""
        usable = self.lanes
        if len(usable) > 1:
            usable = [lane for lane in self.lanes if not self._is_out(lane, now_ns) and lane.device not in first.tried]
            if not usable:
                usable = [lane for lane in self.lanes if lane.device not in first.tried] or self.lanes
        queued = max(queued, first.rows)
        usable = self._worthwhile(usable, queued)
        if len(usable) == 1:
            (lane,) = usable
            return (lane, max(self._cap(lane), first.rows)) if lane.idle else None
        ends = {lane: self._end_ns(lane, queued, now_ns) for lane in usable}
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

    def _lane_ahead(self, first: _Waiting, queued: int, now_ns: int) -> tuple[Lane, int] | None:
        """Return the busy device that would end the waiting rows first and the rows that it should run next, if known.

        They are if a whole batch waits, and once the device's run is over by the time that the batch is joined. It is
        joined then, so that the device does not stand still meanwhile.
        """
        usable = [lane for lane in self.lanes if not lane.failed and lane.device not in first.tried]
        usable = self._worthwhile(usable, queued)
        usable = [lane for lane in usable if lane.device != Device.CPU]  # which would join them itself
        if not usable or not self._batched:
            return None
        lane = min(usable, key=lambda lane: self._end_ns(lane, queued, now_ns))
        if not lane.rows or lane.rows_ahead:
            return None
        cap = self._cap(lane)
        if queued < cap:
            if not self._in_halves(lane, self._clients(lane, queued)):
                return None
            left_ns = lane.busy_until_ns - now_ns - lane.joins_in_ns(queued) - _HANDED_OVER_NS
            if left_ns > 0:
                self._again_in(lane, left_ns)
                return None
        return lane, max(cap, first.rows)

    def _worthwhile(self, lanes: list[Lane], queued: int) -> list[Lane]:
        """Return the devices without those that would add little: their runs take time of the host from the others.

        They are judged at the batches that all clients would make, those that run or are expected back included, and
        not at the rows that wait at the moment. A CPU that did 4 % of the rows of an H200 took a quarter of the
        server's rate away.
        """
        if len(lanes) < 2:
            return lanes
        clients = queued + self._returning + sum(lane.unsettled for lane in lanes)
        rates = {}
        for lane in lanes:
            rows = max(min(self._cap(lane), clients), 1)
            rates[lane] = rows / lane.expected_ns(rows)
        least = _LEAST_SHARE * max(rates.values())
        return [lane for lane in lanes if rates[lane] >= least]

    def _cap(self, lane: Lane) -> int:
        return lane.cap() if self._batched else 1

    def _end_ns(self, lane: Lane, rows: int, now_ns: int) -> float:
        """Return when a device would have run so many rows, beginning with its present batch."""
        begin_ns = now_ns if lane.idle else max(lane.busy_until_ns, now_ns)
        most = self._cap(lane)
        if rows <= most:
            return begin_ns + lane.expected_ns(rows)
        full, rest = divmod(rows, most)
        return begin_ns + full * lane.expected_ns(most) + (lane.expected_ns(rest) if rest else 0.0)

    def _is_out(self, lane: Lane, now_ns: int) -> bool:
        """Return whether a device is left out after a failure; once its time is over, its probe begins."""
        if not lane.failed:
            return False
        if lane.out_until_ns <= now_ns and lane.idle:
            if lane.probe is None:
                lane.failed = False
                return False
            lane.idle = False
            self._running += 1
            loop = asyncio.get_running_loop()
            probe = lane.probe
            lane.worker.submit(lambda: loop.call_soon_threadsafe(self._probed, lane, _error_of(probe)))
        return True

    def _probed(self, lane: Lane, error: Exception | None) -> None:
        lane.idle = True
        self._running -= 1
        if error is None:
            lane.failed = False
            _log.info("%s is used again", lane.device.display)
        else:
            lane.fail(time.perf_counter_ns())
            _log.warning("%s stays out: %s", lane.device.display, error)
        self._dispatch()

    def _wait_ns(self, lane: Lane, first: _Waiting, queued: int, now_ns: int) -> float:
        """Return how long a free device should wait for more requests.

        A run has a fixed part that does not depend on its rows. Waiting for one more row pays while requests arrive
        at shorter intervals than that part divided by the rows that wait. Clients that have just been answered are
        expected to come back as soon as they did before. Other devices than the CPU stand still meanwhile, so they wait
        only if all clients are back within the time that one batch of all saves over two of half; the CPU reads and
        answers their requests.
        """
        waits_ns = now_ns - max(first.arrived_ns, lane.free_since_ns)
        least_ns = self.options.delay_s * 1e9 - (now_ns - first.arrived_ns)
        if self._returning and lane.device != Device.CPU:
            clients = min(queued + self._returning, self._cap(lane))
            saved_ns = 2 * lane.expected_ns((clients + 1) // 2) - lane.expected_ns(clients)
            if self._back_ns * clients >= saved_ns:
                return least_ns
            if waits_ns >= saved_ns:
                self._returning = 0  # they have not come
            return max(least_ns, saved_ns - waits_ns)
        fixed_ns = 2 * lane.expected_ns(queued) - lane.expected_ns(2 * queued)
        # Twice the interval: times that are off must not make the only client wait for others.
        gap_ns = self._return_ns if self._returning else 2 * self._gap_ns
        if not (gap_ns * queued < fixed_ns and waits_ns < fixed_ns):
            return least_ns
        quiet_ns = now_ns - max(self._arrived_ns, self._answered_ns)
        if quiet_ns > _GAPS * gap_ns:
            self._returning = 0
        return max(least_ns, min(_GAPS * gap_ns, fixed_ns / queued) - quiet_ns)

    def _share(self, lane: Lane, queued: int) -> int:
        """Return how many of the rows that wait a free device should take at the most.

        It runs half of its clients' rows while the other half is answered and sends the next requests, unless one batch
        of all takes about as long together with the time that the device then stands still. The CPU does the answering.
        """
        clients = self._clients(lane, queued)
        half = lane.size_of((clients + 1) // 2, 2)
        return half if queued > half and self._in_halves(lane, clients) else queued

    def _clients(self, lane: Lane, queued: int) -> int:
        """Return a device's share of the rows of all clients: those that wait, run, or are expected back."""
        at_work = [each for each in self.lanes if each is lane or each.unsettled]
        return -(-(queued + self._returning + sum(each.unsettled for each in at_work)) // len(at_work))

    def _in_halves(self, lane: Lane, clients: int) -> bool:
        """Return whether two batches that take turns are faster than one of all clients."""
        if lane.device == Device.CPU or not math.isfinite(self._back_ns):
            return False
        back_ns = self._back_ns * clients
        halves_ns = max(2 * lane.expected_ns((clients + 1) // 2), back_ns)
        return halves_ns < _WORTH * (lane.expected_ns(clients) + back_ns)

    def _note_arrival(self, now_ns: int, rows: int) -> None:
        """Keep the mean interval of arrivals, that of arrivals after answers, and how many rows came since the last."""
        self._gap_ns = _mean_of(self._gap_ns, now_ns - self._arrived_ns)
        self._return_ns = _mean_of(self._return_ns, now_ns - max(self._arrived_ns, self._answered_ns))
        self._arrived_ns = now_ns
        self._returning = max(self._returning - rows, 0)
        self._returned += rows

    def _again_in(self, lane: Lane, wait_ns: float) -> None:
        """Dispatch again after a time; the event loop polls for its end, beside other devices than the CPU for less.

        A loop that polls keeps Python's lock from the threads that copy: with 3 ms of it the outputs of 32 rows of
        393 KB took 8 to 10 ms, without 1.4 to 1.7 (two cores).
        """
        if wait_ns < (_TIMER_NS if lane.device == Device.CPU else _LATE_NS):
            self._soon()
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + (wait_ns - _LATE_NS) / 1e9
        if self._timer is not None:
            if self._due_s <= until:
                return
            self._timer.cancel()
        self._due_s = until  # not asked of the handle: uvloop's may have no time, and fire a moment before it
        self._timer = loop.call_at(until, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._dispatch()

    # --- running

    def _start(self, lane: Lane, batch: list[_Waiting], nobody_else: bool) -> None:
        rows = sum(request.rows for request in batch)
        now_ns = time.perf_counter_ns()
        if lane.runs_inline(rows, now_ns, self._gap_ns, nobody_else):
            results = executed(lane, batch)
            lane.ran_inline(now_ns, time.perf_counter_ns())
            if failed := self._end_all(batch, results):
                self._note_batch(lane, batch, results, failed)
            else:  # the answers are sent first
                asyncio.get_running_loop().call_soon(self._note_batch, lane, batch, results, failed)
            return
        lane.busy_from(max(lane.busy_until_ns if lane.rows else 0, now_ns), rows)
        self._running += 1
        loop = asyncio.get_running_loop()
        lane.unsettled += rows
        if len(batch) > 1:
            lane.prepare(batch[0].inputs, lane.size_of(rows, len(batch)), loop.call_soon_threadsafe)
        rooms = lane.next_rooms()
        inputs_of: Callable[[], Mapping[str, Array]] = functools.partial(joined, lane, batch, rooms)
        if lane.idle:
            lane.idle, lane.rows = False, rows
        else:
            lane.rows_ahead, lane.ahead_since_ns = rows, now_ns
            if sum(array.nbytes for request in batch for array in request.inputs.values()) >= BESIDE_BYTES:
                inputs_of = lane.helper.submit(inputs_of).result
        lane.worker.submit(lambda: self._run(loop, lane, batch, lambda: ran(lane, batch, rooms, inputs_of)))

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        lane: Lane,
        batch: list[_Waiting],
        run: Callable[[], Sequence[Answer | Exception]],
    ) -> None:
        """Run a batch in the lane's thread; large outputs are placed beside it, while the next batch runs."""
        results = run()
        if placed_bytes(batch, results) < BESIDE_BYTES or lane.device == Device.CPU:
            results = placed(lane, batch, results)
            loop.call_soon_threadsafe(self._finish, lane, batch, results, time.perf_counter_ns())
            return
        loop.call_soon_threadsafe(self._free, lane, time.perf_counter_ns())
        lane.helper.submit(
            lambda: loop.call_soon_threadsafe(self._finish, lane, batch, placed(lane, batch, results), None)
        )

    def _free(self, lane: Lane, ended_ns: int) -> None:
        """Let a device take its next batch; the run of one that was put together ahead has begun."""
        lane.rows, lane.rows_ahead = lane.rows_ahead, 0
        lane.idle = not lane.rows
        if lane.rows:
            lane.busy_from(max(ended_ns, lane.ahead_since_ns), lane.rows)
        lane.free_since_ns = time.perf_counter_ns()
        self._soon()

    def _finish(
        self, lane: Lane, batch: list[_Waiting], results: Sequence[Answer | Exception], ended_ns: int | None
    ) -> None:
        """Answer the requests of a batch, and free the device if its time comes with the batch."""
        if ended_ns is not None:
            self._free(lane, ended_ns)
        self._running -= 1
        lane.unsettled -= sum(request.rows for request in batch)
        self._note_batch(lane, batch, results, self._end_all(batch, results))
        self._dispatch()

    def _end_all(
        self, batch: Sequence[_Waiting], results: Sequence[Answer | Exception]
    ) -> list[tuple[_Waiting, Exception]]:
        """Give the requests of a batch their answers; return those at whose error the device is at fault."""
        failed = []
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, Exception) and is_device_failure(result):
                failed.append((request, result))
            else:
                self._end(request, result)
        return failed

    def _note_batch(
        self,
        lane: Lane,
        batch: Sequence[_Waiting],
        results: Sequence[Answer | Exception],
        failed: Sequence[tuple[_Waiting, Exception]],
    ) -> None:
        """Learn from a batch that has run, and move the requests that another device is to answer."""
        done = [result for result in results if isinstance(result, Answer)]
        rows = sum(request.rows for request in batch)
        if done and len(done) == len(batch):
            lane.learn(lane.size_of(rows, len(batch)), done[0].times.infer_ns)
        if done:
            self._on_batch(lane.device, rows, len(done), done[0].times)
        if failed:
            self._move(lane, failed)
        if self._returned and self._answered_ns:
            each_ns = (self._arrived_ns - self._answered_ns) / self._returned  # with the time to send the answers
            self._back_ns = _mean_of(self._back_ns, each_ns)
        self._answered_ns = time.perf_counter_ns()
        self._returned = 0
        # Clients that have not come back while a batch ran are not expected any more, nor are those that never do.
        left = min(self._returning, self._answered)
        self._least_left = min(self._least_left, left)
        self._batches += 1
        if self._batches % _GONE == 0:
            left, self._least_left = left - self._least_left, left
        self._returning = left + rows
        self._answered = rows

    def _move(self, lane: Lane, failed: Sequence[tuple[_Waiting, Exception]]) -> None:
        """Queue requests that a device failed again, for the other devices; the last device's error is raised."""
        _log.warning("%s failed a batch and is left out for a while: %s", lane.device.display, failed[0][1])
        lane.fail(time.perf_counter_ns())
        moved = 0
        for request, error in failed:
            request.tried.add(lane.device)
            if request.dropped or all(other.device in request.tried for other in self.lanes):
                self._end(request, error)
            else:
                request.running = False
                self._push(0, request)
                moved += 1
        if moved:
            self._on_failover(lane.device, moved)
        self._soon()


def _mean_of(before: float, now: float) -> float:
    """Return a running mean in which single large values count little."""
    return before + _GAP_WEIGHT * (min(now, 4 * before) - before) if math.isfinite(before) else now


def _error_of(probe: Callable[[], object]) -> Exception | None:
    try:
        probe()
    except Exception as err:  # whatever it is, the device stays out
        return err
    return None
