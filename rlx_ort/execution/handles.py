"""`Handles`: values that outlive a run and are fed to the next one, in host memory or in device memory.

A handle named like an input is that input's value in every run that does not supply it. After a run, outputs move into
the handles they feed. On a device they stay there: each run writes to new memory, and the old memory is freed when the
new has taken its place, so no run writes to memory that it reads.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import InputError
from rlx_ort.execution.coerce import as_array
from rlx_ort.execution.inputs import InputPlan, ResidentFeeds, is_shareable, shared
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine import Engine

__all__ = ["Handles"]

_facts = attrgetter("dtype", "shape")
_shape = attrgetter("shape")


class Handles:
    """The handles of one compiled graph, false while there are none; its methods list the errors.

    Args:
        inputs: input name -> declared type.
        outputs: output name -> declared type.
        plan: checks the inputs of runs.

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
        self._host: dict[str, npt.NDArray[Any]] = {}
        self._device: dict[str, DeviceTensor] = {}
        self._host_feeds: dict[str, int] = {}
        self._device_feeds: dict[str, int] = {}
        self.step: _Step | None = None
        self._repeats = all(isinstance(kind, TensorType) and kind.dtype is not DType.STRING for kind in inputs.values())

    def __bool__(self) -> bool:
        return bool(self._host or self._device)

    def copy(self) -> Handles:
        """Return independent handles with the same values and feeds."""
        with self.lock:
            made = Handles(self._inputs, self._outputs, self._plan)
            made._host = {name: array.copy() for name, array in self._host.items()}
            made._device = dict(self._device)  # never written to, so shared
            made._host_feeds = dict(self._host_feeds)
            made._device_feeds = dict(self._device_feeds)
            return made

    def bind(self, name: str, array: npt.ArrayLike) -> None:
        """Keep a copy of the array under a name, in host memory; replaces a handle of that name, on either side."""
        value = self._checked(name, array)
        with self.lock:
            if name not in self._host:
                self.step = None
            self._host[name] = value.copy()
            self._device.pop(name, None)
            self._device_feeds.pop(name, None)

    def bind_device(self, name: str, array: Any, engine: Engine) -> None:
        """Keep a value on the engine's device as an input; replaces a handle of that name, on either side."""
        kind = self._inputs.get(name)
        if kind is None:
            raise self._unknown(name)
        value = shared(name, array, kind, engine) if isinstance(kind, TensorType) and is_shareable(array) else array
        if not isinstance(value, DeviceTensor):
            value = engine.binder.upload(self._checked(name, value))
        elif not isinstance(kind, TensorType) or value.dtype != kind.dtype.numpy or not _fits(kind, value.shape):
            raise InputError(f"handle {name!r} is {kind}; got {value!r}")
        with self.lock:
            if name not in self._device:
                self.step = None
            self._device[name] = value
            self._host.pop(name, None)
            self._host_feeds.pop(name, None)

    def feed(self, name: str, index: int) -> None:
        """Move output `index` into a host handle after every later run."""
        with self.lock:
            if name not in self._host:
                raise InputError(f"there is no handle {name!r} in host memory to feed; bind_handle makes one")
            self._set_feed(self._host_feeds, name, index)

    def feed_device(self, name: str, index: int) -> None:
        """Move output `index` into a device handle after every later run."""
        with self.lock:
            if name not in self._device:
                raise InputError(f"there is no handle {name!r} on the device to feed; bind_gpu_handle makes one")
            self._set_feed(self._device_feeds, name, index)

    def read(self, name: str) -> npt.NDArray[Any] | None:
        """Return a copy of a host handle, or None when there is none."""
        with self.lock:
            found = self._host.get(name)
            return None if found is None else found.copy()

    def has_device(self, name: str) -> bool:
        """Return whether a device handle has the name."""
        return name in self._device

    def read_device(self, name: str) -> npt.NDArray[Any] | None:
        """Return a device handle's elements as a copy on the host, or None when there is none."""
        with self.lock:
            found = self._device.get(name)
            return None if found is None else found.numpy()

    def clear(self) -> None:
        """Forget every handle and feed."""
        with self.lock:
            self.step = None
            for table in (self._host, self._device, self._host_feeds, self._device_feeds):
                table.clear()

    @property
    def on_device(self) -> bool:
        """Whether a handle is in the memory of the device."""
        return bool(self._device)

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
        held = {name: value for name, value in (*self._host.items(), *self._device.items()) if name in self._inputs}
        return {**held, **inputs}

    def run(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int], *, on_device: bool = False
    ) -> tuple[list[int], list[Any]]:
        """Run with the handles as values of the inputs not given, and move outputs into the handles.

        Returns the indices asked for, each once, and these outputs as arrays, or as device tensors if `on_device`. A
        run that fails changes no handle.

        Raises:
            InputError: an input is missing, unknown or of another type.
            EngineError: the run failed.
        """
        again = None if on_device else self.run_again(engine, inputs, indices)
        return again or self._run_checked(engine, inputs, indices, on_device)

    def run_again(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int]
    ) -> tuple[list[int], list[Any]] | None:
        """Run if the call equals the last one, see `run`; None if not, and nothing has run."""
        step, self.step = self.step, None  # frees the buffers it has bound, unless it can run again
        found = None if step is None else step.run(engine, inputs, indices)
        if found is not None:
            self.step = step
        return found

    def _run_checked(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int], on_device: bool
    ) -> tuple[list[int], list[Any]]:
        """Run after a check of every input, and keep the run in `step` if it can be repeated."""
        feeds = self._plan.feeds(self.behind(inputs), engine)
        host, device = self._host_targets(), self._device_feeds
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
        self._host.update({handle: arrays[index].copy() for handle, index in host.items()})
        self._device.update({handle: results[index] for handle, index in device.items()})
        if on_device:
            return read, [results[index] for index in read]
        if self._device and self._repeats and all(feeds[name] is value for name, value in inputs.items()):
            self.step = _Step(self, engine, feeds, list(inputs), indices, wanted)
        return read, [arrays[index] for index in read]

    def _host_targets(self) -> dict[str, int]:
        """Return host handle -> the output that moves into it, by an explicit feed or by the name `out{i}`."""
        named = {name: index for name in self._host if (index := self._numbered(name)) is not None}
        return named | self._host_feeds

    def _numbered(self, name: str) -> int | None:
        """Return the output that a name such as `out0` stands for; None for other names."""
        digits = name.removeprefix("out")
        if digits == name or not digits.isascii() or not digits.isdigit() or str(int(digits)) != digits:
            return None
        index = int(digits)
        return index if index < len(self._names) else None

    def _set_feed(self, feeds: dict[str, int], name: str, index: int) -> None:
        if feeds.get(name) == index:
            return
        if not 0 <= index < len(self._names):
            raise InputError(f"there is no output {index}; the graph has {len(self._names)} outputs, from 0")
        output = self._outputs[self._names[index]]
        target = self._inputs.get(name)
        if not isinstance(output, TensorType) or (isinstance(target, TensorType) and target.dtype is not output.dtype):
            raise InputError(f"output {index} is {output} and cannot feed handle {name!r}, which is {target}")
        self.step = None
        feeds[name] = index

    def _checked(self, name: str, array: npt.ArrayLike) -> npt.NDArray[Any]:
        kind = self._inputs.get(name)
        if kind is None:
            index = self._numbered(name)
            if index is None:
                raise self._unknown(name)
            kind = self._outputs[self._names[index]]
        if not isinstance(kind, TensorType):
            raise InputError(f"{name!r} is {kind}; only tensors can be held by a handle")
        try:
            value = as_array(shared(name, array, kind, None) if is_shareable(array) else array, kind.dtype)
        except ValueError as err:
            raise InputError(f"handle {name!r} is {kind}: {err}") from err
        if not _fits(kind, value.shape):
            raise InputError(f"handle {name!r} is {kind}; got shape {value.shape}")
        return value

    def _unknown(self, name: str) -> InputError:
        close = difflib.get_close_matches(name, self._inputs, n=1)
        known = ", ".join(map(repr, self._inputs)) or "none"
        hint = f"did you mean {close[0]!r}?" if close else f"the inputs are: {known}"
        return InputError(
            f"a handle is named like an input or `out0` to `out{len(self._names) - 1}`, not {name!r}; {hint}"
        )


