"""`Handles`: values that outlive a run and are fed to the next one, in host memory or in the device's.

A handle named like an input is that input's value in every run that does not supply it. After a run, outputs move into
the handles they feed. On a device they stay there: each run writes to new memory, and the old memory is let go of when
the new has taken its place, so no run reads what it writes.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from rlx_ort.errors import InputError, RunError
from rlx_ort.execution.coerce import as_array
from rlx_ort.execution.handle_step import HandleStep
from rlx_ort.execution.inputs import Adopter, InputPlan, ResidentFeeds, is_shareable, shared
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.engine.binding import DeviceTensor

if TYPE_CHECKING:
    from rlx_ort.execution.engine_slot import Engine

__all__ = ["Handles"]


class Handles:
    """The handles of one compiled graph. Every call, and every run that uses them, takes the same lock.

    Args:
        inputs: input name -> declared type.
        outputs: output name -> declared type.
        plan: what checks the inputs of runs.
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
        self.step: HandleStep | None = None
        self._repeats = HandleStep.possible(inputs)

    def __bool__(self) -> bool:
        return bool(self._host or self._device)

    def copy(self) -> Handles:
        """Return handles with the same values and feeds, which change by themselves from here on."""
        with self.lock:
            made = Handles(self._inputs, self._outputs, self._plan)
            made._host = {name: array.copy() for name, array in self._host.items()}
            made._device = dict(self._device)  # never written to, so they may be shared
            made._host_feeds = dict(self._host_feeds)
            made._device_feeds = dict(self._device_feeds)
            return made

    def bind(self, name: str, array: npt.ArrayLike) -> None:
        """Keep a copy of the array under a name, in host memory; replaces a handle of that name, on either side.

        Raises:
            InputError: no input has the name, it is not `out{i}` of an output, or the array is not of the type.
        """
        value = self._checked(name, array)
        with self.lock:
            if name not in self._host:
                self.step = None
            self._host[name] = value.copy()
            self._device.pop(name, None)
            self._device_feeds.pop(name, None)

    def bind_device(self, name: str, tensor: DeviceTensor) -> None:
        """Keep a tensor on the device as the value of an input; replaces a handle of that name, on either side."""
        with self.lock:
            if name not in self._device:
                self.step = None
            self._device[name] = tensor
            self._host.pop(name, None)
            self._host_feeds.pop(name, None)

    def to_hold(self, name: str, array: Any, adopter: Adopter) -> npt.NDArray[Any] | DeviceTensor:
        """Return what `bind_device` is to hold: a tensor that is on the device already, or an array to be uploaded.

        Raises:
            InputError: no input has the name, or the array is not of its type, or cannot be shared.
        """
        kind = self._inputs.get(name)
        if kind is None:
            raise self._unknown(name, self._inputs)
        value = array
        if is_shareable(array) and isinstance(kind, TensorType):
            value = shared(name, array, kind, adopter)
        if not isinstance(value, DeviceTensor):
            return self._checked(name, value)
        self._check_tensor(name, value)
        return value

    def _check_tensor(self, name: str, tensor: DeviceTensor) -> None:
        """Refuse a tensor on the device that the input of the name does not take.

        Raises:
            InputError: no input has the name, or the tensor is not of its type.
        """
        kind = self._inputs.get(name)
        if not isinstance(kind, TensorType):
            raise self._unknown(name, self._inputs)
        if tensor.dtype != kind.dtype.numpy or not _fits(kind, tensor.shape):
            raise InputError(f"handle {name!r} is {kind}; got {tensor!r}")

    def feed(self, name: str, index: int) -> None:
        """Move output `index` into a host handle after every run from now on.

        Raises:
            InputError: no host handle has the name, or there is no such output, or its dtype is another.
        """
        with self.lock:
            if name not in self._host:
                raise InputError(f"there is no handle {name!r} in host memory to feed; bind_handle makes one")
            self._set_feed(self._host_feeds, name, index)

    def feed_device(self, name: str, index: int) -> None:
        """Move output `index` into a device handle after every run from now on.

        Raises:
            InputError: no device handle has the name, or there is no such output, or its dtype is another.
        """
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

    def unbind(self) -> None:
        """Let go of the engine that the last run was bound to; values and feeds stay."""
        with self.lock:
            self.step = None

    def behind(self, inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the inputs with the handles for those that are not given."""
        if not self or not isinstance(inputs, Mapping):
            return inputs
        held = {name: value for name, value in (*self._host.items(), *self._device.items()) if name in self._inputs}
        return {**held, **inputs}

    def run(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int], *, on_device: bool = False
    ) -> tuple[list[int], list[Any]]:
        """Run with the handles behind the inputs and move outputs into the handles.

        Returns the indices asked for, each once, and these outputs as arrays, or as device tensors if `on_device`. A
        run that fails changes no handle. The lock is held where there are handles.

        Raises:
            InputError: an input is missing, unknown or of another type.
            EngineError: the run failed.
        """
        again = None if on_device else self.run_again(engine, inputs, indices)
        return again or self._run_first(engine, inputs, indices, on_device)

    def run_again(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int]
    ) -> tuple[list[int], list[Any]] | None:
        """Run when the call is the last one again, see `run`; None when it is not, and nothing has run."""
        step, self.step = self.step, None  # what it has bound goes with it, unless it is of use again
        found = None if step is None else step.run(engine, inputs, indices, self._host, self._device)
        if found is not None:
            self.step = step
        return found

    def _run_first(
        self, engine: Engine, inputs: Mapping[str, Any], indices: Sequence[int], on_device: bool
    ) -> tuple[list[int], list[Any]]:
        """Run with every check, and remember the run where it may come again."""
        feeds = self._plan.feeds(self.behind(inputs), engine)
        host = self._host_targets()
        device = self._device_feeds
        read = list(dict.fromkeys(indices))
        # An engine reads a list of no names as all of them.
        wanted = list(dict.fromkeys((*read, *host.values(), *device.values()))) or [0]
        names = [self._names[index] for index in wanted]
        resident = frozenset(self._names[index] for index in (*device.values(), *(read if on_device else ())))
        if resident or feeds.__class__ is ResidentFeeds:
            results = dict(zip(wanted, engine.binder.run(feeds, names, resident), strict=True))
        else:
            results = dict(zip(wanted, engine.run(names, feeds), strict=True))
        arrays = {
            index: found.numpy() if isinstance(found := results[index], DeviceTensor) else found
            for index in (*(() if on_device else read), *host.values())
        }
        self._host.update({handle: arrays[index].copy() for handle, index in host.items()})
        self._device.update({handle: results[index] for handle, index in device.items()})
        if on_device:
            return read, [results[index] for index in read]
        if self._device and self._repeats and all(feeds[name] is value for name, value in inputs.items()):
            self.step = HandleStep(
                engine,
                self._inputs,
                feeds,
                list(inputs),
                self._host,
                self._device,
                indices,
                wanted,
                self._names,
                host,
                device,
            )
        return read, [arrays[index] for index in read]

    def _host_targets(self) -> dict[str, int]:
        """Return host handle -> the output that moves into it: explicit feeds, then the `out{i}` convention."""
        named = {name: index for name in self._host if (index := self._numbered(name)) is not None}
        return named | self._host_feeds

    def _numbered(self, name: str) -> int | None:
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
                raise self._unknown(name, self._inputs)
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

    def _unknown(self, name: str, known: Iterable[str]) -> RunError:
        names = list(known)
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the inputs are: {', '.join(map(repr, names)) or 'none'}"
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
