"""`FedBinder`: the binder of an engine whose runs need more than the user's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import EngineError
from rlx_ort.execution.device_tensor import DeviceTensor
from rlx_ort.providers.binding import Binder, Slots, StoppableRun

__all__ = ["FedBinder", "FedRuns"]


class FedRuns(Protocol):
    """Runs that add what the session needs."""

    @property
    def binder(self) -> Binder:
        """The session's own binder."""

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run once and return the named outputs as arrays."""

    def run_bound(self, feeds: Mapping[str, Any], output_names: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run once; outputs in `resident` stay on the device."""


class FedBinder(Binder):
    """Uploads through the session's binder and runs with what the engine adds; nothing is bound for good."""

    def __init__(self, runs: FedRuns) -> None:
        self._runs = runs

    @property
    def on_host(self) -> bool:
        """Whether the device's memory is host memory."""
        return self._runs.binder.on_host

    def upload(self, array: npt.NDArray[Any]) -> DeviceTensor:
        """Return a tensor on the device; see `Binder.upload`."""
        return self._runs.binder.upload(array)

    def adopt(self, source: Any) -> DeviceTensor | None:
        """Return a tensor without a copy; see `Binder.adopt`."""
        return self._runs.binder.adopt(source)

    def run(self, feeds: Mapping[str, Any], outputs: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run on arrays and device tensors; see `Binder.run`."""
        return self._runs.run_bound(feeds, outputs, resident)

    def slots(
        self,
        inputs: Mapping[str, npt.NDArray[Any]],
        outputs: Mapping[str, npt.NDArray[Any]],
        fixed: Collection[str],
    ) -> Slots | None:
        """Return buffers that a run through the engine fills."""
        return _FedSlots(self._runs, tuple(inputs), outputs, fixed)

    def stoppable(self) -> StoppableRun:
        """Return a run that can be stopped before it begins."""
        return _FedStoppable(self._runs)


class _FedSlots(Slots):
    def __init__(
        self,
        runs: FedRuns,
        inputs: Sequence[str],
        outputs: Mapping[str, npt.NDArray[Any]],
        fixed: Collection[str],
    ) -> None:
        self._runs = runs
        self._inputs = inputs
        self._outputs = list(outputs)
        self._buffers = {name: np.empty_like(outputs[name]) for name in fixed}

    def run(self, arrays: Sequence[npt.NDArray[Any]]) -> Sequence[npt.NDArray[Any]]:
        """Run and copy the results into the buffers; see `Slots.run`."""
        results = self._runs.run(self._outputs, dict(zip(self._inputs, arrays, strict=True)))
        for name, result in zip(self._outputs, results, strict=True):
            if name in self._buffers:
                self._buffers[name][...] = result
        return [self._buffers.get(name, result) for name, result in zip(self._outputs, results, strict=True)]


class _FedStoppable(StoppableRun):
    def __init__(self, runs: FedRuns) -> None:
        self._runs = runs
        self._stopped = False

    def run(self, output_names: Sequence[str], feeds: Mapping[str, Any]) -> list[Any]:
        """Run unless stopped before; see `StoppableRun.run`."""
        if self._stopped:
            raise EngineError("the run was stopped before it began")
        return self._runs.run(output_names, feeds)

    def stop(self) -> None:
        """Make the run not begin; one that has begun cannot be stopped here."""
        self._stopped = True
