"""Seeded mutations of JSON documents: values replaced by hostile ones, entries removed, doubled, or nested deeply."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["mutated_json"]

_HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, 1e308, float("inf"), float("nan"), "", "\0", "é", "x" * 5000),
    *([], {}, [[]], [None], {"": None}, [-1], ["x"], {"$graph": {}}, {"$tensor": {}}),
)


def mutated_json(document: Any, seed: int, count: int) -> Iterator[str]:
    """Yield `count` mutated texts of a document, the same for the same seed."""
    source = random.Random(seed)  # reproducible, not secret
    for _ in range(count):
        changed = copy.deepcopy(document)
        for _ in range(source.choice((1, 1, 1, 2, 3))):
            _change(changed, source)
        yield json.dumps(changed)


def _change(document: Any, source: random.Random) -> None:
    places = list(_places(document))
    if not places:
        return
    holder, key = source.choice(places)
    match source.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        case 2:
            deep: Any = holder[key]
            for _ in range(source.choice((2, 200))):
                deep = [deep]
            holder[key] = deep
        case 3:
            other, place = source.choice(places)
            holder[key] = copy.deepcopy(other[place])
        case _:
            holder[key] = copy.deepcopy(source.choice(_HOSTILE))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
