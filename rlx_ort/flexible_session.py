"""`FlexibleSession`: options and a policy without a device; each graph says, or is asked, where it goes."""

from __future__ import annotations

from rlx_ort.device import Device
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.session import Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.selection.candidates import automatic
from rlx_ort.selection.policy import DevicePolicy
from rlx_ort.selection.refusals import remembered
from rlx_ort.selection.resolve import choice, named, open_first, resolve_device

__all__ = ["FlexibleSession"]


class FlexibleSession:
    """Compiles graphs with the same options on whichever devices are asked for or chosen.

    Args:
        policy: which devices may be chosen; everything by default, without a look at the environment.
        options: how to compile.
    """

    def __init__(self, policy: DevicePolicy | None = None, options: CompileOptions | None = None) -> None:
        self._policy = policy or DevicePolicy()
        self._options = options or CompileOptions()

    @property
    def policy(self) -> DevicePolicy:
        """Which devices may be chosen."""
        return self._policy

    @property
    def options(self) -> CompileOptions:
        """The options graphs are compiled with."""
        return self._options

    @property
    def precision(self) -> Precision:
        """The arithmetic asked for."""
        return self._options.precision

    def with_policy(self, policy: DevicePolicy) -> FlexibleSession:
        """Return a session with another policy."""
        return FlexibleSession(policy, self._options)

    def with_precision(self, precision: Precision | str) -> FlexibleSession:
        """Return a session with another arithmetic."""
        return FlexibleSession(self._policy, self._options.with_(precision=Precision(precision)))

    def with_options(self, options: CompileOptions) -> FlexibleSession:
        """Return a session with other options."""
        return FlexibleSession(self._policy, options)

    def compile_on(
        self,
        device: Device | str,
        graph: Graph,
        weights: WeightStore | None = None,
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """Return the graph compiled for a device, which must take every node unless the options say otherwise.

        Options that are given hold for this graph alone, instead of the session's.

        Raises:
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node it must take.
        """
        return Session(device, options or self._options).compile(graph, weights)

    def compile_resolved(
        self,
        graph: Graph,
        device: Device | str | None = None,
        weights: WeightStore | None = None,
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """Return the graph compiled for the device given, else for `RLX_DEVICE`, else for the fastest that takes it.

        Options that are given hold for this graph alone, instead of the session's.

        Raises:
            DeviceError: the device given cannot be had, or none can.
            LegalizeError: the device given does not take the graph.
        """
        options = options or self._options
        if device is not None:
            chosen = resolve_device(graph, device, self._policy, options)
            return Session(chosen, options).compile(graph, weights)

        def open_on(chosen: Device, by_name: bool) -> CompiledGraph:
            ruled = named(options) if by_name else automatic(options)
            with remembered(graph, chosen, ruled):
                return Session(chosen, ruled).compile(graph, weights)

        return open_first(lambda: choice(graph, None, self._policy, options), open_on)
