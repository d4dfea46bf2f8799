"""Every way of running a graph: each gets the inputs of a call by name and returns the outputs as numpy arrays.

The ways of one graph share its session. An array that a way returns is checked before the next call, since those of the
fixed buffers are good until then only.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from interpreter import Array

from generated.served import Served
from rlx_ort import Device, DType, Graph, GraphDevices, Resilience, RlxError, Session, Value, from_onnx, to_onnx
from rlx_ort.converters.row_independence import row_independence
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.deploy.open import buckets_of, open_package, warm_package
from rlx_ort.deploy.package import Package
from rlx_ort.deploy.start import start_package
from rlx_ort.deploy.triton import batch_dim
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.ir.serde import from_json, to_json
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.selection.policy import DevicePolicy

__all__ = ["COSTLY", "WAYS", "NotThisWayError", "Opened"]

Feeds = dict[str, Array]
_OPTIONS = CompileOptions(placement=PlacementRule.ASSISTED, spinning=False)
"""The CPU may help, as it may where the user names no device; idle threads do not spin, which takes half of the CPU."""
_PADDED = ((1, 3), (3, 6))
_SINGLE = tuple((length, length + 1) for length in range(7))


class NotThisWayError(Exception):
    """A way is not for a graph, as bytes without a shape are not for named dims."""


class Opened:
    """A graph on a device, opened by each way when it is first asked for."""

    def __init__(self, device: Device, graph: Graph) -> None:
        self.device, self.graph = device, graph
        self._made: dict[str, Any] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @cached_property
    def runner(self) -> GraphDevices:
        """The graph on the devices of this machine."""
        return GraphDevices(self.graph, DevicePolicy.only([self.device]), _OPTIONS)

    @cached_property
    def compiled(self) -> CompiledGraph:
        """The session of the runner."""
        return self.runner.compile(self.device)

    def keep(self, name: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returned the first time."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def folder(self) -> Path:
        """A folder that lasts as long as this."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory()
        return Path(self._folder.name)

    def close(self) -> None:
        """End all sessions."""
        for made in self._made.values():
            if hasattr(made, "close"):
                made.close()
        if "runner" in self.__dict__:
            self.runner.close()
        if self._folder is not None:
            self._folder.cleanup()


def _ordered(o: Opened, feeds: Feeds) -> list[Array]:
    return [feeds[value.name] for value in o.graph.inputs]


def _typed(o: Opened, feeds: Feeds) -> list[Any]:
    if any(not isinstance(dim, int) for value in (*o.graph.inputs, *o.graph.outputs) for dim in value.shape):
        raise NotThisWayError  # bytes have no shape
    raw = {name: (array.tobytes(), DType.from_numpy(array.dtype)) for name, array in feeds.items()}
    shapes = map(np.shape, o.compiled.run(feeds))  # a changed model may declare others
    found = o.compiled.run_typed(raw)
    return [np.frombuffer(data, dtype.numpy).reshape(shape) for (data, dtype), shape in zip(found, shapes, strict=True)]


def _dlpack_in(o: Opened, feeds: Feeds) -> list[Any]:
    """Feed back device tensors: the outputs of a graph that passes its inputs on."""

    def passing() -> CompiledGraph:
        graph = Graph("pass")
        graph.outputs = [graph.stop_gradient(graph.input(v.name, v.shape, v.dtype)) for v in o.graph.inputs]
        return Session(o.device, _OPTIONS).compile(graph)

    moved = o.keep("passing", passing).run_dlpack(feeds)
    return o.compiled.run(dict(zip(feeds, moved, strict=True)))


def _read_outputs(o: Opened, feeds: Feeds) -> list[Any]:
    """Read the outputs last to first, the last one twice."""
    order = [*reversed(range(len(o.graph.outputs)))]
    found = o.compiled.run_read_outputs(feeds, [*order, order[0]])
    assert np.array_equal(found[0], found[-1], equal_nan=found[0].dtype.kind in "fc")
    return [*reversed(found[:-1])]


