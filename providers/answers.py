"""What providers answered when they were asked for single nodes, kept on disk for each provider and its versions."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlx_ort.storage import cache_root, write_atomic

__all__ = ["DEVICE", "HELPED", "Answers", "answers_of"]

DEVICE, HELPED = "device", "cpu"
"""The provider takes the node; the CPU takes it instead. Any other answer is the reason of a refusal."""

_SCHEMA = 1
_LOCK_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_open: dict[Path, Answers] = {}


class Answers:
    """The answers of one provider, by the key of the question; read once, written whenever some are new.

    A file that cannot be read or written costs asking again, never an error.
    """

    def __init__(self, path: Path, scope: str) -> None:
        self._path = path
        self._scope = scope
        self._known: dict[str, str] | None = None
        self._lock = threading.Lock()

    def known(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the answers that are known to these questions."""
        with self._lock:
            if self._known is None:
                self._known = self._read()
            return {key: self._known[key] for key in keys if key in self._known}

    def keep(self, answers: Mapping[str, str]) -> None:
        """Remember answers, on disk too."""
        import filelock

        with self._lock:
            self._known = {**(self._known or {}), **answers}
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with filelock.FileLock(f"{self._path}.lock", timeout=_LOCK_TIMEOUT_S):
                    self._known = {**self._read(), **self._known}
                    document = {"schema": _SCHEMA, "scope": self._scope, "answers": self._known}
                    write_atomic(self._path, json.dumps(document).encode())
            except (OSError, filelock.Timeout, NotImplementedError) as err:
                _log.info("the answers of %s are not kept: %s", self._scope, err)

    def _read(self) -> dict[str, str]:
        try:
            document = json.loads(self._path.read_bytes())
            if document["schema"] == _SCHEMA and document["scope"] == self._scope:
                return {str(key): str(answer) for key, answer in document["answers"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
            _log.info("%s is damaged, and its questions are asked again: %s", self._path.name, err)
        return {}


def answers_of(scope: str) -> Answers:
    """Return the answers for a scope: provider, versions, hardware and the options that matter, as one text."""
    path = cache_root() / "capability" / f"{hashlib.sha256(scope.encode()).hexdigest()[:24]}.json"
    with _lock:
        return _open.setdefault(path, Answers(path, scope))
