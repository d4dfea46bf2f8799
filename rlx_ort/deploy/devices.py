"""`PackageDevices`: what `open_package` returns, a `GraphDevices` whose graph is read when something needs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rlx_ort.device import Device
from rlx_ort.errors import IntegrityError
from rlx_ort.graph_devices import GraphDevices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlx_ort.deploy.package import Package
    from rlx_ort.deploy.quick import QuickSession
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.selection.policy import DevicePolicy

__all__ = ["PackageDevices"]


class PackageDevices(GraphDevices):
    """Runs a package on whichever devices are asked for or chosen; see `GraphDevices`.

    A warmed package begins with a session from the compile cache, which runs on the CPU take that name it. It is given
    up as soon as anything else is asked: the graph, the weights, a report, another device, a new policy. From then on
    everything is opened as without it.

    Args:
        package: the open package.
        policy: which devices may be chosen.
        options: how to compile.
        quick: the session of the warmed package, or None to read the graph at once.

    Raises:
        PackageError: the graph file is no graph.
        IntegrityError: it was changed.
    """

    def __init__(
        self, package: Package, policy: DevicePolicy, options: CompileOptions, quick: QuickSession | None = None
    ) -> None:
        self._package = package
        self._quick = quick
        self._loading = threading.RLock()
        self._loaded = False
        self._prepare(policy, options)
        if quick is None:
            self._load()

    @property
    def graph(self) -> Graph:
        """The graph; read from the package when it is first asked for."""
        self._load()
        return self._graph

    @property
    def package_sha256(self) -> str:
        """The digest of the package's index, hexadecimal, which pins the package."""
        return self._package.sha256

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, shared by all devices."""
        self._load()
        return self._weights

    def run(self, device: Device | str, inputs: Mapping[str, Any]) -> list[Any]:
        """Run on a device and return the outputs in order; see `GraphDevices.run`.

        The first four runs of a warmed package use weights as they lie in the cache, later ones packed weights; they
        differ by rounding. `compile` gives a graph that always uses packed ones.
        """
        results = self._run_quick(device, inputs)
        return super().run(device, inputs) if results is None else results

    def run_resolved(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> list[Any]:
        """Run on the device that `resolve` returns."""
        results = None if device is None else self._run_quick(device, inputs)
        return super().run_resolved(inputs, device) if results is None else results

    def invalidate_cache(self) -> None:
        """Close every session and forget the devices and the benchmark winners; the weights stay."""
        self._end_quick()
        super().invalidate_cache()

    def __repr__(self) -> str:
        if self._quick is None:
            return super().__repr__()
        return f"<GraphDevices of {self._package.path.name}, started on {Device.CPU.display}>"

    def _run_quick(self, device: Device | str, inputs: Mapping[str, Any]) -> list[Any] | None:
        """Run from the compile cache, or return None where the graph is needed."""
        quick = self._quick
        if quick is None or Device(device) != Device.CPU or self._policy.refusal(Device.CPU) is not None:
            return None
        return quick.run(inputs)

    def _end_quick(self) -> None:
        quick, self._quick = self._quick, None
        if quick is not None:
            quick.close()

    def _load(self) -> None:
        """Read the graph if that was not done, and give up the session that knows nothing of it."""
        if self._loaded:
            return
        with self._loading:
            if self._loaded:
                return
            graph = self._package.graph()
            self._take(graph)
            declared = {value.name for value in graph.params}
            for variant in self._package.index.variants.values():
                for param, stored in variant.rounded.items():
                    if param not in declared or self._weights.get(param) is None:
                        raise IntegrityError(
                            f"{self._package.path} has rounded weights for {param!r}, which is no parameter of it"
                        )
                    self._weights.provide_rounded(param, self._package.tensor(stored))
            self._loaded = True
            self._end_quick()
