"""Arrays in and out of a run: npz files read without pickle and written whole or not at all, and made-up inputs."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.cli.show import replacing
from rlx_ort.errors import InputError, RlxError
from rlx_ort.ir.core import Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedNode
    from rlx_ort.ir.graph import Graph
    from rlx_ort.parity.inputs import InputSizes

Array: TypeAlias = npt.NDArray[Any]

_REGISTERED = 2
"""`dtype.isbuiltin` of a type that numpy does not define itself, such as bfloat16: npz cannot hold it."""

_WINDOWS = frozenset({"AveragePool", "Conv", "LpPool", "MaxPool"})
_SCALES = tuple(2**power for power in range(14))
"""What made-up lengths and images are enlarged by until they fit."""
_MOST_PIXELS = 1024

_SMALL_BYTES = 64 << 20
_MOST_UNPACKED = 200
"""How many times its own size an archive may unpack to, above `_SMALL_BYTES`: a made-up one can fill the memory."""


def read_npz(path: Path) -> dict[str, Array]:
    """Return the arrays of an npz file. Nothing in the file is executed.

    Raises:
        InputError: the file is no npz archive, is damaged, or holds pickled objects.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no regular file; write one with numpy.savez(path, name=array, ...)")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path} is no npz file; write one with numpy.savez(path, name=array, ...)")
    arrays: dict[str, Array] = {}
    try:
        _refuse_bomb(path)
        with np.load(path, allow_pickle=False) as archive:
            for name in archive.files:
                member = archive[name]
                if not isinstance(member, np.ndarray):
                    raise InputError(f"{path} holds {name!r}, which is no array; write the file with numpy.savez")
                arrays[name] = member
    except InputError:
        raise
    except (ValueError, OSError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile, zlib.error) as err:
        raise InputError(
            f"{path} cannot be read as an npz file: {err}\n"
            "  it may be damaged, or hold Python objects, which are never loaded; write plain arrays with numpy.savez"
        ) from err
    return arrays


