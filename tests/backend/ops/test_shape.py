"""Ops that move, sort, look up and update data, against numpy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from op_tests.harness import Array, check, rand, run

from rlx_ort import Device, EngineError, Graph, InputError, RunError, Session
from rlx_ort.converters.to_onnx.exporter import export_model
from rlx_ort.ir.ops.shape import SCATTER_MODES

RESHAPES: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "static": ([2, 3, 4], [6, 4]),
    "minus one": ([2, 3, 4], [-1, 2]),
    "one name": (["b", 3, 4], ["b", 12]),
    "names that stay": (["b", "s", 4], ["b", "s", 2, 2]),
    "a name and -1": (["b", 3, 4], ["b", -1, 2]),
    "two names folded": (["b", "s", 4], [-1, 4]),
    "a name that moves": (["b", "s", 4], [4, "b", "s"]),
    "names out of order": (["b", "s", 4], ["s", "b", 4]),
}


@pytest.mark.parametrize(("declared", "target"), RESHAPES.values(), ids=RESHAPES)
def test_reshape(declared: Sequence[Any], target: Sequence[Any], device: Device) -> None:
    """The elements keep their order."""
    x, sizes = rand(2, 3, 4), {"b": 2, "s": 3}
    reference = lambda x: x.reshape([sizes.get(dim, dim) for dim in target])  # noqa: E731
    check(device, lambda g, x: g.reshape(x, target), x, shapes=[declared], reference=reference)


@pytest.mark.parametrize("batch", [0, 2])
def test_reshape_of_an_empty_batch(batch: int) -> None:
    """A named dim may be 0 at run time."""
    x = np.zeros((batch, 3, 4), np.float32)
    check(Device.CPU, lambda g, x: g.reshape(x, ["b", 3, 2, 2]), x, shapes=[["b", 3, 4]])


def test_reshape_to_a_size_of_zero() -> None:
    """0 means empty, not "as it was"."""
    (empty,) = run(Device.CPU, lambda g, x: g.reshape(x, [3, 0]), np.zeros((0, 5), np.float32))
    assert empty.shape == (3, 0)


def test_reshape_that_keeps_names_needs_no_shape_nodes() -> None:
    """The usual split into heads is one Reshape with a constant target."""
    g = Graph("g")
    g.outputs = [g.reshape(g.input("x", ["b", "s", 8]), ["b", "s", 2, 4])]
    assert [node.op_type for node in export_model(g).nodes] == ["Reshape"]


MOVES: dict[str, Callable[..., Any]] = {
    "transpose": lambda g, x: g.transpose(x, [2, 0, -2]),
    "narrow": lambda g, x: g.narrow(x, 1, 1, 2),
    "narrow of nothing": lambda g, x: g.narrow(x, 1, 3, 0),
    "narrow from the back": lambda g, x: g.narrow(x, -1, 0, 1),
    "slice": lambda g, x: g.slice(x, [0, 2], [None, -3], [-1, None]),
    "slice backwards": lambda g, x: g.slice(x, [1], [None], [None], [-2]),
    "slice between places": lambda g, x: g.slice(x, [2], [3], [0], [-1]),
    "tile": lambda g, x: g.tile(x, [2, 1, 3]),
    "pad": lambda g, x: g.pad(x, [1, 0, 0], [0, 2, 1], value=0.5),
    "pad with zeros": lambda g, x: g.pad(x, [0, 0, 1], [0, 0, 1]),
    "pad reflect": lambda g, x: g.pad(x, [0, 1, 2], [0, 1, 1], "reflect"),
    "pad edge": lambda g, x: g.pad(x, [0, 1, 0], [1, 0, 3], "edge"),
    "expand": lambda g, x: g.expand(g.narrow(x, 1, 0, 1), [5, -1, 3, -1]),
    "concat of one": lambda g, x: g.concat([x], 0),
    "concat": lambda g, x: g.concat([x, x * 2, x], -1),
}


@pytest.mark.parametrize("declared", [None, ["n", 3, 4]], ids=["static", "open"])
@pytest.mark.parametrize("build", MOVES.values(), ids=MOVES)
def test_movement(build: Callable[..., Any], declared: list[Any] | None, device: Device) -> None:
    """Each op moves the elements as numpy does, with sizes and with an open batch."""
    check(device, build, rand(2, 3, 4), shapes=[declared])


@pytest.mark.parametrize("declared", ["static", "open"])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_slices_begin_and_end_outside_as_in_python(size: int, declared: str) -> None:
    """A bound before the first element or behind the last one takes what Python takes, in both directions."""
    bounds = [None, -6, -3, -2, -1, 0, 1, 2, 5]
    cases = list(itertools.product(bounds, bounds, [1, 2, -1, -2]))
    g, data = Graph("g"), np.arange(size, dtype=np.float32)
    x = g.input("x", [size if declared == "static" else "n"])
    g.outputs = [g.slice(x, [0], [start], [end], [step]) for start, end, step in cases]
    found = Session("cpu").compile(g).run({"x": data})
    wrong = [case for case, result in zip(cases, found, strict=True) if result.tolist() != data[slice(*case)].tolist()]
    assert not wrong


def test_expand_to_a_named_dim(device: Device) -> None:
    """The size of a name is read from another input at run time."""
    build = lambda g, x, like: g.expand(x, ["n", 3]) + like  # noqa: E731
    check(device, build, rand(1, 3), rand(4, 3), shapes=[None, ["n", 3]])


def test_concat_promotes_its_inputs() -> None:
    """i32 and f32 meet in f32."""
    check(Device.CPU, lambda g, a, b: g.concat([a, b], 0), np.array([1, 2], np.int32), rand(2))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather_picks_along_any_axis(axis: int, device: Device) -> None:
    """The dims before the axis stay, those of the indices take its place; negatives count from the end."""
    indices = np.array([[0, 2], [-1, 1]], np.int64)
    check(device, lambda g, t, i: g.gather(t, i, axis), rand(3, 4, 3), indices, shapes=[None, ["n", 2]])


def test_gather_truncates_float_indices() -> None:
    """Indices that travel as f32 drop their fraction."""
    check(Device.CPU, lambda g, t, i: g.gather(t, i), rand(3, 2), np.array([0.0, 1.9, 2.0], np.float32))


def test_index_out_of_range_is_an_error() -> None:
    """A wrong index stops the run instead of reading something else."""
    with pytest.raises(RunError):
        run(Device.CPU, lambda g, t, i: g.gather(t, i), rand(3, 2), np.array([3], np.int64))


JOINED = {
    "in order": ([(0, 2), (3, 3)], 1),
    "the second": ([(3, 2), (0, 3)], 1),
    "of three": ([(3, 2), (0, 3), (3, 1)], -1),
    "of another axis": ([(2, 0, 4), (2, 3, 4)], 2),
}


def _joining(shapes: list[tuple[int, ...]], axis: int) -> Graph:
    """Return a graph that joins inputs whose dims beside the axis have names of their own."""
    graph = Graph("joining")
    named = [[size if at == axis % len(shape) else f"d{place}_{at}" for at, size in enumerate(shape)]
             for place, shape in enumerate(shapes)]  # fmt: skip
    graph.outputs = [graph.concat([graph.input(f"x{place}", dims) for place, dims in enumerate(named)], axis)]
    return graph


@pytest.mark.parametrize(("shapes", "axis"), JOINED.values(), ids=JOINED)
@pytest.mark.parametrize("way", [lambda c, f: c.run(f), lambda c, f: c.run_slots([*f.values()])], ids=["run", "slots"])
def test_inputs_without_elements_that_do_not_fit_are_not_joined(
    shapes: Any, axis: int, way: Any, device: Device
) -> None:
    """As numpy refuses them: the kernels would leave a part of the result unwritten."""
    compiled = Session(device).compile(_joining(shapes, axis))
    feeds = {f"x{place}": np.ones(shape, np.float32) for place, shape in enumerate(shapes)}
    with pytest.raises(ValueError, match="must match exactly"):
        np.concatenate(list(feeds.values()), axis)
    with pytest.raises(InputError, match="'concat' joins"):
        way(compiled, feeds)
    fitting = [tuple(0 if at != axis % len(shape) else size for at, size in enumerate(shape)) for shape in shapes]
    (found,) = way(compiled, {f"x{place}": np.ones(shape, np.float32) for place, shape in enumerate(fitting)})
    assert found.shape == np.concatenate([np.ones(shape) for shape in fitting], axis).shape


CPU = Device.CPU
DTYPES = ["f4", "f2", "f8", "i1", "u1", "i2", "u2", "i4", "i8", "u4"]


def few(dtype: str, *shape: int) -> Array:
    """Return small numbers with many equal ones."""
    return np.random.default_rng([*shape]).integers(0, 5, shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("descending", [True, False])
def test_sort_and_argsort(dtype: str, axis: int, descending: bool) -> None:
    """Equal elements stay in order of place, both ways."""
    x = few(dtype, 3, 7)
    check(CPU, lambda g, x: g.sort(x, axis, descending), x)
    check(CPU, lambda g, x: g.argsort(x, axis, descending), x, shapes=[["n", "m"]], strict=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_running_products_and_maxima(dtype: str, size: int) -> None:
    """Any size, power of two or not."""
    check(CPU, lambda g, x: [g.cumprod(x), g.cummax(x, 1)], few(dtype, 2, size))


def test_running_product_along_the_first_axis(device: Device) -> None:
    """The axis may have others behind it, with names."""
    check(device, lambda g, x: g.cumprod(x, 0), rand(5, 3), shapes=[[5, "n"]], strict=False)


@pytest.mark.parametrize("axes", [0, (1,), (0, -1), ()])
def test_reverse(axes: int | tuple[int, ...], device: Device) -> None:
    """One axis, several, or none."""
    named = (axes,) if isinstance(axes, int) else axes
    reference = lambda x: np.flip(x, named)  # noqa: E731
    check(device, lambda g, x: g.reverse(x, axes), rand(2, 3, 4), strict=False, reference=reference)


@pytest.mark.parametrize("dtype", [*DTYPES, "?"])
@pytest.mark.parametrize("diagonal", [-1, 0, 2])
def test_trilu(dtype: str, diagonal: int) -> None:
    """Both triangles of every matrix of a batch, from any diagonal on."""
    check(CPU, lambda g, x: [g.trilu(x, True, diagonal), g.trilu(x, False, diagonal)], few(dtype, 2, 3, 4))


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.float32])
def test_gather_elements(kind: type) -> None:
    """Indices along an axis, negative ones from the end; floats drop their fraction."""
    check(CPU, lambda g, x, i: g.gather_elements(x, i, 0), rand(3, 3), np.array([[0, 2, 1], [-1, 0, 0]]).astype(kind))


@pytest.mark.parametrize(
    ("indices", "batch_dims"),
    [
        ([[1], [-1], [0]], 0),
        ([[1, 2, 3], [0, 0, 0]], 0),
        ([[[0, 2], [1, -1]], [[2, 0], [0, 3]]], 1),
    ],
    ids=["slices", "elements", "elements of each of a batch"],
)
def test_gather_nd(indices: list[Any], batch_dims: int) -> None:
    """Each row of indices is the place of a slice or of an element."""
    build = lambda g, x, i: g.gather_nd(x, i, batch_dims)  # noqa: E731
    check(CPU, build, rand(2, 3, 4), np.array(indices))


@pytest.mark.parametrize("mode", SCATTER_MODES)
@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "u1", "i4", "i8"])
def test_scatter(mode: str, dtype: str) -> None:
    """Places that repeat are all combined; under `set` they do not repeat."""
    x, updates = few(dtype, 4, 3), few(dtype, 2, 3)
    places = np.array([[0, 1, 2], [3, 0, 1]]) if mode == "set" else np.array([[0, 1, 2], [0, 0, -1]])
    rows = np.array([[0], [2]]) if mode == "set" else np.array([[2], [2]])
    check(CPU, lambda g, x, i, u: g.scatter_elements(x, i, u, 0, mode), x, places, updates)
    check(CPU, lambda g, x, i, u: g.scatter_nd(x, i, u, mode), x, rows, updates)


def test_a_narrow_beyond_a_named_dim_is_refused() -> None:
    """Four rows from row 1 are four rows, or the run fails; fewer come back in no case."""
    check(Device.CPU, lambda g, x: g.narrow(x, 0, 1, 4), rand(6, 3), shapes=[["n", 3]])
    with pytest.raises(EngineError):
        run(Device.CPU, lambda g, x: g.narrow(x, 0, 1, 4), rand(2, 3), shapes=[["n", 3]])
