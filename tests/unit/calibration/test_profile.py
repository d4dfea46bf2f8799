"""The file of a profile: small, quick to read, and damaged when a value in it cannot be."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from rlx_ort.calibration.profile import CalibrationProfile, Row
from rlx_ort.errors import CalibrationError


def test_a_row_is_a_list_on_a_line_of_its_own(here: Any) -> None:
    """Kernel, size, ns, dtype, spread and repeats, in this order."""
    text = here.profile(rows=(Row("MatMul", (64, 4096), 5100.0, "f16", 0.03, 9),)).to_json()
    assert json.loads(text)["rows"] == [["MatMul", [64, 4096], 5100.0, "f16", 0.03, 9]]
    assert '["MatMul", [64, 4096], 5100.0, "f16", 0.03, 9]' in text.splitlines()


def test_four_hundred_rows_are_read_in_five_milliseconds(here: Any) -> None:
    """The quickest of ten readings."""
    rows = tuple(Row("Softmax", (at, 256), at * 1.5, "f32", 0.01, 500) for at in range(1, 401))
    text, times = here.profile(rows=rows).to_json(), []
    for _ in range(10):
        start = time.perf_counter()
        assert CalibrationProfile.from_json(text).rows == rows
        times.append(time.perf_counter() - start)
    assert min(times) < 0.005


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
