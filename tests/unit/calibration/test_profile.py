"""The file of a profile: small, quick to read, and damaged when a value in it cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlx_ort.calibration.profile import CalibrationProfile
from rlx_ort.errors import CalibrationError


def test_another_schema_is_measured_again(here: Any) -> None:
    """The message names both."""
    document = json.loads(here.profile().to_json()) | {"schema": 3}
    with pytest.raises(CalibrationError, match="schema 3, this version reads 4"):
        CalibrationProfile.from_json(json.dumps(document))


@pytest.mark.parametrize("time_ns", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_time_that_cannot_be_makes_a_file_damaged(time_ns: object, here: Any) -> None:
    """Of a row as well as of the host's pace."""
    document = json.loads(here.profile().to_json())
    for broken in (document | {"rows": [["Add", [8], time_ns, "f32", 0.0, 1]]},):
        with pytest.raises(CalibrationError):
            CalibrationProfile.from_json(json.dumps(broken))
