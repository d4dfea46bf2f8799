"""What the pages name exists: files of the repository, modules and names of the package, and linked pages."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_pages import MADE_BY_THE_READER

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/**/*.md", "calibration/*.md", "tests/helpers/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # it names what was moved and removed
)
FILE = re.compile(r"`((?:rlx_ort|providers|converters|calibration|scripts|tests|examples|docs)/[\w./*-]+)`")
NAME = re.compile(r"\brlx_ort(?:\.[A-Za-z_]\w*)+")
LINK = re.compile(r"\]\((?!http)([^)#\s]+)")

LOGGERS = {
    name
    for folder in ("rlx_ort", "providers")
    for path in (ROOT / folder).rglob("*.py")
    for name in re.findall(r'getLogger\("(rlx_ort\.\w+)"\)', path.read_text(encoding="utf-8"))
}
"""Loggers that are no modules."""


def _missing(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for file in set(FILE.findall(text)) - MADE_BY_THE_READER:
        if not any(ROOT.glob(file.rstrip("/"))):
            yield file
    for link in set(LINK.findall(text)):
        if not (page.parent / link).exists():
            yield link
    for name in set(NAME.findall(text)) - LOGGERS:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            yield name


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page: str) -> None:
    """A file, a link or a dotted name that was moved fails here."""
    assert sorted(_missing(ROOT / page)) == []
