"""One recorded run: a `Recorder` makes it of a `FixedRun`, a `Replay` gives it arrays; and how that is checked."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.numerics import agree, relative_error
from rlx_ort.providers.engine.binding import Arrays
from rlx_ort.providers.engine.values import OrtTensor
from rlx_ort.providers.workers import Workers, fill

WORTH = 0.9  # the largest ratio of a replay's time to a plain run's; the minimum of five favours replays by up to 8 %
WARM_RUNS = 3
LENT_BYTES = 256 << 10  # of an output, from which copying it once more takes longer than lending memory

_log = logging.getLogger(__name__)

Copy: TypeAlias = tuple[int, int, int]
"""In a recording: address on the device, on the host, bytes; around a replay: address to write, to read, bytes."""
Owner: TypeAlias = int | tuple[frozenset[str], frozenset[str]]
"""0 for runs on arrays, a number for slots and bound runs, (inputs, outputs) on the device for the others."""
Signature: TypeAlias = tuple[Owner, tuple[str, ...], tuple[tuple[str, Any, tuple[int, ...]], ...]]

facts = attrgetter("dtype", "shape")


def signature(owner: Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> Signature | None:
    """Return the signature of a run, or None for feeds that are not all arrays."""
    try:
        return owner, tuple(names), tuple((name, *facts(array)) for name, array in feeds.items())
    except AttributeError:
        return None


class Recorder(Protocol):
    """A device's driver for one session: records launches on a stream of its own.

    Its provider `options` make a session launch on the stream. ONNX Runtime (1.31) then leaves the thread on the GPU
    that another session has set, where its launches fail, so `enter` comes before each run: it sets the thread's GPU.

    `worker` has the thread that records, which lives until `close`. Some kernels end with the thread that first ran
    them: ONNX Runtime (1.31) keeps cuDNN's plans of attention, in f16 and bf16 on Hopper GPUs and newer, by thread.
    """

    options: Mapping[str, str]
    enter: Callable[[], object]
    worker: Workers

    def host_buffer(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array like another one, in pinned host memory."""

    def reads(self, array: npt.NDArray[Any]) -> bool:
        """Return whether the device reads an array at full speed, since its memory is pinned."""

    def lend(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array that the device writes at full speed; its memory is lent again once nothing refers to it."""

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Return a recording of the copies to the device, a run, and the copies back, none of which is executed."""

    def lasts(self, recording: Any) -> bool:
        """Return whether it may be replayed after the session has planned kernels anew, which may unload its own."""

    def player(self, recording: Any) -> Callable[..., None]:
        """Return a function that replays a recording to its end: `(before, after)`, copies from and to any memory."""

    def move(self, copies: Sequence[Copy]) -> None:
        """Copy within the device and wait."""

    def drop(self, recording: Any) -> None:
        """Free a recording."""

    def wait(self) -> None:
        """Wait for all that was launched on the stream."""

    def close(self) -> None:
        """Free the stream, after the session that used it."""


class NotRecordedError(Exception):
    """Launches cannot be recorded; the message is the reason, for a report or an error."""


class LaterError(NotRecordedError):
    """Launches cannot be recorded now, since another call waits for the whole device."""


class BrokenSessionError(Exception):
    """A session no longer runs after a recording of it failed; the message is ONNX Runtime's."""


class FixedRun:
    """A run over tensors at fixed addresses on the device, outside of the session's arena.

    Inputs that are tensors are bound as they are; for arrays there are tensors of their own, with the arrays' contents.
    Outputs are tensors of their own as well, or inputs, by name. `options` are the RunOptions of runs that wait for the
    device and of those that do not.
    """

    def __init__(
        self,
        engine: Any,
        session: Any,
        memory: tuple[str, int],
        options: tuple[Any, Any],
        errors: tuple[type[Exception], ...],
        inputs: Mapping[str, npt.NDArray[Any] | OrtTensor],
        outputs: Mapping[str, npt.NDArray[Any] | str],
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
        self._outputs = []
        bound = dict(zip(inputs, self._inputs, strict=True))
        for name, value in bound.items():
            self._io.bind_ortvalue_input(name, value)
        for name, place in outputs.items():
            if not isinstance(place, str):
                self._outputs.append(make(list(place.shape), place.dtype, *memory))
            self._io.bind_ortvalue_output(name, bound[place] if isinstance(place, str) else self._outputs[-1])
        for value, given in zip(self._inputs, inputs.values(), strict=True):
            if isinstance(given, np.ndarray):
                value.update_inplace(np.array(given, order="C"))

    @property
    def addresses(self) -> tuple[list[int], list[int]]:
        """The addresses of the inputs, and of the outputs that are no inputs."""
        return [value.data_ptr() for value in self._inputs], [value.data_ptr() for value in self._outputs]

    def warm_up(self, wait: Callable[[], None]) -> tuple[int, int]:
        """Run until everything that a run allocates or tunes once exists.

        Returns:
            The least times of `WARM_RUNS` runs to launch one, and in all, in ns; `wait` waits for the device. One run
            alone may wait for another process that uses the device.
        """
        self._session.run_with_iobinding(self._io, self._options)
        now, least = time.perf_counter_ns, (1 << 62, 1 << 62)
        for _ in range(WARM_RUNS):
            begun = now()
            self._session.run_with_iobinding(self._io, self._quiet)
            launched = now()
            wait()
            least = min(least[0], launched - begun), min(least[1], now() - begun)
        self.settle()
        return least

    def launch(self) -> None:
        """Run without waiting for the device."""
        self._session.run_with_iobinding(self._io, self._quiet)

    def settle(self) -> None:
        """Run and wait. Frees the host buffers that runs without a wait left, and shows that the session still works.

        A session that is closed with such buffers frees them in a callback of the driver, see `run_config` of CUDA. The
        next run may report an error inside a capture; this makes sure that it is not the caller's.
        """
        for attempt in (1, 2):
            try:
                self._session.run_with_iobinding(self._io, self._options)
                break
            except self._errors as err:
                _log.info("run %d after a recording failed: %s", attempt, err)
                if attempt == 2:
                    raise BrokenSessionError(f"after a recording, {type(err).__name__}: {err}") from err
        for value in self._outputs:  # so that a replay that writes nothing is noticed
            value.update_inplace(np.full(value.shape(), 1, value.numpy().dtype))


class Replay:
    """One recorded signature.

    `ins` are arrays for what is given on the host or copied on the device, and the tensors that are read where they
    are; `outs` are arrays like the outputs. Large outputs of runs on arrays are copied into the array that the caller
    gets; a copy into a buffer of the recording and another one from there took 70 % of a replay of GPT-2 (12 MB). Large
    inputs in pinned memory are copied from where they are in the same way.

    It is made in the thread of the driver: a recording launches kernels that may end with the thread that made it.
    """

    def __init__(
        self,
        driver: Recorder,
        bound: FixedRun,
        key: Signature,
        ins: Mapping[str, npt.NDArray[Any] | OrtTensor],
        outs: Arrays,
    ) -> None:
        self.driver = driver
        self.bound = bound
        self.key = key
        self.outputs = list(outs)
        self._names = list(ins)
        self.inputs = {name: described(*facts(given)) for name, given in ins.items()}
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
        lent = key[0] == 0  # the arrays of such runs are the caller's
        self._first = [to[name] if lent and here.nbytes >= LENT_BYTES else 0 for name, here in self._given]
        self._large = {
            name: (back[name], without_memory(like))
            for name, like in outs.items()
            if lent and like.nbytes >= LENT_BYTES
        }
        read = [name for name in outs if name not in resident and name not in self._large]
        self.views = [driver.host_buffer(outs[name]) for name in read]
        for view in self.views:
            view[...] = 1
        copies_in = [
            (to[name], here.ctypes.data, here.nbytes)
            for (name, here), first in zip(self._given, self._first, strict=True)
            if not first
        ]
        copies_out = [(back[name], here.ctypes.data, here.nbytes) for name, here in zip(read, self.views, strict=True)]
        made = driver.worker.submit(partial(_recorded, driver, bound, copies_in, copies_out))
        try:
            self.handle = made.result()
        except BaseException:  # an interrupt as well: nothing else may use the stream before the work has ended
            wait([made])
            raise
        self._play = driver.player(self.handle)

    @property
    def nbytes(self) -> int:
        """The memory of its inputs and outputs, on the device and the host."""
        on_device = sum(size for _, _, size in self._moved) + sum(like.nbytes for _, like in self._stays.values())
        lent = sum(like.nbytes for _, like in self._large.values())
        return on_device + lent + sum(array.nbytes for array in (*self.inside, *self.views))

    def fits(self, owner: Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether a run has this signature."""
        return (
            owner == self.key[0]
            and names == self.outputs
            and list(feeds) == self._names
            and list(map(facts, feeds.values())) == self._facts
        )

    def changed(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the inputs that are recorded in place and are other tensors in this run."""
        return [name for name, tensor in self._held.items() if feeds[name] is not tensor()]

    def run(self, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Replay on arrays and return the output buffers, which the next replay overwrites."""
        for place, array in zip(self.inside, feeds.values(), strict=True):
            fill(place, array)
        self._play()
        return self.views

    def run_fresh(self, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Replay on arrays and return new arrays."""
        before: list[Copy] = []
        for place, first, array in zip(self.inside, self._first, feeds.values(), strict=True):
            source = array if first and array.flags.c_contiguous and self.driver.reads(array) else place
            if source is place:
                fill(place, array)
            if first:
                before.append((first, source.ctypes.data, place.nbytes))
        if not (before or self._large):
            self._play()
            return [view.copy() for view in self.views]
        made = {name: self.driver.lend(like) for name, (_, like) in self._large.items()}
        self._play(before, [(made[name].ctypes.data, at, like.nbytes) for name, (at, like) in self._large.items()])
        views = iter(self.views)
        return [made[name] if name in made else next(views).copy() for name in self.outputs]

    def run_values(self, feeds: Mapping[str, Any], fresh: Callable[[npt.NDArray[Any]], OrtTensor]) -> list[Any]:
        """Replay on arrays and tensors and return new arrays and tensors."""
        for name, place in self._given:
            fill(place, feeds[name])
        made = {name: fresh(like) for name, (_, like) in self._stays.items()}
        self._play(
            [(at, feeds[name].address, size) for name, at, size in self._moved],
            [(made[name].address, at, like.nbytes) for name, (at, like) in self._stays.items()],
        )
        views = iter(self.views)
        return [made[name] if name in made else next(views).copy() for name in self.outputs]

    def close(self) -> None:
        """Drop the recording."""
        self.driver.drop(self.handle)
        del self.bound, self._play  # the session must end before its stream does


def _recorded(driver: Recorder, bound: FixedRun, copies_in: Sequence[Copy], copies_out: Sequence[Copy]) -> Any:
    """Return a recording made in this thread, after a run that loads the kernels for it."""
    driver.enter()
    bound.launch()
    driver.wait()
    try:
        return driver.record(copies_in, bound.launch, copies_out)
    finally:
        bound.settle()


def check_worth(plain_ns: int, replay_ns: int) -> None:
    """Refuse a replay that is not faster than a plain run."""
    if replay_ns > WORTH * plain_ns:
        raise NotRecordedError(f"a replay takes {replay_ns / 1e3:.1f} us, a plain run {plain_ns / 1e3:.1f} us")


def check_replay(
    names: Sequence[str], wanted: Sequence[npt.NDArray[Any]], replayed: Sequence[npt.NDArray[Any]]
) -> None:
    """Compare a replay's outputs with a plain run's: exactly, or to 32 roundings of the largest element for floats."""
    for name, want, got in zip(names, wanted, replayed, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise NotRecordedError(f"a replay gave output {name!r} as {got.dtype}{got.shape}")
        if not agree(got, want, epsilons=32):
            error = relative_error(got, want)
            raise NotRecordedError(f"a replay gave output {name!r} with a relative error of {error:.1e}")


def without_memory(like: npt.NDArray[Any] | OrtTensor) -> npt.NDArray[Any]:
    """Return an array with the dtype and shape of another one or of a tensor, and no memory for its elements."""
    return np.broadcast_to(np.zeros((), like.dtype), like.shape)


def described(dtype: Any, shape: tuple[int, ...]) -> str:
    """Return a dtype and a shape as reports show them."""
    return f"{dtype}{list(shape)}"
