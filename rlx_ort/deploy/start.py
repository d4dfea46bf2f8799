"""Starts a warmed package in the shortest time: from the compile cache alone, without reading the model.

`open_package` gives everything; this gives the first results sooner. What it does not know, it hands to `open_package`.
This module loads few others, since their import would take longer than the start.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.errors import EngineError, PackageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import numpy.typing as npt

    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.graph_devices import GraphDevices
    from rlx_ort.providers.compiled.starts import Interface, Start

__all__ = ["StartedPackage", "package_sha256", "start_package"]

_INDEX = "rlx.json"
_RUNS_BEFORE_PACKING = 4  # packing takes as long as 1 to 10 runs of a large model, and halves those of a few rows


def start_package(path: str | Path, device: str = "cpu") -> StartedPackage:
    """Return a package ready to run on a device, from what `rlx-ort package warm` left in the compile cache.

    A package that was not warmed here, or for another device than the CPU, is opened in full. The first runs use the
    weights as they lie in the cache's file, which all processes share; after four, a thread opens the session with
    packed weights, and later runs use that. The two differ by rounding.

    The package's own files are not verified here but their index, `rlx.json`, by whose digest the cache finds what was
    made of the verified package. Where `RLX_PACKAGE_KEY` asks for signatures, it is opened in full.

    Raises:
        PackageError: there is no package at the path, or it cannot be opened in full either.
        DeviceError: the device cannot be had.
    """
    place = Path(path)
    collecting = gc.isenabled()
    gc.disable()  # nothing of what is imported here is ever garbage
    try:
        started = _quick(place, device)
    finally:
        if collecting:
            gc.enable()
    if started is None:
        started = StartedPackage(place, device)
        started.compiled  # noqa: B018  # errors belong to the start, not to the first run
    return started


def _quick(place: Path, device: str) -> StartedPackage | None:
    """Return the package started from the cache alone, or None where it cannot be."""
    from rlx_ort import environment
    from rlx_ort.providers.compiled.settings import use_of
    from rlx_ort.providers.compiled.starts import find_start
    from rlx_ort.providers.compiled.store import default_store
    from rlx_ort.providers.runtime import describe_runtime, open_saved

    # Where signatures are asked for, the package is opened in full, which looks at them.
    if device == "cpu" and use_of(None, "found") != "off" and not environment.get("PACKAGE_KEY"):
        start = find_start(default_store(), package_sha256(place), describe_runtime())
        if start is not None:
            try:
                session = open_saved(_model_of(start), start.threads, packed=False)
            except EngineError:
                default_store().drop(start.entry.digest)
            else:
                return StartedPackage(place, device, start, session)
    return None


def package_sha256(path: Path) -> str:
    """Return the digest of a package's index, which names everything in it by its own digest.

    Raises:
        PackageError: there is no package at the path.
    """
    try:
        if path.is_dir():
            data = (path / _INDEX).read_bytes()
        else:
            import zipfile

            with zipfile.ZipFile(path) as archive:
                data = archive.read(_INDEX)
    except Exception as err:  # zipfile raises what its decoders raise
        raise PackageError(f"there is no package at {path}: {err}") from err
    return hashlib.sha256(data).hexdigest()


class StartedPackage:
    """A package on one device. `run` may be called from several threads.

    Attributes:
        path: the package.
        device: the device's name.
        quick: whether it was started from the compile cache alone.
    """

    def __init__(self, path: Path, device: str, start: Start | None = None, session: Any = None) -> None:
        self.path = path
        self.device = device
        self.quick = start is not None
        self._start = start
        self._session = session
        self._lock = threading.Lock()
        self._runs = 0
        self._packing: threading.Thread | None = None
        self._runner: GraphDevices | None = None
        self._compiled: CompiledGraph | None = None

    def run(self, inputs: Mapping[str, npt.ArrayLike]) -> list[Any]:
        """Run once and return the outputs in order.

        Arrays of the declared dtypes and shapes go straight to the engine. All else is checked, converted or refused
        by the graph's own rules, for which the package is opened in full the first time.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype.
            EngineError: the run failed.
        """
        session, start = self._session, self._start
        if session is None or start is None or not _fits(inputs, start.inputs):
            return self.compiled.run(inputs)
        try:
            results: list[Any] = session.run([output.name for output in start.outputs], dict(inputs))
        except Exception as err:  # the engine's exceptions have no common base
            raise EngineError(f"the run of {self.path.name} on {self.device} failed: {err}") from err
        self._count()
        return results

    @property
    def runner(self) -> GraphDevices:
        """The package opened in full, on every device; opened when it is first asked for."""
        with self._lock:
            if self._runner is None:
                from rlx_ort.deploy.open import open_package

                self._runner = open_package(self.path)
            return self._runner

    @property
    def compiled(self) -> CompiledGraph:
        """The graph on the device, with everything a `CompiledGraph` can; opens the package in full."""
        runner = self.runner
        with self._lock:
            if self._compiled is None:
                self._compiled = runner.compile(self.device)
            return self._compiled

    def close(self) -> None:
        """Give the sessions up; runs that are in them finish. Closing twice is harmless."""
        with self._lock:
            packing, self._session = self._packing, None
            self._start = None
            runner, self._runner, self._compiled = self._runner, None, None
        if packing is not None:
            packing.join()
        if runner is not None:
            runner.close()

    def __enter__(self) -> StartedPackage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _count(self) -> None:
        """Count a run on unpacked weights, and have them packed when it was one of several."""
        if self._packing is not None:
            return
        with self._lock:
            self._runs += 1
            if self._runs < _RUNS_BEFORE_PACKING or self._packing is not None or self._start is None:
                return
            self._packing = threading.Thread(target=self._pack, args=(self._start,), name="rlx_ort-pack")
        self._packing.start()

    def _pack(self, start: Start) -> None:
        import contextlib

        from rlx_ort.providers.runtime import open_saved

        with contextlib.suppress(EngineError):  # the session that is open goes on
            session = open_saved(_model_of(start), start.threads, packed=True)
            with self._lock:
                if self._session is not None:
                    self._session = session


def _model_of(start: Start) -> Path:
    from rlx_ort.providers.compiled.entry import MODEL_FILE

    return start.entry.folder / MODEL_FILE


def _fits(inputs: Mapping[str, Any], declared: tuple[Interface, ...]) -> bool:
    """Return whether the inputs are just the declared ones, as arrays of their dtypes and of shapes that fit."""
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
