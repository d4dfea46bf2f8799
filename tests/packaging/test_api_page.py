"""Every public name once on its page, used in an example of its section; test_docs_pages.py runs the examples."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import rlx_ort
from rlx_ort import compat

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = {"api.md": rlx_ort.__all__, "rlx-names.md": compat.__all__}
NAME = re.compile(r"^- `(\w+)`: ", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _sections() -> Mapping[str, str]:
    texts = "\n## ".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES)
    _, *sections = re.split(r"^##+ ", texts, flags=re.MULTILINE)
    return {section.splitlines()[0]: section for section in sections if NAME.search(section)}


def _used(code: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(code)))
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


@pytest.mark.parametrize("page", PAGES)
def test_every_public_name_is_there_once(page: str) -> None:
    """No name is missing, and none twice."""
    assert sorted(NAME.findall((DOCS / page).read_text(encoding="utf-8"))) == sorted(PAGES[page])


@pytest.mark.parametrize("title", _sections())
def test_the_example_of_a_section_uses_its_names(title: str) -> None:
    """Each name that a section lists stands in its code."""
    section = _sections()[title]
    assert set(NAME.findall(section)) - _used("".join(BLOCK.findall(section))) == set()
