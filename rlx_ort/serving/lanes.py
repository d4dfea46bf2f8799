"""`Lane`: a device that runs the batches of a model; the cost of batches there, and how one is run."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import InputError, RlxError, ServingError
from rlx_ort.faults import is_device_failure
from rlx_ort.providers.workers import Workers
from rlx_ort.timing import in_row

Array: TypeAlias = npt.NDArray[Any]
Run: TypeAlias = Callable[[Mapping[str, Array], Sequence[str] | None], dict[str, Array]]
"""Runs inputs on one device and returns the outputs with these names, or all."""
Padding: TypeAlias = Literal["never", "joined", "always"]
"""Which batches are padded to a power of two rows: none, those of several requests, or all of them."""

_NEARLY = 1.08  # a smaller batch is taken if its rows cost this factor of the cheapest ones
_KEPT = 5  # times of each batch size, of which the least counts
_JUDGED_EVERY = 16  # runs
_FORGETTING = 0.15  # share by which higher ratios of other batch sizes fall, so that they are tried again
_MOVED = 1.05  # a ratio that changed by this factor changes the batch size
_INLINE_NS = 100_000  # a run on the CPU that takes less is cheaper than handing it to a thread
_ALONE_NS = 300_000  # the same where requests are so rare that the event loop has nothing else to do
_NOBODY_ELSE_NS = 5_000_000  # the same where the event loop serves nobody else; requests that come meanwhile wait
_DISTURBED = 200  # a run on the event loop that takes so many times _INLINE_NS is the last one for a second
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 1.0, 60.0
_COPYING = 4
_THREADED_BYTES = 4 << 20  # inputs and outputs of batches from this size on are copied by several threads
BESIDE_BYTES = 1 << 20
"""Inputs and outputs of batches from this size on are copied beside the device's thread; waking one takes 0.1 ms."""
_JOIN_WEIGHT = 0.125  # weight of a new time in the mean
_MOST_PREPARED = 4  # shapes of a row; of more, each would cost some runs and come seldom
_PREPARED_RUNS = 3  # of each batch size, whose least time counts
_PREPARING_S = 60.0  # for those runs, between batches of requests
_copiers = Workers(_COPYING, "rlx_ort-serve-copy", idle_s=10.0)
_log = logging.getLogger(__name__)


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


class Place(Protocol):
    """Where outputs of a request are copied to, and sent from. Requests with the same `memory` are copied together."""

    memory: Any

    def __call__(self, arrays: Sequence[Array], places: Sequence[Any]) -> Sequence[Array]:
        """Return copies of an output of several requests, which have these places, in a thread. It must not fail."""


@dataclass(slots=True, eq=False)
class Rows:
    """A request in a batch: its inputs, the outputs that are wanted (None for all), and when it came.

    `place` is None if its outputs are sent from where they are.
    """

    inputs: Mapping[str, Array]
    wanted: tuple[str, ...] | None
    rows: int
    arrived_ns: int
    place: Place | None = field(default=None, kw_only=True)


_ToPlace: TypeAlias = tuple[Place, tuple[str, ...] | None, Answer]
Rooms: TypeAlias = dict[str, Array]
"""Memory for the inputs of a batch, by their names."""


