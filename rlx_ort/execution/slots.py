"""Runs through buffers that are bound once: `SlotRunner` for positional runs, `PooledRuns` for many small inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.execution.inputs import InputPlan, matcher, sizes_of
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine
    from rlx_ort.providers.engine.binding import Arrays, Slots

_POOL_FROM_INPUTS = 64
_POOL_AT_MOST_BYTES = 256 * 1024
_POOL_SIZE = 4


class SlotRunner:
    """Fixed buffers for the shapes of the last run.

    The first run of a set of shapes is a plain one; later runs use bound buffers of the sizes of its outputs.

    Attributes:
        lock: the caller of `run` holds it, as the buffers are for one thread at a time.
        buffers: the outputs of the last run, in order; not to be changed.
    """

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], plan: InputPlan) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._plan = plan
        self._engine: Engine | None = None
        self._slots: Slots | None = None
        self._shapes: list[tuple[int, ...]] = []
        self._matches: Callable[[Sequence[Any]], bool] = lambda _: False
        self._dtypes = [kind.dtype.numpy for kind in inputs.values() if isinstance(kind, TensorType)]
        self.buffers: Sequence[npt.NDArray[Any]] = ()
        self.lock = threading.Lock()

    @property
    def supported(self) -> bool:
        """Whether all inputs and outputs are tensors of numbers that a buffer can hold."""
        return _fit_buffers((*self._inputs.values(), *self._outputs.values()))

    @property
    def views(self) -> list[npt.NDArray[Any]]:
        """The output buffers of the last run, in a new list."""
        with self.lock:
            return list(self.buffers)

    def run(self, engine: Engine, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Run on arrays in the order of the inputs; return the output buffers; see `CompiledGraph.run_slots`."""
        if engine is self._engine and self._matches(arrays):
            assert self._slots is not None  # noqa: S101  # set together with the engine
            self.buffers = outputs = self._slots.run(arrays)
            return list(outputs)
        return self._prepare(engine, arrays)

    def clear(self, *, wait: bool = True) -> bool:
        """Release the buffers and the engine they are bound to; unless `wait`, return False during a run."""
        if not self.lock.acquire(blocking=wait):
            return False
        self._engine, self._slots, self.buffers = None, None, ()
        self.lock.release()
        return True

    def _prepare(self, engine: Engine, arrays: Sequence[Any]) -> list[npt.NDArray[Any]]:
        """Check the arrays and run; binds new buffers if their shapes or the engine are new."""
        feeds = self._plan.feeds(self._plan.ordered(arrays))
        if not self.supported:
            self._engine, self._slots = None, None
            self.buffers = engine.run(list(self._outputs), feeds)
            return list(self.buffers)
        ready = [
            value.numpy() if isinstance(value, DeviceTensor) else value
            for value in map(feeds.__getitem__, self._inputs)
        ]
        shapes = [array.shape for array in ready]
        if self._slots is None or engine is not self._engine or shapes != self._shapes:
            self._engine, self._slots, self.buffers = None, None, ()
            given = dict(zip(self._inputs, ready, strict=True))
            outputs = engine.run(list(self._outputs), given)
            named = dict(zip(self._outputs, outputs, strict=True))
            slots = engine.binder.slots(given, named, _sized_by_inputs(self._inputs, self._outputs, given, named))
            if slots is not None:
                self._engine, self._slots, self._shapes = engine, slots, shapes
                self._matches = matcher(self._dtypes, shapes)
                named |= slots.bound
            self.buffers = list(named.values())
        else:
            self.buffers = self._slots.run(ready)
        return list(self.buffers)


def _sized_by_inputs(
    inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], given: Arrays, results: Arrays
) -> set[str]:
    """Return the outputs whose sizes follow from those of the inputs; models declare some that they do not keep."""
    sizes = sizes_of(inputs, {name: array.shape for name, array in given.items()})
    return {
        name
        for name, result in results.items()
        if isinstance(kind := outputs[name], TensorType)
        and kind.shape is not None
        and kind.shape.bind(sizes) == result.shape
    }


def _fit_buffers(kinds: Iterable[ValueType]) -> bool:
    return all(
        isinstance(kind, TensorType) and kind.dtype is not DType.STRING and not kind.dtype.is_packed for kind in kinds
    )


class PooledRuns:
    """Runs of many small inputs through bound buffers, twice as fast as passing them by name.

    Each run takes buffers from a pool, so runs may be concurrent; outputs are new arrays every time.
    """

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType]) -> None:
        self.wanted = len(inputs) >= _POOL_FROM_INPUTS and _fit_buffers((*inputs.values(), *outputs.values()))
        self._outputs = list(outputs)
        self._pool = _Pool()

    def run(self, engine: Engine, key: object, feeds: Mapping[str, Any]) -> list[Any]:
        """Run on checked arrays; `key` is the same object for inputs of the same names, dtypes and shapes."""
        pool = self._pool
        if pool.engine is not engine or pool.key is not key:
            self._pool = pool = _Pool(engine, key)
            pool.small = sum(array.nbytes for array in feeds.values()) <= _POOL_AT_MOST_BYTES
        try:
            slots = pool.free.pop()
        except IndexError:
            made = self._made(pool, engine, feeds)
            if made is None:
                return engine.run(self._outputs, feeds)
            slots = made
        try:
            return list(slots.run(list(feeds.values())))
        finally:
            pool.free.append(slots)

    def clear(self) -> None:
        """Release the buffers and the engine they are bound to."""
        self._pool = _Pool()

    def _made(self, pool: _Pool, engine: Engine, feeds: Mapping[str, Any]) -> Slots | None:
        """Return new buffers; None if the inputs are too large or the pool is full."""
        if not pool.small or pool.made >= _POOL_SIZE or not engine.binder.on_host:
            return None
        pool.made += 1
        return engine.binder.slots(feeds, dict.fromkeys(self._outputs, _NO_ARRAY), ())


@dataclass(slots=True)
class _Pool:
    """Buffers for one engine and one kind of inputs; several threads may pop and append, which is atomic."""

    engine: Engine | None = None
    key: object = None
    free: list[Slots] = field(default_factory=list)
    made: int = 0
    small: bool = False


_NO_ARRAY: npt.NDArray[Any] = np.empty(0)
