"""ONNX Runtime's profile has its place in a trace, whichever clock timed it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rlx_ort.ir.graph import Graph
from rlx_ort.report.trace import Phase, TracedRun


def _trace(folder: Path, clock: Callable[[], int]) -> tuple[Phase, int]:
    """Return the phase in which a session was opened, and where the trace has an event in the middle of it."""
    traced = TracedRun()
    traced.exported = cast("Any", SimpleNamespace(nodes=()))
    with traced.phase("choose"):
        time.sleep(0.01)
    with traced.phase("open"):
        time.sleep(0.005)
        reading_ns = clock()
        time.sleep(0.01)
    profile = folder / "profile.json"
    profile.write_text(json.dumps([{"ph": "X", "cat": "Session", "name": "load", "ts": 2000, "dur": 1}]), "utf-8")
    traced.read_profile(Graph("g"), profile, reading_ns)
    [(_, start_ns, _)] = traced.session
    return traced.phases[-1], start_ns


@pytest.mark.parametrize("clock", [time.time_ns, time.perf_counter_ns, time.monotonic_ns])
def test_a_profile_is_placed_by_the_clock_that_timed_it(tmp_path: Path, clock: Callable[[], int]) -> None:
    """The system's clock on Linux, a steady one on Windows and macOS."""
    opened, start_ns = _trace(tmp_path, clock)
    assert opened.start_ns + 7e6 <= start_ns <= opened.start_ns + opened.ns


def test_a_profile_of_an_unknown_clock_begins_with_its_session(tmp_path: Path) -> None:
    """The error is then below the time that the session took to open, and not the age of the clock."""
    opened, start_ns = _trace(tmp_path, lambda: 12345)
    assert start_ns == opened.start_ns + 2_000_000
