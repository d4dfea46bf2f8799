"""What a warmed package starts from: which entry of the cache answers for it, found without reading the model.

A note is written by `rlx-ort package warm` and read when the package is started. It holds the facts that the entry's
key was made of and that may have changed since: the build of ONNX Runtime and the processor. Only models on the CPU
are noted, and only those whose inputs and outputs are plain arrays.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort.providers.compiled.key import SCHEMA
from rlx_ort.providers.compiled.machine import cpu_facts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rlx_ort.providers.compiled.entry import Entry
    from rlx_ort.providers.compiled.store import CompileStore

__all__ = ["Interface", "Start", "find_start", "note_start", "starts_folder"]


class Interface(NamedTuple):
    """An input or output: its name, numpy dtype, and dims: the name of one that is open, None where it has none."""

    name: str
    dtype: str
    shape: tuple[int | str | None, ...]


class Start(NamedTuple):
    """What a package starts from: the entry of the cache, the model's interface, and how many threads it ran on."""

    entry: Entry
    inputs: tuple[Interface, ...]
    outputs: tuple[Interface, ...]
    threads: int


def starts_folder(root: Path) -> Path:
    """Return the folder of the notes in a cache folder."""
    return root / "starts"


def note_start(
    store: CompileStore,
    package_sha256: str,
    digest: str,
    engine: str,
    interface: tuple[tuple[Interface, ...], tuple[Interface, ...]],
    threads: int,
) -> None:
    """Note that a package starts from an entry; a note that is there is replaced.

    Raises:
        OSError: the cache cannot be written to.
    """
    import uuid

    path = _path(store, package_sha256)
    document = {
        "schema": SCHEMA,
        "entry": digest,
        "facts": _facts(engine),
        "inputs": interface[0],
        "outputs": interface[1],
        "threads": threads,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105  # the same call as everywhere in the cache


def find_start(store: CompileStore, package_sha256: str, engine: str) -> Start | None:
    """Return what a package starts from here and now, or None when that has to be made first."""
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
        return Start(entry, inputs, outputs, max(1, int(document["threads"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _facts(engine: str) -> Mapping[str, Any]:
    return {"engine": engine, **cpu_facts()}


def _path(store: CompileStore, package_sha256: str) -> Path:
    name = hashlib.sha256(package_sha256.encode()).hexdigest()[:32]
    return starts_folder(store.root) / f"{name}.json"
