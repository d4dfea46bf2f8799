"""The predicted time of a graph on a device as a function of one named dim, such as the batch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping

from rlx_ort.converters.collector import paused_collector
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.selection.predict import named_dims, predicted_ns

__all__ = ["BatchCurve", "batch_curve", "curve_of"]

_OFF = 0.01  # what a line may be off in its middle, as a share; at a bend it is then off by twice that at most
_HALVINGS = 4


class BatchCurve:
    """Exact predictions at powers of two, and lines between them that are straight in the logarithms of both.

    Where a line would deviate by over 1 %, its middle is predicted as well. Reading a time takes a microsecond; the
    first one between two powers of two takes three full predictions, more at a bend. May be used from several threads.

    Args:
        predict: a size -> the predicted time of a run in ns, or None where there is none.
    """

    def __init__(self, predict: Callable[[int], float | None]) -> None:
        self._predict = predict
        self._octaves: dict[int, tuple[list[int], list[float]]] = {}

    def ns(self, batch: int) -> float | None:
        """Return the predicted time of a run of this size in ns, or None where there is none; 0 counts as 1."""
        batch = max(batch, 1)
        octave = batch.bit_length()
        sizes, times = self._octaves.get(octave) or self._made(octave)
        if not sizes:
            return None
        at = bisect.bisect_right(sizes, batch)
        low_ns, low = times[at - 1], sizes[at - 1]
        return low_ns * math.pow(times[at] / low_ns, math.log(batch / low) / math.log(sizes[at] / low))

    def _made(self, octave: int) -> tuple[list[int], list[float]]:
        first = 1 << (octave - 1)
        ends = self._predict(first), self._predict(2 * first)
        points: dict[int, float] = {}
        if ends[0] and ends[1]:
            points = {first: ends[0], 2 * first: ends[1]}
            self._halve(points, first, 2 * first, _HALVINGS)
        sizes = sorted(points)
        self._octaves[octave] = found = (sizes, [points[size] for size in sizes])
        return found

    def _halve(self, points: dict[int, float], low: int, high: int, more: int) -> None:
        """Add the middle of a line, and those of its halves where the line was off there."""
        middle = round(math.sqrt(low * high))
        time = self._predict(middle) if more and low < middle < high else None
        if time:
            part = math.log(middle / low) / math.log(high / low)
            off = math.log(time / points[low]) - part * math.log(points[high] / points[low])
            points[middle] = time
            if abs(off) > _OFF:
                self._halve(points, low, middle, more - 1)
                self._halve(points, middle, high, more - 1)


def batch_curve(
    graph: Graph,
    device: Device | str,
    dim: str | None = None,
    options: CompileOptions | None = None,
    dims: Mapping[str, int] | None = None,
) -> BatchCurve:
    """Return the curve of a graph's predicted time on a device, as of the graph and the calibration now.

    Args:
        graph: the graph.
        device: the device.
        dim: the named dim that varies; the first one of the first input that has any if it is not given.
        options: how the graph is compiled.
        dims: sizes of the other named dims.

    Raises:
        ValueError: no dim is given, and no input has a named one.
    """
    if dim is None:
        dim = next((name for _, shape in named_dims(graph) for name in shape if isinstance(name, str)), None)
    if dim is None:
        raise ValueError(f"graph {graph.name!r} has no input with a named dim; name the one that varies")
    return curve_of(lambda: graph, Device(device), dim, options or CompileOptions(), dims or {})


def curve_of(
    graph: Callable[[], Graph | None], device: Device, dim: str, options: CompileOptions, dims: Mapping[str, int]
) -> BatchCurve:
    """Return the curve of a graph that `graph` returns, which may be a weak reference."""

    def predict(size: int) -> float | None:
        alive = graph()
        with paused_collector():  # a prediction creates an object per node
            return None if alive is None else predicted_ns(alive, device, options, {**dims, dim: size})

    return BatchCurve(predict)
