"""`HandleStep`: a run with handles on the device as a loop repeats it, with everything looked up once.

A decode loop makes the same call thousands of times: the same inputs are given, the same handles stand behind the
others, the same outputs are asked for. Only the sizes of growing handles change, so only they are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine

__all__ = ["HandleStep"]

_facts = attrgetter("dtype", "shape")
_shape = attrgetter("shape")


class HandleStep:
    """A repeated run; made after a first run whose inputs were checked in full, and for one thread at a time.

    Args:
        engine: the engine that runs.
        types: input name -> declared type.
        feeds: the checked inputs of the first run, all of them.
        given: those that came with the call; all others are handles.
        host: host memory's handles by name.
        device: the device's handles by name.
        indices: the outputs that the call asked for.
        wanted: the outputs to run for, each once: those and the ones that feed handles.
        names: the names of all outputs.
        host_feeds: host handle -> the output that moves into it.
        device_feeds: device handle -> the output that moves into it.
    """

    def __init__(
        self,
        engine: Engine,
        types: Mapping[str, ValueType],
        feeds: Mapping[str, Any],
        given: Sequence[str],
        host: Mapping[str, Any],
        device: Mapping[str, DeviceTensor],
        indices: Sequence[int],
        wanted: Sequence[int],
        names: Sequence[str],
        host_feeds: Mapping[str, int],
        device_feeds: Mapping[str, int],
    ) -> None:
        self.engine = engine
        self._given = list(given)
        self._kept = [name for name in types if name in host and name not in given]
        self._held = [name for name in types if name in device and name not in given]
        self._indices = list(indices)
        resident = frozenset(names[index] for index in device_feeds.values())
        order = [*self._given, *self._held, *self._kept]
        self._loop = engine.binder.loop(order, [names[index] for index in wanted], resident)
        self._arrays = [np.ndarray] * len(given)
        self._given_facts = [_facts(feeds[name]) for name in given]
        places = {index: place for place, index in enumerate(wanted)}
        self._read = list(dict.fromkeys(indices))
        self._read_places = [places[index] for index in self._read]
        self._host_feeds = [(handle, places[index]) for handle, index in host_feeds.items()]
        self._device_feeds = [(handle, places[index]) for handle, index in device_feeds.items()]
        self._set_rules(types, feeds)

    @staticmethod
    def possible(types: Mapping[str, ValueType]) -> bool:
        """Return whether all inputs are tensors of numbers."""
        return all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in types.values())

    def run(
        self,
        engine: Engine,
        inputs: Mapping[str, Any],
        indices: Sequence[int],
        host: dict[str, Any],
        device: dict[str, DeviceTensor],
    ) -> tuple[list[int], list[Any]] | None:
        """Run, move outputs into the handles, and return the indices asked for, each once, and these outputs as arrays.

        None when the call is another one, or the handles' sizes do not agree with each other any more, and nothing has
        run. The same call has the same engine, names, dtypes and shapes given, and outputs.

        Raises:
            EngineError: the run failed; no handle has changed, and the step is of no use any more.
        """
        if engine is not self.engine or inputs.__class__ is not dict or list(indices) != self._indices:
            return None
        values = list(inputs.values())
        if (
            list(inputs) != self._given
            or list(map(type, values)) != self._arrays
            or list(map(_facts, values)) != self._given_facts
        ):
            return None
        values += map(device.__getitem__, self._held)
        values += map(host.__getitem__, self._kept)
        if not self._agree(list(map(_shape, values[len(self._given) :]))):
            return None
        results = self._loop.run(values)
        for handle, place in self._host_feeds:
            host[handle] = _as_array(results[place]).copy()
        for handle, place in self._device_feeds:
            device[handle] = results[place]
        return self._read, [_as_array(results[place]) for place in self._read_places]

    def _set_rules(self, types: Mapping[str, ValueType], feeds: Mapping[str, Any]) -> None:
        """Note what the handles' sizes are compared with: sizes given, then each kind of handle once."""
        self._sizes: dict[str, int] = {}
        for name in self._given:
            for dim, size in zip(_dims(types[name]), feeds[name].shape, strict=False):
                if isinstance(dim, str):
                    self._sizes[dim] = size
        first: dict[tuple[Any, ...], int] = {}
        self._rules: list[tuple[int, tuple[Any, ...]]] = []
        self._alike: list[tuple[int, int]] = []
        for place, name in enumerate((*self._held, *self._kept)):
            kind = types[name]
            if not isinstance(kind, TensorType) or kind.shape is None:
                continue
            dims = _dims(kind)
            if dims in first and None not in dims:
                self._alike.append((place, first[dims]))
            else:
                first[dims] = place
                self._rules.append((place, dims))

    def _agree(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        for place, like in self._alike:
            if shapes[place] != shapes[like]:
                return False
        sizes = self._sizes.copy()
        for place, dims in self._rules:
            shape = shapes[place]
            if len(shape) != len(dims):
                return False
            for dim, size in zip(dims, shape, strict=True):
                if dim.__class__ is int:
                    if dim != size:
                        return False
                elif dim is not None and sizes.setdefault(dim, size) != size:
                    return False
        return True


def _dims(kind: ValueType) -> tuple[Any, ...]:
    return tuple(kind.shape) if isinstance(kind, TensorType) and kind.shape is not None else ()


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, DeviceTensor) else value
