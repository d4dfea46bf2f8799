"""The start of a warmed package: an entry of the cache, found without reading the model, and its session.

A note is written by `rlx-ort package warm` and read when the package is started. It holds the facts that the entry's
key was made of and that may have changed since: the build of ONNX Runtime, the installation of this library, which
wrote the model, the processor, and `RLX_KERNEL_DISPATCH`. Only models on the CPU are noted, and only those whose inputs
and outputs are plain arrays. The process waits for these imports, so there are few.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlx_ort import environment, kept
from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.compiled.store import MODEL_FILE, SCHEMA, cpu_facts, default_store, use_of
from rlx_ort.providers.engine.process import budget, ending, refuse_at_the_end, watch
from rlx_ort.providers.engine.runtime import describe_runtime, engine_exceptions, onnxruntime
from rlx_ort.providers.engine.stopping import check_stopped, run_options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rlx_ort.providers.engine.compiled.store import Entry


# Packing costs as much as 1 to 10 runs of a large model, and halves the time of runs of a few rows.
_RUNS_BEFORE_PACKING = 4


class Interface(NamedTuple):
    """An input or output: its name, numpy dtype, and dims: the name of one that is open, None where it has none."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class Start(NamedTuple):
    """The start of a package: the entry of the cache, and the model's interface."""

    entry: Entry
    inputs: tuple[Interface, ...]
    outputs: tuple[Interface, ...]


def note_start(package_sha256: str, start: Start) -> bool:
    """Note that a package starts from an entry, replacing an earlier note, and return whether that was possible."""
    facts = {"entry": start.entry.digest, "facts": _facts()}
    return kept.write(_path(package_sha256), SCHEMA, facts | {"inputs": start.inputs, "outputs": start.outputs})


def find_quick(package_sha256: str) -> SavedSession | None:
    """Return a session, not opened yet, for the package whose index has this digest; None if it was not warmed.

    The cache entry is checked as at each use: sizes, and digests of files up to 1 MiB. With `RLX_CACHE=off` packages do
    not use the cache.

    Raises:
        EngineError: ONNX Runtime cannot be used.
    """
    memory = environment.get("DEVICE_MEMORY")  # the full package keeps memory budgets
    if use_of(None, "found") == "off" or memory or _another_provider():
        return None
    store, facts = default_store(), _facts()

    def start_of(document: Mapping[str, Any]) -> Start | None:
        entry = store.find(str(document["entry"])) if document["facts"] == facts else None
        if entry is None:
            return None
        inputs, outputs = (
            tuple(Interface(str(name), str(dtype), tuple(shape)) for name, dtype, shape in document[side])
            for side in ("inputs", "outputs")
        )
        return Start(entry, inputs, outputs)

    start = kept.read(_path(package_sha256), SCHEMA, start_of)
    return None if start is None else SavedSession(start)


def _facts() -> Mapping[str, Any]:
    dispatch = (environment.get("KERNEL_DISPATCH") or "").strip()
    return {"engine": describe_runtime(), "library": _installation(), "kernel_dispatch": dispatch, **cpu_facts()}


def _installation() -> str:
    """Return the stamp of a file that installing writes, or of the frozen program; reading the version takes 25 ms."""
    for path in (environment.__file__, sys.executable):
        try:
            status = os.stat(path)  # noqa: PTH116  # a plain path
        except OSError:
            continue
        return f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    return ""


def _another_provider() -> bool:
    """Return whether another provider was registered for the CPU; only a loaded registry can have one."""
    loaded = sys.modules.get("rlx_ort.providers.registry")
    if loaded is None or not loaded.default_registry.cache_info().currsize:
        return False
    from rlx_ort.device import Device
    from rlx_ort.providers.cpu import CpuProvider

    return type(loaded.default_registry().for_device(Device.CPU)) is not CpuProvider


def _path(package_sha256: str) -> Path:
    name = hashlib.sha256(package_sha256.encode()).hexdigest()[:32]
    return default_store().root / "starts" / f"{name}.json"


