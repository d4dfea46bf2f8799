"""`DeviceRouter`: one graph that is warm on every device it may run on, and goes where it is fastest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy.typing as npt

from rlx_ort.device import Device
from rlx_ort.errors import NoViableDeviceError
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.tensor import TensorData
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.providers.hardware import is_throttled
from rlx_ort.selection.policy import DevicePolicy

__all__ = ["DeviceRouter"]

_log = logging.getLogger(__name__)
_CHECK_EVERY_S = 5.0


class DeviceRouter:
    """Runs one graph on the device that suits its inputs; every device is compiled when the router is made.

    Args:
        graph: the graph; its parameters must have their data.
        policy: which devices may be chosen, and how.
        options: how to compile.
        throttled: tells whether the machine is slowed down by heat; the system is asked by default.

    Attributes:
        rebench_on_throttle: whether heat makes the router compile and measure anew, as the winner may be another.

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
        self._runner = GraphDevices(graph, policy, options)
        self._throttled = throttled
        self._looked_at = -_CHECK_EVERY_S
        self._was_throttled = False
        self._warm()

    @classmethod
    def from_env(cls, graph: Graph, options: CompileOptions | None = None) -> DeviceRouter:
        """Return a router with the policy that the `RLX_*` variables describe.

        Raises:
            DeviceParseError: one of the variables does not parse.
            NoViableDeviceError: no device took the graph.
        """
        return cls(graph, DevicePolicy.from_env(), options)

    @property
    def runner(self) -> GraphDevices:
        """What runs the graph."""
        return self._runner

    def devices(self) -> list[str]:
        """Return the labels of the devices that `run_on` accepts, in the policy's order."""
        return [device.label for device in self._runner.devices()]

    def run(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> tuple[Device, list[Any]]:
        """Run on the device given, else on the one the policy's strategy picks, and return it with the outputs.

        Raises:
            DeviceError: the device given cannot be had, or none can.
            InputError: the inputs do not fit the graph.
            RunError: the run failed.
        """
        self._look_at_the_heat()
        return self._runner.run_chosen(inputs, device)

    def run_on(self, device: Device | str, inputs: Mapping[str, Any]) -> list[Any]:
        """Run on one device and return the outputs; see `GraphDevices.run`."""
        self._look_at_the_heat()
        return self._runner.run(device, inputs)

    def run_chain(self, inputs: Mapping[str, Any], device: Device | str | None = None) -> tuple[Device, list[Any]]:
        """Run on the first device that works of the one given and `RLX_DEVICE_CHAIN`; see `GraphDevices.run_chain`.

        Raises:
            DeviceFallbackError: none of them works; it lists every attempt.
        """
        self._look_at_the_heat()
        return self._runner.run_chain(inputs, device)

    def set_param(self, name: str, array: npt.ArrayLike | TensorData, *, cast: bool = False) -> None:
        """Give a parameter new data on every device; see `GraphDevices.set_param`."""
        self._runner.set_param(name, array, cast=cast)

    def set_param_typed(self, name: str, data: bytes | bytearray | memoryview, dtype: DType | str) -> None:
        """Give a parameter the elements in raw bytes on every device; see `GraphDevices.set_param_typed`."""
        self._runner.set_param_typed(name, data, dtype)

    def close(self) -> None:
        """Close every session."""
        self._runner.close()

    def __enter__(self) -> DeviceRouter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _warm(self) -> None:
        if not self._runner.warm_all():
            self._runner.fastest()  # raises with the blocker of each device, where policy or graph is the reason
            name = self._runner.graph.name
            raise NoViableDeviceError(f"no device took graph {name!r}; the log says why for each")

    def _look_at_the_heat(self) -> None:
        """Compile and measure anew when the machine begins to be throttled; asked at most every few seconds."""
        now = time.monotonic()
        if not self.rebench_on_throttle or now - self._looked_at < _CHECK_EVERY_S:
            return
        self._looked_at = now
        throttled = self._throttled()
        if throttled and not self._was_throttled:
            _log.warning("the machine is slowed down by heat; devices are measured anew")
            self._runner.invalidate_cache()
            self._warm()
        self._was_throttled = throttled
