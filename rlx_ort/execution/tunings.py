"""The variants that `tune` found to be the fastest, kept on disk and taken when the same graph is opened again.

A record holds for one graph with its bound sizes, one device by its hardware, driver and versions, and one set of the
caller's options; without a record, options stay as they are. Packages carry records, see `carried`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort import kept
from rlx_ort.device import Device
from rlx_ort.options.variant import ALLOWED, Variant, variants_of
from rlx_ort.storage import cache_root

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.base import Provider

_log = logging.getLogger(__name__)
_SCHEMA = 1
_FOLDER = "tunings"
_NOT_OF_THE_KEY: Mapping[str, Any] = {
    "cache": None,
    "dims": {},
    "placement": None,
    "profile_prefix": None,
    "sized_sessions": 0,
}
"""Options that say nothing about how fast a run is; sizes are in the model."""

_carried: dict[str, Mapping[str, Any]] = {}
_lock = threading.Lock()


def key_of(provider: Provider, device: Device, model: ExportedModel, options: CompileOptions) -> str | None:
    """Return the key of a record, None for a provider that cannot name its hardware; reads the whole model."""
    scope = provider.question_scope(device)
    if scope is None:
        return None
    plain = options.with_(**_NOT_OF_THE_KEY, tuned=True)
    return kept.digest_of((_SCHEMA, scope, plain.key, model.model.SerializeToString(deterministic=True)))


def keep(key: str, document: Mapping[str, Any]) -> bool:
    """Write the record of a tuning, whose `variant` is taken from now on; returns whether that was possible."""
    return kept.write(_path(key), _SCHEMA, document)


def carry(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Take the records of a package, by their keys, for the rest of the process; those of the machine come first."""
    with _lock:
        _carried.update(records)


def record_of(key: str) -> Mapping[str, Any] | None:
    """Return a record, None if there is none or it is damaged."""
    return kept.read(_path(key), _SCHEMA, lambda document: document) or _carried.get(key)


def of_graph(graph: Graph) -> dict[str, Mapping[str, Any]]:
    """Return the records of a graph on this machine by their keys: of any device, sizes and options."""
    digest = digest_of(graph)
    paths = sorted((cache_root() / _FOLDER).glob("*.json"))
    records = {path.stem: record for path in paths if (record := record_of(path.stem)) is not None}
    return {key: record for key, record in records.items() if record.get("graph") == digest}


def sizes_of(graph: Graph, device: Device) -> list[Mapping[str, int]]:
    """Return the sizes for which a faster variant of a graph is kept or carried for a device, with any options."""
    if not (_carried or (cache_root() / _FOLDER).is_dir()):
        return []
    digest, records = digest_of(graph), (*_carried.values(), *of_graph(graph).values())
    mine = [each for each in records if (each.get("graph"), each.get("device")) == (digest, device.label)]
    return [each["sizes"] for each in mine if each.get("variant") and isinstance(each.get("sizes"), Mapping)]


def digest_of(graph: Graph) -> str:
    """Return the digest of a graph without the data of its weights."""
    from rlx_ort.ir.serde import to_json

    return kept.digest_of(to_json(graph)[0])


def tuned(provider: Provider, device: Device, model: ExportedModel, options: CompileOptions) -> Variant | None:
    """Return the fastest variant of a model that is to be opened with these options, None if it was never tuned."""
    if not options.tuned or not (_carried or (cache_root() / _FOLDER).is_dir()):
        return None
    key = key_of(provider, device, model, options)
    record = None if key is None else record_of(key)
    if record is None:
        return None
    try:
        variant = Variant(dict(record["variant"]))
        offered = {each for step in steps(provider, device, options) for each in step.entries}
        if strange := variant.entries - offered:
            raise ValueError(f"{provider.name} does not offer {sorted(map(str, strange))}")
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        _log.warning("the tuning %s of %s is left out: %s", key, device.label, err)
        return None
    return variant if variant.changes else None


def steps(provider: Provider, device: Device, options: CompileOptions) -> tuple[Variant, ...]:
    """Return the steps that `tune` may take: the provider's variants, then the precisions that the options allow.

    Records are held to them, since a package that brings one may come from anywhere.
    """
    allowed = [each.value for each in provider.precisions if each in ALLOWED[options.precision]]
    exact = variants_of("precision", ["f32"]) if allowed else ()
    return (*provider.variants(device, options), *variants_of("precision", allowed), *exact)


def _path(key: str) -> Path:
    return cache_root() / _FOLDER / f"{key}.json"
