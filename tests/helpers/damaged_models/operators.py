"""Cases of the ONNX backend suite, most of one operator, each changed in one or two ways at a node."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx_suite.cases import Case, all_cases

from damaged_models.files import NUMBERS, REALS, retyped

__all__ = ["damaged_operator"]

_DTYPES = (
    TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64, TensorProto.INT32, TensorProto.INT8,
    TensorProto.UINT8, TensorProto.BOOL, TensorProto.STRING, TensorProto.INT4, TensorProto.UINT4,
)  # fmt: skip
_FOREIGN = [np.dtype(kind) for kind in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn, ml_dtypes.bfloat16)]
_SMALL_BYTES = 100_000


@functools.cache
def _cases() -> Sequence[Case]:
    """Return one case after the other of each operator in turn, so that a sample of any size has many operators."""
    found: dict[str, list[Case]] = {}
    for case in sorted((case for case in all_cases() if case.kind != "light"), key=lambda case: case.name):
        if not case.name.endswith("_expanded") and "_expanded_" not in case.name:
            found.setdefault(case.name.split("_")[1], []).append(case)
    longest = max(map(len, found.values()))
    return [cases[place] for place in range(longest) for cases in found.values() if place < len(cases)]


def damaged_operator(number: int) -> tuple[str, bytes, list[Any]]:
    """Return the operator, the model and the inputs of a number."""
    cases = _cases()
    rng = random.Random(number)
    data, sets = cases[number % len(cases)].load()
    model = onnx.ModelProto.FromString(data)
    inputs = [*sets[0][0]] if sets else []
    names = [info.name for info in model.graph.input]
    node = rng.choice(model.graph.node)
    for _ in range(rng.choice([1, 1, 1, 2])):
        action = rng.choice(["kind", "value", "value", "attribute", "constant", "shape", "dtype", "arity", "declared"])
        match action:
            case "kind" if node.attribute:
                retyped(rng.choice(node.attribute), rng)
            case "value" if node.attribute:
                _revalued(rng.choice(node.attribute), rng)
            case "attribute":
                _listed(node, rng)
            case "constant" if inputs:
                _made_constant(model, names, inputs, rng)
            case "shape" if inputs:
                _reshaped(model, names, inputs, rng)
            case "dtype" if inputs:
                _recast(model, names, inputs, rng)
            case "arity":
                if rng.random() < 0.5 and node.input:
                    node.input.pop()
                else:
                    node.input.append(rng.choice(["", *node.input]) if node.input else "")
            case _:
                for value in (*model.graph.output, *(model.graph.value_info)):
                    value.type.tensor_type.ClearField("shape")
    return node.op_type, model.SerializeToString(), inputs


def _revalued(attribute: AttributeProto, rng: random.Random) -> None:
    match attribute.type:
        case AttributeProto.INT:
            near = attribute.i if abs(attribute.i) < 2**62 else 0
            attribute.i = rng.choice([*NUMBERS, near + 1, near - 1, -near])
        case AttributeProto.FLOAT:
            attribute.f = rng.choice(REALS)
        case AttributeProto.STRING:
            attribute.s = rng.choice([b"", b"\xff\xfe", b"linear", b"constant", b"SAME_LOWER", b"x" * 999])
        case AttributeProto.INTS:
            values = [*attribute.ints]
            if values and rng.random() < 0.6:
                values[rng.randrange(len(values))] = rng.choice(NUMBERS)
            else:
                values = rng.choice([[], [*values, 1], values[:-1], [0] * len(values), [-1] * len(values)])
            attribute.ints[:] = values
        case AttributeProto.FLOATS:
            attribute.floats[:] = [rng.choice(REALS) for _ in range(rng.choice([0, 1, len(attribute.floats)]))]
        case AttributeProto.STRINGS:
            attribute.strings[:] = [b"\xff"] * rng.choice([0, 1, 3])
        case _:
            retyped(attribute, rng)


def _listed(node: onnx.NodeProto, rng: random.Random) -> None:
    if node.attribute and rng.random() < 0.5:
        del node.attribute[rng.randrange(len(node.attribute))]
        return
    name = rng.choice(["axis", "axes", "to", "keepdims", "mode", "blocked", "auto_pad", "pads", "value", "group"])
    if name not in {attribute.name for attribute in node.attribute}:
        retyped(node.attribute.add(name=name), rng)


def _made_constant(model: onnx.ModelProto, names: list[str], inputs: list[Any], rng: random.Random) -> None:
    """Make an input an initializer, with other numbers in half of the cases."""
    places = [place for place, value in enumerate(inputs) if _is_plain(value)]
    if not places:
        return
    place = rng.choice(places)
    array = np.array(inputs[place])
    if rng.random() < 0.3:
        array = rng.choice([array.reshape(-1)[:0], array[None], array.reshape(-1)])
    elif array.dtype.kind in "iu" and array.size and rng.random() < 0.7:
        array = array.copy()
        info = np.iinfo(array.dtype)
        small = [0, 1, -1, 2, 5, 1000, int(info.max), int(info.min)]
        array.flat[rng.randrange(array.size)] = min(max(rng.choice(small), int(info.min)), int(info.max))
    tensor = numpy_helper.from_array(array, names[place])
    if array.dtype in _FOREIGN and tensor.raw_data and rng.random() < 0.5:
        tensor.raw_data = rng.randbytes(len(tensor.raw_data))
    model.graph.initializer.append(tensor)
    if rng.random() < 0.7:
        del model.graph.input[place]
        del names[place], inputs[place]


def _reshaped(model: onnx.ModelProto, names: list[str], inputs: list[Any], rng: random.Random) -> None:
    places = [place for place, value in enumerate(inputs) if _is_plain(value)]
    if not places:
        return
    place = rng.choice(places)
    whole = np.asarray(inputs[place])
    flat, has_axes = whole.reshape(-1), whole.ndim > 0
    scalar = flat[:1].reshape(()) if whole.size else whole
    cut = [whole[:0], whole[1:]] if has_axes else [whole, whole]
    array = rng.choice([whole[None], flat, whole[..., None], scalar, *cut])
    inputs[place] = np.ascontiguousarray(array).reshape(array.shape)
    shape = model.graph.input[place].type.tensor_type.shape
    del shape.dim[:]
    for size in array.shape:
        dim = shape.dim.add()
        if rng.random() < 0.7:
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _recast(model: onnx.ModelProto, names: list[str], inputs: list[Any], rng: random.Random) -> None:
    places = [place for place, value in enumerate(inputs) if _is_plain(value)]
    if not places:
        return
    place, number = rng.choice(places), rng.choice(_DTYPES)
    if number == TensorProto.STRING:
        array = np.asarray(inputs[place])
        inputs[place] = np.array([str(item) for item in array.reshape(-1)], object).reshape(array.shape)
    else:
        with np.errstate(all="ignore"):
            array = np.asarray(inputs[place])
            array = array.astype(np.float32) if array.dtype in _FOREIGN else array  # they have few casts
            inputs[place] = array.astype(helper.tensor_dtype_to_np_dtype(number))
    model.graph.input[place].type.tensor_type.elem_type = number


def _is_plain(value: Any) -> bool:
    known = isinstance(value, np.ndarray | np.generic) and (value.dtype.kind in "fiub" or value.dtype in _FOREIGN)
    return known and value.nbytes < _SMALL_BYTES
