"""Why a session was compiled again: the parts of its key that differ from the nearest entry made before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlx_ort.errors import DeviceUnavailableError
from rlx_ort.providers.compiled.key import CacheKey, Difference, differences

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.execution.options import CompileOptions
    from rlx_ort.ir.graph import Graph
    from rlx_ort.providers.compiled.entry import Entry

__all__ = ["Explanation", "explain_entry", "explain_key", "key_of_graph"]


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


def key_of_graph(graph: Graph, device: Device, options: CompileOptions) -> CacheKey:
    """Return the key that a graph has on a device. Exports the graph and reads its weights; opens no session.

    Raises:
        DeviceUnavailableError: the device does not work here, or nothing of it is kept.
    """
    from rlx_ort.execution.session import open_slot, working_provider
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.providers.base import SessionRequest
    from rlx_ort.providers.compiled.models import session_key
    from rlx_ort.providers.compiled.store import default_store
    from rlx_ort.providers.ort_provider import OrtProvider
    from rlx_ort.providers.runtime import describe_runtime

    provider = working_provider(device)
    if not isinstance(provider, OrtProvider):
        raise DeviceUnavailableError(device, "it is not of ONNX Runtime, and nothing of it is kept")
    weights = WeightStore.for_graph(graph)
    slot = open_slot(provider, device, graph, weights, options)
    _, found = weights.snapshot(slot.exported.params, slot.exported.stored_as)
    request = SessionRequest(device, slot.exported, found, slot.options)
    recipe = provider.recipe(device, slot.options)
    return session_key(recipe, request, describe_runtime(), default_store().root)


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
