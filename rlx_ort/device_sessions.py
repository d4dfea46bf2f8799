"""`DeviceSessions`: the sessions of one graph, one a device, and the compiled graphs that callers share."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from rlx_ort.errors import CancelledRunError
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.engine.stopping import Turns

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.engine import EngineSlot
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.resident import Resident
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.graph import Graph


class DeviceSessions:
    """Opens one session a device and lends compiled graphs on it, one per placement rule; they share all state.

    `rlx_ort.execution` is imported when a graph is first compiled.
    """

    def __init__(self, options: CompileOptions) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._compiling: dict[Device, Turns] = {}
        self._slots: dict[Device, EngineSlot] = {}
        self._lent: dict[tuple[Device, PlacementRule], CompiledGraph] = {}
        self._closed = False
        self.ended = False  # by `close` of the runner, so that runs that wait end, too

    @property
    def devices(self) -> list[Device]:
        """The devices that the graph was compiled for."""
        return list(self._slots)

    def find(self, device: Device, rule: PlacementRule) -> CompiledGraph | None:
        """Return the compiled graph of a device under a rule, or None if it was closed or never made."""
        found = self._lent.get((device, rule))
        return None if found is None or found.closed else found

    def compiled(self, graph: Graph, weights: WeightStore, device: Device, rule: PlacementRule) -> CompiledGraph:
        """Return the compiled graph of a device under a rule, compiling it if needed.

        Raises:
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node that the rule demands.
            CancelledRunError: the sessions were closed.
        """
        with self._lock:
            compiling = self._compiling.setdefault(device, Turns())
        with compiling:
            known = {found.rule: found for each in PlacementRule if (found := self.find(device, each)) is not None}
            if rule in known:
                return known[rule]
            made = next((found.held_to(rule) for found in known.values()), None)
            if made is None:
                from rlx_ort.execution.compiled import CompiledGraph
                from rlx_ort.execution.engine import open_slot
                from rlx_ort.execution.session import working_provider

                slot = self._slots.get(device)
                if slot is None:
                    slot = open_slot(working_provider(device), device, graph, weights, self._options)
                    with self._lock:
                        if self._closed:
                            raise CancelledRunError("the sessions of the runner were closed meanwhile; run again")
                        self._slots[device] = slot
                made = CompiledGraph(slot, rule, owns_slot=False)
            self._lent[device, rule] = made
            return made

    def is_open(self, device: Device) -> bool:
        """Return whether the device has an open session."""
        slot = self._slots.get(device)
        return slot is not None and slot.is_open

    def placement(self, device: Device) -> Placement | None:
        """Return where each node is on a device, or None if no session was opened there."""
        slot = self._slots.get(device)
        return None if slot is None else slot.placement

    def resident(self, device: Device) -> Resident | None:
        """Return what the session of a device takes, or None if the graph was not compiled for it."""
        slot = self._slots.get(device)
        return None if slot is None else slot.resident

    def reopen_stale(self) -> None:
        """Open sessions with old weights again.

        Raises:
            ParamError: a parameter is not set.
        """
        for slot in list(self._slots.values()):
            if slot.is_open:
                slot.engine(PlacementRule.ASSISTED)

    def has_state(self, device: Device) -> bool:
        """Return whether a compiled graph of a device holds state that cannot move to another one."""
        return any(found.has_state for (at, _), found in list(self._lent.items()) if at == device)

    def drop(self, device: Device) -> None:
        """Forget the session of a device without waiting for it, unless it holds state; the next use opens another."""
        if self.has_state(device):
            return
        with self._lock:
            self._slots.pop(device, None)
            self._compiling.pop(device, None)
            for rule in PlacementRule:
                self._lent.pop((device, rule), None)

    def close(self) -> None:
        """Close every session for good; runs in other threads finish first, and a session that opens is closed then."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
        for slot in slots:
            slot.close()
