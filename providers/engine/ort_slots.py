"""Slots of an ONNX Runtime session: buffers that stay bound, so that a run copies arrays and nothing else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from rlx_ort.providers.engine import stopping
from rlx_ort.providers.engine.binding import Arrays, Slots
from rlx_ort.providers.engine.lent_outputs import HostVectors
from rlx_ort.providers.engine.ort_loops import Binding
from rlx_ort.providers.engine.recipe import HOST_MEMORY
from rlx_ort.providers.engine.replays import NotRecordedError
from rlx_ort.providers.engine.runtime import running_error
from rlx_ort.providers.engine.session import OrtEngineSession, SessionCore

_MOST_PINNED_BYTES = 256 << 20  # of one set of slots; pinned memory is taken from all processes
_owners = itertools.count(1)


class BoundSlots(Slots):
    """Slots over a binding: outputs in host memory are written in place, those in other memory are new arrays."""

    def __init__(
        self, session: OrtEngineSession, binding: Binding, like: Sequence[npt.NDArray[Any]], fixed: Arrays
    ) -> None:
        self._device = session.device
        self._errors = session.errors
        self._binding = binding
        self._call, self._inner, self._core = binding.call, binding.inner, binding.core
        self._buffers = fixed
        self._results = list(fixed.values())
        self._varies = fixed.keys() != session.output_types.keys()
        buffers = None
        if session.recipe.memory == HOST_MEMORY:
            binding.bind(like)
            buffers = binding.buffers()
        self._copy = None if buffers is None else _copier(buffers)

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run on one array per input; see `Slots.run`."""
        copy = self._copy
        if copy is None:
            return self._binding.run(arrays)
        try:
            copy(arrays)
            if self._varies:
                return self._binding.launch()
            shared = self._core.shared
            self._call(self._inner, stopping.run_options(shared) if stopping.in_use else shared)
            return self._results
        except self._errors as err:
            raise running_error(err, self._device) from err


class PlainSlots(Slots):
    """Slots of a session whose plain runs are cheaper than bound device buffers, and whose launches may be recorded.

    Outputs of known shapes are pinned buffers; copies to other memory take twice as long, and a new array each time.
    Inputs are read in place: copying them to pinned memory costs as much as it saves. Unless `pinned`, the outputs of
    plain runs are new arrays.
    """

    def __init__(self, session: OrtEngineSession, inputs: list[str], outputs: Arrays, pinned: bool) -> None:
        self._session = session
        self._before = session.recipe.before_run
        self._errors = session.errors
        self._owner = next(_owners)
        self._inputs = inputs
        self._outputs = list(outputs)
        self._pinned: _PinnedOutputs | None = None
        if pinned:
            with contextlib.suppress(NotRecordedError):
                self._pinned = _PinnedOutputs(session, inputs, outputs)

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run on one array per input; see `Slots.run`."""
        core, pinned = self._session.open_core(), self._pinned
        try:
            if self._before is not None:
                self._before()
            recordings = core.recordings
            if recordings is None and pinned is not None:
                return pinned.run(core, arrays)
            feeds = dict(zip(self._inputs, arrays, strict=True))
            if recordings is None or (pinned is None and not recordings.active):
                outputs: list[npt.NDArray[Any]] = core.call(self._outputs, feeds, core.options)
                return outputs
            plain = None if pinned is None else partial(pinned.run, core, arrays)
            return recordings.run_slots(self._owner, self._outputs, feeds, plain)
        except self._errors as err:
            raise running_error(err, self._session.device) from err


class _PinnedOutputs:
    """Runs to pinned buffers. Making it raises `NotRecordedError` where they are too large, or the engine cannot."""

    def __init__(self, session: OrtEngineSession, inputs: list[str], outputs: Arrays) -> None:
        make = session.recipe.pinned
        if make is None or sum(like.nbytes for like in outputs.values()) > _MOST_PINNED_BYTES:
            raise NotRecordedError("its outputs cannot be pinned")
        self._vectors = HostVectors(session.engine)
        self._inputs, self._outputs = inputs, list(outputs)
        self._places = [make(like) for like in outputs.values()]
        self._fetches = self._vectors.of(self._places)

    def run(self, core: SessionCore, arrays: Sequence[npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
        feeds = dict(zip(self._inputs, arrays, strict=True))
        self._vectors.run(core.session, core.options, feeds, self._outputs, self._fetches)
        return self._places


def _copier(buffers: Sequence[npt.NDArray[Any]]) -> Callable[[Sequence[npt.NDArray[Any]]], object]:
    """Return a function that copies arrays into buffers; without a loop, which costs as much again, for one and two."""
    if len(buffers) == 1:
        (only,) = buffers

        def copy_one(arrays: Sequence[npt.NDArray[Any]]) -> None:
            only[...] = arrays[0]

        return copy_one
    puts = [buffer.__setitem__ for buffer in buffers]
    if len(puts) == 2:
        first, second = puts
        return lambda arrays: (first(..., arrays[0]), second(..., arrays[1]))

    def copy_all(arrays: Sequence[npt.NDArray[Any]]) -> None:
        for put, array in zip(puts, arrays, strict=True):
            put(..., array)

    return copy_all
