"""The documentation as a site: what can be checked without the site's generator; `nox --session docs` builds it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from developer_scripts import load_script

import rlx_ort

ROOT = Path(__file__).resolve().parents[2]


site = load_script("docs_site")


def test_the_reference_has_every_public_name_once() -> None:
    """Its pages are made from the groups of docs/api.md."""
    assert sorted(name for names in site.groups().values() for name in names) == sorted(rlx_ort.__all__)


@pytest.mark.parametrize("page", site.pages())
def test_links_between_pages_lead_to_pages_of_the_site(page: str) -> None:
    """No link of a page leads to a file that the site does not have."""
    text, folder = site.FENCED.sub("", site.site_text(page)), posixpath.dirname(site.pages()[page])
    targets = {posixpath.normpath(posixpath.join(folder, match[3])) for match in site.LINK.finditer(text) if match[3]}
    missing = targets - set(site.pages().values())
    assert [target for target in missing if not (ROOT / "docs" / target).is_file()] == []


def test_every_picture_is_described_and_has_colours_for_a_dark_page() -> None:
    """Alt texts in the pages, titles in the files; and no picture loads anything."""
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in site.pages()]
    shown = {Path(match[3]).name: match[2] for text in texts for match in site.LINK.finditer(text) if match[1]}
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert pictures
    for picture in pictures:
        text = picture.read_text(encoding="utf-8")
        assert len(shown[picture.name]) > 40
        assert ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title") is not None
        assert "prefers-color-scheme: dark" in text
        assert "href" not in text


def test_every_page_of_the_menu_exists() -> None:
    """The menu in mkdocs.yml names no page that was moved."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:", 1)[1]
    assert set(re.findall(r"- ([\w/-]+\.md)", menu)) - set(site.pages().values()) == set()


def test_links_to_other_files_become_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to a page follows it to its place; one to a file that is no page becomes text; code is left alone."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "SECURITY.md").write_text(
        "[choose](docs/choosing.md#policy), [all](scripts/start.py), `docs/choosing.md`, [x] (y)\n\n"
        "```text\n[choose](docs/choosing.md)\n```\n",
        encoding="utf-8",
    )
    (tmp_path / "docs" / "choosing.md").write_text("[more](../SECURITY.md)\n", encoding="utf-8")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    assert site.site_text("SECURITY.md") == (
        "[choose](choosing.md#policy), all (`scripts/start.py`), [`docs/choosing.md`](choosing.md), \\[x\\] (y)\n\n"
        "```text\n[choose](docs/choosing.md)\n```\n"
    )
    assert site.site_text("docs/choosing.md") == "[more](security.md)\n"


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page, an anchor and an address on another host that is loaded, each one wrong."""
    monkeypatch.setattr(site, "groups", lambda: {"Graphs": ["Graph"]})
    (tmp_path / "index.html").write_text(
        '<img src="https://a.org/x.png"><a href="gone.html"></a><a href="#gone"></a><a id="i" href="#i"></a>',
        encoding="utf-8",
    )
    assert sorted(site.broken(tmp_path)) == [
        "index.html loads https://a.org/x.png",
        "index.html: gone.html",
        "index.html: no anchor #gone",
        "reference: nothing about Graph",
    ]
