"""JSON read strictly: one meaning for every reader, and entries taken out with their type checked.

No duplicate keys (readers differ in which one counts), no NaN, no numbers that only some readers keep exact, and no
nesting that ends a recursive reader. Errors name their place.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from rlx_ort.errors import RlxError, near_names
from rlx_ort.storage import parse_json

T = TypeVar("T")

_LARGEST = (1 << 63) - 1
_NAMES: Mapping[type, str] = {
    str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "a JSON object"
}  # fmt: skip


def parse(data: bytes, source: str, error: type[RlxError]) -> Fields:
    """Return the JSON object in a file; `source` names it in messages, which are of the class `error`.

    Raises:
        RlxError: the bytes are no strict JSON object.
    """
    try:
        # one pass over the text; a duplicate key, a constant such as NaN or a number beyond float raises ValueError
        document = parse_json(data, object_pairs_hook=unique_keys, parse_constant=_refused, parse_float=_finite)
    except ValueError as err:
        raise error(f"{source} is not JSON that every reader reads alike: {err}") from err
    return Fields(document, source, error)


class Fields:
    """A JSON object whose entries are taken out with their type checked; `where` is its place in messages.

    An entry is missing if it is not there and no default is given.

    Raises:
        RlxError: it is no object; in methods, an entry is missing or of another type.
    """

    def __init__(self, item: Any, where: str, error: type[RlxError], *, inside: bool = False) -> None:
        self.where, self.error = where, error
        self._join = "." if inside else ": "
        self.raw: Mapping[str, Any] = (
            item if isinstance(item, dict) else self.fail(f"is not a JSON object: {item!r:.60}")
        )

    def at(self, key: str) -> str:
        """Return the place of an entry in messages."""
        return f"{self.where}{self._join}{key}"

    def fail(self, problem: str, key: str | None = None) -> NoReturn:
        """Raise the error about this object or one of its entries."""
        raise self.error(f"{self.where if key is None else self.at(key)} {problem}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._get(key, str, default)

    def name(self, key: str, default: str | None = None) -> str:
        """Return a string that is not empty."""
        return self.text(key, default) or self.fail("is an empty text", key)

    def parsed(self, key: str, convert: Callable[[str], T], item: object = None) -> T:
        """Return the value that a string, or one item of a list of them, stands for."""
        text = self.text(key) if item is None else item
        if not isinstance(text, str):
            self.fail(f"has {text!r:.60}, not text", key)
        try:
            return convert(text)
        except (RlxError, ValueError) as err:
            raise self.error(f"{self.at(key)}: {err}") from err

    def number(self, key: str) -> float:
        """Return a number of either kind as a float."""
        value = self._get(key, object, None)
        # Whole numbers have no end in JSON; this comparison is exact, where `float` of a larger one overflows.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
            self.fail(f"is {value!r:.60}, not a number", key)
        return float(value)

    def count(self, key: str, default: int | None = None, *, least: int = 0, most: int = _LARGEST) -> int:
        """Return a whole number in a range, by default from 0 to the largest signed 64-bit integer."""
        value = self._get(key, int, default)
        if value < least:
            self.fail(f"is {value!r:.60}, not a whole number of at least {least}", key)
        return value if value <= most else self.fail(f"is above {most}", key)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        return self._get(key, bool, default)

    def items(self, key: str) -> list[Any]:
        """Return a list, empty when there is none."""
        return self._get(key, list, [])

    def fields(self, key: str) -> Fields:
        """Return an object, empty when there is none."""
        return self._inner(self._get(key, dict, {}), key)

    def entries(self, key: str) -> dict[str, Fields]:
        """Return an object of objects."""
        inner = self.fields(key)
        return {name: inner._inner(item, name) for name, item in inner.raw.items()}

    def objects(self, key: str) -> list[Fields]:
        """Return a list of objects."""
        return [self._inner(item, key) for item in self.items(key)]

    def each(self, read: Callable[[Fields, str], T]) -> dict[str, T]:
        """Return every entry, taken out by one of the methods above."""
        return {key: read(self, key) for key in self.raw}

    def only(self, *known: str) -> None:
        """Refuse keys that are not known, which a newer or forged writer left."""
        strangers = sorted(set(self.raw).difference(known))
        if strangers:
            self.fail(f"is not known; known are {', '.join(sorted(known))}", strangers[0])

    def _inner(self, item: Any, key: str) -> Fields:
        return Fields(item, self.at(key), self.error, inside=True)

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        if key not in self.raw and default is None:
            self.fail(f"is missing; {near_names(key, self.raw)}", key)
        value = self.raw.get(key, default)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(f"is {value!r:.60}, not {_NAMES[kind]}", key)
        return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs, for `json.loads`.

    Raises:
        ValueError: a key occurs twice.
    """
    document = dict(pairs)
    if len(document) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return document


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value