class Lane:
    """One device that runs the batches of a model, one at a time, in a thread of its own.

    Args:
        device: the device.
        run: runs a batch on it.
        predict: rows -> the predicted time of a run in ns, or None where there is none.
        most: the most rows of a batch.
        probe: runs on the device before it is used again after a failure, and raises if it is still at fault.
        padding: which batches are padded, since a device that compiles or records each size should see few sizes.

    Attributes:
        devices: the devices that run a batch, more than one for a graph in stages.
        memory: returns memory of so many bytes, from which the device reads the inputs of a batch.
        opens: opens the session for the sizes of a batch like the given one; None where a change of sizes costs little.
    """

    def __init__(
        self,
        device: Device,
        run: Run,
        predict: Callable[[int], float | None],
        most: int,
        probe: Callable[[], object] | None = None,
        padding: Padding = "never",
    ) -> None:
        self.device = device
        self.devices: tuple[Device, ...] = (device,)
        self.run = run
        self.probe = probe
        self.memory: Callable[[int], npt.NDArray[np.uint8]] = lambda nbytes: np.empty(nbytes, np.uint8)
        self.opens: Callable[[Mapping[str, Array]], object] | None = None
        self.padding: Padding = padding
        self.busy_until_ns = 0
        self.idle = True
        self.rows = self.rows_ahead = 0  # of the batch that runs, and of the one that its thread runs next
        self.ahead_since_ns = 0  # when that one was handed to the thread
        self.unsettled = 0  # rows of batches that run or have run, and are not answered
        self.free_since_ns = 0
        self.out_until_ns = 0
        self.failed = False
        self._predict = functools.lru_cache(maxsize=1024)(predict)
        self._most = most
        self._learned: dict[int, float] = {}  # power of two -> measured over predicted time of batches up to it
        self._measured: dict[int, deque[float]] = {}
        self._judged: dict[int, float] = {}  # those that the cap was found with
        self._cap = self._runs = 0
        self._backoff_s = _LEAST_BACKOFF_S
        self._inline_from_ns = 0
        self._row_joins_in_ns = 0.0
        self._rooms: tuple[Rooms, Rooms] = ({}, {})
        self._prepared: dict[object, int] = {}  # inputs of a row -> the exponent up to which batches are prepared
        self.worker = Workers(1, f"rlx_ort-serve-{device.label}")
        self.helper = Workers(2, f"rlx_ort-serve-{device.label}-copy", idle_s=10.0)  # one joins, one places
        self._opener = Workers(1, f"rlx_ort-serve-{device.label}-open", idle_s=10.0)

    def next_rooms(self) -> Rooms:
        """Return the memory of the inputs of the batch before the last, for the next one to be joined in.

        New pages take longer to make than to fill. Nothing reads that memory any more: at most one batch is joined
        while another one runs, and a run that returns has read its inputs. `ran` drops the memory of runs for which
        this may not hold.
        """
        self._rooms = self._rooms[::-1]
        return self._rooms[0]

    def expected_ns(self, rows: int) -> float:
        """Return the time of a run with so many rows; infinity before anything is known of it."""
        learned, octave = self._learned, octave_of(rows)
        predicted = self._predict(rows if self.padding == "never" else self._padded(rows))
        if not learned:
            return math.inf if predicted is None else predicted
        return (1.0 if predicted is None else predicted) * self._ratio(octave)

    def busy_from(self, begin_ns: int, rows: int) -> None:
        """Expect that a run with so many rows begins then."""
        expected_ns = self.expected_ns(rows)
        self.busy_until_ns = begin_ns + round(expected_ns if math.isfinite(expected_ns) else 1e9)

    def _ratio(self, octave: int) -> float:
        """Return the ratio of batches of about that size, or of those nearest to it that ran."""
        learned = self._learned
        return learned[octave if octave in learned else min(learned, key=lambda known: abs(known - octave))]

    def cap(self) -> int:
        """Return the size of the smallest batch whose rows are about the cheapest, or twice that to try it."""
        if not self._cap:
            sizes = [1 << exponent for exponent in range(self._most.bit_length())]
            costs = [self.expected_ns(rows) / rows for rows in sizes]
            least = min(costs)
            self._cap = next(rows for rows, cost in zip(sizes, costs, strict=True) if cost <= _NEARLY * least)
            if 2 * self._cap <= self._most and max(self._learned, default=-1) == octave_of(self._cap):
                self._cap *= 2
            self._judged = dict(self._learned)
        return self._cap

    def taken(self, rows: int) -> int:
        """Return how many of the rows that wait to run: all, padded, or fewer without padding if a row costs less."""
        if self.padding == "never" or rows == (padded := self._padded(rows)):
            return rows
        fewer = 1 << (octave_of(rows) - 1)
        return rows if fewer * self.expected_ns(padded) <= rows * self.expected_ns(fewer) else fewer

    def size_of(self, rows: int, requests: int) -> int:
        """Return the rows that a batch of so many rows and requests runs with."""
        padded = self.padding == "always" or (self.padding == "joined" and requests > 1)
        return self._padded(rows) if padded else rows

    def _padded(self, rows: int) -> int:
        return max(min(1 << octave_of(rows), self._most), rows)

    def learn(self, rows: int, took_ns: int) -> None:
        """Correct the predictions by a run; the quickest of the last five of its size counts.

        Runs are disturbed at times, and never quickened. Until a size has a session of its own, CUDA plans convolutions
        anew after each batch of another size, 100 to 190 ms for ResNet-50 (H200). A first run that is slower than those
        of other sizes does not count at all, so that a second one is tried.
        """
        self._backoff_s = _LEAST_BACKOFF_S
        learned, octave = self._learned, octave_of(rows)
        measured = self._measured.setdefault(octave, deque(maxlen=_KEPT))
        measured.append(took_ns / (self._predict(rows) or 1.0))
        if len(measured) == 1 and learned and measured[0] > self._ratio(octave):
            return
        learned[octave] = now = min(measured)
        self._runs += 1
        if len(learned) != len(self._judged):
            self._cap = 0
        elif self._runs % _JUDGED_EVERY == 0:
            for other, ratio in learned.items():
                if ratio > now:
                    learned[other] = ratio + _FORGETTING * (now - ratio)
            judged = self._judged
            if any(not judged[at] / _MOVED < ratio < judged[at] * _MOVED for at, ratio in learned.items()):
                self._cap = 0

    def prepare(self, inputs: Mapping[str, Array], rows: int, schedule: Callable[..., object]) -> None:
        """Learn in the background how long batches up to twice this one take; open the sessions for their sizes first.

        Larger batches would be judged by predictions alone, and a device that plans convolutions for each size would do
        so in every batch of another size until it has come some times.

        Args:
            inputs: those of one of its requests.
            rows: the rows that it runs with.
            schedule: schedules a call with its arguments on the event loop, from any thread.
        """
        if self.padding != "joined":
            return
        kind = tuple([(name, array.shape[1:], array.dtype) for name, array in inputs.items()])
        if kind not in self._prepared and len(self._prepared) >= _MOST_PREPARED:
            return
        least, own = self._prepared.get(kind, 0), octave_of(rows)
        until = min(own + 2, self._most.bit_length())
        if until > least:
            self._prepared[kind] = until
            row = {name: array[:1].copy() for name, array in inputs.items()}
            exponents = sorted(range(least, until), key=lambda exponent: abs(exponent - own))
            self._opener.submit(functools.partial(self._prepare, row, exponents, schedule))

    def _prepare(self, row: Mapping[str, Array], exponents: Sequence[int], schedule: Callable[..., object]) -> None:
        for rows in (1 << exponent for exponent in exponents):
            inputs = {name: np.repeat(array, rows, axis=0) for name, array in row.items()}
            try:
                if self.opens is not None:
                    self.opens(inputs)
                run = functools.partial(self.run, inputs, None)
                runs = self.worker.submit(functools.partial(in_row, run, _PREPARED_RUNS))
                for took_ns in runs.result(_PREPARING_S):
                    schedule(self.learn, rows, took_ns)
            except (RlxError, TimeoutError) as err:  # no memory, or the model is closed
                _log.info("batches of %d rows are not prepared on %s: %s", rows, self.device.display, err)
                return

    def joins_in_ns(self, rows: int) -> float:
        """Return the time that it takes to put so many rows together."""
        return self._row_joins_in_ns * rows

    def joined_in(self, rows: int, ns: int) -> None:
        """Learn from a batch that was put together; a thread that had to wait for its turn counts little."""
        before, now = self._row_joins_in_ns, ns / rows
        self._row_joins_in_ns = before + _JOIN_WEIGHT * (min(now, 4 * before) - before) if before else now

    def runs_inline(self, rows: int, now_ns: int, gap_ns: float, nobody_else: bool = False) -> bool:
        """Return whether a run is so short that the event loop may make it, with requests at such intervals.

        Waking a thread for it and the loop after it takes 0.3 to 0.4 ms beside a GPU (H200).
        """
        if octave_of(rows) not in self._learned or now_ns < self._inline_from_ns:
            return False
        expected_ns = self.expected_ns(rows)
        if self.device != Device.CPU or nobody_else:
            return nobody_else and expected_ns < _NOBODY_ELSE_NS
        return expected_ns < _INLINE_NS or (expected_ns < _ALONE_NS and expected_ns < gap_ns / 2)

    def ran_inline(self, began_ns: int, ended_ns: int) -> None:
        """Leave the event loop alone for a second after a run that took long."""
        if ended_ns - began_ns > _DISTURBED * _INLINE_NS:
            self._inline_from_ns = ended_ns + 1_000_000_000

    def fail(self, now_ns: int) -> None:
        """Keep the device out, twice as long as before."""
        self.failed = True
        self.out_until_ns = now_ns + round(self._backoff_s * 1e9)
        self._backoff_s = min(2 * self._backoff_s, _MOST_BACKOFF_S)


