"""One recorded run: what a device's driver offers, the run over fixed addresses, and its replay."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "Arrays",
    "BoundRun",
    "BrokenSessionError",
    "Copy",
    "Key",
    "Owner",
    "Recorder",
    "Replay",
    "Tensor",
    "facts",
]

_log = logging.getLogger(__name__)

Arrays: TypeAlias = Mapping[str, npt.NDArray[Any]]
Copy: TypeAlias = tuple[int, int, int]
"""Address on the device, address on the host, bytes; within the device, address to write, address to read, bytes."""
Owner: TypeAlias = int | tuple[frozenset[str], frozenset[str]]
"""0 for runs on arrays, a number for slots, (inputs, outputs) on the device for the others."""
Key: TypeAlias = tuple[Owner, tuple[str, ...], tuple[tuple[str, Any, tuple[int, ...]], ...]]

facts = attrgetter("dtype", "shape")


class Tensor(Protocol):
    """What a run takes or leaves on the device."""

    @property
    def address(self) -> int:
        """Where it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""

    @property
    def value(self) -> Any:
        """What the engine binds."""

    def numpy(self) -> npt.NDArray[Any]:
        """Return the elements on the host."""


class Recorder(Protocol):
    """A device's driver, for one session: it records what is launched on a stream of its own.

    Attributes:
        options: the provider options that make a session launch on the stream.
    """

    options: Mapping[str, str]

    def host_buffer(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array like another one in memory that the device copies from and to by itself."""

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Return a recording of the copies to the device, a run, and the copies back, none of which is executed.

        Raises:
            NotRecordedError: something in the run cannot be recorded.
        """

    def player(self, recording: Any) -> Callable[..., None]:
        """Return what replays a recording and waits for its end: `(before, after)`, copies within the device."""

    def move(self, copies: Sequence[Copy]) -> None:
        """Copy within the device and wait."""

    def drop(self, recording: Any) -> None:
        """Free a recording."""

    def wait(self) -> None:
        """Wait for all that was launched on the stream."""

    def close(self) -> None:
        """Free the stream, after the session that used it."""


class BrokenSessionError(Exception):
    """A session no longer runs after a recording of it failed; the message is ONNX Runtime's."""


class BoundRun:
    """A run over tensors at fixed addresses on the device, outside of the session's arena.

    Inputs that are tensors are bound as they are; for arrays there are tensors of their own.
    """

    def __init__(
        self,
        engine: Any,
        session: Any,
        memory: tuple[str, int],
        options: tuple[Any, Any],
        errors: tuple[type[Exception], ...],
        inputs: Mapping[str, npt.NDArray[Any] | Tensor],
        outputs: Arrays,
    ) -> None:
        self._io = session.io_binding()
        self._session = session
        self._options, self._quiet = options
        self._errors = errors
        make = engine.OrtValue.ortvalue_from_shape_and_type
        self._inputs = [
            make(list(given.shape), given.dtype, *memory) if isinstance(given, np.ndarray) else given.value
            for given in inputs.values()
        ]
        self._outputs = [make(list(array.shape), array.dtype, *memory) for array in outputs.values()]
        for name, value in zip(inputs, self._inputs, strict=True):
            self._io.bind_ortvalue_input(name, value)
        for name, value in zip(outputs, self._outputs, strict=True):
            self._io.bind_ortvalue_output(name, value)
        for value, given in zip(self._inputs, inputs.values(), strict=True):
            if isinstance(given, np.ndarray):
                value.update_inplace(np.zeros(given.shape, given.dtype))

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """The addresses of the inputs and of the outputs."""
        return [value.data_ptr() for value in self._inputs], [value.data_ptr() for value in self._outputs]

    def warm_up(self) -> None:
        """Run on zeros until all that a run allocates or tunes once is there."""
        for _ in range(2):
            self._session.run_with_iobinding(self._io, self._options)

    def launch(self) -> None:
        """Run without waiting for the device."""
        self._session.run_with_iobinding(self._io, self._quiet)

    def settle(self) -> None:
        """Run and wait, which frees the host buffers that `launch` has left, and shows that the session still works.

        What failed inside of a capture may be reported by the next run; so that is no run of the caller's.

        Raises:
            BrokenSessionError: the session does not work any more.
        """
        for attempt in (1, 2):
            try:
                self._session.run_with_iobinding(self._io, self._options)
                break
            except self._errors as err:
                _log.info("run %d after a recording failed: %s", attempt, err)
                if attempt == 2:
                    raise BrokenSessionError(f"after a recording, {type(err).__name__}: {err}") from err
        for value in self._outputs:  # a replay that writes nothing must not go unseen
            value.update_inplace(np.full(value.shape(), 1, value.numpy().dtype))


class Replay:
    """One recorded signature.

    Args:
        driver: the device's driver.
        bound: the run.
        key: the signature.
        ins: arrays for what is given on the host or copied on the device, and the tensors that are read where they are.
        outs: arrays like the outputs.
    """

    def __init__(
        self, driver: Recorder, bound: BoundRun, key: Key, ins: Mapping[str, npt.NDArray[Any] | Tensor], outs: Arrays
    ) -> None:
        self.driver = driver
        self.bound = bound
        self.key = key
        self.outputs = list(outs)
        self._names = list(ins)
        self._facts = [facts(given) for given in ins.values()]
        on_device, resident = (frozenset[str](), frozenset[str]()) if isinstance(key[0], int) else key[0]
        arrays = {name: given for name, given in ins.items() if isinstance(given, np.ndarray)}
        # The engine's values of these are bound; the tensors themselves would keep the session alive.
        self._held = {name: weakref.ref(given) for name, given in ins.items() if name not in arrays}
        to, back = (dict(zip(names, at, strict=True)) for names, at in zip((ins, outs), bound.addresses, strict=True))
        self._moved = [(name, to[name], arrays[name].nbytes) for name in arrays if name in on_device]
        self._stays = {name: (back[name], outs[name]) for name in outs if name in resident}
        self._given = [(name, driver.host_buffer(arrays[name])) for name in arrays if name not in on_device]
        self.inside = [here for _, here in self._given]
        self.views = [driver.host_buffer(array) for name, array in outs.items() if name not in resident]
        for view in self.views:
            view[...] = 1
        read = [name for name in outs if name not in resident]
        bound.warm_up()
        try:
            self.handle = driver.record(
                [(to[name], here.ctypes.data, here.nbytes) for name, here in self._given],
                bound.launch,
                [(back[name], here.ctypes.data, here.nbytes) for name, here in zip(read, self.views, strict=True)],
            )
        finally:
            bound.settle()
        self._play = driver.player(self.handle)

    @property
    def nbytes(self) -> int:
        """The bytes of its buffers on the device; those for arrays are pinned on the host as well."""
        on_device = sum(size for _, _, size in self._moved) + sum(like.nbytes for _, like in self._stays.values())
        return on_device + sum(array.nbytes for array in (*self.inside, *self.views))

    def fits(self, owner: Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether a run has this signature."""
        return (
            owner == self.key[0]
            and names == self.outputs
            and list(feeds) == self._names
            and list(map(facts, feeds.values())) == self._facts
        )

    def changed(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the inputs that it reads where they are, and that are other tensors in a run."""
        return [name for name, tensor in self._held.items() if feeds[name] is not tensor()]

    def run(self, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Replay on arrays and return the output buffers, which the next replay overwrites."""
        for place, array in zip(self.inside, feeds.values(), strict=True):
            place[...] = array
        self._play()
        return self.views

    def run_values(self, feeds: Mapping[str, Any], fresh: Callable[[npt.NDArray[Any]], Tensor]) -> list[Any]:
        """Replay on arrays and tensors and return new arrays and tensors."""
        for name, place in self._given:
            place[...] = feeds[name]
        made = {name: fresh(like) for name, (_, like) in self._stays.items()}
        self._play(
            [(at, feeds[name].address, size) for name, at, size in self._moved],
            [(made[name].address, at, like.nbytes) for name, (at, like) in self._stays.items()],
        )
        views = iter(self.views)
        return [made[name] if name in made else next(views).copy() for name in self.outputs]

    def close(self) -> None:
        """Free the recording; the buffers live as long as somebody holds a view."""
        self.driver.drop(self.handle)
