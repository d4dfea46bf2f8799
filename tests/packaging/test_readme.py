"""The first page is short, and claims of the pages point to their tests; test_docs_pages.py runs its examples."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CLAIMS = "why.md#claims-and-the-tests-that-hold-them"
CLAIMING = {
    "README.md": "an error with the reason and the repair",
    "docs/quick-start.md": "Nothing falls back to the CPU unless you ask for it",
    "docs/how-it-works.md": "ONNX Runtime moves nodes to the CPU without an error; here it is an error",
    "docs/choosing.md": "the one with the smallest\npredicted time is chosen",
    "docs/packaging.md": "a damaged one is logged as a warning and refused from then on",
}
"""Pages that claim no fallback, the fastest device or the refusal of damaged copies, with their words."""


def test_the_first_page_is_short_and_in_order() -> None:
    """A sentence, a picture, a table with figures and the two commands, in under 150 lines."""
    assert len(README.splitlines()) < 150
    heading, sentence, *_ = README.split("\n\n")
    assert heading == "# rlx_ort"
    assert re.fullmatch(r"[A-Z][^.!?]+\.", sentence)
    places = [README.index(mark) for mark in ("![", "| | plain `onnxruntime` | `rlx_ort` |", "\n## Two commands\n")]
    assert places == sorted(places)
    assert README[places[1] : places[2]].count("\n| ") >= 6
    assert README.index("start.py demo") < README.index("start.py test")


@pytest.mark.parametrize("page", CLAIMING)
def test_a_claim_points_to_its_tests(page: str) -> None:
    """The paragraph or row with the claim links to the table of claims."""
    text = (ROOT / page).read_text(encoding="utf-8")
    [paragraph] = [part for part in re.split(r"\n\n|\n(?=[|-] )", text) if CLAIMING[page] in part]
    assert CLAIMS in paragraph


def test_the_tests_of_claims_exist() -> None:
    """Each row of the table names files, and functions where it names one."""
    table = (ROOT / "docs" / "why.md").read_text(encoding="utf-8").split("| Claim | Test |\n", 1)[1]
    rows = [re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", row) for row in table.splitlines() if row.startswith("| ")]
    assert len(rows) >= 8
    for named in rows:
        assert named
        for file, function in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert function in {"", *(node.name for node in tree.body if isinstance(node, ast.FunctionDef))}
