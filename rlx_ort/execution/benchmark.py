"""Times a graph on several devices: one warm-up, then the median of some runs on each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from rlx_ort.device import Device
from rlx_ort.errors import is_device_failure
from rlx_ort.execution.compiled import CompiledGraph

__all__ = ["DeviceBenchResult", "InputSignature", "benchmark_devices", "input_signature"]

InputSignature: TypeAlias = frozenset[tuple[str, tuple[int, ...], str]]
"""Name, shape and dtype of each input: what a winner is remembered for."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceBenchResult:
    """What one device needed.

    Attributes:
        device: the device.
        label: its label.
        compile_ns: time to compile, in nanoseconds; next to nothing when it was compiled before.
        median_exec_ns: median time of a run in nanoseconds, the upper one of an even number; None when it failed.
        failure: why it failed, empty when it did not.
    """

    device: Device
    label: str
    compile_ns: int
    median_exec_ns: int | None
    failure: str = ""


def benchmark_devices(
    devices: Iterable[Device],
    compile_on: Callable[[Device], CompiledGraph],
    inputs: Mapping[str, Any],
    runs: int,
) -> list[DeviceBenchResult]:
    """Return a row for each device, fastest first; devices that fail come last, with the reason.

    Raises:
        InputError: the inputs do not fit the graph, which would fail on every device.
        ParamError: a parameter is not set.
    """
    rows = [_timed(device, compile_on, inputs, max(runs, 1)) for device in devices]
    return sorted(rows, key=lambda row: (row.median_exec_ns is None, row.median_exec_ns or 0))


def input_signature(inputs: Mapping[str, Any]) -> InputSignature:
    """Return the name, shape and dtype of each input; values that are no arrays count by their type alone."""
    return frozenset((name, *_described(value)) for name, value in inputs.items())


def _described(value: object) -> tuple[tuple[int, ...], str]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError):  # ragged lists, which a sequence input takes
        return (), type(value).__name__
    return array.shape, str(array.dtype)


def _timed(
    device: Device, compile_on: Callable[[Device], CompiledGraph], inputs: Mapping[str, Any], runs: int
) -> DeviceBenchResult:
    start = time.perf_counter_ns()
    compiled_at = start
    try:
        compiled = compile_on(device)
        compiled_at = time.perf_counter_ns()
        compiled.run(inputs)  # the first run of a device compiles kernels and fills caches
        times = []
        for _ in range(runs):
            before = time.perf_counter_ns()
            compiled.run(inputs)
            times.append(time.perf_counter_ns() - before)
    except Exception as err:  # raised again unless the device is at fault
        if not is_device_failure(err):
            raise
        _log.warning("%s is left out of the benchmark: %s", device.display, err)
        return DeviceBenchResult(device, device.label, compiled_at - start, None, str(err) or type(err).__name__)
    return DeviceBenchResult(device, device.label, compiled_at - start, sorted(times)[len(times) // 2])
