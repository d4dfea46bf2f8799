"""`GraphDevices`: one graph, its weights, and every device it may run on. The front door of the package.

It joins the two halves that do not know each other: `rlx_ort.selection` chooses a device, `rlx_ort.execution` runs.
A device that somebody names, in code or in a variable, must take every node (strict); one that was chosen
automatically may be helped by the CPU (assisted). `CompileOptions.placement` overrides both.

The halves are imported when a method first needs them: a warmed package runs without either.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

from rlx_ort.device import Device
from rlx_ort.errors import (
    DeviceError,
    DeviceFallbackError,
    GraphError,
    InputError,
    NoViableDeviceError,
    ParamError,
    RunError,
)
from rlx_ort.execution.options import CompileOptions, PlacementRule
from rlx_ort.selection.policy import Adaptive, Benchmark, DevicePolicy, device_chain_from_env, labels

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    from rlx_ort.adaptive import Choice
    from rlx_ort.execution.benchmark import DeviceBenchResult, InputSignature
    from rlx_ort.execution.compiled import CompiledGraph
    from rlx_ort.execution.engine_slot import EngineSlot
    from rlx_ort.execution.placement import Placement
    from rlx_ort.execution.weights import WeightStore
    from rlx_ort.ir.dtype import DType
    from rlx_ort.ir.graph import Graph
    from rlx_ort.ir.tensor import TensorData
    from rlx_ort.selection.candidates import DeviceCandidate

__all__ = ["GraphDevices", "graph_param_names", "load"]


def graph_param_names(graph: Graph) -> list[str]:
    """Return the names of the graph's parameters, in the order they were added; inputs are not among them."""
    return [value.name for value in graph.params]


def load(path: str | Path, policy: DevicePolicy | None = None, options: CompileOptions | None = None) -> GraphDevices:
    """Read a model, ONNX or IR JSON by its content, and return it ready to run on the devices of this machine.

    Raises:
        ConversionError: the file is no model, or holds something that cannot be translated.
    """
    from rlx_ort.converters.load import load_graph

    return GraphDevices(load_graph(path), policy, options)


