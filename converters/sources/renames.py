"""Renames: from the names of tensors in a weight file to those of weights in a model."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx_ort.errors import ConversionError

__all__ = ["Rename", "Renames", "load_renames"]


@dataclass(frozen=True, slots=True)
class Rename:
    r"""The name of a tensor in the model, and how it is stored there.

    Attributes:
        to: its name in the model; empty to leave it out. Of a pattern: a template in which `\1` or `\g<name>` stand
            for groups.
        transpose: whether its two axes are swapped: PyTorch has the matrix of a layer as `(outputs, inputs)`, a
            MatMul wants `(inputs, outputs)`.
    """

    to: str
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Renames:
    """Names and patterns, tried in this order; a tensor that none of them matches keeps its name.

    Attributes:
        names: name in the file -> rename.
        patterns: regular expressions, each for a whole name, the first that fits decides.
    """

    names: Mapping[str, Rename] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], Rename], ...] = ()

    @classmethod
    def of(
        cls,
        names: Mapping[str, str | Rename] | None = None,
        patterns: Iterable[tuple[str, str | Rename]] = (),
    ) -> Renames:
        """Return renames from plain texts.

        Raises:
            ConversionError: a pattern is no regular expression, or its template names a group that it lacks.
        """
        known = {name: _rename(to) for name, to in (names or {}).items()}
        return cls(known, tuple(_pattern(text, _rename(to)) for text, to in patterns))

    def __call__(self, name: str) -> Rename:
        """Return the rename of a tensor."""
        if name in self.names:
            return self.names[name]
        for pattern, rename in self.patterns:
            if match := pattern.fullmatch(name):
                return Rename(match.expand(rename.to), rename.transpose)
        return Rename(name)


def load_renames(path: str | os.PathLike[str]) -> Renames:
    r"""Read renames from a JSON or TOML file; the content decides which.

    Either the file maps names to names, or it has the entries `names` and `patterns`:

        [names]
        "lm_head.weight" = { to = "head", transpose = true }
        "rope.freqs" = ""  # left out

        [[patterns]]
        match = 'layers\.(\d+)\.(.*)'
        to = 'h.\1.\2'

    Raises:
        ConversionError: the file cannot be read, or is no such file.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
        document: Any = json.loads(text) if text.lstrip()[:1] == "{" else tomllib.loads(text)
    except OSError as err:
        raise ConversionError(f"{file} cannot be read: {err}") from err
    except (ValueError, RecursionError) as err:
        raise ConversionError(f"{file} is no rename file, which is JSON or TOML: {err}") from err
    try:
        grouped = set(document) <= {"names", "patterns"} and isinstance(document.get("names", {}), dict)
        names = document.get("names", {}) if grouped else document
        patterns = document.get("patterns", []) if grouped else []
        return Renames.of(
            {name: _entry(entry) for name, entry in names.items()},
            [(_text(item["match"]), _entry({k: v for k, v in item.items() if k != "match"})) for item in patterns],
        )
    except (TypeError, KeyError, AttributeError, ConversionError) as err:
        reason = f"it lacks {err}" if isinstance(err, KeyError) else err
        raise ConversionError(f"{file} is no rename file: {reason}") from err


def _rename(to: str | Rename) -> Rename:
    return to if isinstance(to, Rename) else Rename(to)


def _entry(entry: Any) -> Rename:
    match entry:
        case None | False:
            return Rename("")
        case str():
            return Rename(entry)
        case {"to": str(to), **rest} if set(rest) <= {"transpose"}:
            transpose = rest.get("transpose", False)
            if isinstance(transpose, bool):
                return Rename(to, transpose)
    raise TypeError(f'{entry!r} is neither a name nor {{"to": name, "transpose": true or false}}')


def _text(item: Any) -> str:
    if not isinstance(item, str):
        raise TypeError(f"{item!r} is no pattern")
    return item


def _pattern(text: str, rename: Rename) -> tuple[re.Pattern[str], Rename]:
    try:
        pattern = re.compile(text)
        # The template is tried on an expression that has the same groups and matches anything.
        re.compile(f"(?:{text})|").fullmatch("").expand(rename.to)  # type: ignore[union-attr]  # it matches
    except (re.error, IndexError) as err:
        raise ConversionError(f"pattern {text!r} -> {rename.to!r}: {err}") from err
    return pattern, rename
