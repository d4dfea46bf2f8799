"""RLX's names, for programs that come from it: docs/rlx-names.md has each one beside ours.

`FlexibleSession` and `DeviceRouter` are layers over `GraphDevices`. The other names are imported from their modules.
`import rlx_ort` finds all of them too, without listing them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlx_ort.device import DEVICE_PRIORITY, Device, device_label, parse_device, parse_device_list
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.execution.buckets import (
    Bucket,
    BucketedCompileCache,
    LayerKvCache,
    bucket_decode_mask,
    pad_rows,
    power_of_two_ladder,
    slice_rows,
)
from rlx_ort.execution.compiled import CompiledGraph
from rlx_ort.execution.expert_pool import (
    ExpertPool,
    RefreshPolicy,
    budget_from_memory,
    merged_mask,
    per_layer_masks,
    refresh_pools,
)
from rlx_ort.execution.interface import ParamSetter
from rlx_ort.execution.moe import MoeResidencyStats
from rlx_ort.execution.placement import DispatchSummary, KernelDispatchReport, format_dispatch_report
from rlx_ort.execution.session import CompileCache, Session
from rlx_ort.execution.weights import WeightStore
from rlx_ort.graph_devices import GraphDevices, graph_param_names
from rlx_ort.ir.dtype import promote
from rlx_ort.ir.graph import DimBinding, Graph, dynamic_symbols, has_dynamic_dims, infer_bindings_from_inputs, op_kinds
from rlx_ort.options.compile_options import CompileOptions, Precision
from rlx_ort.providers.hardware import is_throttled
from rlx_ort.providers.registry import (
    available_apple_devices,
    drain_device,
    fastest_among,
    fastest_device,
    full_name,
    supports_run_slots,
)
from rlx_ort.selection.candidates import device_report, devices_for, fastest_device_for
from rlx_ort.selection.cost import BackendCostModel, ProfileCostModel, estimate_graph_cost, pick_best_device
from rlx_ort.selection.policy import DevicePolicy, device_chain_from_env, device_from_env
from rlx_ort.selection.resolve import resolve_device, resolve_device_chain, run_with_fallback
from rlx_ort.selection.support import dispatch_report_for_device, legalize_graph_for_device

__all__ = [
    "BackendCostModel",
    "BackendsManifest",
    "Bucket",
    "BucketedCompileCache",
    "CompileCache",
    "DEVICE_PRIORITY",
    "DeviceRouter",
    "DimBinding",
    "DispatchSummary",
    "ExpertPool",
    "FlexibleSession",
    "KernelDispatchReport",
    "LayerKvCache",
    "MoeResidencyStats",
    "ProfileCostModel",
    "RefreshPolicy",
    "available_apple_devices",
    "bucket_decode_mask",
    "budget_from_memory",
    "device_chain_from_env",
    "device_from_env",
    "device_label",
    "device_report",
    "devices_for",
    "dispatch_report_for_device",
    "drain_device",
    "dynamic_symbols",
    "estimate_graph_cost",
    "fastest_among",
    "fastest_device",
    "fastest_device_for",
    "format_dispatch_report",
    "full_name",
    "graph_param_names",
    "has_dynamic_dims",
    "infer_bindings_from_inputs",
    "legalize_graph_for_device",
    "merged_mask",
    "op_kinds",
    "pad_rows",
    "parse_device",
    "parse_device_list",
    "per_layer_masks",
    "pick_best_device",
    "power_of_two_ladder",
    "promote",
    "refresh_pools",
    "resolve_device",
    "resolve_device_chain",
    "run_with_fallback",
    "slice_rows",
    "supports_run_slots",
]

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 5.0


class FlexibleSession:
    """Compiles many graphs with the same options, each on the device that is named or chosen for it.

    Attributes:
        policy: which devices may be chosen; everything by default. The environment is not read.
        options: how to compile.
    """

    def __init__(self, policy: DevicePolicy | None = None, options: CompileOptions | None = None) -> None:
        self.policy = policy or DevicePolicy()
        self.options = options or CompileOptions()

    def __repr__(self) -> str:
        return f"<FlexibleSession, {self.precision.value}>"

    @property
    def precision(self) -> Precision:
        """The arithmetic precision."""
        return self.options.precision

    def with_policy(self, policy: DevicePolicy) -> FlexibleSession:
        """Return a session with another policy."""
        return FlexibleSession(policy, self.options)

    def with_precision(self, precision: Precision | str) -> FlexibleSession:
        """Return a session with another arithmetic precision."""
        return self.with_options(self.options.with_(precision=Precision(precision)))

    def with_options(self, options: CompileOptions) -> FlexibleSession:
        """Return a session with other options."""
        return FlexibleSession(self.policy, options)

    def compile_on(
        self,
        device: Device | str,
        graph: Graph,
        weights: WeightStore | None = None,
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """Return the graph compiled for a device; see `Session.compile`. `options` replace those of the session.

        Raises:
            DeviceUnavailableError: the device does not work here.
            PlacementError: it does not take every node it must take.
        """
        return Session(device, options or self.options).compile(graph, weights)

    def compile_resolved(
        self,
        graph: Graph,
        device: Device | str | None = None,
        weights: WeightStore | None = None,
        options: CompileOptions | None = None,
    ) -> CompiledGraph:
        """Return the graph compiled as by `GraphDevices.compile_resolved`. `options` replace those of the session.

        Raises:
            DeviceError: the device given cannot be used, or none can.
            LegalizeError: the device given does not take the graph.
        """
        runner = GraphDevices(graph, self.policy, options or self.options, weights)
        return runner.compile_resolved(device).clone()  # a clone owns its session; the runner is dropped


class DeviceRouter(ParamSetter):
    """Runs one graph on the device that suits its inputs; a session is opened on every device at construction.

    Args:
        graph: the graph; its parameters must have their data.
        policy: which devices may be chosen, and how.
        options: how to compile.
        throttled: returns whether the machine is thermally throttled; by default the operating system is asked.

    Attributes:
        runner: runs the graph.
        rebench_on_throttle: whether the sessions are opened and measured again when throttling begins.

    Raises:
        NoViableDeviceError: no device took the graph.
        ParamError: a parameter is not set.
    """

    def __init__(
        self,
        graph: Graph,
        policy: DevicePolicy | None = None,
        options: CompileOptions | None = None,
        *,
        rebench_on_throttle: bool = True,
        throttled: Callable[[], bool] = is_throttled,
    ) -> None:
        self.rebench_on_throttle = rebench_on_throttle
        self.runner = GraphDevices(graph, policy, options)
        self._throttled = throttled
        self._checked_s = -_CHECK_EVERY_S
        self._was_throttled = False
        self._warm()

    def __repr__(self) -> str:
        return f"<DeviceRouter of {self.runner!r}>"

    @classmethod
    def from_env(cls, graph: Graph, options: CompileOptions | None = None) -> DeviceRouter:
        """Return a router with the policy of the `RLX_*` variables.

        Raises:
            DeviceParseError: one of the variables does not parse.
            NoViableDeviceError: no device took the graph.
        """
        return cls(graph, DevicePolicy.from_env(), options)

    def devices(self) -> list[str]:
        """Return the labels of the devices that `run_on` accepts, in the policy's order."""
        return [device.label for device in self.runner.devices()]

    def run(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> tuple[Device, list[Any]]:
        """Run on the device given, else on the policy's choice, and return it with the outputs; see `run_chosen`."""
        return self._checked().run_chosen(inputs, device)

    def run_on(self, device: Device | str, inputs: Mapping[str, Any]) -> list[Any]:
        """Run on one device and return the outputs; see `GraphDevices.run`."""
        return self._checked().run(device, inputs)

    def run_chain(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> tuple[Device, list[Any]]:
        """Run on the first device that works of the one given and `RLX_DEVICE_CHAIN`; see `GraphDevices.run_chain`."""
        return self._checked().run_chain(inputs, device)

    @property
    def weights(self) -> WeightStore:
        """The parameters' data."""
        return self.runner.weights

    def close(self) -> None:
        """Close every session."""
        self.runner.close()

    def _warm(self) -> None:
        if not self.runner.warm_all():
            self.runner.fastest()  # raises with the blocker of each device, where policy or graph is the reason
            raise NoViableDeviceError(f"no device took graph {self.runner.graph.name!r}; the log has the reasons")

    def _checked(self) -> GraphDevices:
        """Return the runner; when throttling has begun, its sessions are opened again. Checked every few seconds."""
        now = time.monotonic()
        if self.rebench_on_throttle and now - self._checked_s >= _CHECK_EVERY_S:
            self._checked_s = now
            throttled = self._throttled()
            if throttled and not self._was_throttled:
                _log.warning("the machine is thermally throttled; devices are measured again")
                self.runner.invalidate_cache()
                self._warm()
            self._was_throttled = throttled
        return self.runner


@dataclass(frozen=True, slots=True)
class Backend:
    """One provider of this installation.

    Attributes:
        name: the provider's name.
        kinds: the device kinds it serves.
        ep: ONNX Runtime's name of the execution provider.
        devices: labels of the devices its hardware discovery lists, without proof that they work.
        version: the version of the plugin that brings it, empty for one that is built into ONNX Runtime.
    """

    name: str
    kinds: tuple[str, ...]
    ep: str
    devices: tuple[str, ...]
    version: str = ""


@dataclass(frozen=True, slots=True)
class BackendsManifest:
    """The devices that this installation can run on.

    Attributes:
        package: the package's name.
        version: its version.
        engine: ONNX Runtime's package and version, empty where it cannot be used.
        backends: the providers that run something.
    """

    package: str
    version: str
    engine: str
    backends: tuple[Backend, ...]

    @classmethod
    def current(cls) -> BackendsManifest:
        """Return the manifest of this process; no session is opened."""
        import rlx_ort
        from rlx_ort.providers.engine import runtime
        from rlx_ort.providers.plugins import plugin_for
        from rlx_ort.providers.registry import default_registry

        rows = []
        for provider in default_registry().providers():
            if not provider.ep_name and not provider.selectable:
                continue  # it only explains why its devices cannot be used
            plugin = plugin_for(provider.ep_name)
            labels = tuple(device.label for device in provider.devices())
            version = "" if plugin is None else plugin.version
            rows.append(Backend(provider.name, provider.kinds, provider.ep_name, labels, version))
        engine = "" if runtime.runtime_problem() is not None else runtime.describe_runtime()
        return cls("rlx_ort", rlx_ort.__version__, engine, tuple(rows))

    def json(self) -> str:
        """Return the manifest as JSON text."""
        return json.dumps(asdict(self), indent=2)