def _refuse_bomb(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    if unpacked > max(_SMALL_BYTES, _MOST_UNPACKED * path.stat().st_size):
        raise InputError(
            f"{path} has {path.stat().st_size} bytes and would unpack to {unpacked}; if you trust it, write it with "
            "numpy.savez, uncompressed"
        )


def write_npz(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays to an npz file that numpy reads without pickle; the file appears complete or not at all."""
    with replacing(path) as stream, zipfile.ZipFile(stream, "w") as archive:
        # not numpy.savez: its own parameter names would forbid an output called "file"
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, storable(array), allow_pickle=False)


def flattened(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return the arrays by which an npz file holds outputs; `NAME` is that of the output.

    A tensor is `NAME`. The items of a sequence are `NAME[0]`, `NAME[1]` and so on, and `NAME[]` is an empty one. A map
    is two arrays of one length, `NAME.keys` and `NAME.values`. So is a sequence of maps that all have the same keys, as
    classifiers give one for each row: its values are (rows, keys). An optional without a value is `NAME.none`.

    Raises:
        InputError: two outputs would have the same name in the file.
    """
    found: dict[str, Array] = {}
    for output, result in outputs.items():
        for name, array in _parts(output, result):
            if name in found:
                raise InputError(f"two outputs would both be {name!r} in an npz file; rename one of them in the model")
            found[name] = array
    return found


def _parts(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    if value is None:
        yield f"{name}.none", np.empty(0)
    elif isinstance(value, Mapping):
        yield f"{name}.keys", np.array([*value])
        yield f"{name}.values", np.array([*value.values()])
    elif not isinstance(value, list | tuple):
        yield name, np.asarray(value)
    elif value and all(isinstance(item, Mapping) and [*item] == [*value[0]] for item in value):
        yield f"{name}.keys", np.array([*value[0]])
        yield f"{name}.values", np.array([[*item.values()] for item in value])
    else:
        if not value:
            yield f"{name}[]", np.empty(0)
        for index, item in enumerate(value):
            yield from _parts(f"{name}[{index}]", item)


def storable(array: Array) -> Array:
    """Return an array in a type that npz can hold: narrow floats as float32, 4-bit integers as int8, text as unicode.

    Each of these holds every value of the type it replaces.
    """
    if array.dtype == object:
        return array.astype(np.str_)
    if array.dtype.isbuiltin != _REGISTERED:
        return array
    return array.astype(np.int8 if "int" in array.dtype.name else np.float32)


def to_model_types(arrays: Mapping[str, Array], inputs: Sequence[Value]) -> dict[str, Array]:
    """Return arrays in the types of the model's inputs where npz has no such type; others stay as they are."""
    return to_declared_types(arrays, {value.name: value.type for value in inputs})


def to_declared_types(arrays: Mapping[str, Array], wanted: Mapping[str, ValueType]) -> dict[str, Array]:
    """Return arrays in the declared types where npz has no such type; others stay as they are."""
    result = dict(arrays)
    for name, array in arrays.items():
        kind = wanted.get(name)
        if not isinstance(kind, TensorType):
            continue
        if array.dtype.kind == "U" and kind.dtype is DType.STRING:
            result[name] = array.astype(object)
        elif kind.dtype.numpy.isbuiltin == _REGISTERED and array.dtype in (np.float32, np.int8):
            result[name] = array.astype(kind.dtype.numpy)
    return result


def made_up_inputs(graph: Graph, sizes: Mapping[str, int], seed: int = 0) -> tuple[dict[str, Array], Mapping[str, int]]:
    """Return random inputs that most models take, and the sizes that were assumed for named dims without one.

    Floats are normally distributed. Integers and bools are 0 and 1, because they are often indices, lengths or masks.
    Dims without a size get those of `InputSizes`, as in `compare` and `convert`, or larger ones where a convolution or
    pooling needs them.

    Raises:
        InputError: an input is no tensor or has no known rank, so nothing can be made up for it; or no size is large
            enough.
    """
    source = np.random.default_rng(seed)
    dims = _fitting_sizes(graph, sizes)
    arrays = {value.name: _random(value, dims, source) for value in graph.inputs}
    return arrays, dims.assumed


def shaped_inputs(graph: Graph, sizes: Mapping[str, int]) -> tuple[dict[str, Array], Mapping[str, int]]:
    """Return arrays of the shapes of `made_up_inputs` that take no memory, and the sizes that were assumed."""
    dims = _fitting_sizes(graph, sizes)
    kinds = {value.name: value.type for value in graph.inputs}
    shapes = {name: dims.of(name, kind) for name, kind in kinds.items() if isinstance(kind, TensorType) and kind.shape}
    return {name: np.broadcast_to(np.zeros(()), shape) for name, shape in shapes.items()}, dims.assumed


def _fitting_sizes(graph: Graph, given: Mapping[str, int]) -> InputSizes:
    """Return sizes with which no window of the model is larger than what it moves over."""
    from rlx_ort.parity.inputs import SIZE_CHOICES, InputSizes
    from rlx_ort.selection.predict import dims_of

    kinds = {value.name: value.type for value in graph.inputs}
    batch, length, pixels = SIZE_CHOICES[0]
    for scale in _SCALES:
        sizes = InputSizes(kinds, given, (batch, length * scale, min(pixels * scale, _MOST_PIXELS)))
        shapes = {name: sizes.of(name, kind) for name, kind in kinds.items() if isinstance(kind, TensorType)}
        dims = dims_of(graph, {name: np.broadcast_to(np.zeros(()), shape) for name, shape in shapes.items()})
        small = _outgrown_window(graph, dims)
        if not small:
            return sizes
    raise InputError(
        f"no inputs can be made up: node {small!r} needs more than it gets with "
        f"{', '.join(f'{name}={size}' for name, size in dims.items())}; give larger sizes with --dim"
    )


def _outgrown_window(graph: Graph, dims: Mapping[str, int]) -> str:
    """Return the first convolution or pooling whose window is larger than its input; empty if there is none.

    ONNX's inference rounds the negative number of steps to 0, so that the size of the result does not show it.
    """
    from rlx_ort.converters.to_onnx.exporter import drafted
    from rlx_ort.selection.folding import sized_outline

    try:
        draft = drafted(graph)
        if 0 in dims.values() or not any(node.op_type in _WINDOWS for node in draft.outline.nodes):
            return ""
        nodes = sized_outline(draft, graph.weights, dims).nodes
    except RlxError:
        return ""  # whoever runs the graph raises the error
    return next((node.name for node in nodes if node.op_type in _WINDOWS and _is_outgrown(node, dims)), "")


def _is_outgrown(node: ExportedNode, dims: Mapping[str, int]) -> bool:
    attributes = {name: attribute.value for name, attribute in node.pattern.attributes.items()}
    if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return False
    x, *weight = (kind.shape or () for kind in node.inputs if isinstance(kind, TensorType))
    sizes = [dims.get(dim) if isinstance(dim, str) else dim for dim in x[2:]]
    window = attributes.get("kernel_shape") or (weight[0][2:] if weight else [])
    steps = attributes.get("dilations") or [1] * len(sizes)
    pads = attributes.get("pads") or [0] * 2 * len(sizes)
    along = zip(sizes, window, steps, pads, pads[len(sizes) :], strict=False)
    return any(
        isinstance(size, int) and isinstance(extent, int) and size + before + after < (extent - 1) * step + 1
        for size, extent, step, before, after in along
    )


def _random(value: Value, sizes: InputSizes, source: np.random.Generator) -> Array:
    kind = value.type
    if not isinstance(kind, TensorType) or kind.shape is None:
        raise InputError(f"input {value.name!r} has type {kind}; give its data with --inputs")
    shape = sizes.of(value.name, kind)
    if kind.dtype is DType.STRING:
        return np.full(shape, "text", dtype=object)
    if kind.dtype.is_complex:
        return (source.standard_normal(shape) + 1j * source.standard_normal(shape)).astype(kind.dtype.numpy)
    if kind.dtype.is_float:
        return source.standard_normal(shape).astype(kind.dtype.numpy)
    return source.integers(0, 2, shape).astype(kind.dtype.numpy)
