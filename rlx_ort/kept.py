"""Records on disk that save work of a later run: a JSON object in a file, with the version of its form.

A record that is missing, damaged or of another version counts as none, and one that cannot be written is not kept:
either costs the work again, is logged, and is no error. Starts from the compile cache wait for this import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlx_ort.storage import parse_json, write_atomic

if TYPE_CHECKING:
    import logging

T = TypeVar("T")


def digest_of(facts: object) -> str:
    """Return 32 hexadecimal digits for the facts that a record is valid for, by their `repr`."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def read(path: Path, schema: int | str, convert: Callable[[dict[str, Any]], T]) -> T | None:
    """Return a record as `convert` reads it, or None; it may fail as reading an unknown document does."""
    try:
        document = parse_json(path.read_bytes())
        return convert(document) if document["schema"] == schema else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        _log().info("%s is damaged and made again: %r", path, err)
        return None


def write(path: Path, schema: int | str, document: Mapping[str, Any]) -> bool:
    """Write a record whole or not at all, its folder too, and return whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"schema": schema, **document}).encode())
    except OSError as err:
        _log().warning("%s cannot be kept: %s", path, err)
        return False
    return True


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a record among processes; gives whether another process held it.

    Where no lock can be had, because the folder is read-only or the other process does not end, there is a warning and
    none is held: the same work twice, or a lost record, is better than no answer.
    """
    import filelock

    with contextlib.ExitStack() as stack:
        waited = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(f"{path}.lock", timeout=timeout_s)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                waited = True
                lock.acquire()
            stack.callback(lock.release)
        except (OSError, NotImplementedError, filelock.Timeout) as err:
            _log().warning("%s is used without a lock: %s", path, err)
        yield waited


def _log() -> logging.Logger:
    import logging  # takes 4 ms, which a start does without

    return logging.getLogger(__name__)
