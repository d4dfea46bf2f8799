"""`RLX_RESILIENCE` switches resilience on, with settings by name."""

from __future__ import annotations

import pytest

from rlx_ort import environment
from rlx_ort.errors import DeviceParseError
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.ir.graph import Graph
from rlx_ort.resilience.options import Resilience


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", None),
        ("off", None),
        ("0", None),
        ("on", Resilience()),
        ("1", Resilience()),
        ("timeout_s=2", Resilience(timeout_s=2.0)),
        ("bridge=off, Tolerance=1e-2; failover=yes", Resilience(bridge=False, tolerance=0.01)),
    ],
)
def test_the_variable_has_a_switch_or_settings(text: str, wanted: Resilience | None) -> None:
    """Case and spaces do not matter."""
    with environment.override({"RESILIENCE": text}):
        assert Resilience.from_env() == wanted
        runner = GraphDevices.from_env(Graph("empty"))
        assert (None if runner._failover is None else runner._failover.options) == wanted


@pytest.mark.parametrize("text", ["maybe", "timeout=2", "timeout_s=-1", "timeout_s=soon", "bridge=2", "backoff_s"])
def test_a_typo_in_the_variable_is_an_error(text: str) -> None:
    """It is not ignored, because runs would have no limit then; the message has the names."""
    with (
        environment.override({"RESILIENCE": text}),
        pytest.raises(DeviceParseError, match=r"RLX_RESILIENCE=.*the settings are bridge, failover, backoff_s"),
    ):
        Resilience.from_env()
