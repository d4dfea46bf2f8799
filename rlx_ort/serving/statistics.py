"""What a model did since it was loaded: counts, times and their distribution."""

from __future__ import annotations

import time
from bisect import bisect_left
from dataclasses import dataclass, field

from rlx_ort.device import Device
from rlx_ort.serving.lanes import Times, octave_of

BOUNDS_NS = tuple(
    round(first * 10**power) for power in range(4, 11) for first in (1, 1.25, 1.6, 2, 2.5, 3.15, 4, 5, 6.3, 8)
)
"""Upper bounds of the buckets of `Durations`, ten a decade from 10 us to 80 s; longer times have their own bucket."""
_SIZES_COUNTED = 256  # batches of more rows are counted by the next power of two


@dataclass
class Counter:
    """How often something happened, and how long it took in all, in ns."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Count something that took so long."""
        self.count += count
        self.ns += ns


class Durations(list[int]):
    """How many times fell into each bucket of `BOUNDS_NS`, and into that of longer ones."""

    def __init__(self) -> None:
        super().__init__([0] * (len(BOUNDS_NS) + 1))


@dataclass
class BatchRows:
    """The batches of a device by the exponent of the power of two that their rows fit in; rows and time of all runs."""

    octaves: dict[int, int] = field(default_factory=dict)
    total: int = 0
    ns: int = 0

    def add(self, rows: int, ns: int) -> None:
        """Count a batch that ran for so long."""
        octave = octave_of(rows)
        self.octaves[octave] = self.octaves.get(octave, 0) + 1
        self.total += rows
        self.ns += ns


@dataclass
class Statistics:
    """What a model did since it was loaded: in the terms of Triton's extension, and by device."""

    last_ms: int = 0
    inferences: int = 0
    executions: int = 0
    spans: dict[str, Counter] = field(
        default_factory=lambda: {
            name: Counter() for name in ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        }
    )
    batches: dict[int, dict[str, Counter]] = field(default_factory=dict)
    devices: dict[str, int] = field(default_factory=dict)
    rows: dict[str, BatchRows] = field(default_factory=dict)
    failovers: dict[str, int] = field(default_factory=dict)
    durations: Durations = field(default_factory=Durations)
    waits: Durations = field(default_factory=Durations)

    def answered(self, times: Times, total_ns: int) -> None:
        """Count a request that was answered."""
        self.last_ms = time.time_ns() // 1_000_000
        self.inferences += 1
        took, _, *parts = self.spans.values()
        took.add(total_ns)
        spans = (times.queue_ns, times.input_ns, times.infer_ns, times.output_ns)
        for counter, ns in zip(parts, spans, strict=True):
            counter.add(ns)
        self.durations[bisect_left(BOUNDS_NS, total_ns)] += 1
        self.waits[bisect_left(BOUNDS_NS, times.queue_ns)] += 1

    def failed_over(self, device: Device, requests: int) -> None:
        """Count requests that a device failed and another one runs again."""
        self.failovers[device.label] = self.failovers.get(device.label, 0) + requests

    def ran(self, device: Device, rows: int, requests: int, times: Times) -> None:
        """Count a batch that was run."""
        self.executions += 1
        self.devices[device.label] = self.devices.get(device.label, 0) + requests
        self.rows.setdefault(device.label, BatchRows()).add(rows, times.infer_ns)
        size = rows if rows <= _SIZES_COUNTED else 1 << octave_of(rows)  # clients choose the rows
        spans = self.batches.get(size)
        if spans is None:
            spans = self.batches[size] = {name: Counter() for name in list(self.spans)[3:]}
        for name, ns in zip(spans, (times.input_ns, times.infer_ns, times.output_ns), strict=True):
            spans[name].add(ns)
