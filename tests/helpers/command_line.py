"""Calling `rlx-ort` from a test."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["Cli", "Outcome"]


@dataclass(frozen=True)
class Outcome:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document that stdout must be."""
        parsed = json.loads(self.out)
        assert isinstance(parsed, dict), self.out
        return parsed

    def fails(self, code: int, *words: str) -> None:
        """Check the exit code, and that stderr has some words."""
        assert self.code == code, self.err
        assert [word for word in words if word not in self.err] == [], self.err


Cli: TypeAlias = Callable[..., Outcome]
"""A function that runs `rlx-ort` with some arguments."""
