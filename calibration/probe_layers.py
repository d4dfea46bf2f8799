"""Convolutions, products of two computed values, fused attention, and recurrent layers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx_ort.calibration import graphs
from rlx_ort.calibration.series import Series, computing

__all__ = ["CONVS", "attention", "batched", "conv", "recurrent", "turned"]

CONVS = {"conv3x3": (3, False), "conv1x1": (1, False), "depthwise": (3, True)}
"""Probe -> side of the kernel, and whether each channel has its own."""

_FEW_CHANNELS = 64


def conv(probe: str, channels: int, pictures: tuple[tuple[int, int], ...], *, on_cpu: bool = False) -> Series:
    """Return the series of a convolution over so many pictures of a side each.

    A CPU lays the channels out in blocks before the chain and back after it, as it does once in a whole network: of 1 x
    1 over 16 channels of 784 pixels, two cores took 17.5 us as a fourth of a chain of four, 11.2 as a sixteenth of one
    of 16, and 9.1 us for each that makes it longer. Of many channels that is a small part, and their weights take long
    to open. Other devices search for the best algorithm of each node at each size: no more nodes than it takes.
    """
    kernel, depthwise = CONVS[probe]
    each = 2.0 * kernel * kernel * channels * (1 if depthwise else channels)
    points = tuple(
        computing((count, channels, side, side), (count * side * side, channels), each * count * side * side)
        for count, side in pictures
    )
    links = 16 if on_cpu and channels <= _FEW_CHANNELS else 4
    return Series(
        probe, lambda count: graphs.conv(channels, kernel, count, depthwise=depthwise), points, links, trips=1
    )


def batched(shapes: tuple[tuple[int, int, int], ...]) -> Series:
    """Return the series of products of computed values, (batch, s, d) by (d, s) and (s, s) by (s, d)."""
    points = tuple(computing(shape, shape, 2.0 * math.prod(shape) * shape[1]) for shape in shapes)
    return Series("bmm", graphs.bmm, points, 4, feeds=_shaped)


def turned(shapes: tuple[tuple[int, int, int], ...]) -> Series:
    """Return the series of the same with a transpose before each product, to be measured after `batched`."""
    points = tuple(computing(shape, shape, 2.0 * math.prod(shape) * shape[1]) for shape in shapes)
    return Series("turned", lambda links: graphs.bmm(links, turned=True), points, 4, feeds=_small, companion="bmm")


def attention(shapes: tuple[tuple[int, int], ...]) -> Series:
    """Return the series of fused attention with 12 heads of 64 over (batch, sequence)."""
    heads, depth = 12, 64
    points = tuple(
        computing((b, s, heads * depth), (b * heads, s, depth), 4.0 * b * heads * s * s * depth) for b, s in shapes
    )
    return Series("attention", lambda links: graphs.attention(heads, depth, links), points, 4)


def recurrent(hidden: int, shapes: tuple[tuple[int, int], ...]) -> Series:
    """Return the series of an LSTM layer over (steps, batch); a link has a view beside it."""
    points = tuple(computing((t, b, hidden), (t, b, hidden), 16.0 * t * b * hidden * hidden) for t, b in shapes)
    return Series("lstm", lambda links: graphs.lstm(hidden, links), points, 2, companion="dispatch", stretched=False)


def _shaped(shape: tuple[int, ...]) -> dict[str, Any]:
    batch, length, depth = shape
    return _small(shape) | {"key_shape": np.array([batch, depth, length], np.int64)}


def _small(shape: tuple[int, ...]) -> dict[str, Any]:
    """Return a first value of which products of any number stay what they are."""
    return {"seed": np.full(1, 1.0 / math.sqrt(shape[1] * shape[2]), np.float32)}
