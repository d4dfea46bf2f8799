"""Which copies of a package were read whole on this machine; those that start from the compile cache are, too.

A start from the cache reads no weights, so it would never find them damaged. A copy is known by its path and the stamps
of its files, which a start compares. One that is not known is hashed once, in the background after its first answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlx_ort import kept
from rlx_ort.deploy.container import open_container, read_index
from rlx_ort.errors import IntegrityError, PackageError
from rlx_ort.storage import cache_root, stamp_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rlx_ort.deploy.container import Container
    from rlx_ort.providers.engine.compiled.starts import SavedSession

_SCHEMA = 1
_MOST_COPIES = 64
_AT_EXIT_BYTES = 256 << 20  # a copy up to this size is hashed to the end even when the program has ended


class PackageCopy:
    """A copy of a package, by the digest of its index and the state of its files when this object was made."""

    def __init__(self, container: Container, digest: str) -> None:
        self.path = container.path
        self._digest = digest
        self._size = sum(container.sizes.values())
        files = [self.path] if container.crcs else [self.path / name for name in container.sizes]
        self._stamp = hashlib.sha256(repr([*map(_stamp, files)]).encode()).hexdigest()

    def is_known(self) -> bool:
        """Return whether the copy was read whole and is as it was then; takes the time of reading a small file.

        Raises:
            IntegrityError: it was found damaged, and has not changed since.
        """
        noted = _read(self._file).get(str(self.path))
        if noted is None or noted["stamp"] != self._stamp:
            return False
        if noted["damage"]:
            raise IntegrityError(noted["damage"])
        return True

    def check(self) -> None:
        """Hash the copy, unless it is known, and keep the result.

        Raises:
            IntegrityError: it is damaged.
        """
        if not self.is_known():
            self._hash(None)

    def watch(self, quick: SavedSession) -> None:
        """Hash the copy in the background after the first run of a session, unless it is known.

        Raises:
            IntegrityError: it was found damaged.
        """
        quick.on_first_run = None if self.is_known() else self.check_in_background

    def check_in_background(self) -> threading.Thread:
        """Hash the copy in a thread; damage is logged, and later starts of the copy raise it."""
        thread = threading.Thread(target=self._watch, name="rlx_ort-copy")
        thread.start()
        return thread

    def _watch(self) -> None:
        import logging  # takes 4 ms, which a start does without

        log = logging.getLogger(__name__)

        def going_on(count: int) -> None:
            if self._size > _AT_EXIT_BYTES and not threading.main_thread().is_alive():
                raise PackageError("the program ended first")

        try:
            self._hash(going_on)
        except IntegrityError as err:
            log.warning("a package that runs from the compile cache is damaged, and is refused from now on: %s", err)
        except PackageError as err:
            log.info("%s was not read whole: %s", self.path, err)

    def _hash(self, progress: Callable[[int], object] | None) -> None:
        container = open_container(self.path)
        try:
            raw = read_index(container)
            if hashlib.sha256(raw).hexdigest() != self._digest:
                return  # another package was put in its place
            for name, entry in json.loads(raw)["files"].items():
                file, offset = container.locate(name)
                if file.sha256(offset, container.sizes[name], progress) != entry["sha256"]:
                    raise IntegrityError(
                        f"{name} of {self.path} has changed since it was packed; download the package again"
                    )
        except IntegrityError as err:
            self._keep(str(err))
            raise
        finally:
            container.close()
        self._keep("")

    @property
    def _file(self) -> Path:
        return cache_root() / "copies" / f"{self._digest}.json"

    def _keep(self, damage: str) -> None:
        copies = {path: note for path, note in _read(self._file).items() if path != str(self.path)}
        copies = dict([*copies.items()][1 - _MOST_COPIES :])
        copies[str(self.path)] = {"stamp": self._stamp, "damage": damage}
        kept.write(self._file, _SCHEMA, {"copies": copies})


def _stamp(path: Path) -> tuple[int, ...]:
    """Return the state of a file; it changes when the file is written to, replaced or copied."""
    with suppress(OSError):
        status = os.stat(path)  # noqa: PTH116  # a plain path
        return *stamp_of(status), status.st_ctime_ns
    return ()


def _read(path: Path) -> dict[str, dict[str, str]]:
    """Return path -> stamp and damage of the copies that are known; a file that cannot be used counts as none."""

    def copies_of(document: dict[str, Any]) -> dict[str, dict[str, str]]:
        copies = document["copies"].items()
        return {path: {key: str(entry[key]) for key in ("stamp", "damage")} for path, entry in copies}

    return kept.read(path, _SCHEMA, copies_of) or {}
