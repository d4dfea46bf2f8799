"""Operators of ONNX on tensors without elements: the reference's answer, or a typed error, and a process that lives."""

from __future__ import annotations

import pytest
from onnx_suite.emptied import emptied_cases, verdicts

from rlx_ort import Device


@pytest.mark.slow
def test_operators_answer_as_the_reference_does_or_refuse(device: Device) -> None:
    """With each dim of each input 0 in turn, and all dims of one size at once."""
    counts, failures = verdicts(device.label, emptied_cases())
    assert failures == []
    assert counts["equal"]
