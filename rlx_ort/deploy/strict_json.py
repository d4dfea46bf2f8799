"""JSON as a package may hold it: one meaning for every reader, and errors with their place.

No duplicate keys (readers differ in which one counts), no NaN, no numbers that only some readers keep exact, and no
nesting that ends a recursive reader.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from rlx_ort.errors import IntegrityError

__all__ = ["Fields", "dump", "parse"]

T = TypeVar("T")


def parse(data: bytes, name: str) -> Fields:
    """Return the JSON object in a file of the package.

    Raises:
        IntegrityError: the bytes are no strict JSON object.
    """
    try:
        # one pass over the text; a duplicate key, a constant such as NaN or a number beyond float raises ValueError
        document = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite
        )
    except (ValueError, RecursionError) as err:
        raise IntegrityError(f"{name} of the package is no JSON that every reader takes alike: {err}") from err
    return Fields(document, name)


def dump(document: Any) -> bytes:
    """Return the one encoding of a document that this library writes: ASCII, sorted keys, one line feed at the end."""
    return (json.dumps(document, allow_nan=False, sort_keys=True, indent=1) + "\n").encode("ascii")


class Fields:
    """A JSON object whose entries are taken out with their type checked.

    Attributes:
        raw: the decoded JSON.
        where: its place, for messages.

    Raises:
        IntegrityError: it is no object.
    """

    def __init__(self, item: Any, where: str) -> None:
        self.where = where
        self.raw: Mapping[str, Any] = item if isinstance(item, dict) else self._fail(f"an object, not {item!r:.60}")

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        return self._get(key, str, default)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of either kind as a float."""
        value = self.raw.get(key, default)
        # Whole numbers have no end in JSON; this comparison is exact, where `float` of a larger one overflows.
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
            self._fail(f"a number as {key!r}, not {value!r:.60}")
        return float(value)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number from 0 up to what a signed 64-bit integer holds."""
        value = self._get(key, int, default)
        if isinstance(value, bool) or not 0 <= value < 1 << 63:
            self._fail(f"a whole number from 0 as {key!r}, not {value!r:.60}")
        return value

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return true or false."""
        return self._get(key, bool, default)

    def items(self, key: str) -> list[Any]:
        """Return a list, empty when there is none."""
        return self._get(key, list, [])

    def texts(self, key: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None when there is none."""
        if self.raw.get(key) is None:
            return None
        found = self.items(key)
        if not all(isinstance(entry, str) for entry in found):
            self._fail(f"strings in {key!r}")
        return tuple(found)

    def fields(self, key: str) -> Fields:
        """Return an object, empty when there is none."""
        return Fields(self._get(key, dict, {}), f"{self.where}.{key}")

    def entries(self, key: str) -> dict[str, Fields]:
        """Return an object of objects."""
        inner = self.fields(key)
        return {name: Fields(item, f"{inner.where}.{name}") for name, item in inner.raw.items()}

    def only(self, *known: str) -> None:
        """Refuse keys that are not known, which a newer or forged writer left."""
        strangers = sorted(set(self.raw).difference(known))
        if strangers:
            self._fail(f"no key {strangers[0]!r}; known are {', '.join(sorted(known))}")

    def _get(self, key: str, kind: type[T], default: T | None) -> T:
        value = self.raw.get(key, default)
        if not isinstance(value, kind):
            self._fail(f"{kind.__name__} as {key!r}, not {value!r:.60}")
        return value

    def _fail(self, wanted: str) -> NoReturn:
        raise IntegrityError(f"{self.where} of the package should have {wanted}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in one object")
    return found


def _refused(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond the range of numbers")
    return value
