"""`Handles`: values that outlive a run and are fed to the next one, in host memory or in device memory.

A handle named like an input is that input's value in every run that does not supply it. After a run, outputs move into
the handles they feed. On a device they stay there: each run writes to new memory, and the old memory is freed when the
new has taken its place, so no run writes to memory that it reads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError, near_names
from rlx_ort.execution.inputs import InputPlan, ResidentFeeds, coerced, matcher
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import Shape, TensorType, ValueType, fits
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine

_shape = attrgetter("shape")


class Handles:
    """The handles of one compiled graph, false while there are none; its methods list the errors.

    Attributes:
        lock: every call takes it, and the caller of a run holds it.
        step: the last run, ready to be repeated; None if it cannot be.
    """

    def __init__(self, inputs: Mapping[str, ValueType], outputs: Mapping[str, ValueType], plan: InputPlan) -> None:
        self.lock = threading.RLock()
        self._inputs = inputs
        self._outputs = outputs
        self._names = list(outputs)
        self._plan = plan
        self._values: dict[str, Any] = {}  # arrays in host memory, and `DeviceTensor`s
        self._feeds: dict[str, int] = {}
        self.step: _Step | None = None
        self._repeats = all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in inputs.values())

    def __bool__(self) -> bool:
        return bool(self._values)

    def copy(self) -> Handles:
        """Return independent handles with the same values and feeds."""
        with self.lock:
            return self.given_up()

    def given_up(self) -> Handles:
        """Return a copy while a run that holds the lock does not return; it has changed nothing yet."""
        made = Handles(self._inputs, self._outputs, self._plan)
        for name, value in self._values.items():  # a device tensor is never written to, so it is shared
            made._values[name] = value if isinstance(value, DeviceTensor) else value.copy()
        made._feeds = dict(self._feeds)
        return made

    def bind(self, name: str, array: Any, engine: Engine | None = None) -> None:
        """Keep a copy of a value in host memory, or with an engine on its device; replaces a handle of that name."""
        value = self._checked(name, array, engine)
        if engine is None:
            value = value.copy()
        elif not isinstance(value, DeviceTensor):
            value = engine.binder.upload(value)
        with self.lock:
            if not self.has(name, engine is not None):
                self.step = None
                self._feeds.pop(name, None)
            self._values[name] = value

    def feed(self, name: str, index: int, *, on_device: bool) -> None:
        """Move output `index` into a handle after every later run."""
        with self.lock:
            if not self.has(name, on_device):
                where, maker = ("on the device", "bind_gpu_handle") if on_device else ("in host memory", "bind_handle")
                raise InputError(f"there is no handle {name!r} {where} to feed; {maker} makes one")
            if self._feeds.get(name) == index:
                return
            self.check_outputs([index])
            output, target = self._outputs[self._names[index]], self._inputs.get(name)
            if not isinstance(output, TensorType) or (
                isinstance(target, TensorType) and target.dtype is not output.dtype
            ):
                raise InputError(f"output {index} is {output} and cannot feed handle {name!r}, which is {target}")
            self.step = None
            self._feeds[name] = index

    def read(self, name: str, *, on_device: bool) -> npt.NDArray[Any] | None:
        """Return a copy of a handle on the host, or None when there is none."""
        with self.lock:
            if not self.has(name, on_device):
                return None
            array: npt.NDArray[Any] = self._values[name].numpy() if on_device else self._values[name].copy()
            return array

    def clear(self) -> None:
        """Forget every handle and feed."""
        with self.lock:
            self.step = None
            self._values.clear()
            self._feeds.clear()

    @property
    def on_device(self) -> bool:
        """Whether a handle is in the memory of the device."""
        return any(isinstance(value, DeviceTensor) for value in list(self._values.values()))

    def unbind(self, *, wait: bool = True) -> bool:
        """Release the engine that the last run was bound to; unless `wait`, return False during a run."""
        if not self.lock.acquire(blocking=wait):
            return False
        self.step = None
        self.lock.release()
        return True

    def behind(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs with the handles as values of those that are not given."""
        if not self or not isinstance(inputs, Mapping):
            return inputs
        return {**{name: value for name, value in self._values.items() if name in self._inputs}, **inputs}

    def run(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int], on_device: bool
    ) -> tuple[list[int], list[Any]]:
        """Run with the handles as values of the inputs not given, and move outputs into the handles.

        Returns the indices asked for, each once, and these outputs as arrays, or as device tensors if `on_device`. A
        run that fails changes no handle.

        Raises:
            InputError: an input is missing, unknown or of another type.
            EngineError: the run failed.
        """
        if not on_device:
            step, self.step = self.step, None  # frees the buffers it has bound, unless it can run again
            outputs = None if step is None else step.run(engine, inputs, indices)
            if outputs is not None:
                self.step = step
                return outputs
        if indices.__class__ is not range or indices != range(len(self._names)):  # that is all of them
            self.check_outputs(indices)
        feeds = self._plan.feeds(self.behind(inputs), engine)
        host, device = self._targets(on_device=False), self._targets(on_device=True)
        read = list(dict.fromkeys(indices))
        # An engine reads an empty list of names as all of them.
        wanted = list(dict.fromkeys((*read, *host.values(), *device.values()))) or [0]
        names = [self._names[index] for index in wanted]
        resident = frozenset(self._names[index] for index in (*device.values(), *(read if on_device else ())))
        if resident or feeds.__class__ is ResidentFeeds:
            results = dict(zip(wanted, engine.binder.run(feeds, names, resident), strict=True))
        else:
            results = dict(zip(wanted, engine.run(names, feeds), strict=True))
        arrays = {index: _as_array(results[index]) for index in (*(() if on_device else read), *host.values())}
        self._values.update({handle: arrays[index].copy() for handle, index in host.items()})
        self._values.update({handle: results[index] for handle, index in device.items()})
        if on_device:
            return read, [results[index] for index in read]
        if self.on_device and self._repeats and all(feeds[name] is value for name, value in inputs.items()):
            self.step = _Step(self, engine, feeds, list(inputs), indices, wanted)
        return read, [arrays[index] for index in read]

    def check_outputs(self, indices: Sequence[int]) -> None:
        """Refuse an index without an output."""
        for index in indices:
            if not 0 <= index < len(self._names):
                raise InputError(f"there is no output {index}; the graph has {len(self._names)} outputs, from 0")

    def has(self, name: str, on_device: bool) -> bool:
        """Return whether a handle of the host, or of the device, has the name."""
        value = self._values.get(name)
        return value is not None and isinstance(value, DeviceTensor) is on_device

    def _targets(self, on_device: bool) -> dict[str, int]:
        """Return handle -> the output that moves into it, by a feed, or in host memory by the name `out{i}`."""
        targets = {
            name: self._feeds.get(name, None if on_device else self._numbered(name))
            for name in self._values
            if self.has(name, on_device)
        }
        return {name: index for name, index in targets.items() if index is not None}

    def _numbered(self, name: str) -> int | None:
        """Return the output that a name such as `out0` stands for; None for other names."""
        digits = name.removeprefix("out")
        if digits == name or not digits.isascii() or not digits.isdigit() or str(int(digits)) != digits:
            return None
        index = int(digits)
        return index if index < len(self._names) else None

    def _checked(self, name: str, array: Any, engine: Engine | None) -> Any:
        kind = self._inputs.get(name)
        index = None if engine is not None else self._numbered(name)
        if kind is None and index is not None:
            kind = self._outputs[self._names[index]]
        if kind is None:
            raise InputError(
                f"a handle is named like an input or `out0` to `out{len(self._names) - 1}`, not {name!r}; "
                + near_names(name, self._inputs)
            )
        if not isinstance(kind, TensorType):
            raise InputError(f"{name!r} is {kind}; only tensors can be held by a handle")
        value = coerced(f"handle {name!r}", array, kind, engine)
        if engine is None and isinstance(value, DeviceTensor):
            raise InputError(f"handle {name!r} is in host memory; give it the array of {value!r}, from its numpy()")
        if kind.shape is not None and not fits(kind.shape, Shape(value.shape)):
            raise InputError(f"handle {name!r} is {kind}; got {value.dtype.name} of shape {value.shape}")
        return value


