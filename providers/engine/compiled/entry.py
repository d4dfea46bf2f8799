"""One entry of the compile cache: a folder with its files and `entry.json`, their description.

Each use checks the manifest, the size of every file, the SHA-256 of files up to 1 MiB, and of larger ones that of the
first and last 64 KiB. That finds files that were cut short or never written out; a bit that flips inside of a large
file is found by `problem(whole=True)` only, which reads everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort.providers.engine.compiled.key import SCHEMA, CacheKey

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MANIFEST", "MODEL_FILE", "Entry", "describe_files", "read_entry", "write_manifest"]

MANIFEST = "entry.json"
MODEL_FILE = "model.onnx"
_WHOLE_BYTES = 1 << 20
_EDGE_BYTES = 1 << 16


class Entry(NamedTuple):
    """An entry as its manifest describes it; times are in seconds since 1970.

    Attributes:
        digest: its key's digest, which is the folder's name.
        parts: its key's parts.
        label: the model's name and device, for people.
        files: name -> size and digests of each file; None for a folder that the provider fills itself.
        extra: what the maker noted beside.
    """

    folder: Path
    digest: str
    parts: Mapping[str, str]
    label: str
    created_s: float
    used_s: float
    files: Mapping[str, Mapping[str, Any]] | None
    extra: Mapping[str, Any]

    @property
    def nbytes(self) -> int:
        """The bytes of its files; walks the folder where the provider fills it."""
        if self.files is not None:
            return sum(int(found["bytes"]) for found in self.files.values())
        total = 0
        for place, _, names in os.walk(self.folder):
            for name in names:
                try:
                    total += (Path(place) / name).stat().st_size
                except OSError:  # a file of the provider that came and went
                    continue
        return total

    def problem(self, *, whole: bool = False) -> str:
        """Return why the entry's files cannot be used, or an empty string; `whole` reads every byte."""
        for name, wanted in (self.files or {}).items():
            path = self.folder / name
            try:
                if path.stat().st_size != wanted["bytes"]:
                    return f"{name} has {path.stat().st_size} bytes in place of {wanted['bytes']}"
                if (whole and _sha256(path) != wanted["sha256"]) or _edges(path) != wanted["edges"]:
                    return f"{name} was changed"
            except OSError as err:
                return f"{name} cannot be read: {err.strerror or err}"
            except (KeyError, TypeError):
                return "its manifest is damaged"
        return ""

    def touch(self) -> None:
        """Note that the entry is used now, if the cache can be written to."""
        with contextlib.suppress(OSError):
            os.utime(self.folder / MANIFEST)


def read_entry(folder: Path) -> Entry | None:
    """Return the entry of a folder, or None if it has no usable manifest."""
    path = folder / MANIFEST
    try:
        used = path.stat().st_mtime
        document = json.loads(path.read_bytes())
        if document["schema"] != SCHEMA or not CacheKey(document["parts"]).digest == document["digest"] == folder.name:
            return None
        return Entry(
            folder,
            document["digest"],
            document["parts"],
            str(document["label"]),
            float(document["created_s"]),
            used,
            document["files"],
            dict(document["extra"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> size and digests of the files of a folder. Reads all of them and waits until they are on disk."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
            facts = {"bytes": path.stat().st_size, "sha256": _sha256(path), "edges": _edges(path)}
            found[path.relative_to(folder).as_posix()] = facts
    return found


def write_manifest(
    folder: Path,
    key: CacheKey,
    label: str,
    created_s: float,
    files: Mapping[str, Mapping[str, Any]] | None,
    extra: Mapping[str, Any],
) -> None:
    """Write the manifest of a folder that no other process uses yet."""
    document = {
        "schema": SCHEMA,
        "digest": key.digest,
        "parts": dict(key.parts),
        "label": label,
        "created_s": created_s,
        "files": files,
        "extra": dict(extra),
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump(document, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _edges(path: Path) -> str:
    """Return the SHA-256 of a small file, and of the first and last bytes of a large one."""
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return _sha256(path)
    with path.open("rb") as stream:
        found = hashlib.sha256(stream.read(_EDGE_BYTES))
        stream.seek(size - _EDGE_BYTES)
        found.update(stream.read(_EDGE_BYTES))
        return found.hexdigest()
