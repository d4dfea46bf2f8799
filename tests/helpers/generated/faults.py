"""Faults to plant in the library, each of a kind that was once found; the generator has to find every one."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from generated.graphs import quiet
from generated.judge import judged
from rlx_ort import CompiledGraph, Device, Graph
from rlx_ort.converters import row_independence
from rlx_ort.converters.row_independence import RowIndependence
from rlx_ort.converters.to_onnx import norm
from rlx_ort.ir.tensor import TensorData
from rlx_ort.providers.engine import optimizer_faults
from rlx_ort.serving import model_devices

__all__ = ["FAULTS", "found_at", "planted"]


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
    """A layer norm is exported with the epsilon of the first one of the process."""
    sound, first = norm._layer, []

    def layer(emit: Any, x: Any, gamma: Any, beta: Any, eps: float) -> Any:
        first.append(eps)
        return sound(emit, x, gamma, beta, first[0])

    return mock.patch.object(norm, "_layer", layer)


def _fused_norms() -> Any:
    """ONNX Runtime fuses RMS norms with its default in place of an epsilon that is not an f32."""
    others = tuple(fault for fault in optimizer_faults.FAULTS if not fault.epsilon)
    return mock.patch.object(optimizer_faults, "FAULTS", others)


def _signed() -> Any:
    """Elements of u64 pass through i64."""
    sound = CompiledGraph.run

    def run(self: CompiledGraph, inputs: Any = None) -> list[Any]:
        return [
            np.minimum(item, np.uint64(2**63 - 1)) if getattr(item, "dtype", None) == np.uint64 else item
            for item in sound(self, inputs)
        ]

    return mock.patch.object(CompiledGraph, "run", run)


def _stale_row() -> Any:
    """Rows are those of the run before."""
    sound = CompiledGraph.run

    def run(self: CompiledGraph, inputs: Any = None) -> list[Any]:
        before = self._state.last
        found = sound(self, inputs)
        if before[1]:
            self._state.last = before
        return found

    return mock.patch.object(CompiledGraph, "run", run)


def _mixed_rows() -> Any:
    """In background runs every row of an input is the largest of all its rows."""
    sound = CompiledGraph.commit_no_wait

    def commit(self: CompiledGraph, inputs: Any, *more: Any, **named: Any) -> None:
        changed = {
            name: np.broadcast_to(np.sort(array, axis=0)[-1:], array.shape).copy()
            if array.ndim and array.shape[0] > 1
            else array
            for name, array in inputs.items()
        }
        sound(self, changed, *more, **named)

    return mock.patch.object(CompiledGraph, "commit_no_wait", commit)


def _joined_rows() -> Any:
    """A server joins rows of clients although nothing proves that they do not influence each other."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(row_independence, "row_independence", return_value=RowIndependence(True)))
    stack.enter_context(mock.patch.object(model_devices, "_dependence", return_value=""))
    return stack


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "swapped outputs": (_swapped_outputs, "slots"),
    "aliased array": (_aliased_array, "run"),
    "wrong epsilon": (_wrong_epsilon, "run"),
    "fused norms": (_fused_norms, "run"),
    "i64 for u64": (_signed, "run"),
    "stale row": (_stale_row, "rows"),
    "mixed rows": (_mixed_rows, "committed"),
    "joined rows": (_joined_rows, "serving"),
}
"""Name -> what plants it, and the way of running that it is in."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Have the library do wrong until the block ends."""
    with FAULTS[name][0]():
        yield


def found_at(name: str, first: int, limit_s: float, ways: Sequence[str] = ()) -> int | None:
    """Return the first seed whose graph is wrong with a fault and right without it, None if the time is over before.

    `ways` are those to run in, by default all. The arrays that graphs were made from are left alone for the faults that
    are not about them.
    """
    end, spoil = time.monotonic() + limit_s, name == "aliased array"
    seeds = itertools.count(first)
    while time.monotonic() < end:
        with quiet(), planted(name):
            seed, failures = first, []
            while not failures and time.monotonic() < end:
                seed = next(seeds)
                found = judged(Device.CPU, seed, ways=ways, spoil=spoil).failures
                failures = [failure for failure in found if failure.verdict == "WRONG"]
        with quiet():
            if failures and not judged(Device.CPU, seed, ways=[failures[0].way], spoil=spoil).failures:
                return seed
    return None
