"""Every item of the functional contract names the tests that hold it, and these exist."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
AUDIT: dict[str, dict[str, list[str]]] = tomllib.loads(
    (TESTS / "data" / "contract_audit.toml").read_text(encoding="utf-8")
)
ROWS = [(f"{part}: {item}", tests) for part, items in AUDIT.items() for item, tests in items.items()]


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Return the names of the tests of a file."""
    found = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(node.name for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


@pytest.mark.parametrize(("item", "tests"), ROWS, ids=[item for item, _ in ROWS])
def test_an_item_of_the_contract_has_tests(item: str, tests: list[str]) -> None:
    """There is at least one, and each is a test of this checkout."""
    assert tests, f"nothing tests {item}"
    for test in tests:
        file, _, name = test.partition("::")
        functions = functions_of(TESTS / file)
        assert name in functions if name else any(function.startswith("test_") for function in functions), test
