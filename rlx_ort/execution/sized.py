"""`SizedSessions`: input sizes that come back run in sessions of their own, whose models have these sizes fixed.

In such a session ONNX Runtime computes no shapes, so that launches can be recorded where nodes on the host stood in the
way. Convolutions are planned once, by a long search; the plain session plans them anew at each change of size, which
also ends recordings of kernels that were compiled for the plans. Sizes in turns whose recordings last have no session.

A session is opened in the background after some runs of the same sizes, or by `open_now`, compared with the plain one
on the inputs of a real run, and kept if it gives the same results in less time. Both are timed while neither the plain
session nor those of other sizes make a run; other work on the device may spoil the times, so that a slower one is tried
again, ever more rarely. It takes the device's memory for the weights once more, and for work space and the handles of
libraries.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from rlx_ort.errors import CancelledRunError, RlxError
from rlx_ort.numerics import agree, relative_error
from rlx_ort.providers.base import SizedRun
from rlx_ort.providers.engine.process import ending
from rlx_ort.timing import least_in_turns

if TYPE_CHECKING:
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.options.compile_options import PlacementRule
    from rlx_ort.providers.engine.binding import Run

_log = logging.getLogger(__name__)

AFTER_RUNS = 4  # of the same sizes
WORTH = 0.97  # the largest ratio of a run's time to a plain run's
WORTH_IN_TURNS = 1.1  # the same where sizes take turns, at each of which the plain session would have to plan anew
TURNS = 0.5  # the least share of a size's runs that come after a run of another size, for it to take turns
MOST_TRIES = 64  # of one session; each opens another
MOST_KNOWN = 256  # sizes that are counted
WARM_RUNS = 8  # before a session is timed; launches are recorded in them
TIMED_PAIRS = 5
TIMED_AGAIN = 15  # pairs before a session is refused: beside other runs on the device the first ones say little
LEAST_PAIRS, TIMED_S = 3, 0.2  # after so many pairs and so long no more are timed: long runs vary less
TRY_RUNS = 64  # that take about as long as a try, which opens a session and makes 50 runs beside those of the caller
RARER = 16  # times as many runs of a size go by before each further try, if it is only for its time that it was refused
PLAIN_RUNS = 3  # of a size before `open_now` asks for the gain

_Key: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]
_one_at_a_time: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by the device


class Slot(Protocol):
    """Holds the engine of a session with fixed sizes."""

    current: Any
    weights: WeightStore

    def engine(self, rule: PlacementRule) -> Any:
        """Return the open engine with the newest weights."""

    def close(self) -> None:
        """Let go of the engine for good."""


@dataclass(eq=False, repr=False)
class SizedSessions:
    """The sessions with fixed sizes beside one plain session; `run` takes the place of the plain session's.

    Args:
        plain: runs the plain session: `(names, feeds)`.
        gains: returns whether the plain session leaves something to gain for such outputs and inputs, and, by its last
            argument, whether their sizes take turns with others.
        replans: whether a change of sizes costs the plain session its plans of kernels.
        opened: makes the slot of a session with these sizes, for `(name of an input, shape)` pairs.
        rule: the placement rule that they keep.
        most: the most sessions that are kept.
        most_bytes: the most bytes of the device's memory that they may take together.
        in_use: returns the bytes of the device's memory that this process uses, None where that cannot be read; then
            the weights of each count. With its work space a session takes far more: 212 MB for a text recogniser of 21
            MB (H100, ONNX Runtime 1.31.1).
        device: the label of the device; one session is opened at a time on each.
        alone: returns a block in which the plain session makes no runs for other threads. Without it a session of
            DistilBERT that competed with a server's batches took 8.6 ms, where the plain one took 5.7 in its turn, and
            5.3 to 5.7 in it (16 rows, H200, ONNX Runtime 1.31.1).
        tolerance: how far an output may be from the plain session's, over its largest value: other fusions round in
            another order.
    """

    plain: Run
    gains: Callable[[Sequence[str], Mapping[str, Any], bool], bool]
    replans: bool
    opened: Callable[[_Key], Slot]
    rule: PlacementRule
    most: int
    most_bytes: int
    in_use: Callable[[], int | None] = lambda: None
    device: str = ""
    alone: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    tolerance: float = 1e-4

    def __post_init__(self) -> None:
        self._turn = _one_at_a_time[self.device]
        self._full = False  # no room for another
        self._ready: OrderedDict[_Key, Slot] = OrderedDict()
        self._counts: OrderedDict[_Key, tuple[int, int]] = OrderedDict()  # runs, and those after another size
        self._found: dict[_Key, SizedRun] = {}  # the state of each try
        self._slower: dict[_Key, int] = {}  # runs between tries of sizes whose session was not faster
        self._tries = 0
        self._last: _Key | None = None
        self._lock = threading.Lock()

    def run(self, names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run in the session of the inputs' sizes where there is one, else in the plain one; return the outputs."""
        try:
            key = tuple([(name, array.shape) for name, array in feeds.items()])
        except AttributeError:  # sequences and maps
            return self.plain(names, feeds)
        slot = self._ready.get(key)
        if slot is None:
            self._count(key, names, feeds)
            return self.plain(names, feeds)
        try:
            engine = slot.current
            if engine is None or engine.version != slot.weights.version:
                engine = slot.engine(self.rule)
            outputs: list[Any] = engine.run(names, feeds)
            return outputs
        except CancelledRunError:
            raise
        except RlxError as err:  # such as no memory; the plain session then shows whether the device is at fault
            _log.warning("sizes %s run in the plain session again: %s", described(key), err)
            self._drop(key, f"a run failed: {str(err).splitlines()[0]}")
            return self.plain(names, feeds)

    def open_now(self, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Open the session of the inputs' sizes if it may be faster; return whether there is one.

        It is kept whatever it takes where a change of sizes costs the plain session its plans: that one would have to
        make them anew for each of its runs.
        """
        key = tuple([(name, array.shape) for name, array in feeds.items()])
        runs = 0
        while not (gains := self.gains(names, feeds, False)) and runs < PLAIN_RUNS:
            self.plain(names, feeds)
            runs += 1
        with self._lock:
            if key in self._found or not gains or self._full or len(self._ready) >= self.most:
                return key in self._ready
            self._found[key] = SizedRun(described(key), "opening")
            self._tries += 1
        self._try(key, names, feeds, math.inf if self.replans else WORTH)
        return key in self._ready

    def report(self) -> tuple[SizedRun, ...]:
        """Return the state of each try, the earliest first."""
        return tuple(self._found.values())

    def slots(self) -> list[Slot]:
        """Return the slots of the sessions that are kept."""
        return list(self._ready.values())

    def _count(self, key: _Key, names: Sequence[str], feeds: Mapping[str, Any]) -> None:
        last, self._last = self._last, key
        if self._settled(key):
            return
        count, turns = self._counts.pop(key, (0, 0))
        count, turns = count + 1, turns + (key != last)
        self._counts[key] = count, turns
        if len(self._counts) > MOST_KNOWN:
            self._counts.popitem(last=False)
        if count == 1 and self.replans and len(self._counts) == 2:  # the first one is no longer alone
            self._found = {each: entry for each, entry in self._found.items() if entry.state != "refused"}
            self._slower = {}
        full = self._tries >= MOST_TRIES or len(self._ready) >= self.most or self._full
        if full or count % self._slower.get(key, AFTER_RUNS):
            return
        in_turns = self.replans and turns >= TURNS * count
        if not self.gains(names, feeds, in_turns) or not all(isinstance(each, np.ndarray) for each in feeds.values()):
            return
        with self._lock:
            if self._settled(key) or any(entry.state == "opening" for entry in self._found.values()):
                return
            self._found[key] = SizedRun(described(key), "opening")
            self._tries += 1
        copies = {name: array.copy() for name, array in feeds.items()}
        worth = WORTH_IN_TURNS if in_turns else WORTH
        _in_thread(lambda: self._try(key, list(names), copies, worth))

    def _settled(self, key: _Key) -> bool:
        """Return whether the state of a size is final."""
        return key in self._found and key not in self._slower

    def _try(self, key: _Key, names: Sequence[str], feeds: Mapping[str, Any], worth: float) -> None:
        """Open the session of a size, and keep it if it is right and takes no more than this share of a plain run."""
        slot: Slot | None = None
        try:
            with self._turn:
                begun, before = time.perf_counter(), self.in_use()
                slot = self.opened(key)
                engine = slot.engine(self.rule)
                opened_s = time.perf_counter() - begun
                for _ in range(WARM_RUNS):
                    outputs = engine.run(names, feeds)
                nbytes = sum(tensor.nbytes for tensor in engine.weights.values())
                if before is not None and (after := self.in_use()) is not None:
                    nbytes = max(nbytes, after - before)
                taken = nbytes + sum(entry.nbytes for entry in self._found.values())
                if taken > self.most_bytes:
                    self._full = True
                    raise _NotKeptError(f"{taken >> 20} MB with it are more than {self.most_bytes >> 20} MB")
                for name, want, got in zip(names, self.plain(names, feeds), outputs, strict=True):
                    if not _same(got, want, self.tolerance):
                        raise _NotKeptError(f"output {name!r} differs by {relative_error(got, want):.1e}")
                calls = (lambda: self.plain(names, feeds), lambda: engine.run(names, feeds))
                plain_ns, sized_ns = self._least(calls, TIMED_PAIRS if math.isfinite(worth) else 1)
                if sized_ns > worth * plain_ns:
                    plain_ns, sized_ns = map(min, (plain_ns, sized_ns), self._least(calls, TIMED_AGAIN))
                times = f"a run takes {sized_ns / 1e3:.0f} us, a plain one {plain_ns / 1e3:.0f} us"
                if sized_ns > worth * plain_ns:
                    self._slower[key] = RARER * self._slower.get(key, TRY_RUNS)
                    raise _NotKeptError(times)
            self._found[key] = SizedRun(described(key), "used", "", plain_ns, sized_ns, nbytes)
            self._ready[key] = slot
            self._slower.pop(key, None)
            _log.info("sizes %s have a session of their own, opened in %.3g s: %s", described(key), opened_s, times)
        except (RlxError, _NotKeptError) as err:
            self._found[key] = SizedRun(described(key), "refused", str(err).splitlines()[0])
            _log.info("sizes %s have no session of their own: %s", described(key), err)
            if slot is not None:
                slot.close()

    def _least(self, calls: Sequence[Callable[[], object]], rounds: int) -> list[int]:
        """Return the least time of each call in ns; between the rounds other threads have their runs."""
        times, until = list[list[int]](), time.perf_counter() + TIMED_S
        while len(times) < min(rounds, LEAST_PAIRS) or (len(times) < rounds and time.perf_counter() < until):
            others = [engine for slot in self.slots() if (engine := slot.current) is not None]
            with contextlib.ExitStack() as alone:
                for block in (self.alone, *(engine.session.guarded for engine in others)):
                    alone.enter_context(block())
                times.append(least_in_turns(*calls, rounds=1))
        return [min(each) for each in zip(*times, strict=True)]

    def _drop(self, key: _Key, reason: str) -> None:
        self._found[key] = SizedRun(described(key), "refused", reason)
        slot = self._ready.pop(key, None)
        if slot is not None:
            self._full = False
            slot.close()


class _NotKeptError(Exception):
    """A session is not right or not faster; the message is the reason."""


def described(key: _Key) -> str:
    """Return sizes as reports show them."""
    return ", ".join(f"{name} {list(shape)}" for name, shape in key)


def _same(got: Any, want: Any, tolerance: float) -> bool:
    return isinstance(got, np.ndarray) and isinstance(want, np.ndarray) and agree(got, want, tolerance, epsilons=32)


def _in_thread(call: Callable[[], None]) -> None:
    def run() -> None:
        if not ending():
            call()

    threading.Thread(target=run, name="rlx_ort-sizes", daemon=True).start()