def octave_of(rows: int) -> int:
    """Return the exponent of the power of two that a batch is counted as."""
    return (rows - 1).bit_length()


def executed(lane: Lane, batch: Sequence[Rows]) -> Sequence[Answer | Exception]:
    """Run a batch and return an answer or an error for each request; a batch that fails is run again one by one."""
    rooms = lane.next_rooms()
    return placed(lane, batch, ran(lane, batch, rooms, functools.partial(joined, lane, batch, rooms)))


def ran(
    lane: Lane, batch: Sequence[Rows], rooms: Rooms, inputs_of: Callable[[], Mapping[str, Array]]
) -> Sequence[Answer | Exception]:
    """Run a batch as `executed` does, without placing its outputs; `inputs_of` returns the result of `joined`."""
    try:
        return _run_joined(lane, batch, rooms, inputs_of)
    except Exception as err:  # it belongs to the requests
        if len(batch) == 1:
            return [err if isinstance(err, RlxError) or is_device_failure(err) else _wrapped(err)]
    singly: list[Answer | Exception] = []
    for request in batch:
        singly += ran(lane, [request], unshared := Rooms(), functools.partial(joined, lane, [request], unshared))
    return singly


def joined(lane: Lane, batch: Sequence[Rows], rooms: Rooms) -> Mapping[str, Array]:
    """Return the inputs of a batch, those of several requests in memory of `rooms`."""
    inputs, rows = batch[0].inputs, sum(request.rows for request in batch)
    padding = _padding(lane, batch)
    if len(batch) > 1 or padding:
        begun_ns = time.perf_counter_ns()
        whole = {
            name: _joined(lane, name, [request.inputs[name] for request in batch], padding, rooms) for name in inputs
        }
        lane.joined_in(rows, time.perf_counter_ns() - begun_ns)
        return whole
    if not all(array.flags.aligned for array in inputs.values()):  # as it came over the network
        return {name: np.require(array, requirements="A") for name, array in inputs.items()}
    return inputs


