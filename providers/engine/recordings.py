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

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.providers.base import DeviceGraphReport, RecordedRun
from rlx_ort.providers.engine.replays import (
    LENT_BYTES,
    BrokenSessionError,
    FixedRun,
    LaterError,
    NotRecordedError,
    Owner,
    Recorder,
    Replay,
    Signature,
    check_replay,
    check_worth,
    described,
    signature,
    without_memory,
)
from rlx_ort.providers.engine.values import OrtTensor
from rlx_ort.timing import least_in_turns

LEFT_ON_DEVICE = "runs left outputs on the device, where a replay could overwrite them"

PLAIN_RUNS = 3  # of a signature before it is recorded
MOST_RECORDINGS = 64  # served batches come in nine sizes, pictures of text in dozens of widths
MOST_RECORDED_BYTES = 256 << 20  # of inputs and outputs, by which recordings beyond the first are limited as well
MOST_SIGNATURES = 128  # counted but not recorded yet
FIRST_TRIES = 64  # to record a signature, which takes about ten runs
FIRST_TRIES_NS = 2_000_000_000  # of tries, before they must be worth it; see `TRY_SHARE`
MOST_CHANGES = 4  # of sizes that cost recordings, after which a session records no more
TRY_SHARE = 0.04  # of the time of plain runs is for more of them
RUNS_PER_TRY = 256  # plain runs that allow another try, so that tries take at most 4 % of them
MOST_RUNS_WITHOUT = 64  # plain runs after which a session without recordings gives up
MOST_BYTES = 64 << 20  # of inputs and small outputs, for which a recording keeps pinned memory
COPIED_BYTES = 8 << 20  # of inputs and outputs: more are worth a trial for the quicker copies, see `workers.fill`
MOST_DEVICE_BYTES = 256 << 20  # of inputs and outputs on the device, which a recording allocates a second time
MOST_COPIED_OUT = 8  # consecutive plain runs with outputs left on the device, after which the session gives up
TIMED_PAIRS = 5
AGAIN_S = 0.001  # between tries to record a run that must be recorded
HOST_BOUND = 0.5  # the least share of a run that launching takes; a replay of others saves nothing

_BOUND = -1  # the owner of bound runs
_NO_NUMBER = np.dtype(object)


