"""`compare`: runs two models, or one model on two devices, on the same inputs, and measures the differences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rlx_ort import made_up
from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.device import Device
from rlx_ort.errors import EngineError, InputError
from rlx_ort.execution.placement import Placement
from rlx_ort.ir.types import TensorType
from rlx_ort.made_up import SEED, SIZE_CHOICES
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.parity.metrics import Array, Difference, Tolerance, difference
from rlx_ort.parity.opening import ModelSource, OpenModel, OrtFormatFile, as_model, open_model

# Operators that pass the values of their first input on, so that an index stays an index.
_CARRIERS = {"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Transpose", "Slice", "Expand", "Tile"}
# (operator, input with the indices) -> input with the table; EmbedLayerNormalization has token and segment ids.
_TABLES = {
    ("Gather", 1): 0, ("GatherElements", 1): 0, ("GatherBlockQuantized", 1): 0,
    ("EmbedLayerNormalization", 0): 2, ("EmbedLayerNormalization", 1): 4,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OutputDifference:
    """One output of both models.

    `name` is its name in the reference, with an index or key for an element of a list or map. `dtypes` are those of
    both models, `shape` is that of the reference. `ok` means that the difference is within the tolerance.
    """

    name: str
    other_name: str
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    found: Difference
    ok: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`, with the outputs in the reference's order.

    `assumed` has the default sizes that the named dims of random inputs got. It is empty for given inputs, whose `seed`
    is None. `tolerance` is the largest accepted difference.
    """

    outputs: tuple[OutputDifference, ...]
    tolerance: Tolerance
    inputs: Mapping[str, Any]
    assumed: Mapping[str, int]
    seed: int | None
    devices: tuple[str, str]
    placements: tuple[Placement, Placement]

    def __repr__(self) -> str:
        verdict = "within" if self.ok else "beyond"
        return f"<Comparison on {' and '.join(self.devices)}: {len(self.outputs)} outputs {verdict} {self.tolerance}>"

    @property
    def ok(self) -> bool:
        """Whether every output is within the tolerance."""
        return all(output.ok for output in self.outputs)

    @property
    def worst(self) -> OutputDifference | None:
        """The output with the largest difference, None for a model without outputs."""
        return max(self.outputs, key=lambda output: (not output.ok, output.found.size), default=None)


@dataclass(frozen=True, slots=True)
class Reference:
    """The outputs of a model, or the elements of those that are lists and maps, kept after its session is closed."""

    inputs: Mapping[str, Any]
    assumed: Mapping[str, int]
    seed: int | None
    outputs: tuple[tuple[str, Array], ...]
    device: str
    placement: Placement


def compare(
    a: ModelSource,
    b: ModelSource,
    *,
    devices: tuple[Device | str, Device | str] = ("cpu", "cpu"),
    inputs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    tolerance: Tolerance | None = None,
    options: CompileOptions | None = None,
    seed: int = SEED,
) -> Comparison:
    """Run `a` and then `b` on the same inputs and return the difference of each output.

    Outputs are matched by name, else by position. Models are not rewritten first. Only one session is open at a time,
    and the outputs of `a` are held while `b` runs. `a` is the reference and may be the same model. By default the
    inputs are random, see `random_inputs`, and `dims` sizes their named dims. The default tolerance is 1e-5 relative,
    for f32 on one device. Both sessions are opened with `options`.

    Raises:
        ConversionError: a file cannot be read.
        InputError: the inputs do not fit, or the outputs cannot be matched.
        DeviceUnavailableError: a device does not work here.
        EngineError: a session or a run failed.
    """
    first = as_model(a)
    reference = reference_run(first, devices[0], inputs=inputs, dims=dims, options=options, seed=seed)
    second = first if b is a else as_model(b)
    del first
    return compare_to(reference, second, devices[1], tolerance=tolerance, options=options)


def reference_run(
    model: ModelBundle | OrtFormatFile,
    device: Device | str = "cpu",
    *,
    inputs: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    options: CompileOptions | None = None,
    seed: int = SEED,
) -> Reference:
    """Run a model once and return its outputs; the session is closed again.

    Without inputs, random ones are generated; if the model refuses their default sizes, smaller ones are tried.

    Raises:
        InputError: the inputs do not fit the model, or none can be generated for it.
        EngineError: the session or the run failed.
    """
    with open_model(model, device, options) as opened:
        if inputs is not None:
            missing = [name for name in opened.input_types if name not in inputs]
            if missing:
                wanted = ", ".join(opened.input_types)
                raise InputError(f"{model.origin} needs the inputs {wanted}; not given: {', '.join(missing)}")
            return _reference(opened, {name: inputs[name] for name in opened.input_types}, {}, None, device)
        if isinstance(model, OrtFormatFile):
            raise InputError(f"{model.path} does not show the tables that its inputs index; give inputs in an npz file")
        failures: list[tuple[Mapping[str, int], EngineError]] = []
        for assume in SIZE_CHOICES:
            arrays, assumed = random_inputs(model, dims, seed=seed, assume=assume)
            try:
                return _reference(opened, arrays, assumed, seed, device)
            except EngineError as err:
                failures.append((assumed, err))
        assumed, failure = failures[0]
        sizes = ", ".join(f"{name}={size}" for name, size in assumed.items()) or "all sizes known"
        raise EngineError(
            f"{model.origin} does not run on generated inputs ({sizes}): {failure}\n"
            "  give the sizes of its named dims, or inputs in an npz file"
        ) from failure


