"""Which one device to use: what the caller named, else what the environment names, else the fastest.

A named device must take every node. It is never replaced silently: a device named in code raises an error, and one
named by `RLX_DEVICE` is skipped with a warning.

Nothing here opens a session: `run_with_fallback` is given the function that does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from rlx_ort.device import Device, as_devices
from rlx_ort.errors import DeviceFallbackError, NoViableDeviceError
from rlx_ort.faults import first_that_works
from rlx_ort.ir.graph import Graph
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.registry import require_available
from rlx_ort.selection.candidates import blocker_of, devices_for, fastest_device_for
from rlx_ort.selection.graph_cache import refusals
from rlx_ort.selection.policy import DevicePolicy, Devices, device_from_env, labels
from rlx_ort.selection.support import require_legal

T = TypeVar("T")
_log = logging.getLogger(__name__)


def resolve_device(
    graph: Graph,
    hint: Device | str | None = None,
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
) -> Device:
    """Return the device to run the graph on: the hint, else `RLX_DEVICE`, else the fastest by prediction.

    Raises:
        DeviceParseError: the hint or `RLX_DEVICE` names no known device.
        NoViableDeviceError: the policy refuses the hint, or leaves no device.
        DeviceUnavailableError: the hint does not work here.
        LegalizeError: the hint does not take the graph.
    """
    return choice(graph, hint, policy or DevicePolicy(), options)[0]


def choice(
    graph: Graph,
    hint: Device | str | None,
    policy: DevicePolicy,
    options: CompileOptions | None,
    inputs: Mapping[str, Any] | None = None,
) -> tuple[Device, bool]:
    """Return the device that `resolve_device` returns, and whether it was named; `inputs` size the predictions.

    `RLX_DEVICE` is also skipped when the device is known to refuse the graph at opening.
    """
    if hint is not None:
        return _checked_hint(graph, Device(hint), policy, options), True
    wished = device_from_env()
    if wished is not None:
        blocker = _blocker(graph, wished, policy, options) or refusals(graph, named(options)).get(wished)
        if blocker is None:
            return wished, True
        _log.warning("RLX_DEVICE asks for %s, which is skipped: %s", wished.display, blocker)
    return fastest_device_for(graph, policy, options, inputs), False


def resolve_device_chain(
    graph: Graph, chain: Devices, policy: DevicePolicy | None = None, options: CompileOptions | None = None
) -> Device:
    """Return the first device of the chain that may run the graph; nothing outside the chain is considered.

    Raises:
        NoViableDeviceError: none of them may; the message has the reason for each and lists the devices that may.
    """
    policy = policy or DevicePolicy()
    devices, rows = as_devices(chain), list[tuple[Device, str]]()
    for device in _viable(graph, devices, policy, options, rows):
        return device
    viable = labels(devices_for(graph, policy, options))
    raise NoViableDeviceError(
        f"no device of the chain ({labels(devices)}) may run graph {graph.name!r}; devices that may: {viable}", rows
    )


def run_with_fallback(
    graph: Graph,
    policy: DevicePolicy | None,
    chain: Devices,
    fn: Callable[[Device], T],
    options: CompileOptions | None = None,
    attempts: list[tuple[Device, str]] | None = None,
) -> tuple[Device, T]:
    """Return the first device of the chain on which `fn` succeeds, and its result.

    Devices that may not run the graph are skipped without calling `fn`. After an error of `fn` that another device may
    avoid (`rlx_ort.faults.is_device_failure`), the next one is tried. Others are raised as they are, those of other
    libraries and of Python among them; raise a `RunError` from those that another device may avoid. Each device that
    is skipped or fails is appended to `attempts` with the reason, whether the call succeeds or not.

    Raises:
        DeviceFallbackError: no device succeeded; it lists every attempt. An empty chain is one attempt of the CPU.
    """
    attempts = [] if attempts is None else attempts

    def failed(device: Device, error: Exception) -> None:
        _log.warning("%s failed, trying the next device of the chain: %s", device.display, error)
        attempts.append((device, str(error) or type(error).__name__))

    policy, why = policy or DevicePolicy(), "not viable under the policy: "
    viable = _viable(graph, as_devices(chain), policy, options, attempts, why)
    found = first_that_works(viable, fn, failed)
    if found is None:
        raise DeviceFallbackError(attempts or [(Device.CPU, "the chain is empty; name at least one device")])
    return found


def _checked_hint(graph: Graph, device: Device, policy: DevicePolicy, options: CompileOptions | None) -> Device:
    refusal = policy.refusal(device)
    if refusal is not None:
        viable = labels(devices_for(graph, policy, options))
        raise NoViableDeviceError(
            f"the hint asks for {device.display}, which is {refusal}; devices that may run graph {graph.name!r}: "
            f"{viable}. Change the hint or the policy."
        )
    require_available(device)
    require_legal(graph, device, named(options))
    return device


def _viable(
    graph: Graph,
    devices: Iterable[Device],
    policy: DevicePolicy,
    options: CompileOptions | None,
    blocked: list[tuple[Device, str]],
    why: str = "",
) -> Iterator[Device]:
    """Yield the devices that may run the graph; `blocked` gets the others, each with its reason after `why`."""
    for device in devices:
        blocker = _blocker(graph, device, policy, options)
        if blocker is None:
            yield device
        else:
            _log.info("%s is skipped: %s", device.display, blocker)
            blocked.append((device, f"{why}{blocker}"))


def _blocker(graph: Graph, device: Device, policy: DevicePolicy, options: CompileOptions | None) -> str | None:
    return policy.refusal(device) or blocker_of(graph, device, policy, named(options))


def named(options: CompileOptions | None) -> CompileOptions:
    """Return the options for a named device: strict unless they set a placement rule."""
    options = options or CompileOptions()
    return options if options.placement is not None else options.with_(placement=PlacementRule.STRICT)
