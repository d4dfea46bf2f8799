"""What `calibrate` keeps, and what it refuses to keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rlx_ort import CalibrationError, Device, calibrate
from rlx_ort.calibration import measure, store
from rlx_ort.calibration.calibrate import calibrate_together
from rlx_ort.calibration.measure import Bench
from rlx_ort.calibration.profile import CalibrationProfile, Row
from tests.unit.calibration.conftest import ROWS


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Row]:
    """The rows that measuring finds on every device."""
    rows = list(ROWS)

    def found(benches: Sequence[Bench], **settings: Any) -> None:
        for bench in benches:
            bench.rows |= {(row.kernel, row.size, row.dtype): row for row in rows}
            bench.skipped["MatMul"] = "no kernel"

    monkeypatch.setattr(Bench, "begin", lambda bench, keep_open: None)
    monkeypatch.setattr(measure, "measure_kernels", found)
    return rows


def test_each_device_gets_its_profile_and_a_failure_is_its_own(here: Any) -> None:
    """CUDA is measured although the device beside it does not exist."""
    found = calibrate_together(["cuda", "tpu", Device.CUDA])
    assert list(found) == [Device.CUDA, Device("tpu")]
    profile = found[Device.CUDA]
    assert isinstance(profile, CalibrationProfile)
    assert profile.rows == ROWS
    assert store.find(Device.CUDA).profile == profile
    assert isinstance(found[Device("tpu")], CalibrationError)


def test_a_calibration_without_a_product_is_an_error_and_not_kept(here: Any, measured: list[Row]) -> None:
    """The error names what is missing and why it was skipped."""
    measured[:] = [row for row in ROWS if row.kernel != "MatMul"]
    with pytest.raises(CalibrationError, match=r"MatMul could not be measured(.|\n)*MatMul: no kernel"):
        calibrate("cuda", quick=True)
    assert store.find(Device.CUDA).profile is None
