"""Models of the ONNX backend suite, or of files, with changed attributes, dtypes, dims and nodes.

The expected outputs are those of plain ONNX Runtime without optimisation. Where results differ, the reference evaluator
of `onnx` decides, if it has the operators. It also does where the two differ in shape, since the kernels are the same.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from interpreter import Array
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx_suite.cases import stored_cases

from rlx_ort import Graph, from_onnx

__all__ = ["MODELS", "Mutant", "mutant_of"]

MODELS = "GENERATED_MODELS"
"""Environment variable with the paths of ONNX files to mutate, separated as in `PATH`; unset for the suite's."""

_FLOATS = (TensorProto.FLOAT16, TensorProto.DOUBLE)
_SIMILAR = (
    ("Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Softplus", "Floor", "Erf", "HardSwish"),
    ("Add", "Sub", "Mul", "Max", "Min"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2"),
    ("Softmax", "LogSoftmax"),
    ("MaxPool", "AveragePool"),
    ("GlobalAveragePool", "GlobalMaxPool"),
)
_LARGEST = 100_000  # elements of inputs; a GPU in software takes minutes for more
_NO_TENSORS = ("test_sequence", "test_strnorm", "test_gradient")
_Feeds = dict[str, Array]
_Change = Callable[[onnx.ModelProto, np.random.Generator], None]


class Mutant:
    """A changed model: its graph, its inputs, and what it should return."""

    def __init__(self, origin: str, model: onnx.ModelProto, feeds: _Feeds, seed: int) -> None:
        self.origin, self.model, self._feeds, self._seed = origin, model, feeds, seed
        self.graph: Graph = from_onnx(model.SerializeToString())

    def feeds(self, call: int) -> _Feeds:
        """Return the inputs of a call: those of the suite, then ones of the same kind and, if free, other sizes.

        In a third of the models free sizes are 0 in the second call.
        """
        found, free = {}, (0 if self._seed % 12 == 3 else 2) if call % 2 else 3
        for index, value in enumerate(self.graph.inputs):
            rng = np.random.default_rng([self._seed, 5, call, index])
            given = self._feeds[value.name]
            sizes = [dim if isinstance(dim, int) else free for dim in value.shape]
            array = np.resize(given, sizes)
            if call and array.dtype.kind == "f":
                array = rng.permuted(array)
            found[value.name] = np.ascontiguousarray(array.astype(value.dtype.numpy))
        return found

    def expected(self, feeds: _Feeds) -> list[Array] | None:
        """Return the outputs of plain ONNX Runtime, or of the evaluator where shapes differ; None if it refuses."""
        try:
            plain = [np.asarray(item) for item in self._plain.run(None, feeds)]
        except Exception:  # whatever it is, this is no reference
            return None
        other = self.second(feeds) or plain
        return plain if [item.shape for item in plain] == [item.shape for item in other] else other

    def second(self, feeds: _Feeds) -> list[Array] | None:
        """Return the outputs of the reference evaluator; None if it has none."""
        from onnx.reference import ReferenceEvaluator

        try:
            found: Any = ReferenceEvaluator(self.model).run(None, feeds)
        except Exception:  # whatever it is, this is no reference
            return None
        return [np.asarray(item) for item in found]

    @functools.cached_property
    def _plain(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return onnxruntime.InferenceSession(self.model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def mutant_of(seed: int, skip: frozenset[int] = frozenset()) -> Mutant:
    """Return the changed model of a seed, without the changes to skip.

    Raises:
        RlxError: the library refuses to import it.
    """
    rng = np.random.default_rng([seed, 0])
    pool = _pool()
    while True:
        origin = sorted(pool)[rng.integers(len(pool))]
        model, arrays = pool[origin]()
        if sum(array.size for array in arrays) <= _LARGEST:
            break
    weights = {tensor.name for tensor in model.graph.initializer}
    fed = [value for value in model.graph.input if value.name not in weights]
    feeds = dict(zip((value.name for value in fed), arrays, strict=False))
    for value in fed:
        if value.name not in feeds:
            feeds[value.name] = _array_of(value, rng)
    for index in range(int(rng.choice([1, 1, 2, 3]))):
        change = np.random.default_rng([seed, 1, index])
        if index not in skip:
            made = _CHANGES[change.integers(len(_CHANGES))]
            made(model, change)
            origin += f", {made.__name__.strip('_')} changed"
    del model.graph.value_info[:]  # the types before the changes
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    return Mutant(origin, model, feeds, seed)


@functools.cache
def _pool() -> dict[str, Callable[[], tuple[onnx.ModelProto, Sequence[Array]]]]:
    """Return the name of each model, and what loads it with the inputs that it comes with."""
    if paths := os.environ.get(MODELS):
        return {path: functools.partial(_of_file, Path(path)) for path in paths.split(os.pathsep)}
    cases = (case for case in stored_cases() if not case.name.startswith(_NO_TENSORS))
    return {case.id: functools.partial(_of_case, case) for case in cases}


def _of_file(path: Path) -> tuple[onnx.ModelProto, Sequence[Array]]:
    return copy.deepcopy(_read(path)), []


@functools.lru_cache(maxsize=4)
def _read(path: Path) -> onnx.ModelProto:
    return onnx.load(path)


def _of_case(case: Any) -> tuple[onnx.ModelProto, Sequence[Array]]:
    data, sets = case.load()
    return onnx.ModelProto.FromString(data), sets[0][0] if sets else []


def _array_of(value: onnx.ValueInfoProto, rng: np.random.Generator) -> Array:
    kind = value.type.tensor_type
    shape = [dim.dim_value or 3 for dim in kind.shape.dim]
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if dtype.kind == "f":
        return (rng.integers(-16, 17, shape) / 8).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)  # indices, lengths and masks


def _attribute(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Change a number of an attribute."""
    kinds = (AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT)
    found = [item for node in model.graph.node for item in node.attribute if item.type in kinds]
    if not found:
        return
    item = found[rng.integers(len(found))]
    if item.type == AttributeProto.FLOAT:
        item.f = float(rng.choice([item.f * 2, 1e-3, 0.5, 1.0]))
    elif item.name == "keepdims":  # the evaluator keeps dims with any number but 0, ONNX Runtime with 1
        item.i = 1 - item.i
    elif item.type == AttributeProto.INT:
        item.i = int(rng.choice([item.i + 1, item.i - 1, -item.i, 0, 1]))
    elif len(item.ints):
        place = int(rng.integers(len(item.ints)))
        if rng.random() < 0.3:
            item.ints[:] = [int(number) for number in rng.permutation(list(item.ints))]
        else:
            item.ints[place] = max(int(item.ints[place] + rng.choice([1, -1, 2])), -3)


def _constant(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Change an element of a small tensor of integers, such as a shape, axes or starts."""
    tensors = [*model.graph.initializer]
    tensors += [item.t for node in model.graph.node for item in node.attribute if item.type == AttributeProto.TENSOR]
    tensors = [item for item in tensors if item.data_type == TensorProto.INT64 and 0 < np.prod(item.dims) < 9]
    if not tensors:
        return
    tensor = tensors[rng.integers(len(tensors))]
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[rng.integers(array.size)] += int(rng.choice([1, -1, 2]))
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def _dtype(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Have the model compute in another float dtype."""
    to = int(rng.choice(_FLOATS))

    def tensor(item: TensorProto) -> None:
        if item.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(item).astype(helper.tensor_dtype_to_np_dtype(to))
            item.CopyFrom(numpy_helper.from_array(array, item.name))

    for item in model.graph.initializer:
        tensor(item)
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = to
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                tensor(attribute.t)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i == TensorProto.FLOAT:
                attribute.i = to


def _dims(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Name the same dim of all inputs, or give it another size."""
    size = int(rng.choice([0, 0, 0, 1, 2, 3]))
    weights = {tensor.name for tensor in model.graph.initializer}
    shapes = [value.type.tensor_type.shape.dim for value in model.graph.input if value.name not in weights]
    place = int(rng.integers(max(map(len, shapes), default=0) or 1))
    for dims in shapes:
        if place >= len(dims):
            continue
        if size:
            dims[place].dim_value = size
        else:
            dims[place].dim_param = "free"


def _operator(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Put another operator of the same inputs in the place of one."""
    found = [(node, kinds) for node in model.graph.node for kinds in _SIMILAR if node.op_type in kinds]
    if found:
        node, kinds = found[rng.integers(len(found))]
        node.op_type = str(rng.choice(kinds))


def _wiring(model: onnx.ModelProto, rng: np.random.Generator) -> None:
    """Swap the first two inputs of a node, or return a value that was none of the outputs."""
    node = model.graph.node[rng.integers(len(model.graph.node))]
    if len(node.input) > 1 and rng.random() < 0.4:
        node.input[0], node.input[1] = node.input[1], node.input[0]
        return
    kinds = {output.name: output for output in model.graph.output}
    if node.output and node.output[0] and node.output[0] not in kinds:
        floats = helper.make_tensor_value_info(node.output[0], _float_of(model), None)
        model.graph.output.insert(int(rng.integers(2)), floats)


def _float_of(model: onnx.ModelProto) -> int:
    found: int = next((v.type.tensor_type.elem_type for v in model.graph.output), TensorProto.FLOAT)
    return found


_CHANGES: tuple[_Change, ...] = (_attribute, _attribute, _constant, _dtype, _dims, _dims, _operator, _wiring)
