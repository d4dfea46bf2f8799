"""Damaged ONNX files and models of one operator, in children: a typed error or the results of plain ONNX Runtime.

The sample is small and always the same; with larger numbers below it has thousands.
"""

from __future__ import annotations

from collections import Counter

from damaged_models.files import KINDS, damaged_file
from damaged_models.pool import judged, sample

FILES = 8  # of each kind
FIELDS = 100  # more files with changed fields, of which there are the most
OPERATORS = 160


def test_damaged_models_end_in_a_typed_error_or_a_right_answer() -> None:
    """None ends or blocks its process, takes gigabytes, raises another error or answers with other numbers."""
    tasks = sample([*KINDS], FILES, OPERATORS) + sample(["fields"], FIELDS, 0, start=FILES)
    verdicts = list(judged(tasks))
    assert len(verdicts) == len(tasks)
    defects = [str(verdict) for verdict in verdicts if verdict.is_defect]
    assert not defects, "\n".join(defects)
    found = Counter(verdict.outcome for verdict in verdicts)
    same = sum(verdict.plain == "same" for verdict in verdicts)
    assert found["typed error"] > len(verdicts) // 4
    assert same > len(verdicts) // 8


def test_a_number_gives_the_same_file_each_time() -> None:
    """A defect that is found once can be looked at again."""
    for kind in KINDS:
        assert damaged_file(kind, 5) == damaged_file(kind, 5)
