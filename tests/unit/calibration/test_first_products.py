"""What the first product of a run takes, on a device whose times are arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from rlx_ort.calibration import first_products
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device
from rlx_ort.ir.graph import Graph

_TRIP, _PRODUCT, _COPY, _WAIT = 3000, 50, 2, 20_000


class Machine:
    """A CPU on which a product takes so much a row, a copy so much a row, and a product after it a wait as well."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: Device, *, quick: bool = False) -> None:
        self.now = 0
        self.prober = Prober(device, Budget(100.0, 0.015, lambda: self.now), quick=quick)
        sides = ((1, 512), (32, 512)) if quick else ((1, 256), (32, 256), (128, 256))
        self.prober.rows = [Sample("roundtrip", (), float(_TRIP))]
        self.prober.rows += [Sample("gemm", (m, side, side), 100.0 * m) for m, side in sides]
        monkeypatch.setattr(Prober, "compile", lambda prober, graph, options=None: Compiled(self, graph))

    def rows(self, probe: str) -> dict[tuple[int, ...], float]:
        """Return size -> ns of what was measured of a probe."""
        return {row.size: row.ns for row in self.prober.rows if row.probe == probe}


class Compiled:
    """A graph that is ready to run on such a device."""

    def __init__(self, machine: Machine, graph: Graph) -> None:
        self.machine = machine
        ops = {getattr(node.op, "op_type", "") for node in graph.nodes}
        self.copies, self.products = "Concat" in ops, "MatMul" in ops

    def run(self, feeds: dict[str, Any]) -> None:
        """Let the time of a run pass."""
        m = feeds["x" if "x" in feeds else "rows0"].shape[0]
        self.machine.now += _TRIP + self.products * _PRODUCT * m + self.copies * _COPY * m
        self.machine.now += _WAIT if self.copies and self.products else 0

    def close(self) -> None:
        """Do nothing."""


def test_a_product_alone_is_what_is_left_of_a_run_without_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of sizes that were measured in a chain, since it is compared with that."""
    machine = Machine(monkeypatch, Device.CPU)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("alone") == pytest.approx({(1, 256, 256): _PRODUCT, (32, 256, 256): 32 * _PRODUCT})


def test_a_product_after_a_copy_is_what_it_adds_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's own time is taken off, the wait that the two cause is not."""
    machine = Machine(monkeypatch, Device.CPU)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("after") == pytest.approx({(m, 256, 256): m * _PRODUCT + _WAIT for m in (1, 32, 128)})


@pytest.mark.parametrize(("device", "quick"), [(Device.CPU, True), (Device("cuda"), False)])
def test_products_after_a_copy_are_for_a_cpu_that_has_time(
    monkeypatch: pytest.MonkeyPatch, device: Device, quick: bool
) -> None:
    """An accelerator is at work already, and the short form has no time for them."""
    machine = Machine(monkeypatch, device, quick=quick)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("after") == {}
    assert machine.rows("alone")


def test_nothing_is_measured_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole graphs, which come after it, keep their time."""
    machine = Machine(monkeypatch, Device.CPU)
    first_products.measure(machine.prober, 0.0)
    assert machine.rows("alone") == machine.rows("after") == {}
