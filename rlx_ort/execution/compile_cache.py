"""`CompileCache`: the compiled graphs of one device that were used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from rlx_ort.device import Device
from rlx_ort.execution.session import Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.options.compile_options import CompileOptions

if TYPE_CHECKING:
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.ir.graph import Graph

__all__ = ["CompileCache"]


class CompileCache:
    """Key -> compiled graph on one device, for at most `capacity` graphs; the one used longest ago makes room.

    A graph that made room is closed, unless somebody holds it: then it lives as long as they do. Methods may be called
    from several threads; a key is compiled once.

    Args:
        device: where the graphs run.
        capacity: how many are kept, at least 1.
        options: how they are compiled, unless a call says otherwise; options are part of the key.

    Raises:
        DeviceUnavailableError: the device does not work here.
    """

    def __init__(self, device: Device | str = "cpu", capacity: int = 8, options: CompileOptions | None = None) -> None:
        self._session = Session(device, options)
        self._capacity = max(capacity, 1)
        self._known: OrderedDict[Hashable, CompiledGraph] = OrderedDict()
        self._pending: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    @property
    def device(self) -> Device:
        """The device."""
        return self._session.device

    @property
    def capacity(self) -> int:
        """How many graphs are kept."""
        return self._capacity

    def get_or_compile(
        self,
        key: Hashable,
        build: Callable[[], Graph],
        *,
        options: CompileOptions | None = None,
        weights: WeightStore | None = None,
    ) -> CompiledGraph:
        """Return the graph of a key, built and compiled when it is not there; its parameters stay as they were set.

        `build` and the compilation run outside of the cache's lock, so other keys do not wait for them.

        Raises:
            GraphVerifyError: the graph is wrong.
            PlacementError: the device does not take every node it must take.
            EngineError: the engine refused the model.
        """
        full = (key, _options_key(options or self._session.options))
        with self._lock:
            pending = self._pending.setdefault(full, threading.Lock())
        with pending:
            try:
                return self._found_or_made(full, build, options, weights)
            finally:
                with self._lock:
                    self._pending.pop(full, None)

    def clear(self) -> None:
        """Forget every graph."""
        with self._lock:
            self._known.clear()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: object) -> bool:
        """Return whether a graph of the key is there, compiled with the options of the cache."""
        return (key, _options_key(self._session.options)) in self._known

    def _found_or_made(
        self, full: Hashable, build: Callable[[], Graph], options: CompileOptions | None, weights: WeightStore | None
    ) -> CompiledGraph:
        with self._lock:
            found = self._known.get(full)
            if found is not None:
                self._known.move_to_end(full)
                if not found.closed:
                    return found
                weights = found.weights if weights is None else weights
        session = self._session if options is None else Session(self.device, options)
        made = session.compile(build(), weights)
        with self._lock:
            self._known[full] = made
            while len(self._known) > self._capacity:
                # Not closed here: whoever still runs it goes on, and the last reference closes its session.
                self._known.popitem(last=False)
        return made


def _options_key(options: CompileOptions) -> str:
    """Return what tells options apart; their mappings have no hash, and their order does not count."""
    pairs = []
    for name in sorted(options.__dataclass_fields__):
        value = getattr(options, name)
        pairs.append((name, repr(sorted(value.items())) if hasattr(value, "items") else repr(value)))
    return repr(pairs)
