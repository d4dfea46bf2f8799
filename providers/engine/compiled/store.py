"""`CompileStore`: the entries of a cache folder, shared by all processes of the user.

An entry is made in a folder of its own and appears by one rename, so a process that dies leaves nothing that another
one would use. Making is done under a file lock a key, which the system releases when its holder dies; using needs no
lock. Evicting renames an entry away before it deletes it: where an open mapping forbids that, as on Windows, the entry
stays.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rlx_ort.providers.engine.compiled.entry import Entry, describe_files, read_entry, write_manifest
from rlx_ort.providers.engine.compiled.key import CacheKey
from rlx_ort.providers.engine.compiled.settings import limit_bytes
from rlx_ort.storage import cache_root

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

__all__ = ["CompileStore", "default_store"]

_PART, _TRASH, _LOCKS = "part-", "trash-", "locks"
_NOTES = ("starts", "digests")  # see `starts` and `digests` beside this module
_RETRIES = 5  # a virus scanner may hold a new file for a moment on Windows
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
        """Return an entry that is whole, and note its use; a damaged one is dropped. Reads at most 1 MiB a file."""
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
        """Return the entry of a key, made by `fill` where it is not there; others that want it wait for it.

        `fill` gets an empty folder, writes the files, and returns what to note beside them. Afterwards the entries
        used longest ago make room. With `open_ended` the files are not described, since the provider goes on writing.

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
                self.drop(key.digest)  # what is there cannot be used
                _renamed(part, self.root / key.digest)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        self.evict(keep=key.digest)
        made = read_entry(self.root / key.digest)
        if made is None:
            raise OSError(f"the entry {key.digest} vanished from {self.root} as it was made")
        return made

    def entries(self) -> list[Entry]:
        """Return every entry that has a usable manifest, the one used last first; files are not looked at."""
        found = [read_entry(folder) for folder in self._folders()]
        return sorted((entry for entry in found if entry is not None), key=lambda entry: -entry.used_s)

    def drop(self, digest: str) -> bool:
        """Delete an entry and return whether it is gone; one that Windows keeps open stays for the next time."""
        import shutil
        import uuid

        folder = self.root / digest
        trash = self.root / f"{_TRASH}{uuid.uuid4().hex}"
        try:
            folder.rename(trash)  # atomic: nobody finds half an entry
        except FileNotFoundError:
            return True
        except OSError as err:
            _log().info("the compile cache keeps entry %s, which is in use: %s", digest, err)
            return False
        shutil.rmtree(trash, ignore_errors=True)
        return True

    def evict(self, keep: str = "") -> list[str]:
        """Delete the entries used longest ago until the limit holds, and what dead processes left; return digests."""
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

        What was noted of packages and weights files goes as well, and is not counted.
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
        """Delete what dead processes left: trash, and parts of keys that nobody makes now."""
        import shutil

        import filelock

        with contextlib.suppress(OSError):
            for path in list(self.root.iterdir()):
                if path.name.startswith(_TRASH):
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name.startswith(_PART):
                    owner = path.name[len(_PART) :].partition("-")[0]
                    if owner == digest:  # its lock is ours
                        shutil.rmtree(path, ignore_errors=True)
                        continue
                    with contextlib.suppress(filelock.Timeout), self._lock(owner, timeout_s=0):
                        shutil.rmtree(path, ignore_errors=True)


def _log() -> logging.Logger:
    import logging  # a start from the cache has nothing to tell

    return logging.getLogger("rlx_ort.cache")


def _renamed(source: Path, target: Path) -> None:
    """Rename a folder, and try again for a moment where another program has a file of it open.

    Raises:
        OSError: it stays impossible.
    """
    for attempt in range(_RETRIES):
        try:
            os.replace(source, target)  # noqa: PTH105  # the name by which tests make it fail as Windows does
            return
        except PermissionError:
            if attempt + 1 == _RETRIES:
                raise
            time.sleep(_RETRY_S * 2**attempt)


def default_store() -> CompileStore:
    """Return the store of this user, in the folder `compiled` of the cache; see `settings`."""
    return CompileStore(cache_root() / "compiled")