def _fits(kind: TensorType, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of the type may have the shape."""
    wanted = kind.shape
    return wanted is None or (
        len(wanted) == len(shape)
        and all(not isinstance(dim, int) or dim == size for dim, size in zip(wanted, shape, strict=True))
    )


class _Step:
    """A run with handles on the device as a loop repeats it, with every lookup done once.

    A decode loop makes the same call thousands of times: only the sizes of growing handles change, so only they are
    checked. Made after a run whose inputs were checked in full; for one thread at a time.

    Args:
        handles: their values are read and replaced in every run.
        engine: the engine that runs.
        feeds: the checked inputs of the first run, handles included.
        given: the inputs that come with the call.
        indices: the outputs that the call asks for.
        wanted: those and the outputs that feed handles, each once.
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
        self._host, self._device = handles._host, handles._device
        self._engine = engine
        self._given = given
        self._kept = [name for name in types if name in self._host and name not in given]
        self._held = [name for name in types if name in self._device and name not in given]
        self._indices = list(indices)
        resident = frozenset(names[index] for index in handles._device_feeds.values())
        order = [*given, *self._held, *self._kept]
        self._loop = engine.binder.loop(order, [names[index] for index in wanted], resident)
        self._arrays = [np.ndarray] * len(given)
        self._given_facts = [_facts(feeds[name]) for name in given]
        places = {index: place for place, index in enumerate(wanted)}
        self._read = list(dict.fromkeys(indices))
        self._read_places = [places[index] for index in self._read]
        self._host_feeds = [(handle, places[index]) for handle, index in handles._host_targets().items()]
        self._device_feeds = [(handle, places[index]) for handle, index in handles._device_feeds.items()]
        self._set_rules(types, feeds)

    def run(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int]
    ) -> tuple[list[int], list[Any]] | None:
        """Run, move outputs into the handles, and return as `Handles.run` does.

        None, and nothing has run, if the engine, the outputs asked for, or the names, dtypes or shapes of the inputs
        differ, or the handles' sizes do not fit each other any more.

        Raises:
            EngineError: the run failed; no handle has changed, and the step cannot be used again.
        """
        if engine is not self._engine or inputs.__class__ is not dict or list(indices) != self._indices:
            return None
        values = list(inputs.values())
        if (
            list(inputs) != self._given
            or list(map(type, values)) != self._arrays
            or list(map(_facts, values)) != self._given_facts
        ):
            return None
        values += map(self._device.__getitem__, self._held)
        values += map(self._host.__getitem__, self._kept)
        if not self._agree(list(map(_shape, values[len(self._given) :]))):
            return None
        results = self._loop.run(values)
        for handle, place in self._host_feeds:
            self._host[handle] = _as_array(results[place]).copy()
        for handle, place in self._device_feeds:
            self._device[handle] = results[place]
        return self._read, [_as_array(results[place]) for place in self._read_places]

    def _set_rules(self, types: Mapping[str, ValueType], feeds: Mapping[str, Any]) -> None:
        """Prepare the comparison of the handles' shapes: with the sizes of inputs, and with each other."""
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
        """Return whether handles of these shapes fit the declared types, the inputs and each other."""
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
