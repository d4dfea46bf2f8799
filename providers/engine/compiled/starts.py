"""The start of a warmed package: an entry of the cache, found without reading the model, and its session.

A note is written by `rlx-ort package warm` and read when the package is started. It holds the facts that the entry's
key was made of and that may have changed since: the build of ONNX Runtime, the installation of this library, which
wrote the model, the processor, and `RLX_KERNEL_DISPATCH`. Only models on the CPU are noted, and only those whose inputs
and outputs are plain arrays. The process waits for these imports, so there are few.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort import environment
from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.compiled.store import SCHEMA, cpu_facts
from rlx_ort.providers.engine.process import budget, refuse_at_the_end, watch
from rlx_ort.providers.engine.runtime import engine_exceptions, onnxruntime
from rlx_ort.providers.engine.stopping import check_stopped, held_stop
from rlx_ort.storage import parse_json, write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rlx_ort.providers.engine.compiled.store import CompileStore, Entry


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


def note_start(
    store: CompileStore,
    package_sha256: str,
    digest: str,
    engine: str,
    interface: tuple[tuple[Interface, ...], tuple[Interface, ...]],
) -> None:
    """Note that a package starts from an entry, replacing an earlier note."""
    path = _path(store, package_sha256)
    document = {
        "schema": SCHEMA,
        "entry": digest,
        "facts": _facts(engine),
        "inputs": interface[0],
        "outputs": interface[1],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(document, indent=1).encode())


def find_start(store: CompileStore, package_sha256: str, engine: str) -> Start | None:
    """Return the start of a package, checked by `CompileStore.find`, or None if it has to be made first."""
    if _another_provider():
        return None
    try:
        document = parse_json(_path(store, package_sha256).read_bytes())
        if document["schema"] != SCHEMA or document["facts"] != _facts(engine):
            return None
        entry = store.find(str(document["entry"]))
        if entry is None:
            return None
        inputs, outputs = (
            tuple(Interface(str(name), str(dtype), tuple(shape)) for name, dtype, shape in document[side])
            for side in ("inputs", "outputs")
        )
        return Start(entry, inputs, outputs)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(engine: str) -> Mapping[str, Any]:
    dispatch = (environment.get("KERNEL_DISPATCH") or "").strip()
    return {"engine": engine, "library": _installation(), "kernel_dispatch": dispatch, **cpu_facts()}


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


def _path(store: CompileStore, package_sha256: str) -> Path:
    name = hashlib.sha256(package_sha256.encode()).hexdigest()[:32]
    return store.root / "starts" / f"{name}.json"


class SavedSession:
    """ONNX Runtime's session on a model of the compile cache, for the CPU. `run` may be called from several threads.

    Without `packed` kernels do not pack their weights: it opens several times faster, since ONNX Runtime packs weights
    again to find the saved model, and runs are 1.1 to 2 times slower. All sessions of one `owner` count once in the
    thread budget. No run may begin once it is `stopped`.

    Raises:
        EngineError: ONNX Runtime cannot be used, or refuses the model, or the process ends.
    """

    def __init__(self, model: Path, owner: object, *, packed: bool) -> None:
        refuse_at_the_end()
        engine = onnxruntime()
        options = engine.SessionOptions()
        options.graph_optimization_level = engine.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        if not packed:
            options.add_session_config_entry("session.disable_prepacking", "1")
            # Used for a few runs only; spinning workers would take cores from whatever else is starting.
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        given = {"providers": ["CPUExecutionProvider"], "enable_fallback": 0}
        create = partial(engine.InferenceSession, str(model), options, **given)
        try:
            self._session = budget().opened(options, None, owner, create, on_cpu=True)
        except engine_exceptions() as err:
            raise EngineError(f"the saved model {model} does not open: {err}") from err
        self.stopped = False
        self._options = engine.RunOptions()
        watch(self)

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the named outputs as numpy arrays; see `EngineSession.run`."""
        if self.stopped:
            raise EngineError("the process ends, and no run begins any more")
        try:
            stop = held_stop()
            options = self._options if stop is None else stop.run_options(onnxruntime())
            results: list[Any] = self._session.run(list(output_names), dict(feeds), options)
        except engine_exceptions() as err:
            check_stopped()
            raise EngineError(f"the run failed: {err}") from err
        return results

    def stop_runs(self) -> None:
        """End all runs that are in flight and let no other begin; for the end of the process."""
        self.stopped = True
        self._options.terminate = True
