"""Graph files and calibration profiles that were damaged or made up: read, or refused with a typed error."""

from __future__ import annotations

import json

import numpy as np
from mutations import mutated_json

from rlx_ort.calibration.profile import CalibrationProfile, ProfileKey, Row
from rlx_ort.errors import CalibrationError, ConversionError
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.serde import from_json, to_json

COUNT = 400


def test_a_mutated_graph_is_read_or_refused() -> None:
    """Nothing but a `ConversionError` leaves the reader, whatever stands in the file."""
    graph = Graph("g")
    value = graph.input("x", [2, 4]) @ graph.param("w", [4, 4], data=np.ones((4, 4), np.float32))
    graph.outputs = [graph.activation("relu", value) + graph.constant(np.ones(4, np.float32))]
    text, tensors = to_json(graph)
    refused = 0
    for changed in mutated_json(json.loads(text), 36, COUNT):
        try:
            from_json(changed, tensors)
        except ConversionError:
            refused += 1
    assert refused > COUNT // 2


def test_a_mutated_profile_is_read_or_refused() -> None:
    """What is read can be compared, kept and written again."""
    key = ProfileKey("cpu", "CPUExecutionProvider", "a processor", threads=4)
    rows = (Row("gemm", (4, 4, 4), 3.0), Row("add", (9,), 3.0))
    text = CalibrationProfile(key, rows, skipped={"conv": "no memory"}).to_json()
    refused = 0
    for changed in mutated_json(json.loads(text), 36, COUNT):
        try:
            found = CalibrationProfile.from_json(changed)
        except CalibrationError:
            refused += 1
        else:
            assert found.key.file_name
            assert CalibrationProfile.from_json(found.to_json()) == found
    assert refused > COUNT // 4
