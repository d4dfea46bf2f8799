"""Seeded mutations of JSON documents and files: hostile values, entries removed, doubled, nested, bytes changed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["changed_json", "mutated_bytes", "mutated_json", "nested"]

_HOSTILE: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 2**64, 10**40, 1e308, float("inf"), float("nan"), "", "\0", "é", "x" * 5000),
    *("\ud800", 10**4000),
    *([], {}, [[]], [None], {"": None}, [-1], ["x"], {"$graph": {}}, {"$tensor": {}}),
)


def mutated_json(document: Any, number: int) -> bytes:
    """Return a mutated text of a document, the same for the same number; some are deep, some have bytes changed."""
    source = random.Random(number)  # reproducible, not secret
    if number % 8 == 7:
        return mutated_bytes(json.dumps(document).encode(), source)
    changed = changed_json(document, source)
    if number % 8 < 6:
        return json.dumps(changed).encode()
    holder, key = source.choice(list(_places(changed)) or [([None], 0)])
    holder[key] = "@"
    before, after = source.choice(_BRACKETS)
    depth = source.choice((60, 150, 199, 320, 500, 990, 20_000))
    return json.dumps(changed).replace('"@"', before * depth + "1" + after * depth).encode()


def changed_json(document: Any, source: random.Random, more: Sequence[Any] = ()) -> Any:
    """Return a document with one to three changes; `more` are values that are hostile to its reader."""
    changed = copy.deepcopy(document)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        _change(changed, source, (*_HOSTILE, *more))
    return changed


_TOKENS = (
    b"PK\3\4", b"PK\1\2", b"PK\5\6", b"PK\6\6", b"PK\6\7", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff", b"..", b"/",
    b"\\", b"[" * 3000, b'{"a":' * 2000, b"NaN", b"1" * 5000, b"\x80",
)  # fmt: skip
_BRACKETS = (
    ("[", "]"), ('{"a":', "}"), ('{"$sequence":', "}"), ('{"$map":{"a":', "}}"), ('{"$map_type":["i64",', "]}"),
)  # fmt: skip


def nested(depth: int) -> list[Any]:
    """Return a list in a list, `depth` times."""
    deep: list[Any] = []
    for _ in range(depth - 1):
        deep = [deep]
    return deep


def mutated_bytes(data: bytes, source: random.Random) -> bytes:
    """Return bytes with a few changes: bits, cuts, repeats, and tokens that mean something to a reader."""
    made = bytearray(data)
    for _ in range(source.choice([1, 1, 1, 2, 5])):
        # headers, directory and the end are where a reader looks, and they are short: half of the changes go there
        near = source.choice([source.randrange(len(made) + 1), max(len(made) - source.randrange(900), 0)])
        end = min(near + source.choice([1, 4, 16, 200]), len(made))
        action = source.randrange(6)
        if action == 0 and near < len(made):
            made[near] ^= 1 << source.randrange(8)
        elif action == 1:
            made[near:near] = source.choice(_TOKENS)
        elif action == 2:
            token = source.choice(_TOKENS)[:64]
            made[near : near + len(token)] = token
        elif action == 3:
            del made[near:end]
        elif action == 4:
            made[near:near] = made[near:end]
        else:
            made[near:end] = source.randbytes(end - near)
    return bytes(made)


def _change(document: Any, source: random.Random, hostile: Sequence[Any]) -> None:
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
            holder[key] = copy.deepcopy(source.choice(hostile))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield value, key
        yield from _places(item)