class SavedSession:
    """A warmed package on the CPU, run from the compile cache alone; `run` may be called from several threads.

    `open` or the first run opens ONNX Runtime's session. The first four runs use the unpacked weights of the cache
    file, which all processes share: opening is several times faster, since ONNX Runtime packs weights again to find
    those that were saved, and runs are 1.1 to 2 times slower. Then a thread opens a session with packed weights for
    later runs, if `packs` is true. Results of the two differ by rounding. Methods return None when the full package is
    needed. `on_first_run` is called once, after the first run.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.packs = True
        self.on_first_run: Callable[[], object] | None = None
        self._names = [output.name for output in start.outputs]
        self._lock = threading.Lock()
        self._session: Any = None
        self._options: Any = None
        self._closed = self._stopped = False
        self._runs = 0
        self._packing: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether it was closed, or the cache entry could not be opened; it then runs nothing."""
        return self._closed

    def open(self) -> bool:
        """Open ONNX Runtime's session if needed, and return whether one is open; a bad cache entry is dropped.

        Raises:
            EngineError: the process ends.
        """
        with self._lock:
            if self._session is None and not self._closed:
                try:
                    self._session = self._opened(packed=False)
                except EngineError:
                    if ending():  # the entry is not at fault
                        raise
                    default_store().drop(self.start.entry.digest)
                    self._closed = True
            return self._session is not None

    def run(self, inputs: Mapping[str, Any]) -> list[Any] | None:
        """Run once and return the outputs in order; None when the full package must run: see `closed` and `fits`.

        A failed run closes the session. The full package then repeats the run and raises the error.

        Raises:
            EngineError: the process ends.
        """
        session = self._session if self.fits(inputs) and self.open() else None
        if session is None:  # or it was closed by another thread
            return None
        try:
            self._refuse_stopped()
            results: list[Any] = session.run(self._names, dict(inputs), run_options(self._options))
        except engine_exceptions():
            check_stopped()
            self._refuse_stopped()
            self.close()
            return None
        self._count()
        return results

    def fits(self, inputs: Mapping[str, Any]) -> bool:
        """Return whether the inputs are just the declared ones, as arrays of their dtypes and of shapes that fit."""
        declared = self.start.inputs
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

    def stop_runs(self) -> None:
        """End all runs that are in flight and let no other begin; for the end of the process."""
        self._stopped = True
        self._options.terminate = True

    def _refuse_stopped(self) -> None:
        if self._stopped:
            raise EngineError("the process is exiting; no run can begin")

    def _opened(self, *, packed: bool) -> Any:
        refuse_at_the_end()
        engine = onnxruntime()
        options = engine.SessionOptions()
        options.graph_optimization_level = engine.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        if not packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
            # Used for a few runs only; spinning workers would take cores from whatever else is starting.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        model = self.start.entry.folder / MODEL_FILE
        given = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
        create = partial(engine.InferenceSession, str(model), options, **given)
        try:
            # Both sessions count once in the budget, which keeps the start alive; this object would keep a session.
            session = budget().opened(options, None, self.start, create, on_cpu=True)
        except engine_exceptions() as err:
            raise EngineError(f"the saved model {model} does not open: {err}") from err
        if self._options is None:
            self._options = engine.RunOptions()
            watch(self)
        return session

    def _count(self) -> None:
        """Count a run on unpacked weights, and start packing after the last of the first few."""
        if self._packing is not None:
            return
        with self._lock, contextlib.suppress(RuntimeError):  # the interpreter ends and starts no thread any more
            self._runs += 1
            first, self.on_first_run = self.on_first_run, None
            if first is not None:
                first()
            if self._runs < _RUNS_BEFORE_PACKING or self._packing is not None or self._closed or not self.packs:
                return
            packing = threading.Thread(target=self._pack, name="rlx_ort-pack")
            packing.start()
            self._packing = packing

    def _pack(self) -> None:
        with contextlib.suppress(EngineError):  # the session that is open goes on
            session = self._opened(packed=True)
            with self._lock:
                if not self._closed:
                    self._session = session