def compare_to(
    reference: Reference,
    model: ModelBundle | OrtFormatFile,
    device: Device | str = "cpu",
    *,
    tolerance: Tolerance | None = None,
    options: CompileOptions | None = None,
) -> Comparison:
    """Run a model on the inputs of a reference and return the difference of each output.

    Raises:
        InputError: the model does not have the inputs or the outputs of the reference.
        EngineError: the session or the run failed.
    """
    allowed = tolerance or Tolerance()
    with open_model(model, device, options) as opened:
        feeds = renamed_inputs(opened, reference.inputs, model.origin)
        results = _flattened(zip(opened.output_names, opened.run(feeds), strict=True))
        placement = opened.placement
    names = [[name for name, _ in side] for side in (results, reference.outputs)]
    complaint = f"{model.origin} has the outputs {', '.join(names[0])}, the reference {', '.join(names[1])}"
    pairs = zip(reference.outputs, _matched(names[1], dict(results), complaint), strict=True)
    outputs = []
    for (name, left), (other, right) in pairs:
        gap = difference(left, right)
        dtypes = (str(left.dtype), str(right.dtype))
        outputs.append(OutputDifference(name, other, dtypes, left.shape, gap, allowed.accepts(gap)))
    devices, placements = (reference.device, Device(device).label), (reference.placement, placement)
    return Comparison(tuple(outputs), allowed, reference.inputs, reference.assumed, reference.seed, devices, placements)


def _flattened(outputs: Iterable[tuple[str, Any]]) -> tuple[tuple[str, Array], ...]:
    """Return outputs as (name, array); lists and maps become one entry per element, absent optionals none."""
    flat: list[tuple[str, Array]] = []
    for name, value in outputs:
        if isinstance(value, list):
            flat += _flattened((f"{name}[{index}]", item) for index, item in enumerate(value))
        elif isinstance(value, dict):
            flat += _flattened((f"{name}[{key!r}]", value[key]) for key in sorted(value, key=str))
        elif value is not None:
            flat.append((name, np.asarray(value)))
    return tuple(flat)


def _reference(
    opened: OpenModel, feeds: Mapping[str, Any], assumed: Mapping[str, int], seed: int | None, device: Device | str
) -> Reference:
    outputs = _flattened(zip(opened.output_names, opened.run(feeds), strict=True))
    return Reference(feeds, assumed, seed, outputs, Device(device).label, opened.placement)


def renamed_inputs(opened: OpenModel, inputs: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the inputs with the names and dtypes of another model, matched by name if all match, else by position.

    Raises:
        InputError: the model has neither the same names nor the same number of inputs.
    """
    wanted = opened.input_types
    values = _matched(
        list(wanted), inputs, f"{origin} has the inputs {', '.join(wanted)}, the reference {', '.join(inputs)}"
    )
    feeds = {}
    for (name, kind), (_, value) in zip(wanted.items(), values, strict=True):
        if isinstance(kind, TensorType) and isinstance(value, np.ndarray) and value.dtype != object:
            value = value.astype(kind.dtype.numpy, copy=False)
        feeds[name] = value
    return feeds


def _matched(names: Sequence[str], pool: Mapping[str, Any], complaint: str) -> list[tuple[str, Any]]:
    """Return a name and value of the pool for each name: those of that name if all are there, else by position."""
    if set(names) <= pool.keys():
        return [(name, pool[name]) for name in names]
    if len(names) == len(pool):
        return list(pool.items())
    raise InputError(complaint)


def random_inputs(
    model: ModelBundle,
    sizes: Mapping[str, int] | None = None,
    *,
    seed: int = SEED,
    assume: tuple[int, int, int] = SIZE_CHOICES[0],
) -> made_up.MadeInputs:
    """Return random inputs for a model, see `made_up.random_inputs`; integers that index a table are in its range.

    Raises:
        InputError: an input is no tensor, or its rank is unknown.
        GraphVerifyError: no input has a dim that `sizes` names.
    """
    types = model.input_types()
    bounds = _index_bounds(model.proto.graph, types)
    return made_up.random_inputs(types, sizes, seed=seed, assume=assume, bounds=bounds)


def _index_bounds(graph: onnx.GraphProto, inputs: Iterable[str]) -> dict[str, int]:
    """Return input -> length of the shortest table that its values index, for inputs that index one."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    carried = {name: {name} for name in inputs}  # value -> the inputs whose values it has
    bounds: dict[str, int] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            starts = carried.get(name, set())
            if starts and (rows := _table_rows(node, index, shapes)) is not None:
                bounds.update({start: min(rows, bounds.get(start, rows)) for start in starts})
            if starts and ((node.op_type in _CARRIERS and index == 0) or node.op_type == "Concat"):
                carried.setdefault(node.output[0], set()).update(starts)
    return bounds


def _table_rows(node: onnx.NodeProto, index: int, shapes: Mapping[str, Sequence[int]]) -> int | None:
    """Return the length of the table that input `index` of a node indexes, None without a table."""
    place = _TABLES.get((node.op_type, index))
    shape = shapes.get(node.input[place]) if place is not None and place < len(node.input) else None
    axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
    return shape[axis] if shape and -len(shape) <= axis < len(shape) else None
