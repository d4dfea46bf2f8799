"""What the first product of a run takes, on a device whose times are arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from arithmetic_device import ArithmeticDevice

from rlx_ort.calibration import first_products
from rlx_ort.calibration.profile import Sample
from rlx_ort.device import Device

_PRODUCT, _COPY, _WAIT = 50, 2, 20_000


def work_ns(ops: list[str], feeds: dict[str, Any]) -> int:
    """Return what a run takes: a product or a copy so much a row, and a product after a copy a wait as well."""
    m = feeds["x" if "x" in feeds else "rows0"].shape[0]
    copies, products = "Concat" in ops, "MatMul" in ops
    return int(products * _PRODUCT * m + copies * _COPY * m + (_WAIT if copies and products else 0))


def machine_of(
    monkeypatch: pytest.MonkeyPatch, device: Device = Device.CPU, *, quick: bool = False
) -> ArithmeticDevice:
    """Return a device of which some products in chains are known."""
    machine = ArithmeticDevice(monkeypatch, work_ns, device, quick=quick)
    sides = ((1, 512), (32, 512)) if quick else ((1, 256), (32, 256), (128, 256))
    machine.prober.rows += [Sample("gemm", (m, side, side), 100.0 * m) for m, side in sides]
    return machine


def test_a_product_alone_is_what_is_left_of_a_run_without_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only of sizes that were measured in a chain, since it is compared with that."""
    machine = machine_of(monkeypatch)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("alone") == pytest.approx({(1, 256, 256): _PRODUCT, (32, 256, 256): 32 * _PRODUCT})


def test_a_skewed_product_alone_is_measured_where_the_square_of_its_size_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a chain of skewed products takes more, where each core fetches rows from others, is not its."""
    machine = machine_of(monkeypatch)
    machine.prober.rows.append(Sample("gemm", (128, 512, 512), 1e4))
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("alone")[128, 256, 1024] == pytest.approx(128 * _PRODUCT)


def test_a_product_after_a_copy_is_what_it_adds_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy's own time is taken off, the wait that the two cause is not."""
    machine = machine_of(monkeypatch)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("after") == pytest.approx({(m, 256, 256): m * _PRODUCT + _WAIT for m in (1, 32, 128)})


@pytest.mark.parametrize(("device", "quick"), [(Device.CPU, True), (Device("cuda"), False)])
def test_products_after_a_copy_are_for_a_cpu_that_has_time(
    monkeypatch: pytest.MonkeyPatch, device: Device, quick: bool
) -> None:
    """An accelerator is at work already, and the short form has no time for them."""
    machine = machine_of(monkeypatch, device, quick=quick)
    first_products.measure(machine.prober, 1e12)
    assert machine.rows("after") == {}
    assert machine.rows("alone")


def test_nothing_is_measured_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole graphs, which come after it, keep their time."""
    machine = machine_of(monkeypatch)
    first_products.measure(machine.prober, 0.0)
    assert machine.rows("alone") == machine.rows("after") == {}
