"""`FedBinder`: the binder of an engine whose runs need more than the user's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from rlx_ort.providers.engine.binding import Binder, DeviceTensor, HostBinder, Runs

__all__ = ["FedBinder", "FedRuns"]


class FedRuns(Runs, Protocol):
    """Runs that add what the session needs."""

    @property
    def binder(self) -> Binder:
        """The session's own binder."""

    def run_bound(self, feeds: Mapping[str, Any], output_names: Sequence[str], resident: Collection[str]) -> list[Any]:
        """Run once; outputs in `resident` stay on the device."""


class FedBinder(HostBinder):
    """Uploads through the session's binder and runs with what the engine adds; nothing is bound for good."""

    _runs: FedRuns

    def __init__(self, runs: FedRuns) -> None:
        super().__init__(runs)

    @property
    def on_host(self) -> bool:
        """Whether runs read their inputs in host memory; see `Binder.on_host`."""
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
