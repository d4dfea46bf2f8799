"""`CacheKey`: everything a compiled model depends on, by name, so that a miss can be explained."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SCHEMA", "CacheKey", "Difference", "differences"]

SCHEMA = "1"
"""Part of every key; grows when the layout of an entry or the meaning of a part changes."""


class CacheKey(NamedTuple):
    """The parts of a key: name -> text. Two keys are the same entry exactly when all their parts are equal."""

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """The entry's name: 32 hexadecimal digits of a SHA-256 over all parts."""
        found = hashlib.sha256(f"schema\0{SCHEMA}\0".encode())
        for name, value in sorted(self.parts.items()):
            found.update(f"{len(name)}:{name}{len(value)}:{value}".encode())
        return found.hexdigest()[:32]


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
