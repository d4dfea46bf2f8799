"""Runs a model by ONNX Runtime with all rows at once and with each alone, to see whether rows influence each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

__all__ = ["difference", "influence", "opened"]

Feeds = Mapping[str, Any]


def opened(model: onnx.ModelProto) -> ort.InferenceSession:
    """Return a session of one thread without optimisation, so that the same shapes give the same bits."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def difference(session: ort.InferenceSession, feeds: Feeds, tolerance: float = 1e-4) -> str:
    """Return how the outputs of rows that run together differ from those of rows that run alone; empty if they do not.

    Raises:
        Exception: the engine refuses the rows alone, whatever it does with all of them.
    """
    count = len(next(iter(feeds.values())))
    alone = [session.run(None, {name: array[row : row + 1] for name, array in feeds.items()}) for row in range(count)]
    try:
        together = session.run(None, dict(feeds))
    except Exception as err:  # its classes are those of the engine
        return f"rows run alone, but not together: {err}"
    for place, output in enumerate(together):
        parts = [outputs[place] for outputs in alone]
        if output.shape[:1] != (count,) or any(part.shape != (1, *output.shape[1:]) for part in parts):
            return f"output {place} has shape {output.shape} together, {[part.shape for part in parts]} alone"
        joined = np.concatenate(parts)
        if output.dtype.kind != "f":
            if not np.array_equal(output, joined):
                return f"output {place} is {output} together, {joined} alone"
        elif not np.allclose(output, joined, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"output {place} is {output} together, {joined} alone"
    return ""


def influence(session: ort.InferenceSession, feeds: Feeds, change: Callable[[Any, int], Any]) -> str:
    """Return how a row changes with the values of the others; empty if it does not, but for the last bits.

    `change` gets values and the row that stays. A run with other values may fail: then nothing is known.
    """
    together = session.run(None, dict(feeds))
    for row in range(len(next(iter(feeds.values())))):
        try:
            found = session.run(None, {name: change(array, row) for name, array in feeds.items()})
        except Exception:  # its classes are those of the engine
            continue
        for place, (before, after) in enumerate(zip(together, found, strict=True)):
            if before.shape != after.shape or not np.allclose(before[row], after[row], 1e-6, 1e-6, equal_nan=True):
                return f"row {row} of output {place} is {before[row]} or {after[row]} beside other values"
    return ""
