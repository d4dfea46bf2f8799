"""What a warmed package starts from: which entry of the cache answers for it, found without reading the model.

A note is written by `rlx-ort package warm` and read when the package is started. It holds the facts that the entry's
key was made of and that may have changed since: the build of ONNX Runtime, the installation of this library, which
wrote the model, the processor, and `RLX_KERNEL_DISPATCH`. Only models on the CPU are noted, and only those whose inputs
and outputs are plain arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort import environment
from rlx_ort.providers.engine.compiled.key import SCHEMA
from rlx_ort.providers.engine.compiled.machine import cpu_facts
from rlx_ort.storage import write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rlx_ort.providers.engine.compiled.entry import Entry
    from rlx_ort.providers.engine.compiled.store import CompileStore

__all__ = ["Interface", "Start", "find_start", "note_start", "starts_folder"]


class Interface(NamedTuple):
    """An input or output: its name, numpy dtype, and dims: the name of one that is open, None where it has none."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class Start(NamedTuple):
    """What a package starts from: the entry of the cache, and the model's interface."""

    entry: Entry
    inputs: tuple[Interface, ...]
    outputs: tuple[Interface, ...]


def starts_folder(root: Path) -> Path:
    """Return the folder of the notes in a cache folder."""
    return root / "starts"


def note_start(
    store: CompileStore,
    package_sha256: str,
    digest: str,
    engine: str,
    interface: tuple[tuple[Interface, ...], tuple[Interface, ...]],
) -> None:
    """Note that a package starts from an entry; a note that is there is replaced.

    Raises:
        OSError: the cache cannot be written to.
    """
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
    """Return what a package starts from here and now, or None when that has to be made first.

    The entry is checked as `CompileStore.find` does.
    """
    if _another_provider():
        return None
    try:
        document = json.loads(_path(store, package_sha256).read_bytes())
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
    """Return what tells this installation from an older or newer one: the stamp of a file that installing writes.

    Its version would take 25 ms to read. A frozen application has no such file, and is one itself.
    """
    for path in (environment.__file__, sys.executable):
        try:
            status = os.stat(path)  # noqa: PTH116  # a plain path
        except OSError:
            continue
        return f"{path} {status.st_ino} {status.st_size} {status.st_mtime_ns}"
    return ""


def _another_provider() -> bool:
    """Return whether somebody registered a provider of their own for the CPU; only a loaded registry has one."""
    loaded = sys.modules.get("rlx_ort.providers.registry")
    if loaded is None or not loaded.default_registry.cache_info().currsize:
        return False
    from rlx_ort.device import Device
    from rlx_ort.providers.cpu import CpuProvider

    return type(loaded.default_registry().for_device(Device.CPU)) is not CpuProvider


def _path(store: CompileStore, package_sha256: str) -> Path:
    name = hashlib.sha256(package_sha256.encode()).hexdigest()[:32]
    return starts_folder(store.root) / f"{name}.json"
