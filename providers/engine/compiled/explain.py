"""Why a session was compiled again: the parts of its key that differ from the nearest entry made before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlx_ort.providers.engine.compiled.key import CacheKey, Difference, differences

if TYPE_CHECKING:
    from rlx_ort.providers.engine.compiled.entry import Entry

__all__ = ["Explanation", "explain_entry", "explain_key"]


class Explanation(NamedTuple):
    """What the cache says of a key.

    Attributes:
        digest: the key's digest.
        entry: the entry of that key, None when it has to be compiled.
        nearest: the entry made before it that has most parts in common, None when there is none like it.
        changed: the parts in which they differ.
    """

    digest: str
    entry: Entry | None
    nearest: Entry | None
    changed: tuple[Difference, ...]


def explain_entry(entry: Entry, entries: Sequence[Entry]) -> Explanation:
    """Return why an entry was made, given those that there were."""
    older = [other for other in entries if other.created_s < entry.created_s]
    return _explained(entry.digest, entry.parts, entry, older)


def explain_key(key: CacheKey, entries: Sequence[Entry]) -> Explanation:
    """Return whether a key has an entry, and if not, what changed."""
    found = next((entry for entry in entries if entry.digest == key.digest), None)
    if found is not None:
        return explain_entry(found, entries)
    return _explained(key.digest, key.parts, None, entries)


def _explained(digest: str, parts: Mapping[str, str], entry: Entry | None, others: Sequence[Entry]) -> Explanation:
    """Find the nearest of the other entries: of the same model or weights, with the fewest parts that differ."""
    related = [
        other
        for other in others
        if any(parts.get(name) and other.parts.get(name) == parts.get(name) for name in ("model", "weights"))
    ]
    if not related:
        return Explanation(digest, entry, None, ())
    nearest = min(related, key=lambda other: (len(differences(other.parts, parts)), -other.created_s))
    return Explanation(digest, entry, nearest, differences(nearest.parts, parts))