class _Step:
    """A run with handles on the device as a loop repeats it, with every lookup done once.

    A decode loop makes the same call thousands of times: only the sizes of growing handles and inputs change, so only
    they are checked. Made after a run whose inputs were checked in full; for one thread at a time.
    """

    def __init__(
        self,
        handles: Handles,
        engine: Engine,
        feeds: Mapping[str, Any],
        given: list[str],
        indices: Sequence[int],
        wanted: Sequence[int],
    ) -> None:
        types, names = handles._inputs, handles._names
        self._values = handles._values
        self._on_sizes = handles._plan.on_sizes
        self._engine = engine
        self._given = given
        self._held = [name for name in types if name in self._values and name not in given]
        self._indices = list(indices)
        device = handles._targets(on_device=True)
        resident = frozenset(names[index] for index in device.values())
        self._loop = engine.binder.loop([*given, *self._held], [names[index] for index in wanted], resident)
        self._dtypes = [feeds[name].dtype for name in given]
        self._dims = [_dims(types[name]) for name in given]
        self._matches: Callable[[Sequence[Any]], bool] = lambda _: False
        places = {index: place for place, index in enumerate(wanted)}
        self._read = list(dict.fromkeys(indices))
        self._read_places = [places[index] for index in self._read]
        self._host_feeds = [(handle, places[index]) for handle, index in handles._targets(False).items()]
        self._device_feeds = [(handle, places[index]) for handle, index in device.items()]
        # For the comparison of the handles' shapes: with the sizes of inputs, and with each other.
        self._fixed: dict[Any, int] = {}  # a dim that is a size stands for itself
        first: dict[tuple[Any, ...], int] = {}
        self._rules: list[tuple[int, tuple[Any, ...]]] = []
        self._alike: list[tuple[int, int]] = []
        for place, name in enumerate(self._held):
            dims = _dims(types[name])
            if dims is None:
                continue
            if dims in first and None not in dims:
                self._alike.append((place, first[dims]))
            else:
                first[dims] = place
                self._rules.append((place, dims))
                self._fixed.update((dim, dim) for dim in dims if isinstance(dim, int))
        self._takes([feeds[name] for name in given])

    def run(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int]
    ) -> tuple[list[int], list[Any]] | None:
        """Run, move outputs into the handles, and return as `Handles.run` does.

        None, and nothing has run, if the engine, the outputs asked for, or the names or dtypes of the inputs differ, or
        sizes do not fit each other any more. After an error no handle has changed, and the step cannot be used again.
        """
        if engine is not self._engine or inputs.__class__ is not dict or list(indices) != self._indices:
            return None
        values = list(inputs.values())
        if list(inputs) != self._given or not (self._matches(values) or self._takes(values)):
            return None
        values += map(self._values.__getitem__, self._held)
        if not self._agree(list(map(_shape, values[len(self._given) :]))):
            return None
        results = self._loop(values)
        for handle, place in self._host_feeds:
            self._values[handle] = _as_array(results[place]).copy()
        for handle, place in self._device_feeds:
            self._values[handle] = results[place]
        return self._read, [_as_array(results[place]) for place in self._read_places]

    def _takes(self, values: Sequence[Any]) -> bool:
        """Expect inputs of the sizes of these from now on, and return whether they fit the declared types."""
        sizes = self._fixed.copy()
        for value, dtype, dims in zip(values, self._dtypes, self._dims, strict=True):
            if value.__class__ is not np.ndarray or value.dtype is not dtype:
                return False
            if dims is None:
                continue
            if len(value.shape) != len(dims):
                return False
            for dim, size in zip(dims, value.shape, strict=True):
                if size != (dim if isinstance(dim, int) else size if dim is None else sizes.setdefault(dim, size)):
                    return False
        self._sizes = sizes
        self._matches = matcher(self._dtypes, [value.shape for value in values])
        return True

    def _agree(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Return whether handles of these shapes fit the declared types, the inputs and each other.

        Raises:
            InputError: a node does not fit the sizes.
            EngineError: a kernel of the device fails, is wrong or ends the process with these sizes.
        """
        if any(shapes[place] != shapes[like] for place, like in self._alike):
            return False
        sizes = self._sizes.copy()
        for place, dims in self._rules:
            shape = shapes[place]
            if len(shape) != len(dims):
                return False
            for dim, size in zip(dims, shape, strict=True):
                if dim is not None and sizes.setdefault(dim, size) != size:
                    return False
        self._on_sizes(sizes, 0 in sizes.values() or any(0 in shape for shape in shapes))
        return True


def _dims(kind: ValueType) -> tuple[Any, ...] | None:
    return tuple(kind.shape) if isinstance(kind, TensorType) and kind.shape is not None else None


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, DeviceTensor) else value