class GraphDevices:
    """Runs one graph on whichever devices are asked for or chosen, one session a device, one copy of the weights.

    Methods may be called from several threads. Devices are given as `Device` or by name. Making one compiles
    nothing and probes nothing.

    Args:
        graph: the graph; if it grows later, it is compiled anew.
        policy: which devices may be chosen; everything by default, without a look at the environment.
        options: how to compile.

    Attributes:
        last_attempts: the devices that refused or failed before one answered in the last `run_try` or `run_chain`.
        last_choice: what the adaptive strategy last chose, with predictions and measurements; None before.
    """

    _slots: dict[Device, EngineSlot]
    _compiled_graphs: dict[tuple[Device, PlacementRule], CompiledGraph]
    _compile_locks: dict[Device, threading.Lock]
    _devices: list[Device] | None
    _winners: dict[InputSignature, Device]
    _revision: int

    def __init__(self, graph: Graph, policy: DevicePolicy | None = None, options: CompileOptions | None = None) -> None:
        self._prepare(policy, options)
        self._take(graph)

    def _prepare(self, policy: DevicePolicy | None, options: CompileOptions | None) -> None:
        """Set everything but the graph and its weights, which `_take` brings."""
        self._policy = policy or DevicePolicy()
        self._options = options or CompileOptions()
        self._lock = threading.RLock()
        self.last_attempts: tuple[tuple[Device, str], ...] = ()
        self.last_choice: Choice | None = None
        self._forget()

    def _take(self, graph: Graph) -> None:
        from rlx_ort.execution.weights import WeightStore

        self._weights = WeightStore.for_graph(graph)
        self._revision = graph.revision
        self._graph = graph

    @classmethod
    def from_env(cls, graph: Graph, options: CompileOptions | None = None) -> GraphDevices:
        """Return a runner with the policy that the `RLX_*` variables describe.

        Raises:
            DeviceParseError: one of the variables does not parse.
        """
        return cls(graph, DevicePolicy.from_env(), options)

    @property
    def graph(self) -> Graph:
        """The graph."""
        return self._graph

    @property
    def policy(self) -> DevicePolicy:
        """Which devices may be chosen."""
        return self._policy

    @property
    def options(self) -> CompileOptions:
        """How graphs are compiled."""
        return self._options

    @property
    def weights(self) -> WeightStore:
        """The parameters' data, shared by all devices."""
        return self._weights

    # Which device

    def devices(self) -> list[Device]:
        """Return the devices that may be chosen, best first; found once and kept until `invalidate_cache`."""
        from rlx_ort.selection.candidates import devices_for

        self._follow_graph()
        with self._lock:
            if self._devices is None:
                self._devices = devices_for(self.graph, self._policy, self._options)
            return list(self._devices)

    def report(self) -> list[DeviceCandidate]:
        """Return a fresh report: one row a device, with what stands in its way."""
        from rlx_ort.selection.candidates import device_report

        return device_report(self.graph, self._policy, self._options)

    def fastest(self) -> Device:
        """Return the device with the smallest predicted time now; `RLX_DEVICE` is not looked at.

        Raises:
            NoViableDeviceError: no device may be chosen; it says why for each.
        """
        from rlx_ort.selection.candidates import fastest_device_for

        return fastest_device_for(self.graph, self._policy, self._options)

    def resolve(self, device: Device | str | None = None) -> Device:
        """Return the device to use: the one given, else `RLX_DEVICE`, else the fastest.

        Raises:
            DeviceError: the device given cannot be had, or none can.
            LegalizeError: the device given does not take the graph.
        """
        from rlx_ort.selection.resolve import resolve_device

        return resolve_device(self.graph, device, self._policy, self._options)

    def resolve_chain(self, device: Device | str | None = None) -> Device:
        """Return the first device that may run the graph: the one given, then those of `RLX_DEVICE_CHAIN`.

        Without a chain this is `resolve`. With one, `RLX_DEVICE` is not looked at.

        Raises:
            NoViableDeviceError: none of them may.
        """
        from rlx_ort.selection.resolve import chain_with, resolve_device_chain

        chain = chain_with(device)
        if not device_chain_from_env():
            return self.resolve(device)
        return resolve_device_chain(self.graph, chain, self._policy, self._options)

    def resolve_with_inputs(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> Device:
        """Return the device to use for such inputs; under the benchmark strategy the fastest measured one.

        Under the adaptive strategy devices are measured where predictions cannot tell. The winner is remembered for
        the shapes and dtypes of the inputs. `RLX_DEVICE` does not count under either.

        Raises:
            DeviceFallbackError: every device failed in the benchmark.
            NoViableDeviceError: no device may be chosen.
        """
        pick = self._policy.pick_strategy()
        if device is not None or not isinstance(pick, (Benchmark, Adaptive)):
            return self.resolve(device)
        from rlx_ort.execution.benchmark import input_signature

        self._follow_graph()
        key, winners = input_signature(inputs), self._winners  # another thread may begin with an empty map meanwhile
        winner = winners.get(key)
        if winner is not None:
            return winner
        if isinstance(pick, Adaptive):
            from rlx_ort.adaptive import choose

            choice = choose(self.graph, self._policy, self._options, inputs, self._to_time, pick.runs)
            self.last_choice, winner = choice, choice.device
        else:
            rows = self.benchmark(inputs, pick.runs)
            if not rows:
                return self.fastest()
            if rows[0].median_exec_ns is None:
                raise DeviceFallbackError((row.device, row.failure) for row in rows)
            winner = rows[0].device
        winners[key] = winner
        return winner

    # Weights

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data on every device; see `WeightStore.set`.

        Raises:
            ParamError: no such parameter, another shape, or another dtype than declared.
        """
        self._follow_graph()
        self.weights.set(name, array, cast=cast)

    def set_param_typed(
        self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str, *, cast: bool = False
    ) -> None:
        """Give a parameter the elements in raw little-endian bytes; see `WeightStore.set_typed`.

        Raises:
            ParamError: no such parameter, a wrong number of bytes, or another dtype than declared.
        """
        self._follow_graph()
        self.weights.set_typed(name, data, dtype, cast=cast)

    def update_params(self) -> contextlib.AbstractContextManager[None]:
        """Return a `with` block whose `set_param` calls take effect together, when it ends without an error."""
        return self.weights.update()

    def sync_params_to_all(self) -> None:
        """Open stale sessions again now, on every device that was compiled, and not at their next run.

        Raises:
            ParamError: a parameter is not set.
        """
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            if slot.current is not None:
                slot.engine(PlacementRule.ASSISTED)

    # Compile

    def compile(self, device: Device | str) -> CompiledGraph:
        """Return the graph compiled for a device; the second call returns the same object, until it is closed.

        Closing it gives up its handles and other state; the session belongs to the runner and stays open. A graph that
        was chosen automatically shares all state with the one that was named, so a handle bound in one is in both.

        Raises:
            NoViableDeviceError: the policy refuses the device.
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node; see `CompileOptions.placement`.
        """
        return self._compiled(Device(device), named=True)

    def compile_fastest(self) -> CompiledGraph:
        """Return the graph compiled for the fastest device; see `fastest` and `compile`."""
        return self._compiled(self.fastest(), named=False)

    def compile_resolved(self, device: Device | str | None = None) -> CompiledGraph:
        """Return the graph compiled for the device that `resolve` returns."""
        return self._compiled(*self._resolved(device))

    def compile_chain(self, device: Device | str | None = None) -> CompiledGraph:
        """Return the graph compiled for the device that `resolve_chain` returns."""
        if not device_chain_from_env():
            return self.compile_resolved(device)
        return self._compiled(self.resolve_chain(device), named=True)

    def compile_resolved_with_inputs(
        self, inputs: Mapping[str, Any], device: Device | str | None = None
    ) -> CompiledGraph:
        """Return the graph compiled for the device that `resolve_with_inputs` returns."""
        from rlx_ort.selection.resolve import is_named

        chosen = self.resolve_with_inputs(inputs, device)
        benchmarked = device is None and isinstance(self._policy.pick_strategy(), (Benchmark, Adaptive))
        return self._compiled(chosen, named=not benchmarked and is_named(chosen, device))

    def warm_all(self) -> list[Device]:
        """Compile the graph for every device of `devices` and return those that took it; the others are logged."""
        import logging  # a start from the compile cache has nothing to tell

        warm = []
        for device in self.devices():
            try:
                self._compiled(device, named=False)
            except (DeviceError, GraphError, RunError) as err:
                logging.getLogger(__name__).warning("%s is not warmed up: %s", device.display, err)
            else:
                warm.append(device)
        return warm

    def placement(self, device: Device | str) -> Placement:
        """Return where each node is on a device; compiles the graph if that was not done.

        Raises:
            ParamError: a parameter is not set, so no session can be opened.
            DeviceError: the policy refuses the device, or it does not work here.
        """
        device = Device(device)
        with self._lock:
            slot = self._slots.get(device)
        if slot is not None and slot.placement is not None:
            return slot.placement
        return self._compiled(device, named=False).placement

    # Run

    def run(self, device: Device | str, inputs: Mapping[str, Any]) -> list[Any]:
        """Run on a device and return the outputs in order; see `compile` and `CompiledGraph.run`."""
        return self.compile(device).run(inputs)

    def run_resolved(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> list[Any]:
        """Run on the device that `resolve` returns."""
        return self.compile_resolved(device).run(inputs)

    def run_fastest(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Run on the device that `fastest` returns."""
        return self.compile_fastest().run(inputs)

    def run_resolved_with_inputs(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> list[Any]:
        """Run on the device that `resolve_with_inputs` returns."""
        return self.compile_resolved_with_inputs(inputs, device).run(inputs)

    def run_try(self, chain: Iterable[Device | str], inputs: Mapping[str, Any]) -> tuple[Device, list[Any]]:
        """Run on the first device of a chain that works, and return it with the outputs.

        A device that refuses or fails, when compiling or when running, is an attempt; the next one is tried.

        Raises:
            DeviceFallbackError: every device refused or failed; `attempts` says why for each.
            InputError: the inputs do not fit the graph, which would fail everywhere.
            ParamError: a parameter is not set.
        """
        from rlx_ort.selection.resolve import run_with_fallback

        attempts: list[tuple[Device, str]] = []
        try:
            return run_with_fallback(
                self.graph,
                self._policy,
                chain,
                lambda device: self.run(device, inputs),
                self._options,
                attempts=attempts,
            )
        finally:
            self.last_attempts = tuple(attempts)

    def run_chain(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> tuple[Device, list[Any]]:
        """Run on the device given, then on those of `RLX_DEVICE_CHAIN`; the first that works answers.

        With neither, run on the device that `resolve` returns.

        Raises:
            DeviceFallbackError: every device refused or failed.
            InputError: the inputs do not fit the graph.
            ParamError: a parameter is not set.
        """
        from rlx_ort.selection.resolve import chain_with

        chain = chain_with(device)
        if chain:
            return self.run_try(chain, inputs)
        self.last_attempts = ()
        try:
            chosen, named = self._resolved(None)
        except (DeviceError, GraphError) as err:
            raise DeviceFallbackError.from_text(str(err)) from err
        try:
            return chosen, self._compiled(chosen, named=named).run(inputs)
        except (InputError, ParamError):
            raise
        except (DeviceError, GraphError, RunError) as err:
            raise DeviceFallbackError([(chosen, str(err))]) from err

    def benchmark(self, inputs: Mapping[str, Any], runs: int = 10) -> list[DeviceBenchResult]:
        """Time the graph on every device of `devices`: one warm-up, then `runs` runs; fastest first.

        Devices that fail come last, with the reason. Nothing is remembered.
        """
        from rlx_ort.execution.benchmark import benchmark_devices

        return benchmark_devices(self.devices(), self._to_time, inputs, runs)

    # State

    def invalidate_cache(self) -> None:
        """Close every session and forget the devices and the benchmark winners; the weights stay.

        What the probes found is remembered by the registry, for the whole process.
        """
        with self._lock:
            slots = list(self._slots.values())
            self._forget()
        for slot in slots:
            slot.close()

    def set_policy(self, policy: DevicePolicy) -> None:
        """Replace the policy and forget what the old one decided; see `invalidate_cache`."""
        with self._lock:
            self._policy = policy
            self.invalidate_cache()

    def close(self) -> None:
        """Close every session; runs in other threads finish first. The runner stays usable and compiles anew."""
        self.invalidate_cache()

    def __enter__(self) -> GraphDevices:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<GraphDevices {self.graph.name!r}, compiled for {labels(self._slots)}>"

    def _forget(self) -> None:
        self._slots = {}
        self._compiled_graphs = {}
        self._compile_locks = {}
        self._devices = None
        self._winners = {}

    def _follow_graph(self) -> None:
        """Compile anew when the graph has grown since; without this, answers would be those of the old graph."""
        graph = self.graph
        if graph.revision != self._revision:
            with self._lock:
                self.close()
                self._revision = graph.revision
                self.weights.declare_from(graph)

    def _resolved(self, device: Device | str | None) -> tuple[Device, bool]:
        """Return the device to use and whether somebody named it."""
        from rlx_ort.selection.resolve import is_named

        chosen = self.resolve(device)
        return chosen, is_named(chosen, device)

    def _to_time(self, device: Device) -> CompiledGraph:
        """Return a graph whose runs leave the handles of the one that is lent as they are."""
        found = self._compiled(device, named=False)
        return found.clone() if found.has_handles else found

    def _compiled(self, device: Device, named: bool) -> CompiledGraph:
        self._follow_graph()
        rule = self._options.placement or (PlacementRule.STRICT if named else PlacementRule.ASSISTED)
        found = self._compiled_graphs.get((device, rule))
        if found is not None and not found.closed:
            return found
        refusal = self._policy.refusal(device)
        if refusal is not None:
            raise NoViableDeviceError(f"{device.display} may not run graph {self.graph.name!r}: it is {refusal}")
        with self._lock:
            compiling = self._compile_locks.setdefault(device, threading.Lock())
        with compiling:
            found = self._lent(device, rule)
            if found is None:
                from rlx_ort.execution.compiled import CompiledGraph
                from rlx_ort.execution.session import open_slot, working_provider

                slot = self._slots.get(device)
                if slot is None:
                    provider = working_provider(device)
                    slot = open_slot(provider, device, self.graph, self.weights, self._options)
                    self._slots[device] = slot
                found = CompiledGraph(slot, rule, owns_slot=False)
            self._compiled_graphs[device, rule] = found
            return found

    def _lent(self, device: Device, rule: PlacementRule) -> CompiledGraph | None:
        """Return the graph that was lent for a device, held to the rule, or None where it was closed or never made."""
        for known in (rule, *PlacementRule):
            found = self._compiled_graphs.get((device, known))
            if found is not None and not found.closed:
                return found if known is rule else found.held_to(rule)
        return None
