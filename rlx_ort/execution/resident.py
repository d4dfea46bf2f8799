"""`Resident`: a graph on a device, the memory of its session there, and how that is learned.

Opening and the first runs of a session are measured. What a later run may add on top is reserved before it runs: what
its arena was shrunk by, what an earlier session has grown by, and work space of the device's libraries, for a thread
that has not run the session yet or for recorded launches.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rlx_ort.providers.hardware import release_free_heap

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import EngineSession, MemoryReading, Provider

_NOISE_BYTES = 1 << 20
_FIRST_RUNS = 4  # are measured: launches are recorded at the third, which takes buffers
_NEVER = -(1 << 60)

_sizes: weakref.WeakKeyDictionary[Graph, dict[Device, int]] = weakref.WeakKeyDictionary()
_openings: weakref.WeakKeyDictionary[Graph, dict[Device, int]] = weakref.WeakKeyDictionary()


def opening_bytes(graph: Graph, device: Device) -> int | None:
    """Return the least bytes that a measured session of a graph kept when it was opened on a device, or None.

    The first session of a process pays for memory that the device's libraries keep, which is not the graph's; the least
    of several openings is nearest to the graph's own.
    """
    return _openings.get(graph, {}).get(device)


class Resident:
    """A graph on a device and its session's memory, also while that is closed.

    `release` returns a function that closes the session if it is idle, or None once that is gone.

    Attributes:
        device: the device.
        model: the name of the graph.
        weights: bytes of its weights; 0 before it was opened under a budget.
        at_opening: bytes that opening its session takes; 0 if unknown.
        in_runs: bytes that its runs add, in the arena.
        most: bytes that it took for a moment while it was opened.
        most_in_runs: bytes that its runs have added for a moment.
        freed: how much of that the last shrinking of the arena has freed.
        sure: whether two measurements of both agree, with nothing else running; each opening is measured until then.
        opened: how often a session was opened.
        evictions: how often it was closed to make room.
        used_s: when it was used last, on the monotonic clock.
        governed: whether its device had a budget when the session was opened.
        cached: whether its session was opened from the compile cache because it had been closed to make room.
        closed: whether the graph is closed for good, and has no session again.
        engine: a weak reference to the engine that was opened last.
    """

    def __init__(
        self, provider: Provider, device: Device, graph: Graph, release: Callable[[], Callable[[], bool] | None]
    ) -> None:
        self.device = device
        self._release = release
        self.model = graph.name
        self.weights = self.at_opening = self.in_runs = self.most = self.most_in_runs = 0
        self.opened = self.evictions = 0
        self.used_s = self._swept_s = 0.0
        self.sure = self.governed = self.cached = self.closed = False
        self.engine: Callable[[], Any] = lambda: None
        self._provider = provider
        self._sizes, self._openings = _sizes.setdefault(graph, {}), _openings.setdefault(graph, {})
        self._largest = -1  # bytes of inputs; the arena grows with larger ones
        self._to_measure = _FIRST_RUNS  # of the runs to come; 0 for good once all were measured in one session
        self._undisturbed = False
        self._inside = 0  # runs in progress
        self._promised: dict[int, int] = {}  # thread -> bytes that room was made for, until its run has ended
        self._last = _NEVER  # bytes that the last measurement found
        self.freed = self._regrows = 0  # bytes; the second are promised to a run that takes them again
        self._threads: set[int] = set()  # that have run the open session: each may take work space of its own
        self._new = True  # not run since it was opened
        self._open: weakref.WeakSet[EngineSession] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def sessions(self) -> int:
        """How many of its sessions something still refers to: a device tensor keeps one, for example."""
        return len(self._open)

    @property
    def nbytes(self) -> int:
        """The bytes that its session takes, or took before it was closed; 0 if unknown."""
        return self.at_opening + self.in_runs - self.freed

    @property
    def expected(self) -> int:
        """The bytes that its session took, or that another session of the graph did on the device; 0 if unknown."""
        return self._largest_use or self._sizes.get(self.device, 0)

    @property
    def reserved(self) -> int:
        """The bytes that runs are expected to add, at most for a moment, and room was made for."""
        with self._lock:
            return self._ahead_of_first_run + sum(self._promised.values())

    @property
    def idle_arena(self) -> bool:
        """Whether its arena may hold unused memory that no attempt to shrink it has seen."""
        return self.sessions > 0 and self.in_runs > 0 and self.used_s > self._swept_s

    def read(self) -> MemoryReading | None:
        """Return this process's use of the device's memory now."""
        return self._provider.memory(self.device)

    def read_trimmed(self) -> MemoryReading | None:
        """Return a reading without heap memory held for reuse."""
        release_free_heap()
        return self.read()

    def touch(self) -> None:
        """Note a use."""
        self.used_s = time.monotonic()

    def promise(self, nbytes: int) -> None:
        """Reserve so many bytes for the run that this thread is about to make."""
        with self._lock:
            self._promised[threading.get_ident()] = nbytes

    def hold(self, engine: object) -> None:
        """Take an engine that was opened for it."""
        self.engine = weakref.ref(engine)
        self.touch()

    def count(self, session: EngineSession) -> None:
        """Count a new session until nothing refers to it."""
        with self._lock:
            self._open.add(session)
            self.opened += 1
            self._new, self.freed, self._regrows = True, 0, 0
            self._threads.clear()
            if self._to_measure:
                self._to_measure = _FIRST_RUNS

    def note_opening(self, nbytes: int, most: int, sure: bool) -> None:
        """Note the memory and the peak of an opening; the next run is measured as well."""
        with self._lock:
            if sure or self._last == _NEVER:  # a disturbed measurement replaces no other
                expected = self.at_opening + self.in_runs or self._sizes.get(self.device, 0)
                self.at_opening, self.in_runs, self.most = nbytes, max(0, expected - nbytes), most
                self._openings[self.device] = min(nbytes, self._openings.get(self.device, nbytes))
            self._largest, self._undisturbed = -1, sure

    def note_run(self, fed: int, nbytes: int, most: int, sure: bool) -> None:
        """Note the added memory and the peak of a run on `fed` bytes of inputs."""
        with self._lock:
            first = self._largest < 0
            before = self._grown
            if sure or self._last == _NEVER:
                self.in_runs = max(0, before + nbytes)
                self.most_in_runs = max(self.most_in_runs, before + most)
            self._largest = max(fed, self._largest)
            self._ran()
            self._to_measure = max(0, self._to_measure - 1)
            self._undisturbed = self._undisturbed and sure
            self._sizes[self.device] = self._largest_use
            if first:
                self.compare(self.nbytes)

    def compare(self, nbytes: int) -> None:
        """Compare the session's memory with the last measurement, which included libraries loaded once."""
        allowed = max(_NOISE_BYTES, self._last // 10)
        self.sure = self._undisturbed and abs(nbytes - self._last) <= allowed
        self._last = nbytes if self._undisturbed else _NEVER

    def forget(self) -> None:
        """Measure again from the next opening on."""
        self.sure, self._last, self._to_measure = False, _NEVER, _FIRST_RUNS

    def shrink(self) -> bool:
        """Give unused memory of the session's arena back to the device if no run is in it; return whether any was."""
        with self._lock:
            self._swept_s = time.monotonic()
            engine = None if self._inside else self.engine()
            shrink = None if engine is None else getattr(engine.session, "shrink_arena", None)
            before = None if shrink is None else self.read_trimmed()
            if shrink is None or not shrink():
                return False
            after = self.read_trimmed()  # the heap may keep memory that the arena gives back
            if before is None or after is None:
                return False
            self.freed = min(self.freed + max(0, before.nbytes - after.nbytes), self.in_runs)
            return before.nbytes > after.nbytes

    def release(self) -> bool:
        """Close the session if it is idle, and return whether it was open and idle."""
        release = self._release()
        released = release is not None and release()
        self.evictions += released
        return released

    @property
    def _largest_use(self) -> int:
        return max(self.most, self.at_opening + max(self.in_runs, self.most_in_runs))

    @property
    def _ahead_of_first_run(self) -> int:
        return max(self.in_runs, self.most_in_runs) if self._new else 0

    @property
    def _grown(self) -> int:
        """The bytes that runs of the open session have added and that are in use."""
        return 0 if self._new else self.in_runs - self.freed - self._regrows

    def enter(self, fed: int) -> int:
        """Begin a run on `fed` bytes, while which the arena is not shrunk; or return the bytes to promise it before."""
        thread = threading.get_ident()
        with self._lock:
            unknown = self.is_measured(fed) or thread not in self._threads
            ahead = 0
            if unknown or self.freed:
                most = max(self.in_runs, self.most_in_runs, self._provider.work_space_bytes if unknown else 0)
                ahead = most - self._grown - self._ahead_of_first_run
            if ahead > self._promised.get(thread, 0):
                return ahead
            self._regrows, self.freed = self._regrows + self.freed, 0
            self._inside += 1
            return 0

    def leave(self) -> None:
        """End the run of this thread."""
        with self._lock:
            self._inside -= 1
            self._promised.pop(threading.get_ident(), None)

    def is_measured(self, fed: int) -> bool:
        """Return whether a run on so many bytes is measured: the first ones, and those on more than before."""
        return self._to_measure > 0 or fed > self._largest

    def took_memory(self) -> bool:
        """Note a run that was not measured, and return whether it may have taken memory."""
        if not (self._new or self._regrows or threading.get_ident() not in self._threads):
            return False
        with self._lock:
            self._ran()
        return True

    def _ran(self) -> None:
        """Note that a run has taken its memory; not before, since that stays reserved until it is in use."""
        self._threads.add(thread := threading.get_ident())
        self._promised.pop(thread, None)
        self._new, self.freed, self._regrows = False, 0, 0
