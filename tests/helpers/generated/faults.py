"""Faults to plant in the library, each of a kind that was once found; the generator has to find every one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import TensorData

__all__ = ["FAULTS", "planted"]


def _swapped_outputs() -> Any:
    """The fixed buffers return the outputs last to first."""
    sound = CompiledGraph.run_slots
    return mock.patch.object(CompiledGraph, "run_slots", lambda self, arrays: sound(self, arrays)[::-1])


def _aliased_array() -> Any:
    """A parameter keeps the caller's array."""
    sound = Graph.param

    def param(self: Any, name: str, shape: Any, dtype: Any = "f32", *, data: Any = None, **more: Any) -> Any:
        value = sound(self, name, shape, dtype, data=data, **more)
        if isinstance(data, np.ndarray):
            self.weights[name] = TensorData.from_array(data)
        return value

    return mock.patch.object(Graph, "param", param)


def _wrong_epsilon() -> Any:
    """A layer norm takes the epsilon of the first one of the process."""
    sound, first = Graph.layer_norm, []

    def layer_norm(self: Any, *inputs: Any, eps: float = 1e-5, **more: Any) -> Any:
        from generated import judge

        if getattr(judge, "planting", True):
            first.append(eps)
        return sound(self, *inputs, eps=first[0], **more)

    return mock.patch.object(Graph, "layer_norm", layer_norm)


def _signed() -> Any:
    """Elements of u64 pass through i64 and f64."""
    sound = CompiledGraph.run

    def run(self: CompiledGraph, inputs: Any = None) -> list[Any]:
        return [
            item.astype(np.float64).astype(np.uint64) if getattr(item, "dtype", None) == np.uint64 else item
            for item in sound(self, inputs)
        ]

    return mock.patch.object(CompiledGraph, "run", run)


def _stale_row() -> Any:
    """Rows are those of the run before."""
    sound = CompiledGraph.run

    def run(self: CompiledGraph, inputs: Any = None) -> list[Any]:
        before = self._last
        found = sound(self, inputs)
        if before[1]:
            self._last = before
        return found

    return mock.patch.object(CompiledGraph, "run", run)


def _mixed_rows() -> Any:
    """In background runs the first row of an input of floats is that of its largest element."""
    sound = CompiledGraph.commit_no_wait

    def commit(self: CompiledGraph, inputs: Any, *more: Any, **named: Any) -> None:
        changed = {
            name: np.broadcast_to(array.max(axis=0, keepdims=True), array.shape).copy()
            if array.ndim and array.shape[0] > 1
            else array
            for name, array in inputs.items()
        }
        sound(self, changed, *more, **named)

    return mock.patch.object(CompiledGraph, "commit_no_wait", commit)


FAULTS: dict[str, Callable[[], Any]] = {
    "swapped outputs": _swapped_outputs,
    "aliased array": _aliased_array,
    "wrong epsilon": _wrong_epsilon,
    "i64 for u64": _signed,
    "stale row": _stale_row,
    "mixed rows": _mixed_rows,
}
"""Name -> what plants it."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Have the library do wrong until the block ends."""
    with FAULTS[name]():
        yield
