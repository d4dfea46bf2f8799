"""`CompileStore`: the entries of a cache folder, shared by all processes of the user, and the keys they have.

Each use of an entry checks its manifest, the size of every file, the SHA-256 of files up to 1 MiB, and of larger ones
that of the first and last 64 KiB. That finds files that were cut short or never written out; a bit that flips inside of
a large file is found by `problem(whole=True)` only, which reads everything.

An entry is made in a hidden folder (`storage.partial_path`) and appears by one rename, so a process that dies leaves no
partial entry. Making holds one file lock per key, which the system releases when the process dies; using needs no lock.
Eviction renames an entry before deleting it: where an open mapping forbids that, as on Windows, the entry stays.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlx_ort import environment, kept
from rlx_ort.errors import DeviceParseError
from rlx_ort.providers.hardware import cpu_name
from rlx_ort.storage import cache_root, clear_unfinished, partial_path, put_in_place, remove, unfinished

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Mapping, Sequence

DEFAULT_LIMIT_BYTES = 10 * 1024**3
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?"
_LOCKS = "locks"
_NOTES = ("starts", "digests")  # of `starts` and `models`

SCHEMA = "1"
"""Part of every key; grows when the layout of an entry or the meaning of a part changes."""

# The instructions by which the CPU kernels of ONNX Runtime choose how weights are laid out (core/mlas/lib/platform.cpp
# and core/common/cpuid_info.cc); others are left out, since a new kernel lists them anew without changing a layout.
_INSTRUCTIONS = """
    sse4_1 avx avx2 fma f16c avx_vnni avx512f avx512vl avx512bw avx512dq avx512_vnni avx512_bf16 avx512_fp16
    amx_tile amx_int8 amx_bf16 asimd asimddp i8mm svei8mm bf16 sve sve2 sme fphp asimdhp
"""

MANIFEST = "entry.json"
MODEL_FILE = "model.onnx"
_WHOLE_BYTES = 1 << 20
_EDGE_BYTES = 1 << 16


class CacheKey(NamedTuple):
    """The parts of a key: name -> text. Two keys are the same entry exactly when all their parts are equal."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The entry's name: 32 hexadecimal digits of a SHA-256 over all parts."""
        hashed = hashlib.sha256(f"schema\0{SCHEMA}\0".encode())
        for name, value in sorted(self.parts.items()):
            hashed.update(f"{len(name)}:{name}{len(value)}:{value}".encode())
        return hashed.hexdigest()[:32]


class Difference(NamedTuple):
    """One part in which two keys differ; a part that a key does not have is empty."""

    part: str
    before: str
    after: str


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> tuple[Difference, ...]:
    """Return the parts in which two keys differ, in the order of their names."""
    names = sorted(before.keys() | after.keys())
    pairs = [(name, before.get(name, ""), after.get(name, "")) for name in names]
    return tuple(Difference(name, old, new) for name, old, new in pairs if old != new)


class Explanation(NamedTuple):
    """Whether a key has an entry, and how it differs from earlier ones."""

    digest: str
    entry: Entry | None
    """None when it has to be compiled."""
    nearest: Entry | None
    """The earlier entry with the most parts in common, None if no entry has the same model or weights."""
    changed: tuple[Difference, ...]


def explain(key: CacheKey, entries: Sequence[Entry]) -> Explanation:
    """Return whether a key has an entry, and how it differs from the nearest earlier one of its model or weights."""
    entry = next((each for each in entries if each.digest == key.digest), None)
    same = [(name, key.parts[name]) for name in ("model", "weights") if key.parts.get(name)]
    related = [
        other
        for other in entries
        if (entry is None or other.created_s < entry.created_s)
        and any(other.parts.get(name) == value for name, value in same)
    ]
    if not related:
        return Explanation(key.digest, entry, None, ())
    nearest = min(related, key=lambda other: (len(differences(other.parts, key.parts)), -other.created_s))
    return Explanation(key.digest, entry, nearest, differences(nearest.parts, key.parts))


@functools.cache
def cpu_facts() -> dict[str, str]:
    """Return the parts of a key that describe the processor: its name, and the instructions it has."""
    return read_cpu_facts(Path("/proc/cpuinfo"))


