"""`Recordings`: the launches of a session's runs, recorded once per input signature and replayed.

A replay runs the same kernels at the same addresses, without ONNX Runtime. Its intermediates lie in blocks of the
session's arena that ONNX Runtime treats as free. So no tensor may stay there: outputs that remain on the device are
copied to memory of their own until the session has stopped recording. All runs of a session launch on one stream, with
library handles that ONNX Runtime shares between them, so runs are serialised, recorded or not.

Device tensors that were the same in the last plain runs, such as parameters, are recorded in place. Others, such as a
state that is an output of the last run, are copied on the device to the recording's own inputs before each replay, and
so are those that change later.

Runs over fixed memory (`record_bound`), such as the steps of a decode loop, read and write a state in place. Some of
their nodes may run on the CPU, if they only compute with shapes, which are the same in each replay.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.to_onnx.exported import ExportedNode
from rlx_ort.converters.to_onnx.model import ModelNode
from rlx_ort.errors import EngineError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.types import TensorType, ValueType
from rlx_ort.providers.base import DeviceGraphReport, NodeAssignment, RecordedRun
from rlx_ort.providers.engine.binding import Arrays
from rlx_ort.providers.engine.values import OrtTensor, has_foreign_dtype

LEFT_ON_DEVICE = "runs left outputs on the device, where a replay could overwrite them"

PLAIN_RUNS = 3  # of a signature before it is recorded
MOST_RECORDINGS = 4
MOST_SIGNATURES = 32  # counted but not recorded yet
FIRST_TRIES = 20  # to record a signature, which takes about ten runs
RUNS_PER_TRY = 256  # plain runs that allow another try, so that tries take at most 4 % of them
MOST_RUNS_WITHOUT = 64  # plain runs after which a session without recordings gives up
MOST_BYTES = 16 << 20  # of inputs and outputs: the copy to pinned memory costs more than the launches
MOST_DEVICE_BYTES = 256 << 20  # of inputs and outputs on the device, which a recording allocates a second time
MOST_COPIED_OUT = 8  # consecutive plain runs with outputs left on the device, after which the session gives up
WORTH = 0.9  # the largest ratio of a replay's time to a plain run's; the minimum of five favours replays by up to 8 %
TIMED_PAIRS = 5
WARM_RUNS = 3
HOST_BOUND = 0.5  # the least share of a run that launching takes; a replay of others saves nothing

_NO_NUMBER = np.dtype(object)

_log = logging.getLogger(__name__)

Copy: TypeAlias = tuple[int, int, int]
"""Address on the device, address on the host, bytes; within the device, address to write, address to read, bytes."""
_Owner: TypeAlias = int | tuple[frozenset[str], frozenset[str]]
"""0 for runs on arrays, a number for slots, (inputs, outputs) on the device for the others."""
_Key: TypeAlias = tuple[_Owner, tuple[str, ...], tuple[tuple[str, Any, tuple[int, ...]], ...]]

_facts = attrgetter("dtype", "shape")

_CONTROL_FLOW = "is control flow, which the host decides"
_UNRECORDABLE: dict[str, str] = {
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), _CONTROL_FLOW),
    **dict.fromkeys(("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), "draws random numbers"),
    **dict.fromkeys(("Multinomial", "Bernoulli", "Sampling"), "draws random numbers"),
    **dict.fromkeys(
        ("NonZero", "Compress", "Unique", "NonMaxSuppression", "BeamSearch", "GreedySearch", "WhisperBeamSearch"),
        "has outputs whose shapes depend on values",
    ),
}
_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "com.microsoft", "com.ms.internal.nhwc"})


class Recordings:
    """Decides which runs of one session are recorded, and replays them; every call takes the session's lock.

    `plain` runs the session: `(names, feeds, options)`. `bind` makes a `BoundRun` for inputs and outputs like the given
    ones, and `fresh` a tensor on the device like an array, outside of the session's arena. All runs of the session hold
    `lock`. `shared` are the RunOptions of runs that are not stopped one by one: only these are replayed. With
    `required`, a signature that cannot be recorded is an error.

    `active` is true if anything is recorded, or may be; `broken` if a failed recording left the session in an unknown
    state.
    """

    def __init__(
        self,
        driver: Recorder,
        plain: Callable[..., list[Any]],
        bind: Callable[[Mapping[str, npt.NDArray[Any] | OrtTensor], Mapping[str, npt.NDArray[Any] | str]], BoundRun],
        fresh: Callable[[npt.NDArray[Any]], OrtTensor],
        lock: Any,
        shared: Any,
        *,
        required: bool,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self.active = True
        self.broken = False
        self._driver = driver
        self._plain = plain
        self._bind = bind
        self._fresh = fresh
        self._lock = lock
        self.shared = shared
        self._required = required
        self._errors: tuple[type[Exception], ...] = (*errors, EngineError, NotRecordedError)
        self._recorded: OrderedDict[_Key, _Replay] = OrderedDict()
        self._last: _Replay | None = None
        self._counts: OrderedDict[_Key, tuple[int, dict[str, weakref.ref[Any]]]] = OrderedDict()
        self._refused: OrderedDict[_Key, str] = OrderedDict()
        self._changing: dict[_Key, set[str]] = {}  # inputs that are copied, since they were not the same for ever
        self._credit = FIRST_TRIES * RUNS_PER_TRY
        self._runs_without = 0
        self._copied_out = 0  # runs in a row
        self._reason = ""
        self._bound: weakref.WeakSet[_Replay] = weakref.WeakSet()
        self._bound_refusal = ""

    @property
    def uses_arena(self) -> bool:
        """Whether replays use memory of the session's arena, now or later."""
        return self.active or bool(self._bound)

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run, by a replay where there is a recording, and return new arrays."""
        with self._lock:
            if not self.active or options is not self.shared:
                return self._plain(names, feeds, options)
            found = self._found(0, names, feeds)
            if found is not None:
                return [view.copy() for view in found.run(feeds)]
            return self._run_plain(0, names, feeds, partial(self._plain, names, feeds, self.shared))

    def run_slots(
        self, owner: int, names: Sequence[str], feeds: Mapping[str, Any], plain: Callable[[], list[Any]] | None
    ) -> list[Any]:
        """Run like `run` and return buffers that only the next such call of the same owner overwrites.

        Each owner, a number above 0, has recordings of its own; `plain` runs without one, if it is given.
        """
        plain = plain or partial(self._plain, names, feeds, self.shared)
        with self._lock:
            if not self.active:
                return plain()
            found = self._found(owner, names, feeds)
            if found is not None:
                return found.run(feeds)
            return self._run_plain(owner, names, feeds, plain)

    def run_values(
        self, names: Sequence[str], feeds: Mapping[str, Any], resident: Collection[str], plain: Callable[[], list[Any]]
    ) -> list[Any]:
        """Run like `run` on arrays and tensors of the device; outputs in `resident` come as tensors.

        `plain` runs without a recording; what it leaves on the device may be in the session's arena.
        """
        with self._lock:
            if not self.active:
                return plain()
            on_device = frozenset(name for name, value in feeds.items() if not isinstance(value, np.ndarray))
            owner: _Owner = (on_device, frozenset(resident)) if on_device or resident else 0
            found = self._found(owner, names, feeds)
            if found is not None and (changed := found.changed(feeds)):
                self._changing.setdefault(found.key, set()).update(changed)
                self._last = None
                self._recorded.pop(found.key).close()
                found = None
            if found is not None:
                self._copied_out = 0
                return found.run_values(feeds, self._fresh)
            results = self._run_plain(owner, names, feeds, plain)
            self._copied_out += bool(resident)
            if self._copied_out >= MOST_COPIED_OUT and not self._required:
                self.give_up(LEFT_ON_DEVICE)
            return results

    def kept(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a plain run, with copies of what it left where a replay of a bound run may write."""
        return self._copied(results) if self._bound else results

    def record_bound(
        self, inputs: Mapping[str, npt.NDArray[Any] | OrtTensor], outputs: Mapping[str, npt.NDArray[Any] | str]
    ) -> _Replay:
        """Record a run that reads and writes fixed memory; the session's guard is held.

        The run is repeated on what the inputs hold now, which must change nothing: a step writes its keys and values to
        the same place again.

        Args:
            inputs: arrays, which are copied to the device in each replay, and tensors, which stay where they are.
            outputs: arrays like those that a replay returns, and names of inputs that the others are written to.

        Raises:
            NotRecordedError: the launches cannot be recorded, or a replay of them would not be faster.
        """
        arrays = {name: place for name, place in outputs.items() if not isinstance(place, str)}
        try:
            if self._bound_refusal:
                raise NotRecordedError(self._bound_refusal)
            bound = self._bind(inputs, outputs)
            self._check_launches(bound)
            found = _Replay(self._driver, bound, (0, tuple(arrays), ()), inputs, arrays)
        except BrokenSessionError as err:
            self.broken = True
            self.give_up(str(err))
            raise NotRecordedError(str(err)) from err
        except NotRecordedError:
            raise
        except self._errors as err:
            raise NotRecordedError(f"{type(err).__name__}: {err}") from err
        self._bound.add(found)
        return found

    def refuse_bound(self, reason: str) -> None:
        """Record no bound run from now on."""
        self._bound_refusal = reason

    def give_up(self, reason: str) -> None:
        """Drop every recording but those of bound runs, and record no more by signature."""
        with self._lock:
            if self.active:
                self._reason = reason
                self.active = False
                self._drop_all()

    def report(self) -> DeviceGraphReport:
        """Return the recorded signatures, and the refused ones with the reason."""
        with self._lock:
            recorded = [
                RecordedRun({name: _text(*facts) for name, *facts in key[2]}, key[1], found.nbytes)
                for key, found in self._recorded.items()
            ]
            waits = f"more than {MOST_RECORDINGS} input signatures take turns: one in {RUNS_PER_TRY} runs is recorded"
            waiting = {key: waits for key, (count, _) in self._counts.items() if count >= PLAIN_RUNS}
            refused = {
                ", ".join(f"{name} {_text(*facts)}" for name, *facts in key[2]): reason
                for key, reason in (self._refused | waiting).items()
            }
            for found in self._bound:
                recorded.append(RecordedRun(found.inputs, tuple(found.outputs), found.nbytes))
            if self._bound_refusal:
                refused["steps over fixed memory"] = self._bound_refusal
            return DeviceGraphReport(tuple(recorded), refused, self._reason)

    def close(self) -> None:
        """Free every recording; nothing runs any more."""
        self.active = False
        self._drop_all()

    def _drop_all(self) -> None:
        self._last = None
        while self._recorded:
            self._recorded.popitem()[1].close()

    def _found(self, owner: _Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> _Replay | None:
        last = self._last
        if last is not None and last.fits(owner, names, feeds):
            return last
        key = _key(owner, names, feeds)
        found = None if key is None else self._recorded.get(key)
        if found is not None:
            assert key is not None  # noqa: S101  # it was found by it
            self._recorded.move_to_end(key)
            self._last = found
        return found

    def _copied(self, results: Sequence[Any]) -> list[Any]:
        """Return results with copies, outside of the session's arena, of those that are on the device."""
        found, copies = list(results), []
        for place, result in enumerate(results):
            if result is not None and not isinstance(result, np.ndarray):
                like = _like(result)
                found[place] = self._fresh(like)
                if like.nbytes:
                    copies.append((found[place].address, result.address, like.nbytes))
        if copies:
            self._driver.move(copies)
        return found

    def _run_plain(
        self, owner: _Owner, names: Sequence[str], feeds: Mapping[str, Any], plain: Callable[[], list[Any]]
    ) -> list[Any]:
        """Run without a recording, and record the signature if it has come often enough."""
        results = plain() if isinstance(owner, int) else self._copied(plain())
        key = _key(owner, names, feeds)
        if key is None:
            return results
        if key in self._refused:
            self._raise_if_required(self._refused[key])
            return results
        self._runs_without += 1
        count, seen = self._counts.pop(key, (0, {}))
        count += 1
        self._credit = min(self._credit + 1, FIRST_TRIES * RUNS_PER_TRY)
        if count < PLAIN_RUNS or (self._credit < RUNS_PER_TRY and not self._required):
            tensors = {name: weakref.ref(value) for name, value in feeds.items() if not isinstance(value, np.ndarray)}
            self._counts[key] = count, tensors
            while len(self._counts) > MOST_SIGNATURES:
                self._counts.popitem(last=False)
            rare = count < PLAIN_RUNS and self._runs_without >= MOST_RUNS_WITHOUT
            if rare and not self._recorded and not self._required:
                self.give_up(f"no input signature came {PLAIN_RUNS} times in {self._runs_without} runs")
            return results
        self._credit -= RUNS_PER_TRY
        try:
            changing = self._changing.get(key, ())
            held = {name: feeds[name] for name, tensor in seen.items() if tensor() is feeds[name]}
            held = {name: tensor for name, tensor in held.items() if name not in changing}
            self._record(key, names, feeds, results, plain, held)
        except NotRecordedError as err:
            self._refuse(key, str(err))
            self._raise_if_required(str(err))
        except BrokenSessionError as err:
            self.broken = True
            self.give_up(str(err))
            self._raise_if_required(str(err))
        return results

    def _raise_if_required(self, reason: str) -> None:
        if self._required:
            raise not_recorded(reason)

    def _refuse(self, key: _Key, reason: str) -> None:
        self._refused[key] = reason
        while len(self._refused) > MOST_SIGNATURES:
            self._refused.popitem(last=False)
        if not self._recorded and not self._counts and not self._required:
            self.give_up(reason)

    def _record(
        self,
        key: _Key,
        names: Sequence[str],
        feeds: Mapping[str, Any],
        results: Sequence[Any],
        plain: Callable[[], list[Any]],
        held: Mapping[str, OrtTensor],
    ) -> None:
        """Record a signature that has just run plainly with these results, if its replay is right and faster."""
        values = (*feeds.values(), *results)
        if not all(getattr(value, "dtype", _NO_NUMBER).kind in "biufc" for value in values):
            raise NotRecordedError("an input or output is no tensor of numbers")
        ins = {name: held[name] if name in held else _like(value) for name, value in feeds.items()}
        outs = {name: _like(value) for name, value in zip(names, results, strict=True)}
        on_host = [value.nbytes for value in values if isinstance(value, np.ndarray)]
        on_device = [_like(value).nbytes for value in values if not isinstance(value, np.ndarray)]
        if not all((*on_host, *on_device)):
            raise NotRecordedError("an input or output is empty")
        total = sum(on_host)
        if total > MOST_BYTES and not self._required:
            raise NotRecordedError(f"{total >> 20} MB of inputs and outputs take longer than the launches")
        total = sum(on_device) - sum(_like(tensor).nbytes for tensor in held.values())
        if total > MOST_DEVICE_BYTES and not self._required:
            raise NotRecordedError(f"another {total >> 20} MB would be needed on the device")
        replay: Callable[[], list[Any]]
        recording = None
        try:
            bound = self._bind(ins, outs)
            self._check_launches(bound)
            recording = _Replay(self._driver, bound, key, ins, outs)
            if isinstance(key[0], int):
                replay = partial(recording.run, feeds)
            else:
                replay = partial(recording.run_values, feeds, self._fresh)
            check_replay(names, [_array(value) for value in results], [_array(value) for value in replay()])
            if not self._required:
                self._check_worth(plain, replay, copies=key[0] == 0)
        except self._errors as err:
            if recording is not None:
                recording.close()
            if isinstance(err, NotRecordedError):
                raise
            raise NotRecordedError(f"{type(err).__name__}: {err}") from err
        self._recorded[key] = self._last = recording
        self._runs_without = 0
        if len(self._recorded) > MOST_RECORDINGS:
            self._recorded.popitem(last=False)[1].close()

    def _check_launches(self, bound: BoundRun) -> None:
        """Warm up, and refuse a run whose time the device takes."""
        launch_ns, run_ns = bound.warm_up(self._driver.wait)
        if launch_ns < HOST_BOUND * run_ns and not self._required:
            raise NotRecordedError(f"of {run_ns / 1e3:.0f} us, launching takes {launch_ns / 1e3:.0f} us")

    def _check_worth(self, plain: Callable[[], Any], replay: Callable[[], list[Any]], *, copies: bool) -> None:
        """Compare the minimum times of interleaved replays and plain runs, and refuse a replay that is not faster."""
        now, least = time.perf_counter_ns, [1 << 62, 1 << 62]
        for _ in range(TIMED_PAIRS):
            start = now()
            plain()
            middle = now()
            for view in replay():
                if copies:
                    view.copy()
            least = [min(least[0], middle - start), min(least[1], now() - middle)]
        check_worth(*least)


def not_recorded(reason: str) -> EngineError:
    """Return the error of a run that was to be recorded."""
    return EngineError(f"device_graph=True, and the run cannot be recorded: {reason}; compile with device_graph='auto'")


def _like(value: npt.NDArray[Any] | OrtTensor) -> npt.NDArray[Any]:
    """Return an array with the dtype and shape of a value; for a tensor one without memory."""
    return value if isinstance(value, np.ndarray) else np.broadcast_to(np.zeros((), value.dtype), value.shape)


def _array(value: npt.NDArray[Any] | OrtTensor) -> npt.NDArray[Any]:
    return value if isinstance(value, np.ndarray) else value.numpy()


def _key(owner: _Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> _Key | None:
    """Return the signature of a run, or None for feeds that are not all arrays."""
    try:
        return owner, tuple(names), tuple((name, *_facts(array)) for name, array in feeds.items())
    except AttributeError:
        return None


def _text(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


class Recorder(Protocol):
    """A device's driver for one session: records what is launched on a stream of its own.

    Its provider `options` make a session launch on the stream. ONNX Runtime (1.31) then leaves the thread on the GPU
    that another session has set, where its launches fail, so `enter` comes before each run: it sets the thread's GPU.
    """

    options: Mapping[str, str]
    enter: Callable[[], object]

    def host_buffer(self, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array like another one, in pinned host memory."""

    def record(self, copies_in: Sequence[Copy], run: Callable[[], None], copies_out: Sequence[Copy]) -> Any:
        """Return a recording of the copies to the device, a run, and the copies back, none of which is executed."""

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


class NotRecordedError(Exception):
    """Launches cannot be recorded; the message is the reason, for a report or an error."""


class BrokenSessionError(Exception):
    """A session no longer runs after a recording of it failed; the message is ONNX Runtime's."""


class BoundRun:
    """A run over tensors at fixed addresses on the device, outside of the session's arena.

    Inputs that are tensors are bound as they are; for arrays there are tensors of their own, with what the arrays hold.
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
        return least

    def launch(self) -> None:
        """Run without waiting for the device."""
        self._session.run_with_iobinding(self._io, self._quiet)

    def settle(self) -> None:
        """Run and wait. Frees the host buffers that `launch` left, and shows that the session still works.

        The next run may report what failed inside a capture; this makes sure that it is not the caller's.
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


class _Replay:
    """One recorded signature.

    `ins` are arrays for what is given on the host or copied on the device, and the tensors that are read where they
    are; `outs` are arrays like the outputs.
    """

    def __init__(
        self,
        driver: Recorder,
        bound: BoundRun,
        key: _Key,
        ins: Mapping[str, npt.NDArray[Any] | OrtTensor],
        outs: Arrays,
    ) -> None:
        self.driver = driver
        self.bound = bound
        self.key = key
        self.outputs = list(outs)
        self._names = list(ins)
        self.inputs = {name: _text(*_facts(given)) for name, given in ins.items()}
        self._facts = [_facts(given) for given in ins.values()]
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
        on_device = sum(size for _, _, size in self._moved) + sum(like.nbytes for _, like in self._stays.values())
        return on_device + sum(array.nbytes for array in (*self.inside, *self.views))

    def fits(self, owner: _Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        return (
            owner == self.key[0]
            and names == self.outputs
            and list(feeds) == self._names
            and list(map(_facts, feeds.values())) == self._facts
        )

    def changed(self, feeds: Mapping[str, Any]) -> list[str]:
        """Return the inputs that are recorded in place and are other tensors in this run."""
        return [name for name, tensor in self._held.items() if feeds[name] is not tensor()]

    def run(self, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
        """Replay on arrays and return the output buffers, which the next replay overwrites."""
        for place, array in zip(self.inside, feeds.values(), strict=True):
            place[...] = array
        self._play()
        return self.views

    def run_values(self, feeds: Mapping[str, Any], fresh: Callable[[npt.NDArray[Any]], OrtTensor]) -> list[Any]:
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
        self.driver.drop(self.handle)
        del self.bound, self._play  # the session must end before its stream does


_SHAPE_ARITHMETIC = {"Shape", "Size", "Constant", "Gather", "Slice", "Concat", "Squeeze", "Unsqueeze", "Cast"}
_SHAPE_ARITHMETIC |= {"Add", "Sub", "Mul", "Div"}


def without_shape_arithmetic(assignments: Iterable[NodeAssignment]) -> list[NodeAssignment]:
    """Return the nodes but those on the CPU that may be there for the sizes of tensors.

    If they depend on values after all, those are copied from the device in the middle of the run, which cannot be
    recorded.
    """
    cpu = "CPUExecutionProvider"
    return [node for node in assignments if node.provider != cpu or node.op_type not in _SHAPE_ARITHMETIC]


def host_work(ep_name: str, memory: str, assignments: Iterable[NodeAssignment], session: Any) -> str:
    """Return why the host takes part in a session's runs beyond launching kernels, or an empty string.

    All nodes must be on the provider, and all inputs and outputs in its memory.
    """
    for node in assignments:
        if node.provider != ep_name:
            return f"node {node.name or node.op_type!r} ({node.op_type}) runs on {node.provider}"
        if _UNRECORDABLE.get(node.op_type) == _CONTROL_FLOW:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {_CONTROL_FLOW}"
    if memory == "cpu":
        return ""
    for side in ("input", "output"):
        ask = getattr(session, f"get_{side}_memory_infos", None)
        if ask is None:
            return f"this ONNX Runtime does not report where {side}s are; 1.23 or newer does"
        values = session.get_inputs() if side == "input" else session.get_outputs()
        for value, info in zip(values, ask(), strict=True):
            # The device's own memory has no name, or the provider's, and the default type.
            if info.name.lower() == "cpu" or int(info.device_mem_type) != 0:
                return f"{side} {value.name!r} is in host memory"
    return ""


def unrecordable(nodes: Iterable[NodeAssignment | ExportedNode | ModelNode], types: Mapping[str, ValueType]) -> str:
    """Return why no run of a model can be recorded, judged by its nodes and inputs and outputs, or an empty string."""
    for node in nodes:
        what = _UNRECORDABLE.get(node.op_type, "")
        if not what and node.domain not in _KNOWN_DOMAINS:
            what = f"is of the domain {node.domain}"
        if what:
            return f"node {node.name or node.op_type!r} ({node.op_type}) {what}"
    for name, kind in types.items():
        if not isinstance(kind, TensorType) or kind.dtype is DType.STRING or has_foreign_dtype(kind):
            return f"{name!r} is {kind}, and only tensors of types that numpy has can be recorded"
    return ""


def check_worth(plain_ns: int, replay_ns: int) -> None:
    """Refuse a replay that is not faster than a plain run."""
    if replay_ns > WORTH * plain_ns:
        raise NotRecordedError(f"a replay takes {replay_ns / 1e3:.1f} us, a plain run {plain_ns / 1e3:.1f} us")


def check_replay(names: Sequence[str], wanted: Sequence[npt.NDArray[Any]], found: Sequence[npt.NDArray[Any]]) -> None:
    """Compare a replay's outputs with a plain run's: exactly, or to 32 roundings of the largest element for floats."""
    for name, want, got in zip(names, wanted, found, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise NotRecordedError(f"a replay gave output {name!r} as {got.dtype}{got.shape}")
        if np.array_equal(want, got, equal_nan=want.dtype.kind in "fc"):
            continue
        if want.dtype.kind not in "fc":
            raise NotRecordedError(f"a replay gave another output {name!r} than a plain run")
        with np.errstate(all="ignore"):
            error = np.abs(got.astype(np.complex128 if want.dtype.kind == "c" else np.float64) - want)
            scale = float(np.abs(want[np.isfinite(want)]).max(initial=0.0))
        same = (want == got) | (np.isnan(want) & np.isnan(got)) | (error <= 32 * np.finfo(want.dtype).eps * scale)
        if not same.all():
            raise NotRecordedError(f"a replay gave output {name!r} with an error of {float(np.nanmax(error)):.1e}")
