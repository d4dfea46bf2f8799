"""`QuickSession`: a warmed package on the CPU, run from the compile cache alone.

Only the saved session is read, so the first results come as soon as the engine is loaded. Methods return None when the
full package is needed. This module imports few others, because importing them would take longer than the start.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort import environment
from rlx_ort.errors import EngineError
from rlx_ort.execution.interface import outputs_class

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlx_ort.deploy.copies import PackageCopy
    from rlx_ort.providers.engine.compiled.starts import Interface, SavedSession, Start

# Packing costs as much as 1 to 10 runs of a large model, and halves the time of runs of a few rows.
_RUNS_BEFORE_PACKING = 4


def find_quick(package_sha256: str) -> QuickSession | None:
    """Return a session, not opened yet, for the package whose index has this digest; None if it was not warmed.

    The cache entry is checked as at each use: sizes, and digests of files up to 1 MiB. With `RLX_CACHE=off` packages do
    not use the cache.

    Raises:
        EngineError: ONNX Runtime cannot be used.
    """
    from rlx_ort.providers.engine.compiled.starts import find_start
    from rlx_ort.providers.engine.compiled.store import default_store, use_of
    from rlx_ort.providers.engine.runtime import describe_runtime

    if use_of(None, "found") == "off" or environment.get("DEVICE_MEMORY"):  # the full package keeps memory budgets
        return None
    start = find_start(default_store(), package_sha256, describe_runtime())
    return None if start is None else QuickSession(start)


class QuickSession:
    """The session of a warmed package; opened by `open` or by the first run. `run` may be called from several threads.

    The first four runs use the unpacked weights of the cache file, which all processes share. Then a thread opens a
    session with packed weights for later runs, if `packs` is true. Results of the two differ by rounding. `interface`
    has the inputs and the outputs.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self.interface = (start.inputs, start.outputs)
        self.packs = True
        self._names = [output.name for output in start.outputs]
        self.named = outputs_class(self._names)
        self._lock = threading.Lock()
        self._session: SavedSession | None = None
        self._closed = False
        self._runs = 0
        self._packing: threading.Thread | None = None
        self._unknown: PackageCopy | None = None

    def watch(self, copy: PackageCopy) -> None:
        """Hash the package in the background after the first run, unless this copy of it was read whole before.

        Raises:
            IntegrityError: this copy was found damaged.
        """
        self._unknown = None if copy.is_known() else copy

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the cache entry could not be opened; it then runs nothing."""
        return self._closed

    def open(self) -> bool:
        """Open the engine's session if needed, and return whether one is open; a bad cache entry is dropped.

        Raises:
            EngineError: the process ends.
        """
        with self._lock:
            if self._session is None and not self._closed:
                try:
                    self._session = self._opened(packed=False)
                except EngineError:
                    from rlx_ort.providers.engine.compiled.store import default_store
                    from rlx_ort.providers.engine.process import ending

                    if ending():  # the entry is not at fault
                        raise
                    default_store().drop(self._start.entry.digest)
                    self._closed = True
            return self._session is not None

    def run(self, inputs: Mapping[str, Any]) -> list[Any] | None:
        """Run once and return the outputs in order; None when the full package must run: see `closed` and `fits`.

        A failed run closes the session. The full package then repeats the run and raises the error.

        Raises:
            EngineError: the process ends.
        """
        if not self.fits(inputs) or not self.open():
            return None
        session = self._session
        if session is None:  # closed by another thread
            return None
        try:
            results = session.run(self._names, inputs)
        except EngineError:
            if session.stopped:
                raise
            self.close()
            return None
        self._count()
        return results

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the inputs are just the declared ones, as arrays of their dtypes and of shapes that fit."""
        declared: tuple[Interface, ...] = self._start.inputs
        if len(inputs) != len(declared):
            return False
        sizes: dict[str, int] = {}
        for name, dtype, shape in declared:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.dtype != dtype or array.ndim != len(shape):
                return False
            for dim, size in zip(shape, array.shape, strict=True):
                if dim is not None and size != (sizes.setdefault(dim, size) if isinstance(dim, str) else dim):
                    return False
        return True

    def settle(self) -> None:
        """Wait until the weights are packed, if that has begun."""
        packing = self._packing
        if packing is not None:
            packing.join()

    def close(self) -> None:
        """Close the session and free its threads; runs in progress finish. Closing twice is harmless."""
        with self._lock:
            self._closed, self._session = True, None
        self.settle()

    def _opened(self, *, packed: bool) -> SavedSession:
        from rlx_ort.providers.engine.compiled.starts import SavedSession
        from rlx_ort.providers.engine.compiled.store import MODEL_FILE

        # The budget keeps the owner alive for as long as the session; this object would keep the session in turn.
        return SavedSession(self._start.entry.folder / MODEL_FILE, self._start, packed=packed)

    def _count(self) -> None:
        """Count a run on unpacked weights, and start packing after the last of the first few."""
        if self._packing is not None:
            return
        with self._lock:
            self._runs += 1
            unknown, self._unknown = self._unknown, None
            if unknown is not None:
                with contextlib.suppress(RuntimeError):  # the interpreter ends
                    unknown.check_in_background()
            if self._runs < _RUNS_BEFORE_PACKING or self._packing is not None or self._closed or not self.packs:
                return
            packing = threading.Thread(target=self._pack, name="rlx_ort-pack")
            with contextlib.suppress(RuntimeError):  # the interpreter ends and starts no thread any more
                packing.start()
                self._packing = packing

    def _pack(self) -> None:
        with contextlib.suppress(EngineError):  # the session that is open goes on
            session = self._opened(packed=True)
            with self._lock:
                if not self._closed:
                    self._session = session