def _rows(o: Opened, feeds: Feeds) -> list[Any]:
    """Read the outputs row by row after a run."""
    found = []
    for index, output in enumerate(o.compiled.run(feeds)):
        inner = output.shape[-1] if output.ndim and output.size else 1
        rows = [o.compiled.read_output_row(index, row, inner) for row in range(output.size // inner)]
        assert o.compiled.read_output_row(index, output.size // inner, inner) is None
        found.append(np.concatenate([output.reshape(-1)[:0], *rows]).reshape(output.shape))
    return found


def _slot_rows(o: Opened, feeds: Feeds) -> list[Any]:
    """Read the outputs of the fixed buffers row by row."""
    found = []
    for index, output in enumerate(o.compiled.run_slots(_ordered(o, feeds))):
        rows = [o.compiled.read_output_row(index, row, 1) for row in range(output.size)]
        found.append(np.concatenate([output.reshape(-1)[:0], *rows]).reshape(output.shape))
    return found


def _handles(o: Opened, feeds: Feeds, bind: str = "bind_handle") -> list[Any]:
    twin = o.keep(bind, o.compiled.clone)
    for name, array in feeds.items():
        getattr(twin, bind)(name, array)
        array[...] = np.zeros((), array.dtype)
    return twin.run({})


def _pipelined(o: Opened, feeds: Feeds) -> list[Any]:
    zeros = {name: np.zeros_like(array) for name, array in feeds.items()}
    return o.compiled.run_pipelined([feeds, zeros, feeds])[2]


def _committed(o: Opened, feeds: Feeds) -> list[Any]:
    o.compiled.commit_no_wait(feeds, None)
    for array in feeds.values():
        array[...] = np.zeros((), array.dtype)
    return o.compiled.sync_pending()[0]


def _threads(o: Opened, feeds: Feeds) -> list[Any]:
    """Run beside a thread that runs on zeros."""
    zeros = {name: np.zeros_like(array) for name, array in feeds.items()}
    other = threading.Thread(target=_ignoring_refusals, args=(o.compiled, zeros))
    other.start()
    try:
        return o.compiled.run(feeds)
    finally:
        other.join()


def _ignoring_refusals(compiled: CompiledGraph, feeds: Feeds) -> None:
    with contextlib.suppress(RlxError):
        compiled.run(feeds)


def _updated(o: Opened, feeds: Feeds) -> list[Any]:
    """Run with parameters of zeros, then with their data set again."""
    data = {value.name: o.graph.weights[value.name] for value in o.graph.params}
    if not data:
        raise NotThisWayError

    def make() -> GraphDevices:
        return GraphDevices(o.graph, DevicePolicy.only([o.device]), _OPTIONS)

    runner = o.keep("updated", make)
    for changed in (True, False):
        with runner.update_params():
            for name, tensor in data.items():
                runner.set_param(name, np.zeros_like(tensor.numpy()) if changed else tensor)
        with contextlib.suppress(RlxError) if changed else contextlib.nullcontext():
            found = runner.run(o.device, feeds)
    return found


def _extent(o: Opened, feeds: Feeds) -> list[Any]:
    """Run on the first rows of inputs that have more."""
    dim = batch_dim(o.graph)
    if dim is None or any(dim in value.shape[1:] for value in o.graph.inputs) or not _size(o, feeds, dim):
        raise NotThisWayError
    twin = o.keep("extent", o.compiled.clone)
    longer = {name: np.concatenate([array, np.ones_like(array), np.ones_like(array)]) for name, array in feeds.items()}
    twin.set_active_extent((_size(o, feeds, dim), 3 * _size(o, feeds, dim)))
    return twin.run(longer)


def _packed(o: Opened, name: str, recipe: Recipe | None = None) -> Path:
    path = o.folder / f"{name}.rlx"
    if not path.exists():
        create_package(o.graph, path, recipe)
    return path


def _warmed(o: Opened) -> Path:
    """Return a package that can run from the compile cache."""
    warm_package(_packed(o, "model"), [o.device])
    return _packed(o, "model")


def _warmed_package(o: Opened) -> Any:
    return open_package(_warmed(o), DevicePolicy.only([o.device]))


def _started_package(o: Opened) -> Any:
    """Return a package that is not opened in full."""
    return start_package(_warmed(o), o.device.label)


def _buckets(o: Opened, feeds: Feeds) -> list[Any]:
    """Run graphs of fixed lengths: padded ones where rows are proved independent, else one for each length."""
    dims = [dim for value in o.graph.inputs for dim in value.shape if isinstance(dim, str)]
    if not dims:
        raise NotThisWayError
    padded = batch_dim(o.graph) == dims[0] and not any(
        dims[0] in v.shape[1:] for v in (*o.graph.inputs, *o.graph.outputs)
    )
    padded = padded and bool(row_independence(o.graph, dims[0]))

    def make() -> Any:
        recipe = Recipe(buckets=(dims[0], _PADDED if padded else _SINGLE))
        package = o.keep("bucket package", lambda: Package(_packed(o, "buckets", recipe)))
        return buckets_of(package, o.device, _OPTIONS)

    cache, build = o.keep("buckets", make)
    o.keep("bucket cache", lambda: cache)
    rows = _size(o, feeds, dims[0])
    inners = [array.size // rows or None if padded and rows else None for array in feeds.values()]
    given = [(name, array, inner) for (name, array), inner in zip(feeds.items(), inners, strict=True)]
    outputs = [_row_size(o, feeds, value) for value in o.graph.outputs] if padded else []
    if cache.bucket_for(rows) is None or 0 in outputs:  # 0 says that an output has no rows
        raise NotThisWayError
    found = cache.run_padded(rows, rows, build, given, outputs)
    assert found is not None
    return found[1]


def _row_size(o: Opened, feeds: Mapping[str, Array], value: Value) -> int:
    return math.prod(dim if isinstance(dim, int) else _size(o, feeds, dim) for dim in value.shape[1:])


def _size(o: Opened, feeds: Mapping[str, Array], dim: str) -> int:
    """Return how long a named dim of the inputs is, 0 for one that they do not have."""
    found = (
        size
        for value in o.graph.inputs
        for name, size in zip(value.shape, feeds[value.name].shape, strict=True)
        if name == dim
    )
    return next(found, 0)


def _reimport(o: Opened) -> CompiledGraph:
    """Compile what comes back from ONNX and JSON."""
    text, tensors = to_json(from_onnx(to_onnx(o.graph)))
    return Session(o.device, _OPTIONS).compile(from_json(text, tensors))


def _resilient(o: Opened) -> GraphDevices:
    return GraphDevices(o.graph, DevicePolicy.only([o.device]), resilience=Resilience())


def _opened_package(o: Opened) -> Any:
    return open_package(_packed(o, "model"), DevicePolicy.only([o.device]))


WAYS: dict[str, Callable[[Opened, Feeds], list[Any]]] = {
    "run": lambda o, feeds: o.compiled.run(feeds),
    "names": lambda o, feeds: list(o.compiled(**feeds)),
    "runner": lambda o, feeds: o.runner.run(o.device, feeds),
    "runner names": lambda o, feeds: list(o.runner(**feeds)),
    "fastest": lambda o, feeds: o.runner.run_fastest(feeds),
    "chain": lambda o, feeds: o.runner.run_try([o.device], feeds)[1],
    "runner dlpack": lambda o, feeds: [tensor.numpy() for tensor in o.runner.run_dlpack(feeds, o.device)],
    "slots": lambda o, feeds: o.compiled.run_slots(_ordered(o, feeds)),
    "raw": lambda o, feeds: o.compiled.run_raw(feeds),
    "clone slots": lambda o, feeds: o.keep("slot clone", o.compiled.clone).run_slots(_ordered(o, feeds)),
    "typed": _typed,
    "dlpack": lambda o, feeds: [tensor.numpy() for tensor in o.compiled.run_dlpack(feeds)],
    "dlpack in": _dlpack_in,
    "read_outputs": _read_outputs,
    "rows": _rows,
    "slot rows": _slot_rows,
    "handles": _handles,
    "device handles": lambda o, feeds: _handles(o, feeds, "bind_gpu_handle"),
    "pipelined": _pipelined,
    "committed": _committed,
    "async": lambda o, feeds: asyncio.run(o.compiled.run_async(feeds)),
    "resilient": lambda o, feeds: list(o.keep("resilient", lambda: _resilient(o))(**feeds)),
    "reimported": lambda o, feeds: o.keep("reimported", lambda: _reimport(o)).run(feeds),
    "threads": _threads,
    "updated": _updated,
    "extent": _extent,
    "package": lambda o, feeds: list(o.keep("package", lambda: _opened_package(o))(**feeds)),
    "warmed package": lambda o, feeds: list(o.keep("warmed", lambda: _warmed_package(o))(**feeds)),
    "started package": lambda o, feeds: list(o.keep("started", lambda: _started_package(o)).run(feeds)),
    "buckets": _buckets,
    "serving": lambda o, feeds: o.keep("serving", lambda: Served(o.device, o.graph, o.folder)).run(feeds),
}
"""Name -> the way."""

COSTLY = {
    "async": 4, "resilient": 4, "reimported": 4, "dlpack in": 4, "threads": 2, "updated": 4, "package": 16,
    "warmed package": 64, "started package": 64, "buckets": 8, "serving": 4,
}  # fmt: skip
"""Way -> of how many graphs one is run in it; those of the others all are."""
