"""What a profile says of the host: kept in its file, absent in older ones, and filled by a calibration."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from rlx_ort.calibration import calibrate, probes
from rlx_ort.calibration.prober import Prober
from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.device import Device
from rlx_ort.errors import CalibrationError
from tests.unit.calibration.conftest import ROWS


def _changed(profile: CalibrationProfile, **fields: Any) -> str:
    """Return a profile's text with other fields in it."""
    return json.dumps(json.loads(profile.to_json()) | fields)


def test_the_pace_of_the_host_is_kept_in_the_file(here: Any) -> None:
    """It comes back as it was."""
    text = here.profile(pace_ns=12_900.0).to_json()
    assert json.loads(text)["pace_ns"] == 12_900.0
    assert CalibrationProfile.from_json(text).pace_ns == 12_900.0


def test_a_file_without_the_pace_of_the_host_is_read(here: Any) -> None:
    """Files of the same schema were written before it was measured."""
    document = json.loads(here.profile(pace_ns=12_900.0).to_json())
    del document["pace_ns"]
    assert CalibrationProfile.from_json(json.dumps(document)) == here.profile(pace_ns=0.0)


@pytest.mark.parametrize("pace_ns", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_pace_that_is_no_time_makes_a_file_damaged(pace_ns: object, here: Any) -> None:
    """As any other time that cannot be."""
    with pytest.raises(CalibrationError):
        CalibrationProfile.from_json(_changed(here.profile(), pace_ns=pace_ns))


@pytest.mark.parametrize(("looks", "pace_ns"), [(20, 13.0), (3, 0.0)])
def test_a_calibration_notes_what_the_host_took(
    looks: int, pace_ns: float, here: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock is 13 ns after the one before; three looks are too few to tell."""

    def measure(prober: Prober) -> None:
        for _ in range(looks):
            prober.pace.now()
        prober.rows += ROWS

    monkeypatch.setattr(probes, "measure", measure)
    profile = calibrate.calibrate(Device.CUDA, quick=True, clock=itertools.count(0, 13).__next__)
    assert profile.pace_ns == pace_ns
