"""The cost of converting 3 GiB: its time beside that of copying the file, and the memory it takes at most.

The speed is measured with and without the verification, which reads both models once more and runs them. The peak is
that of the resident set, so mapped pages of weight files count, which the system may drop at any time; the peak of the
anonymous part, which it cannot drop, is printed beside it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from figures.graphs import chain
from figures.record import Figure, fresh, peak_bytes, sampled, seconds_of
from rlx_ort.conversion.convert import ConvertOptions, convert
from rlx_ort.converters.files import save_onnx
from rlx_ort.providers.hardware import private_bytes

LAYERS, WIDTH = 192, 2048  # 192 matrices of 16 MiB: 3 GiB
REPEATS = 3
MOST_TIMES, MOST_MEMORY = 2, 1.3  # half the speed of a copy


def measure() -> Iterator[Figure]:
    """Yield time over copy time and peak memory over size, for another format and for another precision."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fresh(make, str(folder / "model.onnx"))
        for title, suffix, precision in (("to JSON and safetensors", ".json", ""), ("to ONNX in f16", ".onnx", "f16")):
            for verify in (False, True):
                yield from _figures(folder, title, str(folder / f"converted{suffix}"), precision, verify)


def make(path: str) -> None:
    """Save the model; each matrix differs, as ONNX Runtime keeps equal packed weights once."""
    data = np.random.default_rng(0).standard_normal(WIDTH * WIDTH + LAYERS) / WIDTH**0.5
    save_onnx(chain(LAYERS, WIDTH, data.astype(np.float32)), path, external_data=True)


def converted(source: str, target: str, verify: bool, precision: str) -> list[float]:
    """Convert, and return the seconds and the peaks of the resident set and of its anonymous part."""
    options = ConvertOptions(verify=verify, precision=precision or None)
    with sampled(private_bytes, 0.01) as anonymous:
        seconds = seconds_of(lambda: convert(source, target, options))
    return [seconds, peak_bytes(), max(anonymous)]


def _figures(folder: Path, title: str, target: str, precision: str, verify: bool) -> Iterator[Figure]:
    size = LAYERS * WIDTH * WIDTH * 4
    rows = []
    for _ in range(REPEATS):
        copied = _copy_seconds(folder / "model.onnx.data", folder / "copy")
        row = fresh(converted, str(folder / "model.onnx"), target, verify, precision)
        rows.append([row[0] / copied, copied, *row])
        for file in folder.glob("converted*"):
            file.unlink()
    ratio, copied, seconds, peak, anonymous = (statistics.median(column) for column in zip(*rows, strict=True))
    title = f"3 GiB of f32 ONNX {title}, {'verified' if verify else 'not verified'}"
    detail = f"{seconds:.2f} s against {copied:.2f} s for the copy"
    yield Figure(f"{title}: time over a copy", ratio, "times", None if verify else MOST_TIMES, detail)
    detail = f"peak resident set {peak / 2**30:.2f} GiB, of it anonymous {anonymous / 2**30:.2f} GiB"
    yield Figure(f"{title}: peak memory over the model's size", peak / size, "times", MOST_MEMORY, detail)


def _copy_seconds(source: Path, target: Path) -> float:
    """Return the time of a copy in pieces of 8 MiB that ends when the data is on the disk."""

    def copy() -> None:
        with source.open("rb") as reader, target.open("wb") as writer:
            while piece := reader.read(8 << 20):
                writer.write(piece)
            writer.flush()
            os.fsync(writer.fileno())

    seconds = seconds_of(copy)
    target.unlink()
    return seconds