def placed(lane: Lane, batch: Sequence[Rows], results: Sequence[Answer | Exception]) -> Sequence[Answer | Exception]:
    """Copy outputs to where they are sent from."""
    begun_ns = time.perf_counter_ns()
    answers = _to_place(batch, results)
    try:
        _call_all(lane, [functools.partial(_place, part) for part in _together(answers)], placed_bytes(batch, results))
    except Exception as err:  # it belongs to the requests
        return [_wrapped(err)] * len(batch)
    took_ns = time.perf_counter_ns() - begun_ns
    for result in results if answers else ():
        if isinstance(result, Answer):
            result.times.output_ns += took_ns
    return results


def placed_bytes(batch: Sequence[Rows], results: Sequence[Answer | Exception]) -> int:
    """Return how much `placed` copies."""
    return sum(array.nbytes for *_, answer in _to_place(batch, results) for array in answer.outputs.values())


def _to_place(batch: Sequence[Rows], results: Sequence[Answer | Exception]) -> list[_ToPlace]:
    """Return the answers whose outputs are placed, with where they go and the outputs that are wanted."""
    return [
        (request.place, request.wanted, result)
        for request, result in zip(batch, results, strict=True)
        if request.place is not None and isinstance(result, Answer)
    ]


def place_order(request: Rows) -> int:
    """Return a key that brings requests of a batch together which are placed together, if they are sorted by it."""
    return 0 if request.place is None else id(request.place.memory)


