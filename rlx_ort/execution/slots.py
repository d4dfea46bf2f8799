"""`SlotRunner`: positional runs through buffers that are bound once, the cheapest way to run a graph repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.execution.inputs import InputPlan
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine
    from rlx_ort.providers.binding import Slots

__all__ = ["SlotRunner"]


class SlotRunner:
    """Fixed buffers for the shapes of the last run; for one thread at a time, which the caller sees to.

    The first run of a set of shapes is a plain one that tells the sizes of the outputs.

    Args:
        inputs: input name -> declared type.
        outputs: output name -> declared type.
        plan: what checks the inputs of runs.
    """

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], plan: InputPlan) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._plan = plan
        tensors = [kind for kind in inputs.values() if isinstance(kind, TensorType)]
        symbols = {dim for kind in tensors for dim in kind.shape or () if dim is not None}
        # The shape of these follows from those of the inputs; others may differ from run to run.
        self._fixed = frozenset(
            name
            for name, kind in outputs.items()
            if isinstance(kind, TensorType)
            and kind.shape is not None
            and all(isinstance(dim, int) or dim in symbols for dim in kind.shape)
        )
        self._engine: Engine | None = None
        self._slots: Slots | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes = [kind.dtype.numpy for kind in tensors]
        self._count = len(inputs)
        self._buffers: Sequence[npt.NDArray[Any]] = ()

    @property
    def supported(self) -> bool:
        """Whether all inputs and outputs are tensors of numbers that a buffer can hold."""
        return all(
            isinstance(kind, TensorType) and kind.dtype is not DType.STRING and not kind.dtype.is_packed
            for kind in (*self._inputs.values(), *self._outputs.values())
        )

    @property
    def views(self) -> list[npt.NDArray[Any]]:
        """The output buffers of the last run."""
        return list(self._buffers)

    def run(self, engine: Engine, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Run on arrays in the order of the inputs; return the output buffers.

        Raises:
            InputError: an array is missing or of another type than declared.
            EngineError: the run failed.
        """
        slots = self._slots
        if slots is None or engine is not self._engine or len(arrays) != self._count:
            return self._prepare(engine, arrays)
        array_type = np.ndarray
        for array, dtype, shape in zip(arrays, self._dtypes, self._shapes, strict=True):
            if array.__class__ is not array_type or array.dtype is not dtype or array.shape != shape:
                return self._prepare(engine, arrays)
        self._buffers = found = slots.run(arrays)
        return list(found)

    def clear(self) -> None:
        """Let go of the buffers and of the engine they are bound to."""
        self._engine = None
        self._slots = None
        self._buffers = ()

    def _prepare(self, engine: Engine, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Check the arrays in full; bind new buffers where their shapes, or the engine, are new."""
        feeds = self._plan.feeds(self._plan.ordered(arrays))
        ready = [feeds[name] for name in self._inputs]
        shapes = [array.shape for array in ready]
        if self._slots is None or engine is not self._engine or shapes != self._shapes:
            self.clear()
            outputs = engine.run(list(self._outputs), feeds)
            named = dict(zip(self._outputs, outputs, strict=True))
            given = dict(zip(self._inputs, ready, strict=True))
            slots = engine.binder.slots(given, named, self._fixed) if self.supported else None
            if slots is None:
                self._buffers = outputs
                return list(outputs)
            self._engine, self._slots, self._shapes = engine, slots, shapes
        self._buffers = self._slots.run(ready)
        return list(self._buffers)
