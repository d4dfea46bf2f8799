"""A device for probes to measure whose times are arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

__all__ = ["TRIP_NS", "ArithmeticDevice"]

TRIP_NS = 3000
"""What each run takes beside its work."""


class ArithmeticDevice:
    """A prober whose graphs move a clock instead of computing.

    Args:
        monkeypatch: puts the clock in the place of sessions.
        work_ns: operators of a graph and its inputs -> what a run takes beyond `TRIP_NS`.
        device: what the prober takes it for.
        quick: whether the short form is measured.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        work_ns: Callable[[list[str], dict[str, Any]], int],
        device: Device = Device.CPU,
        *,
        quick: bool = False,
    ) -> None:
        self.now = self.opened = 0
        self.work_ns = work_ns
        self.prober = Prober(device, Budget(1000.0, 0.015, lambda: self.now), quick=quick)
        self.prober.rows = [Sample("roundtrip", (), float(TRIP_NS))]
        monkeypatch.setattr(Prober, "compile", lambda prober, graph, options=None: _Compiled(self, graph))

    def rows(self, probe: str) -> dict[tuple[int, ...], float]:
        """Return size -> ns of what was measured of a probe."""
        return {row.size: row.ns for row in self.prober.rows if row.probe == probe}


class _Compiled:
    def __init__(self, device: ArithmeticDevice, graph: Graph) -> None:
        device.opened += 1
        self.device = device
        self.ops = [getattr(node.op, "op_type", "") for node in graph.nodes]

    def run(self, feeds: dict[str, Any]) -> None:
        """Let the time of a run pass."""
        self.device.now += TRIP_NS + self.device.work_ns(self.ops, feeds)

    def close(self) -> None:
        """Do nothing."""