def _together(answers: Sequence[_ToPlace]) -> Iterator[list[_ToPlace]]:
    """Yield neighbours that are placed together, in about as many parts as there are threads that copy."""
    for _, group in itertools.groupby(answers, lambda each: (id(each[0].memory), each[1])):
        part = [*group]
        each = -(-len(part) // max(1, round(_COPYING * len(part) / len(answers))))
        yield from (part[at : at + each] for at in range(0, len(part), each))


def _run_joined(
    lane: Lane, batch: Sequence[Rows], rooms: Rooms, inputs_of: Callable[[], Mapping[str, Array]]
) -> list[Answer]:
    begun_ns = time.perf_counter_ns()
    inputs, wanted = inputs_of(), _all_wanted(batch)
    joined_ns = time.perf_counter_ns()
    try:
        outputs = lane.run(inputs, wanted)
    except BaseException:
        rooms.clear()  # a run that took too long goes on in its thread
        raise
    if any(np.may_share_memory(output, room) for output in outputs.values() for room in rooms.values()):
        rooms.clear()  # an output is an input
    ran_ns = time.perf_counter_ns()
    pieces = _split(outputs, [request.rows for request in batch], _padding(lane, batch))
    ended_ns = time.perf_counter_ns()
    spans = (joined_ns - begun_ns, ran_ns - joined_ns, ended_ns - ran_ns)
    return [
        Answer(piece, lane.device, Times(begun_ns - request.arrived_ns, *spans))
        for request, piece in zip(batch, pieces, strict=True)
    ]


def _padding(lane: Lane, batch: Sequence[Rows]) -> int:
    rows = sum(request.rows for request in batch)
    return lane.size_of(rows, len(batch)) - rows


def _all_wanted(batch: Sequence[Rows]) -> tuple[str, ...] | None:
    if any(request.wanted is None for request in batch):
        return None
    return tuple(dict.fromkeys(name for request in batch for name in request.wanted or ()))


def _joined(lane: Lane, name: str, arrays: list[Array], padding: int, rooms: Rooms) -> Array:
    """Return arrays as one, with the last row repeated, since a model takes its values."""
    arrays += [arrays[-1][-1:]] * padding
    if arrays[0].dtype == object:
        return np.concatenate(arrays)
    starts = [0, *itertools.accumulate(map(len, arrays))]
    shape = (starts[-1], *arrays[0].shape[1:])
    size = math.prod(shape) * arrays[0].itemsize
    room = rooms.get(name)
    if room is None or room.nbytes < size:
        room = rooms[name] = lane.memory(size)
    whole = room[:size].view(arrays[0].dtype).reshape(shape)
    each = -(-len(arrays) // (_COPYING if _is_threaded(lane, whole.nbytes) else 1))
    _call_all(
        lane,
        [
            functools.partial(np.concatenate, part, out=whole[starts[at] : starts[at + len(part)]])
            for at in range(0, len(arrays), each)
            if (part := arrays[at : at + each])
        ],
        whole.nbytes,
    )
    return whole


def _place(part: Sequence[_ToPlace]) -> None:
    places, (wanted, *_), answers = zip(*part, strict=True)
    for name in list(answers[0].outputs) if wanted is None else wanted:
        copies = places[0]([answer.outputs[name] for answer in answers], places)
        for answer, copy in zip(answers, copies, strict=True):
            answer.outputs[name] = copy


def _is_threaded(lane: Lane, size: int) -> bool:
    """Return whether copies of so many bytes are made by several threads, since a device or its clients wait."""
    return size >= _THREADED_BYTES and lane.device != Device.CPU


def _call_all(lane: Lane, copies: Sequence[Callable[[], object]], size: int) -> None:
    """Make copies of so many bytes in all."""
    if not copies:
        return
    each = -(-len(copies) // (_COPYING if _is_threaded(lane, size) else 1))
    first, *others = [copies[at : at + each] for at in range(0, len(copies), each)]
    copied = [_copiers.submit(functools.partial(_call, part)) for part in others]
    _call(first)
    for each_part in copied:
        each_part.result()


def _call(copies: Sequence[Callable[[], object]]) -> None:
    for copy in copies:
        copy()


def _split(outputs: dict[str, Array], rows: Sequence[int], padding: int) -> list[dict[str, Array]]:
    if len(rows) == 1 and not padding:
        return [outputs]
    total = sum(rows) + padding
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
