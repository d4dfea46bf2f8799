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
from rlx_ort.execution.resident import Resident
from rlx_ort.options.compile_options import CacheUse
from rlx_ort.providers.engine.binding import Run
from rlx_ort.providers.engine.compiled.store import parse_bytes
from rlx_ort.providers.engine.stopping import Turns, check_stopped
from rlx_ort.providers.hardware import keep_free_heap_small, release_free_heap

if TYPE_CHECKING:
    from rlx_ort.providers.base import EngineSession, Provider, SessionRequest

VARIABLE = "RLX_DEVICE_MEMORY"
_IDLE_S = 2.0  # without a run; then the arena is shrunk
_STEP_S = 0.002
_SAMPLE_S = 0.001  # between two readings while a session is opened or run for the first time
_PATIENCE_S = 0.25
_LONGEST_WAIT_S = 30.0  # for a session in use to become idle
_SEPARATORS = re.compile(r"[,;\s]+")


def parse_budgets(text: str) -> dict[str, int]:
    """Return device label or kind -> bytes, from a text such as `cuda=8GB,cuda:1=4GB`; a size alone has the key `""`.

    Raises:
        DeviceParseError: an entry is no size, or its device is unknown.
    """
    budgets = {}
    for entry in filter(None, _SEPARATORS.split(text)):
        name, given, size = entry.rpartition("=")
        try:
            budgets[Device(name).label if given else ""] = parse_bytes(size)
        except ValueError as err:
            raise DeviceParseError(text, f"{VARIABLE}: {err}; write cuda=8GB,cpu=2GB, or 8GB for each GPU") from err
    return budgets


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
        """Hold measurements back while a change of the memory in use is made, after the measurement in progress."""
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
        """Hold all else back, and yield a function that returns whether that worked."""
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
        self._awaited: tuple[Device, int] | None = None  # bytes that the session being opened is expected to take
        self._wanted: dict[int, tuple[Device, int]] = {}  # thread -> bytes that its run waits for
        self._sweeper: threading.Thread | None = None

    def residents(self, device: Device | None = None) -> list[Resident]:
        """Return the graphs that had a session and may have one again, the one used longest ago first.

        A closed graph counts while something, such as a device tensor, still refers to its session.
        """
        with self._table:
            residents = [each for each in self._residents if device is None or each.device == device]
            residents = [each for each in residents if each.sessions or not each.closed]
        return sorted(residents, key=lambda each: each.used_s)

    def used(self, device: Device) -> int:
        """Return the bytes that count against the budget of a device: all that the process uses, else its sessions."""
        known = self.residents(device)
        reading = known[0].read() if known else None
        awaited = self._awaited
        more = awaited[1] if awaited is not None and awaited[0] == device else 0
        if reading is not None and reading.whole:
            return reading.nbytes + more + sum(each.reserved for each in known if each.sessions)
        return more + sum(each.nbytes * each.sessions for each in known)

    def open(self, provider: Provider, resident: Resident, request: SessionRequest) -> EngineSession:
        """Open a session, within the budget of its device if there is one.

        Raises:
            MemoryBudgetError: there is no room for it.
            RlxError: the provider's own error.
        """
        with self._table:
            self._residents.add(resident)
        budget = budget_of(request.device)
        resident.governed = budget is not None
        if budget is None:
            session = provider.open(request)
            resident.count(session)
            return session
        reading = resident.read()
        on_host = reading is not None and not reading.whole
        if on_host:
            keep_free_heap_small()
        resident.weights = sum(tensor.nbytes for tensor in request.weights.values())
        options, cached = request.options, False
        if resident.evictions and options.cache is None and environment.get("CACHE") is None:
            options, cached = options.with_(cache=CacheUse.ON), True
        request = replace(request, options=options, budgeted=True)
        with self._opening:
            needed = self._needed(resident)
            if on_host and cached > resident.cached:  # making the cache's entry takes the weights again
                needed = min(needed + resident.weights, max(needed, budget))
            self._make_room(resident, budget, needed)
            if resident.cached != cached:
                resident.cached = cached
                resident.forget()
            try:
                if resident.sure:
                    with self.quiet.shared():
                        session = provider.open(request)
                else:
                    session = self._open_measured(provider, resident, request)
                resident.count(session)
            finally:
                self._awaited = None
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
                most = max(samples, default=before.nbytes) - before.nbytes
                resident.note_opening(added, most, undisturbed())
        return session

    def measured(self, resident: Resident, fed: int, run: Callable[[], list[Any]]) -> list[Any]:
        """Run on `fed` bytes of inputs, note the memory that it adds, and close others above the device's budget."""
        with self.quiet.alone() as undisturbed:
            before = resident.read_trimmed()
            with _sampled(resident) as samples:
                outputs = run()
            after = resident.read_trimmed()
            added = most = 0
            if before is not None and after is not None:
                added = after.nbytes - before.nbytes
                most = max(samples, default=before.nbytes) - before.nbytes
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

    def promise(self, resident: Resident, nbytes: int) -> None:
        """Make room for the memory that the run of this thread may add, and keep it until that run.

        Waits for a quarter of a second at most: no run fails because others take the memory.
        """
        device, budget = resident.device, budget_of(resident.device)
        deadline, thread = time.monotonic() + _PATIENCE_S, threading.get_ident()
        self._wanted[thread] = device, nbytes
        try:
            while True:
                with self._table:
                    if budget is None or self.used(device) + nbytes <= budget or time.monotonic() > deadline:
                        resident.promise(nbytes)
                        return
                freed = False
                if self._opening.acquire(blocking=False):  # who holds it frees memory too
                    try:
                        freed = self._free_one(resident)
                    finally:
                        self._opening.release()
                if not freed:
                    time.sleep(_STEP_S)
        finally:
            del self._wanted[thread]

    def relieve(self, device: Device, keep: Resident | None) -> bool:
        """Free the memory of idle sessions of a device, except one of them; return whether anything was freed."""
        with self._opening:
            others = [each for each in self.residents(device) if each.sessions and each is not keep]
            shrunk = [self._shrink(each) for each in others]
            with self.quiet.shared():
                evicted = [_evict(each) for each in others]
            return any(evicted) or any(shrunk)

    def _needed(self, resident: Resident) -> int:
        """Return the expected memory of a session: that of its last opening, else its weights and a usual surplus."""
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
        while True:
            with self._table:  # no other thread takes the same room; runs that wait for some come first
                waiting = list(self._wanted.values()) if needed else []  # others begin and end to wait meanwhile
                wanted = sum(nbytes for where, nbytes in waiting if where == device)
                if (used := self.used(device)) + needed + wanted <= budget:
                    self._awaited = (device, needed)
                    return
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
        if any(each.idle_arena and self._shrink(each) for each in others):
            return True
        with self.quiet.shared():
            return any(_evict(each) for each in others)

    def _shrink(self, resident: Resident) -> bool:
        with self.quiet.alone():  # the freed memory is measured
            return resident.shrink()

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
                        self._shrink(each)
                    finally:
                        self._opening.release()


@contextlib.contextmanager
def _sampled(resident: Resident) -> Iterator[list[int]]:
    """Read the memory of the process again and again within a `with` block, if all of it is known."""
    samples: list[int] = []
    reading, done = resident.read(), threading.Event()
    if reading is None or not reading.whole:
        yield samples
        return

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            if (now := resident.read()) is not None:
                samples.append(now.nbytes)

    thread = threading.Thread(target=sample, name="rlx_ort-memory-samples", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def accounted(run: Run, resident: Resident) -> Run:
    """Return the run of a session under a budget, measured for its first runs and for larger inputs than before."""

    def accounted_run(names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        fed = sum(getattr(value, "nbytes", 0) for value in feeds.values())
        ledger = residency()
        while ahead := resident.enter(fed):
            ledger.promise(resident, ahead)
        try:
            if resident.is_measured(fed):
                return ledger.measured(resident, fed, lambda: run(names, feeds))
            with ledger.quiet.shared():
                outputs = run(names, feeds)
            if resident.took_memory():
                ledger.settle(resident)
            return outputs
        finally:
            resident.leave()

    return accounted_run


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
