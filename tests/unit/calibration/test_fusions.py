"""What a fused node adds, told from chains with and without it."""

from __future__ import annotations

import pytest

from rlx_ort.calibration.probe_products import subtract
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import Sample
from rlx_ort.calibration.timing import Budget
from rlx_ort.device import Device

_SIZE = (512,)


def fusions(**ns: float) -> dict[str, float]:
    """Return probe -> ns of the rows that are made of links that took so long."""
    prober = Prober(Device.CPU, Budget(1.0, 0.01, lambda: 0))
    prober.rows = [Sample(f"fused:{probe.replace('plain', '')}", _SIZE, took) for probe, took in ns.items()]
    subtract(prober)
    return {row.probe: row.ns for row in prober.rows}


def test_each_node_is_what_its_link_takes_beyond_the_one_without_it() -> None:
    """A bias beyond the bare product, an activation beyond the product with its bias."""
    found = fusions(plain=1000.0, bias=1300.0, gemm_act=1450.0)
    assert found == pytest.approx({"fused:bias": 300.0, "fused:gemm_act": 150.0})


@pytest.mark.parametrize(("plain", "bias"), [(1000.0, 0.0), (0.0, 1300.0), (0.0, 0.0)])
def test_a_link_that_drowned_in_noise_makes_no_row(plain: float, bias: float) -> None:
    """Nothing is divided by its time, and the other link does not become the node's."""
    assert fusions(plain=plain, bias=bias) == {}


def test_a_quicker_link_with_the_node_makes_it_free() -> None:
    """Noise does not make a node take less than nothing."""
    assert fusions(conv=1000.0, conv_act=990.0) == {"fused:conv_act": 0.0}
