"""`Residency`: the open sessions of this process, and the memory budgets of their devices.

`RLX_DEVICE_MEMORY` sets the budgets. Under a budget, sessions are opened one at a time and their memory is measured
around opening and first run. When room is needed, arenas of idle sessions are shrunk, then the least recently used idle
sessions are closed; their next run opens them again, from the compile cache. A session is idle if nothing but its slot
refers to its engine, so a session in use is never closed.

Devices without a budget are not measured, and their runs take no step more.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import DeviceParseError, MemoryBudgetError
from rlx_ort.options.compile_options import CacheUse
from rlx_ort.providers.engine.compiled.store import parse_bytes
from rlx_ort.providers.engine.stopping import Turns, check_stopped
from rlx_ort.providers.hardware import keep_free_heap_small, release_free_heap

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine, EngineSlot
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.base import EngineSession, MemoryReading, Provider, SessionRequest

VARIABLE = "RLX_DEVICE_MEMORY"
_IDLE_S = 2.0  # without a run; then the arena is shrunk
_STEP_S = 0.002
_SAMPLE_S = 0.001  # between two readings while a session is opened or run for the first time
_PATIENCE_S = 0.25
_NOISE_BYTES = 1 << 20
_FIRST_RUNS = 4  # are measured: launches are recorded at the third, which takes buffers
_NEVER = -(1 << 60)
_LONGEST_WAIT_S = 30.0  # for a session in use to become idle
_SEPARATORS = re.compile(r"[,;\s]+")


def parse_budgets(text: str) -> dict[str, int]:
    """Return device label or kind -> bytes, from a text such as `cuda=8GB,cuda:1=4GB`; a size alone has the key `""`.

    Raises:
        DeviceParseError: an entry is no size, or its device is unknown.
    """
    found = {}
    for entry in filter(None, _SEPARATORS.split(text)):
        name, given, size = entry.rpartition("=")
        try:
            found[Device(name).label if given else ""] = parse_bytes(size)
        except ValueError as err:
            raise DeviceParseError(text, f"{VARIABLE}: {err}; write cuda=8GB,cpu=2GB, or 8GB for each GPU") from err
    return found


def budget_of(device: Device) -> int | None:
    """Return the memory budget of a device in bytes, None if it has none.

    The entry of the device comes first, then that of the first device of its kind, then the size without a device,
    which is for every device but the CPU.

    Raises:
        DeviceParseError: `RLX_DEVICE_MEMORY` does not parse.
    """
    text = environment.get(VARIABLE)
    if not text:
        return None
    budgets = parse_budgets(text)
    common = None if device.kind == Device.CPU.kind else budgets.get("")
    return budgets.get(device.label, budgets.get(Device(device.kind).label, common))


_sizes: weakref.WeakKeyDictionary[Graph, dict[Device, int]] = weakref.WeakKeyDictionary()


class _Quiet:
    """Lets a measurement be made while no session under a budget runs, is opened or is closed.

    All waits end after a quarter of a second. A measurement that other runs disturbed is made again at the next chance.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._alone = self._disturbed = False

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Hold measurements back; what changes the memory in use goes in here, after the measurement in progress."""
        with self._changed:
            if self._alone and not self._changed.wait_for(lambda: not self._alone, _PATIENCE_S):
                self._disturbed = True
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextlib.contextmanager
    def alone(self) -> Iterator[Callable[[], bool]]:
        """Hold all else back, and yield what returns whether that worked."""
        with self._changed:
            holds = self._changed.wait_for(lambda: not self._alone, _PATIENCE_S)
            if holds:
                self._alone = True
                self._disturbed = not self._changed.wait_for(lambda: not self._inside, _PATIENCE_S)
        try:
            yield lambda: holds and not self._disturbed
        finally:
            if holds:
                with self._changed:
                    self._alone = False
                    self._changed.notify_all()


class Resident:
    """A graph on a device and what its session takes, also while that is closed.

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
        sessions: its sessions that exist.
        opened: how often a session was opened.
        evictions: how often it was closed to make room.
        used_s: when it was used last, on the monotonic clock.
        governed: whether its device had a budget when the session was opened.
        cached: whether its session was opened from the compile cache because it had been closed to make room.
        slots: the slots that hold its engine.
        engine: a weak reference to the engine that was opened last.
    """

    def __init__(self, provider: Provider, device: Device, graph: Graph) -> None:
        self.device = device
        self.model = graph.name
        self.weights = self.at_opening = self.in_runs = self.most = self.most_in_runs = 0
        self.sessions = self.opened = self.evictions = 0
        self.used_s = self._swept_s = 0.0
        self.sure = self.governed = self.cached = False
        self.slots: weakref.WeakSet[EngineSlot] = weakref.WeakSet()
        self.engine: Callable[[], Engine | None] = _no_engine
        self._provider = provider
        self._sizes = _sizes.setdefault(graph, {})
        self._largest = -1  # bytes of inputs; the arena grows with larger ones
        self._to_measure = _FIRST_RUNS  # of the runs to come; 0 for good once all were measured in one session
        self._undisturbed = False
        self._last = _NEVER  # bytes that the last measurement found
        self.freed = 0
        self._threads: set[int] = set()  # that have run the open session: each may take work space of its own
        self._new = True  # not run since it was opened
        self._lock = threading.RLock()  # reentrant: a finalizer may run during any call

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
        """The bytes that its first run is expected to add, at most for a moment; 0 after that run."""
        return max(self.in_runs, self.most_in_runs) if self._new else 0

    @property
    def idle_arena(self) -> bool:
        """Whether its arena may hold unused memory that no attempt to shrink it has seen."""
        return self.sessions > 0 and self.in_runs > 0 and self.used_s > self._swept_s

    def read(self) -> MemoryReading | None:
        """Return what this process uses of the device now."""
        return self._provider.memory(self.device)

    def read_trimmed(self) -> MemoryReading | None:
        """Return a reading without what the heap holds for reuse."""
        release_free_heap()
        return self.read()

    def touch(self) -> None:
        """Note a use."""
        self.used_s = time.monotonic()

    def hold(self, engine: Engine) -> None:
        """Take an engine that was opened for it; under a budget, its runs are measured."""
        self.engine = weakref.ref(engine)
        self.touch()
        if self.governed:
            engine.run = self._measured(engine.run)

    def count(self, session: EngineSession) -> None:
        """Count a new session until nothing refers to it: a device tensor keeps one from being freed, for example."""
        with self._lock:
            self.sessions += 1
            self.opened += 1
            self._new, self.freed = True, 0
            self._threads.clear()
            if self._to_measure:
                self._to_measure = _FIRST_RUNS
        weakref.finalize(session, self._gone).atexit = False

    def note_opening(self, nbytes: int, most: int, sure: bool) -> None:
        """Note what opening has taken, and at most for a moment; the next run is measured as well."""
        with self._lock:
            if sure or self._last == _NEVER:  # a disturbed measurement replaces no other
                expected = self.at_opening + self.in_runs or self._sizes.get(self.device, 0)
                self.at_opening, self.in_runs, self.most = nbytes, max(0, expected - nbytes), most
            self._largest, self._undisturbed = -1, sure

    def note_run(self, fed: int, nbytes: int, most: int, sure: bool) -> None:
        """Note what a run on `fed` bytes of inputs has added, and at most for a moment."""
        with self._lock:
            first = self._largest < 0
            before = 0 if self._new else self.in_runs - self.freed
            if sure or self._last == _NEVER:
                self.in_runs = max(0, before + nbytes)
                self.most_in_runs = max(self.most_in_runs, before + most)
            self._largest = max(fed, self._largest)
            self._new, self.freed = False, 0
            self._to_measure = max(0, self._to_measure - 1)
            self._undisturbed = self._undisturbed and sure
            self._sizes[self.device] = self._largest_use
            if first:
                self.compare(self.nbytes)

    def compare(self, nbytes: int) -> None:
        """Compare what the session takes with the last measurement, which counted what is loaded once and for all."""
        allowed = max(_NOISE_BYTES, self._last // 10)
        self.sure = self._undisturbed and abs(nbytes - self._last) <= allowed
        self._last = nbytes if self._undisturbed else _NEVER

    def forget(self) -> None:
        """Measure again from the next opening on."""
        self.sure, self._last, self._to_measure = False, _NEVER, _FIRST_RUNS

    def shrink(self) -> bool:
        """Give unused memory of the session's arena back to the device; return whether there was any."""
        self._swept_s = time.monotonic()
        engine = self.engine()
        shrink = None if engine is None else getattr(engine.session, "shrink_arena", None)
        before = None if shrink is None else self.read_trimmed()
        if shrink is None or not shrink():
            return False
        after = self.read_trimmed()  # the heap may keep what the arena gives back
        if before is not None and after is not None:
            with self._lock:
                self.freed = min(max(0, before.nbytes - after.nbytes), self.in_runs)
        return self.freed > 0

    def release(self) -> bool:
        """Close the session if it is idle, and return whether it was open and idle."""
        slots = list(self.slots)
        with contextlib.ExitStack() as held:
            for slot in slots:
                if not slot.lock.acquire(blocking=False):
                    return False
                held.callback(slot.lock.release)
            if not all(slot.unbind_idle() for slot in slots):
                return False
            holders = [slot for slot in slots if slot.let_go()]
            engine = self.engine()
            if engine is not None:  # a run needs it
                for slot in holders:
                    slot.keep(engine)
                return False
        self.evictions += bool(holders)
        return bool(holders)

    @property
    def _largest_use(self) -> int:
        return max(self.most, self.at_opening + max(self.in_runs, self.most_in_runs))

    def _gone(self) -> None:
        with self._lock:
            self.sessions -= 1

    def _measured(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return the run of a session, measured for its first runs and for larger inputs than before."""

        def measured(names: Sequence[str], feeds: Mapping[str, Any], *more: Any) -> list[Any]:
            fed = sum(getattr(value, "nbytes", 0) for value in feeds.values())
            found = residency()
            if self._to_measure or fed > self._largest:
                return found.measured(self, fed, lambda: run(names, feeds, *more))
            with found.quiet.shared():
                outputs = run(names, feeds, *more)
            thread = threading.get_ident()
            if self._new or self.freed or thread not in self._threads:
                self._threads.add(thread)
                self._new, self.freed = False, 0  # not before: what the run adds stays reserved until it is in use
                found.settle(self)
            return outputs

        return measured


def _no_engine() -> None:
    return None


class Residency:
    """The sessions of a process. Methods may be called from several threads.

    Args:
        longest_wait_s: seconds that an opening waits for sessions in use to become idle.
        idle_s: seconds without a run after which an arena is shrunk.

    Attributes:
        quiet: keeps runs and measurements apart.
    """

    def __init__(self, longest_wait_s: float = _LONGEST_WAIT_S, idle_s: float = _IDLE_S) -> None:
        self.longest_wait_s = longest_wait_s
        self.idle_s = idle_s
        self._residents: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._table = threading.RLock()
        self.quiet = _Quiet()
        self._opening = Turns()  # under a budget, one session at a time is opened, closed or shrunk
        self._sweeper: threading.Thread | None = None

    def residents(self, device: Device | None = None) -> list[Resident]:
        """Return the graphs that had a session, on a device or on all, the one used longest ago first."""
        with self._table:
            found = [each for each in self._residents if device is None or each.device == device]
        return sorted(found, key=lambda each: each.used_s)

    def used(self, device: Device) -> int:
        """Return the bytes that count against the budget of a device: all that the process uses, else its sessions."""
        known = self.residents(device)
        reading = known[0].read() if known else None
        if reading is not None and reading.whole:
            return reading.nbytes + sum(each.reserved for each in known if each.sessions)
        return sum(each.nbytes * each.sessions for each in known)

    def open(self, slot: EngineSlot, request: SessionRequest) -> EngineSession:
        """Open a session of a slot, within the budget of its device if there is one.

        Raises:
            MemoryBudgetError: there is no room for it.
            RlxError: the provider's own error.
        """
        resident = slot.resident
        with self._table:
            self._residents.add(resident)
        budget = budget_of(request.device)
        resident.governed = budget is not None
        if budget is None:
            session = slot.provider.open(request)
            resident.count(session)
            return session
        reading = resident.read()
        if reading is not None and not reading.whole:  # of host memory
            keep_free_heap_small()
        resident.weights = sum(tensor.nbytes for tensor in request.weights.values())
        options, cached = request.options, False
        if resident.evictions and options.cache is None and environment.get("CACHE") is None:
            options, cached = options.with_(cache=CacheUse.ON), True
        request = replace(request, options=options, budgeted=True)
        with self._opening:
            self._make_room(resident, budget, self._needed(resident))
            if resident.cached != cached:
                resident.cached = cached
                resident.forget()
            if resident.sure:
                with self.quiet.shared():
                    session = slot.provider.open(request)
            else:
                session = self._open_measured(slot.provider, resident, request)
            resident.count(session)
            try:
                self._make_room(resident, budget, 0, own=1)
            except BaseException as err:
                if isinstance(err, MemoryBudgetError):
                    resident.compare(resident.at_opening)
                with self.quiet.shared():
                    session.close()
                raise
        return session

    def _open_measured(self, provider: Provider, resident: Resident, request: SessionRequest) -> EngineSession:
        with self.quiet.alone() as undisturbed:
            before = resident.read_trimmed()
            with _sampled(resident) as samples:
                session = provider.open(request)
            after = resident.read_trimmed()
            if before is None or after is None:
                resident.note_opening(resident.weights, 0, sure=True)
            else:
                added = max(0, after.nbytes - before.nbytes)
                resident.note_opening(added, max(samples, default=0) - before.nbytes, undisturbed())
        return session

    def measured(self, resident: Resident, fed: int, run: Callable[[], list[Any]]) -> list[Any]:
        """Run on `fed` bytes of inputs, note what that adds, and close others if the device is above its budget."""
        with self.quiet.alone() as undisturbed:
            before = resident.read_trimmed()
            with _sampled(resident) as samples:
                outputs = run()
            after = resident.read_trimmed()
            added = most = 0
            if before is not None and after is not None:
                added, most = after.nbytes - before.nbytes, max(samples, default=0) - before.nbytes
            resident.note_run(fed, added, most, undisturbed())
        self.settle(resident)
        return outputs

    def settle(self, resident: Resident) -> None:
        """Close idle sessions if a device is above its budget after a run that took memory."""
        budget = budget_of(resident.device)
        if budget is not None and self._opening.acquire(blocking=False):  # who holds it makes room itself
            try:
                while self.used(resident.device) > budget and self._free_one(resident):
                    pass
            finally:
                self._opening.release()
        if resident.idle_arena:
            self._sweep_later()

    def relieve(self, device: Device, keep: Resident | None) -> bool:
        """Free what idle sessions of a device take, except one of them; return whether anything was freed."""
        with self._opening:
            others = [each for each in self.residents(device) if each.sessions and each is not keep]
            with self.quiet.shared():
                shrunk = [each.shrink() for each in others]
                evicted = [_evict(each) for each in others]
            return any(evicted) or any(shrunk)

    def _needed(self, resident: Resident) -> int:
        """Return what a session is expected to take: what it took before, else its weights and a usual surplus."""
        if resident.expected:
            return resident.expected
        surplus = sorted(each.expected - each.weights for each in self.residents(resident.device) if each.nbytes)
        return resident.weights + (max(0, surplus[len(surplus) // 2]) if surplus else 0)

    def _make_room(self, resident: Resident, budget: int, needed: int, own: int = 0) -> None:
        """Free memory until `needed` bytes fit into the budget, waiting for sessions in use if it must.

        `own` sessions of the resident are not waited for. Limits of the run end the wait.
        """
        deadline = time.monotonic() + self.longest_wait_s
        device = resident.device
        while (used := self.used(device)) + needed > budget:
            if self._free_one(resident):
                continue
            busy = [each for each in self.residents(device) if each.sessions > (own if each is resident else 0)]
            if not (busy or own or resident.sure):
                return  # its size is known once it is open
            if not busy or time.monotonic() > deadline:
                raise _no_room(resident, budget, used, needed, busy)
            check_stopped()
            time.sleep(_STEP_S)

    def _free_one(self, keep: Resident) -> bool:
        """Shrink an arena, or close the least recently used idle session; return whether either could be done."""
        others = [each for each in self.residents(keep.device) if each.sessions and each is not keep]
        with self.quiet.shared():
            return any(each.idle_arena and each.shrink() for each in others) or any(_evict(each) for each in others)

    def _sweep_later(self) -> None:
        with self._table:
            if self._sweeper is None or not self._sweeper.is_alive():
                self._sweeper = threading.Thread(target=self._sweep, name="rlx_ort-memory", daemon=True)
                self._sweeper.start()

    def _sweep(self) -> None:
        """Shrink arenas that are idle, until there is none left that may become idle."""
        while True:
            time.sleep(self.idle_s / 2)
            with self._table:
                waiting = [each for each in self._residents if each.idle_arena]
                if not waiting:
                    self._sweeper = None
                    return
            for each in waiting:
                if time.monotonic() - each.used_s >= self.idle_s and self._opening.acquire(blocking=False):
                    try:
                        with self.quiet.shared():
                            each.shrink()
                    finally:
                        self._opening.release()


@contextlib.contextmanager
def _sampled(resident: Resident) -> Iterator[list[int]]:
    """Read the memory of the process again and again within a `with` block, if all of it is known."""
    found: list[int] = []
    reading, done = resident.read(), threading.Event()
    if reading is None or not reading.whole:
        yield found
        return

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            if (now := resident.read()) is not None:
                found.append(now.nbytes)

    thread = threading.Thread(target=sample, name="rlx_ort-memory-samples", daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _evict(resident: Resident) -> bool:
    if not resident.release():
        return False
    release_free_heap()
    return True


def _no_room(resident: Resident, budget: int, used: int, needed: int, busy: Sequence[Resident]) -> MemoryBudgetError:
    holders = ", ".join(f"{each.model} ({each.nbytes:,} bytes)" for each in busy) or "none"
    return MemoryBudgetError(
        f"graph {resident.model!r} does not fit into the memory budget of {resident.device.display}: of {budget:,} "
        f"bytes {used:,} are used, and {needed:,} more are needed; sessions in use: {holders}. Raise {VARIABLE}, or "
        "run fewer models at once"
    )


_residency = Residency()


def _start_anew() -> None:
    """Forget all sessions: locks and threads do not cross a fork."""
    global _residency
    _residency = Residency()


def residency() -> Residency:
    """Return the sessions of this process."""
    return _residency


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
