"""The page is one file that runs its own scripts only, and the libraries in it are those of the table."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from sample_reports import sample_report

import rlx_ort.report
from rlx_ort.report.page import rendered, vendored

ASSETS = Path(rlx_ort.report.__path__[0]) / "assets"
SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


@pytest.mark.parametrize("name", vendored())
def test_a_library_is_the_file_of_the_table_and_has_its_licence(name: str) -> None:
    """The hash is that of the npm package's file, and the licence's text lies beside it."""
    library = vendored()[name]
    assert hashlib.sha256((ASSETS / library["file"]).read_bytes()).hexdigest() == library["sha256"]
    licence = (ASSETS / f"{name}.LICENSE.txt").read_text(encoding="utf-8")
    assert library["licence"] == "MIT"
    assert "Permission is hereby granted, free of charge" in licence


def test_every_library_is_in_the_table() -> None:
    """No script but that of the page is without an entry."""
    scripts = {path.name for path in ASSETS.glob("*.js")}
    assert scripts == {"page.js", *(library["file"] for library in vendored().values())}


def test_the_policy_of_the_page_allows_its_scripts_and_no_network() -> None:
    """Everything is refused but inline styles and scripts with these hashes."""
    page = rendered([sample_report(2, 4)])
    policy = re.search(r'http-equiv="Content-Security-Policy"\s+content="([^"]*)"', page)
    assert policy is not None
    scripts = SCRIPT.findall(page)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == len(vendored()) + 1
    assert policy[1] == (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{digest}'" for digest in hashes)
    )
    assert "sourceMappingURL" not in page
    assert re.findall(r'\b(?:src|href)="(?!#|data:)', page.split("<script", 1)[0]) == []


def test_names_of_a_model_cannot_end_the_script() -> None:
    """Names come from files; those with markup arrive as text."""
    name = "</script><script>alert(1)</script><!--"
    page = rendered([sample_report(1, 3, title=name, name=name)])
    assert "<script>alert" not in page
    content = DATA.search(page)
    assert content is not None
    assert json.loads(content[1])["reports"][0]["model"] == name
    assert "<title>&lt;/script&gt;" in page


def test_the_page_of_a_small_model_is_small() -> None:
    """Below 1.5 MB, libraries included."""
    assert len(rendered([sample_report(2, 10)]).encode()) < 1_500_000
