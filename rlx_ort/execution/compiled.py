"""`CompiledGraph`: a graph that is ready to run on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.execution.engine_slot import EngineSlot
from rlx_ort.execution.inputs import InputPlan
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.execution.placement import Placement
from rlx_ort.execution.typed_io import TypedBytes, arrays_from_typed, typed_from_arrays
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.converters.to_onnx.exported import ExportedModel
    from rlx_ort.device import Device

__all__ = ["CompiledGraph"]


class CompiledGraph:
    """A graph on one device, with the weights of a store; made by `Session.compile`.

    Runs may be started from several threads at once. A parameter that is set after a run makes the session stale; it
    is opened again before the next run, and no run sees old and new values together.
    """

    def __init__(self, slot: EngineSlot, rule: PlacementRule, inputs: InputPlan | None = None) -> None:
        self._slot = slot
        self._rule = rule
        self._strict = rule is PlacementRule.STRICT
        self._weights = slot.weights
        self._inputs = inputs or InputPlan(slot.exported.input_types)
        self._output_names = list(slot.exported.output_types)
        self._last: tuple[list[int] | None, list[Any]] = (None, [])
        slot.open_if_ready(rule)

    @property
    def device(self) -> Device:
        """The device the graph runs on."""
        return self._slot.device

    @property
    def options(self) -> CompileOptions:
        """The options it was compiled with."""
        return self._slot.options

    @property
    def rule(self) -> PlacementRule:
        """The placement rule it keeps."""
        return self._rule

    @property
    def exported(self) -> ExportedModel:
        """The ONNX model the engine runs."""
        return self._slot.exported

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, which other compiled graphs may share."""
        return self._weights

    @property
    def input_specs(self) -> Mapping[str, ValueType]:
        """Input name -> declared type, in order."""
        return self._slot.exported.input_types

    @property
    def output_specs(self) -> Mapping[str, ValueType]:
        """Output name -> declared type, in order."""
        return self._slot.exported.output_types

    @property
    def placement(self) -> Placement:
        """Where each node is; opens the session if it is not open yet.

        Raises:
            ParamError: a parameter is not set, so there is no session to look at.
            PlacementError: the nodes are not where the rule wants them.
        """
        if self._slot.placement is None:
            self._slot.engine(self._rule)
        assert self._slot.placement is not None  # noqa: S101  # opening a session fills it in
        return self._slot.placement

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data; see `WeightStore.set`.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        self._weights.set(name, array, cast=cast)

    def set_param_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; see `WeightStore.set_typed`.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        self._weights.set_typed(name, data, dtype, cast=cast)

    def update_params(self) -> contextlib.AbstractContextManager[None]:
        """Return a `with` block whose `set_param` calls take effect together, when it ends without an error."""
        return self._weights.update()

    def run(self, inputs: Mapping[str, Any] | None = None) -> list[Any]:
        """Run once and return the outputs as numpy arrays, in the order of the graph's outputs.

        Arrays of the declared dtype are not copied. Outputs that are sequences or maps come as lists or dicts.

        Raises:
            InputError: an input is missing, unknown, or of another shape or dtype than declared.
            ParamError: a parameter is not set.
            PlacementError: the nodes are not where the rule wants them.
            EngineError: the run failed.
        """
        slot = self._slot
        engine = slot.current
        if engine is None or engine.version != self._weights.version or (self._strict and not engine.strict_ok):
            engine = slot.engine(self._rule)
        outputs = engine.run(self._output_names, self._inputs.feeds(_NOTHING if inputs is None else inputs))
        self._last = (None, outputs)
        return outputs.copy()

    def run_read_outputs(self, inputs: Mapping[str, Any], indices: Sequence[int] | None = None) -> list[Any]:
        """Run once and return only the listed outputs, in the listed order, duplicates kept; None means all.

        Outputs that are not listed are not read back from the device.

        Raises:
            InputError: an index names no output, or an input is wrong.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        if indices is None:
            return self.run(inputs)
        wanted = list(dict.fromkeys(indices))
        for index in wanted:
            if not 0 <= index < len(self._output_names):
                raise InputError(f"there is no output {index}; the graph has {len(self._output_names)} outputs, from 0")
        read = wanted or [0]  # an engine reads a list of no names as all of them
        engine = self._slot.current
        if engine is None or engine.version != self._weights.version or (self._strict and not engine.strict_ok):
            engine = self._slot.engine(self._rule)
        outputs = engine.run([self._output_names[index] for index in read], self._inputs.feeds(inputs))
        self._last = (read, outputs)
        return [outputs[read.index(index)] for index in indices]

    def read_output_row(self, out: int, row: int, row_inner: int) -> npt.NDArray[Any] | None:
        """Return row `row` of output `out` of the last run, whose elements are counted in rows of `row_inner`.

        None when there is no such row, or the last run did not read that output. The array shares the output's
        memory. With several threads the last run is the one that ended last.
        """
        indices, outputs = self._last
        if indices is not None:
            if out not in indices:
                return None
            out = indices.index(out)
        if not 0 <= out < len(outputs) or not isinstance(outputs[out], np.ndarray) or row < 0 or row_inner < 1:
            return None
        flat = outputs[out].reshape(-1)
        if (row + 1) * row_inner > flat.size:
            return None
        found: npt.NDArray[Any] = flat[row * row_inner : (row + 1) * row_inner]
        return found

    def run_typed(
        self, inputs: Mapping[str, TypedBytes], output_dtypes: Sequence[DType | str] | None = None
    ) -> list[tuple[bytes, DType]]:
        """Run once on raw bytes: input name -> (bytes, dtype); return (bytes, dtype) for each output.

        An input of another dtype than declared is converted where that loses nothing. Outputs come in their
        declared dtypes, or in `output_dtypes`: then floats become integers by truncation towards zero, saturating at
        the limits, with NaN as 0, and anything but 0 is True as a bool.

        Raises:
            InputError: an input or dtype is wrong, the bytes do not fill the declared shape, or an output is no
                tensor of numbers.
            ParamError: a parameter is not set.
            EngineError: the run failed.
        """
        dtypes = self._declared_dtypes() if output_dtypes is None else _parsed(output_dtypes)
        if len(dtypes) != len(self._output_names):
            raise InputError(f"the graph has {len(self._output_names)} outputs, got {len(dtypes)} output dtypes")
        return typed_from_arrays(self.run(arrays_from_typed(self.input_specs, inputs)), dtypes)

    def close(self) -> None:
        """Give the session up; runs in other threads finish first. Closing twice is harmless."""
        self._slot.close()
        self._last = (None, [])

    def __enter__(self) -> CompiledGraph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._slot.closed else "not open yet" if self._slot.current is None else "open"
        shape = f"{len(self.input_specs)} inputs, {len(self._output_names)} outputs"
        return f"<CompiledGraph on {self.device.label}, {shape}, {self._rule.value}, {state}>"

    def _declared_dtypes(self) -> list[DType]:
        kinds = self.output_specs.values()
        return [kind.dtype if isinstance(kind, TensorType) else DType.STRING for kind in kinds]


_NOTHING: Mapping[str, Any] = {}


def _parsed(dtypes: Sequence[DType | str]) -> list[DType]:
    try:
        return [DType.parse(dtype) for dtype in dtypes]
    except ValueError as err:
        raise InputError(f"output dtypes: {err}") from err
