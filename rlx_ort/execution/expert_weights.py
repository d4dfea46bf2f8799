"""`ExpertWeights`: a store as a session sees it that has some experts of a parameter here and some there."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rlx_ort.execution.moe import Experts, taken
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.narrow import narrowed
from rlx_ort.ir.tensor import TensorData

__all__ = ["ExpertWeights"]

_DECLARED: Mapping[str, DType] = MappingProxyType({})


class ExpertWeights:
    """A view of a store with parameters made of some experts of others. May be used from several threads.

    Args:
        store: the store.
        experts: name of a made parameter -> what it holds.
    """

    def __init__(self, store: WeightStore, experts: Mapping[str, Experts]) -> None:
        self._store = store
        self._experts = dict(experts)
        self._made: dict[tuple[str, DType | None], tuple[TensorData, TensorData]] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """The store's version."""
        return self._store.version

    def snapshot(
        self, names: Iterable[str], stored_as: Mapping[str, DType] = _DECLARED
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters; see `WeightStore.snapshot`.

        Raises:
            ParamError: some of them are not set.
        """
        wanted = list(names)
        plain = {name: dtype for name, dtype in stored_as.items() if name not in self._experts}
        version, found = self._store.snapshot(self._sources(wanted), plain)
        with self._lock:
            return version, {
                name: self._part(name, found[self._experts[name].param], stored_as.get(name))
                if name in self._experts
                else found[name]
                for name in wanted
            }

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those parameters of the store that are needed and not set."""
        return self._store.missing(self._sources(names))

    def pin(self, names: Iterable[str]) -> None:
        """Note that a session uses these parameters."""
        self._store.pin(self._sources(names))

    def unpin(self, names: Iterable[str]) -> None:
        """Undo one `pin` of the same names."""
        self._store.unpin(self._sources(names))

    def _sources(self, names: Iterable[str]) -> list[str]:
        return list(dict.fromkeys(self._experts[name].param if name in self._experts else name for name in names))

    def _part(self, name: str, data: TensorData, dtype: DType | None) -> TensorData:
        """Return some experts of the data, made once for each value of it."""
        source, made = self._made.get((name, dtype), (None, data))
        if source is not data:
            made = taken(data, self._experts[name].experts)
            if dtype is not None and dtype is not made.dtype:
                made = narrowed(made, dtype)
            self._made[name, dtype] = (data, made)
        return made
