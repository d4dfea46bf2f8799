"""What the tests know of each device: how exact its results are, and which tests its engine is known to fail.

One TOML file a device kind, in `tests/data/devices`. `[bounds]` has the largest relative error of its results by
dtype. Each `[[known_failures]]` has a `reason` with a link or a reproduction, and `tests`: test ids, in which `*`
stands for any text. A test that is listed must fail, one that is not listed must pass. `crashes = true` is for tests
that end the process, which are not run. `package = "NAME"` limits an entry to where that package is installed, and
`without = "FLAG"` to Linux on processors that lack a feature, as /proc/cpuinfo names it.
`cause` says whose fault it is, by default the engine's. `tests/data/wine.toml` lists in the same way what fails under
Wine on any device, each with a `reproduction`.

`late_refusals` is the number of tests that a device may refuse when a session is opened, because its capability cannot
be known before. They fail in no other way: nothing was computed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx_ort import Device, DType

__all__ = ["FOLDER", "UNDER_WINE", "KnownFailure", "bound", "known_failure", "known_failures", "late_refusals"]

FOLDER = Path(__file__).parents[1] / "data" / "devices"
UNDER_WINE = sys.platform == "win32" and hasattr(ctypes.WinDLL("ntdll"), "wine_get_version")


@dataclass(frozen=True)
class KnownFailure:
    """Tests that fail on a device because of its engine."""

    reason: str
    tests: tuple[str, ...]
    crashes: bool = False
    package: str = ""
    without: str = ""
    cause: str = "engine"
    reproduction: str = ""

    @property
    def applies(self) -> bool:
        """Whether the package it is limited to is installed, and the processor lacks the feature."""
        if self.without and self.without in _processor_features():
            return False
        try:
            return not self.package or bool(importlib.metadata.version(self.package))
        except importlib.metadata.PackageNotFoundError:
            return False

    def lists(self, test_id: str) -> bool:
        """Return whether a test is one of them."""
        return any(re.fullmatch(".*".join(map(re.escape, name.split("*"))), test_id) for name in self.tests)


def bound(device: Device, dtype: DType = DType.F32) -> float:
    """Return the largest relative error of the device's results in a dtype, 0 where it has no such results."""
    facts = _facts(device.kind)
    if not facts:
        raise FileNotFoundError(f"{FOLDER / device.kind}.toml is missing: it holds the bounds of {device.display}")
    bounds: dict[str, float] = facts["bounds"]
    return bounds.get(dtype.value, 0.0)


def known_failures(kind: str) -> Iterator[KnownFailure]:
    """Yield the known failures of a device kind; there are none of a kind without a file."""
    for entry in _facts(kind).get("known_failures", ()):
        yield KnownFailure(**{**entry, "tests": tuple(entry["tests"])})


def known_failure(kind: str, test_id: str) -> KnownFailure | None:
    """Return why a test is known to fail on a device kind here, or None."""
    return next((entry for entry in known_failures(kind) if entry.lists(test_id) and entry.applies), None)


def late_refusals(kind: str) -> int:
    """Return how many tests a device kind may refuse when the session is opened, and not by its capability before."""
    return int(_facts(kind).get("late_refusals", 0))


@functools.cache
def _processor_features() -> frozenset[str]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return frozenset(word for line in lines if line.startswith("flags") for word in line.split())


@functools.cache
def _facts(kind: str) -> dict[str, Any]:
    path = (FOLDER.parent if kind == "wine" else FOLDER) / f"{kind}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