class Recordings:
    """Decides which runs of one session are recorded, and replays them; every call takes the session's lock.

    `plain` runs the session: `(names, feeds, options)`. `bind` makes a `FixedRun` for inputs and outputs like the given
    ones, and `fresh` a tensor on the device like an array, outside of the session's arena. All runs of the session hold
    `lock`. `shared` are the RunOptions of runs that are not stopped one by one: only these are replayed. With
    `required`, a signature that cannot be recorded is an error. With `replans`, a plain run of other sizes drops the
    plans of kernels, and with them the code that some recordings launch, which go before it.

    `active` is true if anything is recorded, or may be; `broken` if a failed recording left the session in an unknown
    state. `bound_refusal` is why no bound run is recorded.
    """

    def __init__(
        self,
        driver: Recorder,
        plain: Callable[..., list[Any]],
        bind: Callable[[Mapping[str, npt.NDArray[Any] | OrtTensor], Mapping[str, npt.NDArray[Any] | str]], FixedRun],
        fresh: Callable[[npt.NDArray[Any]], OrtTensor],
        lock: Any,
        shared: Any,
        *,
        required: bool,
        errors: tuple[type[Exception], ...],
        replans: bool = False,
    ) -> None:
        self.active = True
        self.broken = False
        self._replans = replans
        self._size: object = None  # of the last plain run
        self._changes = 0  # of sizes that cost a recording
        self._driver = driver
        self._plain = plain
        self._bind = bind
        self._fresh = fresh
        self._lock = lock
        self.shared = shared
        self._required = required
        self._errors: tuple[type[Exception], ...] = (*errors, EngineError, NotRecordedError)
        self._recorded: OrderedDict[Signature, Replay] = OrderedDict()
        self._last: Replay | None = None
        self._counts: OrderedDict[Signature, tuple[int, dict[str, weakref.ref[Any]]]] = OrderedDict()
        self._refused: OrderedDict[Signature, str] = OrderedDict()
        self._changing: dict[Signature, set[str]] = {}  # inputs that are copied, since they were not the same for ever
        self._credit = FIRST_TRIES * RUNS_PER_TRY
        self._credit_ns = float(FIRST_TRIES_NS)
        self._runs_without = 0
        self._copied_out = 0  # runs in a row
        self._reason = ""
        self._bound: weakref.WeakSet[Replay] = weakref.WeakSet()
        self.bound_refusal = ""

    @property
    def uses_arena(self) -> bool:
        """Whether replays use memory of the session's arena, now or later."""
        return self.active or bool(self._bound)

    def refuses(self, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether such runs on arrays are not recorded, and not for want of runs."""
        return not self.active or signature(0, names, feeds) in self._refused

    def lasts(self, names: Sequence[str], feeds: Mapping[str, Any]) -> bool:
        """Return whether such runs on arrays are recorded, for as long as there is room."""
        key = signature(0, names, feeds)
        replay = None if key is None else self._recorded.get(key)
        return replay is not None and (not self._replans or self._driver.lasts(replay.handle))

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run, by a replay where there is a recording, and return new arrays."""
        with self._lock:
            if not self.active or options is not self.shared:
                self.leave_size()
                return self._plain(names, feeds, options)
            replay = self._found(0, names, feeds)
            if replay is not None:
                return list(replay.run_fresh(feeds))
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
            replay = self._found(owner, names, feeds)
            if replay is not None:
                return replay.run(feeds)
            return self._run_plain(owner, names, feeds, plain)

    def run_values(
        self, names: Sequence[str], feeds: Mapping[str, Any], resident: Collection[str], plain: Callable[[], list[Any]]
    ) -> list[Any]:
        """Run like `run` on arrays and tensors of the device; outputs in `resident` come as tensors.

        `plain` runs without a recording; its results on the device may be in the session's arena.
        """
        with self._lock:
            if not self.active:
                return plain()
            on_device = frozenset(name for name, value in feeds.items() if not isinstance(value, np.ndarray))
            owner: Owner = (on_device, frozenset(resident)) if on_device or resident else 0
            replay = self._found(owner, names, feeds)
            if replay is not None and (changed := replay.changed(feeds)):
                self._changing.setdefault(replay.key, set()).update(changed)
                self._last = None
                self._recorded.pop(replay.key).close()
                replay = None
            if replay is not None:
                self._copied_out = 0
                return replay.run_values(feeds, self._fresh)
            results = self._run_plain(owner, names, feeds, plain)
            self._copied_out += bool(resident)
            if self._copied_out >= MOST_COPIED_OUT and not self._required:
                self.give_up(LEFT_ON_DEVICE)
            return results

    def leave_size(self) -> None:
        """Drop the recordings that a run of other sizes, which is not made here, would spoil."""
        if self._replans and self._recorded:
            self._drop_spoiled(None)

    def kept(self, results: Sequence[Any]) -> Sequence[Any]:
        """Return the results of a plain run, with copies of those that a replay of a bound run may write."""
        return self._copied(results) if self._bound else results

    def record_bound(
        self, inputs: Mapping[str, npt.NDArray[Any] | OrtTensor], outputs: Mapping[str, npt.NDArray[Any] | str]
    ) -> Replay:
        """Record a run that reads and writes fixed memory; the session's guard is held.

        The run is repeated on the same inputs, which must change nothing: a step writes its keys and values to
        the same place again.

        Args:
            inputs: arrays, which are copied to the device in each replay, and tensors, which stay where they are.
            outputs: arrays like those that a replay returns, and names of inputs that the others are written to.

        Raises:
            NotRecordedError: the launches cannot be recorded, or a replay of them would not be faster.
        """
        arrays = {name: place for name, place in outputs.items() if not isinstance(place, str)}
        try:
            if self.bound_refusal:
                raise NotRecordedError(self.bound_refusal)
            bound = self._bind(inputs, outputs)
            self._check_launches(bound)
            replay = Replay(self._driver, bound, (_BOUND, tuple(arrays), ()), inputs, arrays)
        except BrokenSessionError as err:
            self.broken = True
            self.give_up(str(err))
            raise NotRecordedError(str(err)) from err
        except NotRecordedError:
            raise
        except self._errors as err:
            raise NotRecordedError(f"{type(err).__name__}: {err}") from err
        self._bound.add(replay)
        return replay

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
                RecordedRun({name: described(*facts) for name, *facts in key[2]}, key[1], replay.nbytes)
                for key, replay in self._recorded.items()
            ]
            waits = f"many input signatures take turns: after {FIRST_TRIES}, one in {RUNS_PER_TRY} runs is recorded"
            waiting = {key: waits for key, (count, _) in self._counts.items() if count >= PLAIN_RUNS}
            refused = {
                ", ".join(f"{name} {described(*facts)}" for name, *facts in key[2]): reason
                for key, reason in (self._refused | waiting).items()
            }
            for replay in self._bound:
                recorded.append(RecordedRun(replay.inputs, tuple(replay.outputs), replay.nbytes))
            if self.bound_refusal:
                refused["steps over fixed memory"] = self.bound_refusal
            return DeviceGraphReport(tuple(recorded), refused, self._reason)

    def close(self) -> None:
        """Free every recording; nothing runs any more."""
        self.active = False
        self._drop_all()

    def _drop_spoiled(self, key: Signature | None) -> None:
        """Drop recordings that do not last before a run of other sizes; end recording where that comes too often."""
        size = None if key is None else key[2]
        if size is not None and size == self._size:
            return
        self._size = size
        spoiled = [key for key, replay in self._recorded.items() if not self._driver.lasts(replay.handle)]
        if spoiled:
            self._last = None
            for each in spoiled:
                self._recorded.pop(each).close()
            self._changes += 1
            if self._changes >= MOST_CHANGES and not self._required:
                self.give_up("its sizes take turns, and each change plans convolutions anew")

    def _drop_all(self) -> None:
        self._last = None
        while self._recorded:
            self._recorded.popitem()[1].close()

    def _found(self, owner: Owner, names: Sequence[str], feeds: Mapping[str, Any]) -> Replay | None:
        last = self._last
        if last is not None and last.fits(owner, names, feeds):
            return last
        key = signature(owner, names, feeds)
        replay = None if key is None else self._recorded.get(key)
        if replay is not None:
            assert key is not None  # noqa: S101  # it was found by it
            self._recorded.move_to_end(key)
            self._last = replay
        return replay

    def _copied(self, results: Sequence[Any]) -> list[Any]:
        """Return results with copies, outside of the session's arena, of those that are on the device."""
        outputs, copies = list(results), []
        for place, result in enumerate(results):
            if result is not None and not isinstance(result, np.ndarray):
                like = _like(result)
                outputs[place] = self._fresh(like)
                if like.nbytes:
                    copies.append((outputs[place].address, result.address, like.nbytes))
        if copies:
            self._driver.move(copies)
        return outputs

    def _run_plain(
        self, owner: Owner, names: Sequence[str], feeds: Mapping[str, Any], plain: Callable[[], list[Any]]
    ) -> list[Any]:
        """Run without a recording, and record the signature if it has come often enough."""
        key = signature(owner, names, feeds)
        if self._replans:
            self._drop_spoiled(key)
        begun = time.perf_counter_ns()
        results = plain() if isinstance(owner, int) else self._copied(plain())
        took_ns = time.perf_counter_ns() - begun
        if key is None:
            return results
        if key in self._refused:
            self._raise_if_required(self._refused[key])
            return results
        self._runs_without += 1
        count, seen = self._counts.pop(key, (0, {}))
        count += 1
        self._credit = min(self._credit + 1, FIRST_TRIES * RUNS_PER_TRY)
        self._credit_ns = min(self._credit_ns + TRY_SHARE * took_ns, FIRST_TRIES_NS)
        tensors = {name: weakref.ref(value) for name, value in feeds.items() if not isinstance(value, np.ndarray)}
        if count < PLAIN_RUNS or not (self._required or (self._credit >= RUNS_PER_TRY and self._credit_ns > 0)):
            self._counts[key] = count, tensors
            while len(self._counts) > MOST_SIGNATURES:
                self._counts.popitem(last=False)
            rare = count < PLAIN_RUNS and self._runs_without >= MOST_RUNS_WITHOUT
            if rare and not self._recorded and not self._required:
                self.give_up(f"no input signature came {PLAIN_RUNS} times in {self._runs_without} runs")
            return results
        self._credit -= RUNS_PER_TRY
        begun = time.perf_counter_ns()
        changing = self._changing.get(key, ())
        held = {name: feeds[name] for name, tensor in seen.items() if tensor() is feeds[name]}
        held = {name: tensor for name, tensor in held.items() if name not in changing}
        try:
            self._record_when_possible(key, names, feeds, results, plain, held)
        except LaterError:
            self._credit += RUNS_PER_TRY
            self._counts[key] = count - 1, tensors
        except NotRecordedError as err:
            self._refuse(key, str(err))
            self._raise_if_required(str(err))
        except BrokenSessionError as err:
            self.broken = True
            self.give_up(str(err))
            self._raise_if_required(str(err))
        finally:
            self._credit_ns -= time.perf_counter_ns() - begun
        return results

    def _record_when_possible(self, *given: Any) -> None:
        """Record, after calls that wait for the device if there must be a recording.

        Raises:
            LaterError: there is such a call, and there need not be one.
        """
        while True:
            try:
                self._record(*given)
                return
            except LaterError:
                if not self._required:
                    raise
            time.sleep(AGAIN_S)

    def _raise_if_required(self, reason: str) -> None:
        if self._required:
            raise not_recorded(reason)

    def _refuse(self, key: Signature, reason: str) -> None:
        self._refused[key] = reason
        while len(self._refused) > MOST_SIGNATURES:
            self._refused.popitem(last=False)
        if not self._recorded and not self._counts and not self._required:
            self.give_up(reason)

    def _record(
        self,
        key: Signature,
        names: Sequence[str],
        feeds: Mapping[str, Any],
        results: Sequence[Any],
        plain: Callable[[], list[Any]],
        held: Mapping[str, OrtTensor],
    ) -> None:
        """Record a signature that has just run plainly with these results, if its replay is right and faster."""
        values = (*feeds.values(), *results)
        if not all(getattr(value, "dtype", _NO_NUMBER).kind in "biufc" for value in values):
            raise NotRecordedError("an input or output is not a tensor of numbers")
        ins = {name: held[name] if name in held else _like(value) for name, value in feeds.items()}
        outs = {name: _like(value) for name, value in zip(names, results, strict=True)}
        lent = [value.nbytes for value in results if key[0] == 0 and value.nbytes >= LENT_BYTES]
        on_host = [value.nbytes for value in values if isinstance(value, np.ndarray)]
        on_device = [_like(value).nbytes for value in values if not isinstance(value, np.ndarray)]
        if not all((*on_host, *on_device)):
            raise NotRecordedError("an input or output is empty")
        total = sum(on_host) - sum(lent)
        if total > MOST_BYTES and not self._required:
            raise NotRecordedError(f"{total >> 20} MB of inputs and outputs would be kept in pinned memory")
        total = sum(on_device) + sum(lent) - sum(_like(tensor).nbytes for tensor in held.values())
        if total > MOST_DEVICE_BYTES and not self._required:
            raise NotRecordedError(f"another {total >> 20} MB would be needed on the device")
        replay: Callable[[], list[Any]]
        recording = None
        try:
            bound = self._bind(ins, outs)
            if sum(on_host) < COPIED_BYTES:
                self._check_launches(bound)
            recording = Replay(self._driver, bound, key, ins, outs)
            if isinstance(key[0], int):
                replay = partial(recording.run if key[0] else recording.run_fresh, feeds)
            else:
                replay = partial(recording.run_values, feeds, self._fresh)
            check_replay(names, [_array(value) for value in results], [_array(value) for value in replay()])
            if not self._required:
                check_worth(*least_in_turns(plain, replay, rounds=TIMED_PAIRS))
        except self._errors as err:
            if recording is not None:
                recording.close()
            if isinstance(err, NotRecordedError):
                raise
            raise NotRecordedError(f"{type(err).__name__}: {err}") from err
        self._recorded[key] = self._last = recording
        self._runs_without = 0
        nbytes = sum(each.nbytes for each in self._recorded.values())
        while len(self._recorded) > MOST_RECORDINGS or (len(self._recorded) > 1 and nbytes > MOST_RECORDED_BYTES):
            oldest = self._recorded.popitem(last=False)[1]
            nbytes -= oldest.nbytes
            oldest.close()

    def _check_launches(self, bound: FixedRun) -> None:
        """Warm up, and refuse a run whose time the device takes."""
        launch_ns, run_ns = bound.warm_up(self._driver.wait)
        if launch_ns < HOST_BOUND * run_ns and not self._required:
            raise NotRecordedError(f"of {run_ns / 1e3:.0f} us, launching takes {launch_ns / 1e3:.0f} us")


def not_recorded(reason: str) -> EngineError:
    """Return the error of a run that was to be recorded."""
    return EngineError(f"device_graph=True, and the run cannot be recorded: {reason}; compile with device_graph='auto'")


def _like(value: npt.NDArray[Any] | OrtTensor) -> npt.NDArray[Any]:
    """Return an array with the dtype and shape of a value; for a tensor one without memory."""
    return value if isinstance(value, np.ndarray) else without_memory(value)


def _array(value: npt.NDArray[Any] | OrtTensor) -> npt.NDArray[Any]:
    return value if isinstance(value, np.ndarray) else value.numpy()
