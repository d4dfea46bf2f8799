"""`CompileStore`: the entries of a cache folder, shared by all processes of the user.

An entry is made in a folder of its own and appears by one rename, so a process that dies leaves no partial entry.
Making holds one file lock per key, which the system releases when the process dies; using needs no lock. Eviction
renames an entry before deleting it: where an open mapping forbids that, as on Windows, the entry stays.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort import environment
from rlx_ort.providers.engine.compiled.entry import Entry, describe_files, read_entry, write_manifest
from rlx_ort.providers.engine.compiled.key import CacheKey
from rlx_ort.storage import cache_root

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

__all__ = ["CompileStore", "DEFAULT_LIMIT_BYTES", "default_store", "limit_bytes", "parse_bytes", "use_of"]

DEFAULT_LIMIT_BYTES = 10 * 1024**3
_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?"
_PART, _TRASH, _LOCKS = "part-", "trash-", "locks"
_NOTES = ("starts", "digests")  # of `starts` and `models`
_RETRIES = 5
_RETRY_S = 0.05


class CompileStore:
    """The entries below a folder. Methods may be called from several threads and processes.

    Args:
        root: the folder; it is created when the first entry is made.
        limit: the most bytes the entries take together; None asks `RLX_CACHE_LIMIT` each time. The newest entry stays
            even where it is larger alone.
    """

    def __init__(self, root: Path, limit: int | None = None) -> None:
        self.root = root
        self._limit = limit

    @property
    def limit(self) -> int:
        """The most bytes the entries take together."""
        return limit_bytes() if self._limit is None else self._limit

    def find(self, digest: str) -> Entry | None:
        """Return an intact entry and note its use; a damaged one is dropped. Reads at most 1 MiB a file."""
        entry = read_entry(self.root / digest)
        if entry is None:
            return None
        problem = entry.problem()
        if problem:
            _log().warning("the compile cache drops entry %s of %s: %s", digest, entry.label, problem)
            self.drop(digest)
            return None
        entry.touch()
        return entry

    def make(
        self,
        key: CacheKey,
        label: str,
        fill: Callable[[Path], Mapping[str, Any] | None],
        *,
        open_ended: bool = False,
    ) -> Entry:
        """Return the entry of a key, made by `fill` if missing; other processes wait for it meanwhile.

        `fill` gets an empty folder, writes the files, and returns what to note beside them. Afterwards the least
        recently used entries are evicted. With `open_ended` the files are not described: the provider keeps writing.

        Raises:
            OSError: the cache cannot be written to.
        """
        import shutil
        import tempfile

        self.root.mkdir(parents=True, exist_ok=True)
        with self._lock(key.digest):
            found = self.find(key.digest)
            if found is not None:
                return found
            self._clear_parts(key.digest)
            part = Path(tempfile.mkdtemp(prefix=f"{_PART}{key.digest}-", dir=self.root))
            try:
                extra = fill(part) or {}
                files = None if open_ended else describe_files(part)
                write_manifest(part, key, label, time.time(), files, extra)
                self.drop(key.digest)  # it is damaged, or has no manifest
                _renamed(part, self.root / key.digest)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        self.evict(keep=key.digest)
        made = read_entry(self.root / key.digest)
        if made is None:
            raise OSError(f"the entry {key.digest} vanished from {self.root} as it was made")
        return made

    def entries(self) -> list[Entry]:
        """Return every entry with a usable manifest, most recently used first; its files are not checked."""
        found = [read_entry(folder) for folder in self._folders()]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used_s)

    def drop(self, digest: str) -> bool:
        """Delete an entry and return whether it is gone; Windows keeps one that is open."""
        import shutil
        import uuid

        folder = self.root / digest
        trash = self.root / f"{_TRASH}{uuid.uuid4().hex}"
        try:
            folder.rename(trash)  # atomic
        except FileNotFoundError:
            return True
        except OSError as err:
            _log().info("the compile cache keeps entry %s, which is in use: %s", digest, err)
            return False
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def evict(self, keep: str = "") -> list[str]:
        """Delete least recently used entries until the limit holds, and what dead processes left; return digests."""
        self._clear_parts()
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
        """Delete every entry; return the bytes that were freed and the digests of those in use, which stay.

        Notes on packages and weights files are deleted as well, and not counted.
        """
        import shutil

        self._clear_parts()
        for notes in _NOTES:
            shutil.rmtree(self.root / notes, ignore_errors=True)
        freed, kept = 0, []
        for entry in self.entries():
            size = entry.nbytes
            if self.drop(entry.digest):
                freed += size
            else:
                kept.append(entry.digest)
        for folder in self._folders():  # those without a manifest
            if folder.name not in kept:
                self.drop(folder.name)
        return freed, kept

    def _folders(self) -> Iterator[Path]:
        with contextlib.suppress(OSError):
            for path in sorted(self.root.iterdir()):
                if len(path.name) == 32 and path.is_dir():
                    yield path

    @contextlib.contextmanager
    def _lock(self, digest: str, timeout_s: float = -1) -> Iterator[None]:
        import filelock

        locks = self.root / _LOCKS
        locks.mkdir(exist_ok=True)
        with filelock.FileLock(locks / digest, timeout=timeout_s):
            yield

    def _clear_parts(self, digest: str = "") -> None:
        """Delete what dead processes left: trash, and parts of keys that no process is making."""
        import shutil

        import filelock

        with contextlib.suppress(OSError):
            for path in list(self.root.iterdir()):
                if path.name.startswith(_TRASH):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.startswith(_PART):
                    owner = path.name[len(_PART) :].partition("-")[0]
                    held = contextlib.nullcontext() if owner == digest else self._lock(owner, timeout_s=0)
                    with contextlib.suppress(filelock.Timeout), held:
                        shutil.rmtree(path, ignore_errors=True)


def _log() -> logging.Logger:
    import logging  # not needed by a start from the cache

    return logging.getLogger("rlx_ort.cache")


def _renamed(source: Path, target: Path) -> None:
    """Rename a folder; retry while another program, such as a virus scanner, has a file of it open."""
    for attempt in range(_RETRIES):
        try:
            os.replace(source, target)  # noqa: PTH105  # the name by which tests make it fail as Windows does
            return
        except PermissionError:
            if attempt + 1 == _RETRIES:
                raise
            time.sleep(_RETRY_S * 2**attempt)


def default_store() -> CompileStore:
    """Return the store of this user, in the folder `compiled` of the cache."""
    return CompileStore(cache_root() / "compiled")


def limit_bytes() -> int:
    """Return the limit of all entries together in bytes: `RLX_CACHE_LIMIT`, such as `4G`, by default 10 GiB."""
    return environment.parse_or("CACHE_LIMIT", DEFAULT_LIMIT_BYTES, parse_bytes)


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as `500M`, `4G` or `1.5 GiB`; units count in 1024.

    Raises:
        ValueError: the text is no size.
    """
    import re

    match = re.fullmatch(_SIZE, text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is no size such as 500M or 4G")
    return int(float(match[1]) * _UNITS[match[2]])


def use_of(asked: str | None, default: str = "off") -> str:
    """Return how the cache is used, `on`, `off` or `found`: as asked, else by `RLX_CACHE`, else by default.

    A variable that is neither, such as `1` or `0`, is read as a flag.
    """
    if asked is not None:
        return asked
    value = (environment.get("CACHE") or default).strip().lower()
    if value in ("on", "off", "found"):
        return value
    return "on" if environment.flag("CACHE") else "off"