def read_cpu_facts(table: Path) -> dict[str, str]:
    """Return name, instructions and system by the first processor of a file such as `/proc/cpuinfo`.

    Without one, as on Windows and macOS, the system's name for the processor stands for both.
    """
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError), table.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            name, _, value = line.partition(":")
            if not name.strip() and facts:
                break  # the first processor's block is over
            facts.setdefault(name.strip().lower(), value.strip())
    words = set(facts.get("flags", facts.get("features", "")).split())
    name = facts.get("model name", facts.get("model", "")) or cpu_name()
    isa = " ".join(sorted(words.intersection(_INSTRUCTIONS.split())))
    isa = isa or os.environ.get("PROCESSOR_IDENTIFIER", "") or name
    return {"cpu": name, "cpu_instructions": isa, "system": f"{sys.platform} {platform.machine()}"}


class Entry(NamedTuple):
    """An entry as its manifest describes it; times are in seconds since 1970.

    `label` is the model's name and device, for people. `files` has size and digests of each file; None for a folder
    that the provider fills itself.
    """

    folder: Path
    digest: str
    parts: Mapping[str, str]
    label: str
    created_s: float
    used_s: float
    files: Mapping[str, Mapping[str, Any]] | None

    @property
    def nbytes(self) -> int:
        """The bytes of its files; walks the folder where the provider fills it."""
        if self.files is not None:
            return sum(int(file["bytes"]) for file in self.files.values())
        total = 0
        for place, _, names in os.walk(self.folder):
            for name in names:
                with contextlib.suppress(OSError):  # a file of the provider that came and went
                    total += (Path(place) / name).stat().st_size
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

    def write_manifest(self) -> None:
        """Write the manifest to its folder, which no other process uses yet."""
        document = {"schema": SCHEMA, **self._asdict()}
        del document["folder"], document["used_s"]
        with (self.folder / MANIFEST).open("w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())


def read_entry(folder: Path) -> Entry | None:
    """Return the entry of a folder, or None if it has no usable manifest."""
    path = folder / MANIFEST

    def entry_of(document: Mapping[str, Any]) -> Entry | None:
        digest, parts = document["digest"], document["parts"]
        if not CacheKey(parts).digest == digest == folder.name:
            return None
        label, created_s, used_s = str(document["label"]), float(document["created_s"]), path.stat().st_mtime
        return Entry(folder, digest, parts, label, created_s, used_s, document["files"])

    return kept.read(path, SCHEMA, entry_of)


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return name -> size and digests of the files of a folder. Reads all of them and waits until they are on disk."""
    described = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb+") as stream:
                os.fsync(stream.fileno())
            facts = {"bytes": path.stat().st_size, "sha256": _sha256(path), "edges": _edges(path)}
            described[path.relative_to(folder).as_posix()] = facts
    return described


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _edges(path: Path) -> str:
    """Return the SHA-256 of a small file, and of the first and last bytes of a large one."""
    size = path.stat().st_size
    if size <= _WHOLE_BYTES:
        return _sha256(path)
    with path.open("rb") as stream:
        hashed = hashlib.sha256(stream.read(_EDGE_BYTES))
        stream.seek(size - _EDGE_BYTES)
        hashed.update(stream.read(_EDGE_BYTES))
        return hashed.hexdigest()


class CompileStore:
    """The entries below a folder. Methods may be called from several threads and processes.

    All entries together take at most `limit` bytes, by default `RLX_CACHE_LIMIT` or 10 GiB. The newest entry stays even
    where it is larger alone.
    """

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self.root = root
        self._limit = limit

    @property
    def limit(self) -> int:
        """The most bytes the entries take together."""
        return _limit_of_variable() if self._limit is None else self._limit

    def find(self, digest: str) -> Entry | None:
        """Return an intact entry and note its use; a damaged one is dropped. Reads at most 1 MiB a file."""
        entry = read_entry(self.root / digest)
        if entry is None:
            return None
        if problem := entry.problem():
            _log().warning("the compile cache drops entry %s of %s: %s", digest, entry.label, problem)
            self.drop(digest)
            return None
        entry.touch()
        return entry

    def make(self, key: CacheKey, label: str, fill: Callable[[Path], None], *, open_ended: bool = False) -> Entry:
        """Return the entry of a key, made by `fill` if missing; other processes wait for it meanwhile.

        `fill` gets an empty folder and writes the files. Afterwards the least recently used entries are evicted. With
        `open_ended` the files are not described: the provider keeps writing.
        """
        import filelock

        begun, locks = time.perf_counter(), self.root / _LOCKS
        locks.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(locks / key.digest):
            entry = self.find(key.digest)
            if entry is not None:
                return entry
            clear_unfinished(self.root)
            part = partial_path(self.root / key.digest)
            unfinished.add(part)
            try:
                part.mkdir(mode=0o700)
                fill(part)
                files = None if open_ended else describe_files(part)
                now = time.time()
                Entry(part, key.digest, dict(key.parts), label, now, now, files).write_manifest()
                self.drop(key.digest)  # it is damaged, or has no manifest
                put_in_place(part, self.root / key.digest)
            finally:
                remove(part)
                unfinished.discard(part)
        self.evict(keep=key.digest)
        made = read_entry(self.root / key.digest)
        if made is None:
            raise OSError(f"the entry {key.digest} vanished from {self.root} as it was made")
        took_s = time.perf_counter() - begun
        _log().info("the compile cache keeps entry %s of %s, made in %.3g s", key.digest, label, took_s)
        return made

    def entries(self) -> list[Entry]:
        """Return every entry with a usable manifest, most recently used first; its files are not checked."""
        entries = [read_entry(folder) for folder in self._folders()]
        return sorted((entry for entry in entries if entry is not None), key=lambda entry: -entry.used_s)

    def drop(self, digest: str) -> bool:
        """Delete an entry and return whether it is gone; Windows keeps one that is open."""
        trash = partial_path(self.root / digest)
        try:
            (self.root / digest).rename(trash)  # atomic
        except FileNotFoundError:
            return True
        except OSError as err:
            _log().info("the compile cache keeps entry %s, which is in use: %s", digest, err)
            return False
        remove(trash)
        return True

    def evict(self, keep: str = "") -> list[str]:
        """Delete least recently used entries until the limit holds, and leftovers of dead processes; return digests."""
        clear_unfinished(self.root)
        entries = self.entries()
        sizes = {entry.digest: entry.nbytes for entry in entries}
        total = sum(sizes.values())
        gone = []
        for entry in reversed(entries):
            if total <= self.limit:
                break
            if entry.digest != keep and self.drop(entry.digest):
                total -= sizes[entry.digest]
                gone.append(entry.digest)
        return gone

    def clear(self) -> tuple[int, list[str]]:
        """Delete every entry and note; return the bytes of entries that were freed and the digests of those in use."""
        clear_unfinished(self.root)
        for notes in _NOTES:
            remove(self.root / notes)
        freed, kept = 0, []
        for folder in self._folders():
            entry = read_entry(folder)
            size = 0 if entry is None else entry.nbytes
            if self.drop(folder.name):
                freed += size
            elif entry is not None:
                kept.append(folder.name)
        return freed, kept

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for path in sorted(self.root.iterdir()):
                if len(path.name) == 32 and path.is_dir():
                    yield path


def _log() -> logging.Logger:
    import logging  # not needed by a start from the cache

    return logging.getLogger("rlx_ort.cache")


def default_store() -> CompileStore:
    """Return the store of this user, in the folder `compiled` of the cache."""
    return CompileStore(cache_root() / "compiled")


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as `500M`, `4G` or `1.5 GiB`, or raise ValueError; units count in 1024."""
    import re

    match = re.fullmatch(_SIZE, text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 500M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


def use_of(asked: str | None, default: str = "off") -> str:
    """Return `on`, `off` or `found`: as asked, else by `RLX_CACHE`, which may be a flag too, else by default.

    Raises:
        DeviceParseError: `RLX_CACHE` is none of these, or `RLX_CACHE_LIMIT` is no size.
    """
    if asked is not None:
        return asked
    text = environment.get("CACHE") or default
    value = _SPELLINGS.get(text.strip().lower())
    if value is None:
        raise DeviceParseError(text, f"RLX_CACHE={text!r} is neither on, off nor found")
    if value != "off":
        _limit_of_variable()  # a typo is reported before anything is compiled
    return value


_SPELLINGS = {
    **dict.fromkeys(("on", "1", "true", "yes"), "on"),
    **dict.fromkeys(("off", "0", "false", "no", ""), "off"),
    "found": "found",
}


def _limit_of_variable() -> int:
    """Return the bytes that `RLX_CACHE_LIMIT` allows, or the default where it is unset or empty."""
    text = environment.get("CACHE_LIMIT") or ""
    try:
        return parse_bytes(text) if text.strip() else DEFAULT_LIMIT_BYTES
    except ValueError as err:
        raise DeviceParseError(text, f"RLX_CACHE_LIMIT: {err}") from err
