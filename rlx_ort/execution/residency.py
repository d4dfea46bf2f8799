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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import DeviceParseError, MemoryBudgetError
from rlx_ort.options.compile_options import CacheUse
from rlx_ort.providers.engine.compiled.store import parse_bytes
from rlx_ort.providers.hardware import release_free_heap

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine
    from rlx_ort.execution.engine_slot import EngineSlot
    from rlx_ort.providers.base import EngineSession, MemoryReading, Provider, SessionRequest

__all__ = ["Residency", "Resident", "budget_of", "parse_budgets", "residency"]

VARIABLE = "RLX_DEVICE_MEMORY"
_IDLE_S = 2.0  # without a run; then the arena is shrunk
_STEP_S = 0.002
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


class Resident:
    """A graph on a device and what its session takes, also while that is closed.

    Attributes:
        device: the device.
        model: the name of the graph.
        weights: bytes of its weights; 0 before it was opened under a budget.
        nbytes: bytes that its session takes, or took before it was closed; 0 if unknown.
        at_opening: those of them that opening it took.
        reserved: bytes that its first run is expected to add; 0 after that run.
        sessions: its sessions that exist.
        opened: how often a session was opened.
        evictions: how often it was closed to make room.
        used_s: when it was used last, on the monotonic clock.
        governed: whether its device had a budget when the session was opened.
        slots: the slots that hold its engine.
        engine: a weak reference to the engine that was opened last.
    """

    def __init__(self, provider: Provider, device: Device, model: str) -> None:
        self.device = device
        self.model = model
        self.weights = self.nbytes = self.at_opening = self.reserved = 0
        self.sessions = self.opened = self.evictions = 0
        self.used_s = self._swept_s = 0.0
        self.governed = False
        self.slots: weakref.WeakSet[EngineSlot] = weakref.WeakSet()
        self.engine: Callable[[], Engine | None] = _no_engine
        self._provider = provider
        self._largest = -1  # bytes of inputs; the arena grows with larger ones
        self._lock = threading.RLock()  # reentrant: a finalizer may run during any call

    @property
    def idle_arena(self) -> bool:
        """Whether its arena may hold unused memory that no attempt to shrink it has seen."""
        return self.sessions > 0 and self.nbytes > self.at_opening and self.used_s > self._swept_s

    def read(self) -> MemoryReading | None:
        """Return what this process uses of the device now."""
        return self._provider.memory(self.device)

    def touch(self) -> None:
        """Note a use."""
        self.used_s = time.monotonic()

    def hold(self, engine: Engine) -> None:
        """Take an engine that was opened for it; under a budget, its runs are measured."""
        self.engine = weakref.ref(engine)
        self.touch()
        if self.governed:
            engine.run = self._measured(engine.run)

    def count(self, session: EngineSession, nbytes: int = 0) -> None:
        """Count a new session until nothing refers to it: a device tensor keeps one from being freed, for example."""
        with self._lock:
            self.reserved = max(0, self.nbytes - nbytes)
            self.nbytes = self.at_opening = nbytes
            self.sessions += 1
            self.opened += 1
            self._largest = -1
        weakref.finalize(session, self._gone).atexit = False

    def grow(self, fed: int, nbytes: int) -> None:
        """Note what a run on `fed` bytes of inputs added."""
        with self._lock:
            self._largest, self.reserved = max(fed, self._largest), 0
            self.nbytes = max(self.at_opening, self.nbytes + nbytes)

    def shrink(self) -> bool:
        """Give unused memory of the session's arena back to the device; return whether that was done."""
        self._swept_s = time.monotonic()
        engine = self.engine()
        shrink = None if engine is None else getattr(engine.session, "shrink_arena", None)
        if shrink is None or not shrink():
            return False
        with self._lock:
            self.nbytes, self._largest = self.at_opening, -1  # the next run is measured again
        return True

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

    def _gone(self) -> None:
        with self._lock:
            self.sessions -= 1

    def _measured(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """Return the run of a session, measured for its first inputs and for larger ones than before."""

        def measured(names: Sequence[str], feeds: Mapping[str, Any], *more: Any) -> list[Any]:
            fed = sum(getattr(value, "nbytes", 0) for value in feeds.values())
            if fed <= self._largest:
                return run(names, feeds, *more)
            before = self.read()
            outputs = run(names, feeds, *more)
            residency().ran(self, fed, before)
            return outputs

        return measured


def _no_engine() -> None:
    return None


class Residency:
    """The sessions of a process. Methods may be called from several threads.

    Args:
        longest_wait_s: seconds that an opening waits for sessions in use to become idle.
        idle_s: seconds without a run after which an arena is shrunk.
    """

    def __init__(self, longest_wait_s: float = _LONGEST_WAIT_S, idle_s: float = _IDLE_S) -> None:
        self.longest_wait_s = longest_wait_s
        self.idle_s = idle_s
        self._residents: weakref.WeakSet[Resident] = weakref.WeakSet()
        self._table = threading.RLock()
        self._opening = threading.RLock()  # under a budget, one session at a time is opened, closed or shrunk
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
        reserved = sum(each.reserved for each in known if each.sessions)
        if reading is not None and reading.whole:
            return reading.nbytes + reserved
        return sum(each.nbytes * each.sessions for each in known) + reserved

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
        resident.weights = sum(tensor.nbytes for tensor in request.weights.values())
        options = request.options
        if resident.evictions and options.cache is None and environment.get("CACHE") is None:
            options = options.with_(cache=CacheUse.ON)
        with self._opening:
            self._make_room(resident, budget, self._needed(resident))
            before = resident.read()
            session = slot.provider.open(replace(request, options=options, budgeted=True))
            after = resident.read()
            if before is None or after is None:
                resident.count(session, resident.weights)
            else:
                resident.count(session, max(0, after.nbytes - before.nbytes))
            try:
                self._make_room(resident, budget, 0, own=1)
            except MemoryBudgetError:
                session.close()
                raise
        return session

    def ran(self, resident: Resident, fed: int, before: MemoryReading | None) -> None:
        """Note what a measured run added, and close others if the device is above its budget now."""
        after = resident.read()
        if before is not None and after is not None:
            resident.grow(fed, after.nbytes - before.nbytes)
        else:
            resident.grow(fed, 0)
        budget = budget_of(resident.device)
        if budget is None:
            return
        if self._opening.acquire(blocking=False):  # who holds it makes room itself
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
            shrunk = [each.shrink() for each in others]
            evicted = [_evict(each) for each in others]
            return any(evicted) or any(shrunk)

    def _needed(self, resident: Resident) -> int:
        """Return what a session is expected to take: what it took before, else its weights and a usual surplus."""
        if resident.nbytes:
            return resident.nbytes
        surplus = sorted(each.nbytes - each.weights for each in self.residents(resident.device) if each.nbytes)
        return resident.weights + (max(0, surplus[len(surplus) // 2]) if surplus else 0)

    def _make_room(self, resident: Resident, budget: int, needed: int, own: int = 0) -> None:
        """Free memory until `needed` bytes fit into the budget, waiting for sessions in use if it must.

        `own` sessions of the resident are not waited for.
        """
        deadline = time.monotonic() + self.longest_wait_s
        device = resident.device
        while (used := self.used(device)) + needed > budget:
            if self._free_one(resident):
                continue
            busy = [each for each in self.residents(device) if each.sessions > (own if each is resident else 0)]
            if not (busy or own or resident.nbytes):
                return  # its size is known once it is open
            if not busy or time.monotonic() > deadline:
                raise _no_room(resident, budget, used, needed, busy)
            time.sleep(_STEP_S)

    def _free_one(self, keep: Resident) -> bool:
        """Shrink an arena, or close the least recently used idle session; return whether either could be done."""
        others = [each for each in self.residents(keep.device) if each.sessions and each is not keep]
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
                        each.shrink()
                    finally:
                        self._opening.release()


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
