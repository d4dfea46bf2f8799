"""`Engine`: an open session with the weights it was opened with.

Some engines feed mutable parameters with every run, and some read outputs that the user's graph does not have. Every
way to run such an engine goes through `_Fed`; the others run their session directly.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.providers.engine.binding import Binder, DeviceTensor, HostBinder, binder_of

if TYPE_CHECKING:
    from rlx_ort.providers.base import EngineSession

__all__ = ["Engine", "Observer", "WeightSource"]

Observer: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Receives the hidden outputs of a run, by name."""


class WeightSource(Protocol):
    """Where sessions get weights from: a `WeightStore`, or a view of one."""

    @property
    def version(self) -> int:
        """Grows with each change."""

    def snapshot(
        self, names: Sequence[str], stored_as: Mapping[str, DType] = ...
    ) -> tuple[int, Mapping[str, TensorData]]:
        """Return the version and the data of some parameters, all of that one version."""

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return those of the names that are not set."""

    def pin(self, names: Sequence[str]) -> None:
        """Note that a session uses these parameters."""

    def unpin(self, names: Sequence[str]) -> None:
        """Undo one `pin` of the same names."""


class Engine:
    """An open session; it closes with the last reference to it.

    Attributes:
        run: runs the session on the inputs of the user's graph: `(output_names, feeds) -> arrays`.
        weights: the data it was opened with.
        version: the newest version of the store whose values it has.
        strict_ok: whether no node strays from the device.
        files: the files that its weights are mapped from.
    """

    __slots__ = (
        "__weakref__",
        "_binder",
        "_fed",
        "_finalizer",
        "_lock",
        "files",
        "run",
        "session",
        "strict_ok",
        "version",
        "weights",
    )

    def __init__(
        self,
        session: EngineSession,
        weights: Mapping[str, TensorData],
        version: int,
        source: WeightSource,
        feeds: Mapping[str, Any] | None = None,
        observed: tuple[tuple[str, ...], Observer] | None = None,
    ) -> None:
        self.session = session
        self.weights = weights
        self.version = version
        self.strict_ok = False
        places = (data.source for data in weights.values())
        self.files = tuple({place.path: place for place in places if place is not None}.values())
        self._fed = _Fed(session, dict(feeds or {}), observed) if feeds or observed is not None else None
        self.run: Callable[..., list[Any]] = session.run if self._fed is None else self._fed.run
        self._binder: Binder | None = None
        self._lock = threading.Lock()
        names = (*weights, *(feeds or {}))
        source.pin(names)
        self._finalizer = weakref.finalize(self, _close, session, source, names)

    def renew(self, version: int, feeds: Mapping[str, Any]) -> None:
        """Take over a newer version, which differs in mutable parameters at most."""
        with self._lock:
            if version > self.version:
                if self._fed is not None:
                    self._fed.values = dict(feeds)  # a new dict: a run in progress keeps the old one
                self.version = version

    @property
    def binder(self) -> Binder:
        """The memory side of the session, which feeds it in the same way as `run`."""
        if self._binder is None:
            self._binder = binder_of(self.session) if self._fed is None else _FedBinder(self._fed)
        return self._binder

    def check_files(self) -> None:
        """Refuse to run on a mapped weights file that was written to: reading a truncated mapping ends the process.

        A file that was replaced or deleted is harmless, since the mapping keeps the old one.

        Raises:
            EngineError: a file was changed in place.
        """
        for source in self.files:
            try:
                now = FileRange.stamp_of(os.stat(source.path))  # noqa: PTH116  # called in every run
            except OSError:
                continue
            if now != source.stamp and now[:2] == source.stamp[:2]:
                raise EngineError(
                    f"the weights file {source.path} was changed in place while it is mapped; write a new file, rename "
                    "it over the old one, and load the graph again"
                )

    def close(self) -> None:
        """Close the session now."""
        self._finalizer()


class _Fed:
    """Runs a session with additional values, and passes hidden outputs to an observer."""

    __slots__ = ("_observed", "_session", "binder", "values")

    def __init__(
        self, session: EngineSession, values: dict[str, Any], observed: tuple[tuple[str, ...], Observer] | None
    ) -> None:
        self._session = session
        self._observed = observed
        self.binder = binder_of(session)
        self.values = values

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any], resident: Collection[str] = ()) -> list[Any]:
        fed = {**feeds, **self.values}
        hidden: tuple[str, ...] = () if self._observed is None else self._observed[0]
        wanted = [*output_names, *hidden]
        if resident or any(isinstance(value, DeviceTensor) for value in fed.values()):
            outputs = self.binder.run(fed, wanted, resident)
        else:
            outputs = self._session.run(wanted, fed)
        if self._observed is not None:
            self._observed[1](dict(zip(hidden, outputs[len(output_names) :], strict=True)))
        return outputs[: len(output_names)]


class _FedBinder(HostBinder):
    """Uploads through the session's own binder and runs through `_Fed`; binds no buffers."""

    def __init__(self, fed: _Fed) -> None:
        super().__init__(fed)
        self._fed = fed

    @property
    def on_host(self) -> bool:
        """Whether runs read their inputs in host memory; see `Binder.on_host`."""
        return self._fed.binder.on_host

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device; see `Binder.upload`."""
        return self._fed.binder.upload(array)

    def adopt(self, source: Any) -> DeviceTensor | None:
        """Return a tensor without a copy; see `Binder.adopt`."""
        return self._fed.binder.adopt(source)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        return self._fed.run(outputs, feeds, resident)


def _close(session: EngineSession, source: WeightSource, names: tuple[str, ...]) -> None:
    session.close()
    source.unpin(names)
