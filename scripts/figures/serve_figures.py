"""Serving: the overhead of a request over a run, and what batching gains; see `scripts/serve_figures.py`."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from serve_figures import Report, batching, overhead, save_models

from figures.record import Figure, scaled


def measure() -> Iterator[Figure]:
    """Yield the figures; gains are inverted, since a target is the most that a figure may be."""
    report = Report(quiet=True)
    settings = argparse.Namespace(gpu=False, models="product,encoder", seconds=2.0, rounds=scaled(3))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tensors = save_models(folder, 4, 512, 8)
        overhead(report, folder, tensors, scaled(8))
        batching(report, folder, tensors, ["cpu"], settings)
    for row in report.rows:
        sign, _, limit = row["target"].partition(" ")
        name, value, unit = row["figure"], row["value"], row["unit"] or "of it"
        if sign == ">=":
            yield Figure(f"{name}, inverted", 1 / value, unit, 1 / float(limit), row["detail"])
        else:
            yield Figure(name, value, unit, float(limit) if limit else None, row["detail"])
