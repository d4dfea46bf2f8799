"""Build the documentation as a site that needs no network: `python scripts/docs_site.py --out site`.

The pages are those of `docs/` and those at the root but the README; the reference is made from the docstrings of the
public names. Needs the group `docs`. Warnings, broken links and whatever would be loaded from another host fail the
build. With REPOSITORY_URL, as in a release, pages link to the repository and to the other versions.
"""

from __future__ import annotations

import argparse
import logging
import os
import posixpath
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api.md"
MORE_PAGES = {f"{name}.md": f"{name.lower()}.md" for name in ("ARCHITECTURE", "CHANGELOG", "CONTRIBUTING", "SECURITY")}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
CODE = re.compile(r"(?<!\[)`([\w./-]+\.md)`(?!\])")
BRACKETED = re.compile(r"(?<= )\[(\w+)\](?= )")
LISTED = re.compile(r"^\d+\. .*\n(?:(?: {3}.*)?\n)*", re.MULTILINE)


def pages() -> Mapping[str, str]:
    """Return where each page of the repository is in the site."""
    return MORE_PAGES | {f"docs/{page.name}": page.name for page in sorted((ROOT / "docs").glob("*.md"))}


def groups() -> dict[str, list[str]]:
    """Return the public names under each heading of docs/api.md."""
    _, *sections = re.split(r"^## ", API.read_text(encoding="utf-8"), flags=re.MULTILINE)
    named_in = {section.splitlines()[0]: re.findall(r"^- `(\w+)`: ", section, re.MULTILINE) for section in sections}
    return {title: names for title, names in named_in.items() if names}


def site_text(page: str) -> str:
    """Return the text of a page with its links as they are in the site.

    A link to a file that is no page becomes the path of that file.
    """
    places, here = pages(), pages()[page]

    def place(target: str) -> str | None:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        inside = path.removeprefix("docs/") if (ROOT / path).suffix in (".svg", ".png") else None
        there = places.get(path, inside)
        return None if there is None else posixpath.relpath(there, posixpath.dirname(here) or ".")

    def linked(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups("")
        there = place(target) if target else ""
        return f"{text} (`{target}`)" if there is None else f"{mark}[{text}]({there}{anchor})"

    def named(match: re.Match[str]) -> str:
        there = places.get(match[1])
        return match[0] if there in (None, here) else f"[{match[0]}]({there})"

    def prose(text: str) -> str:
        return BRACKETED.sub(r"\[\1\]", CODE.sub(named, LINK.sub(linked, text)))

    text = (ROOT / page).read_text(encoding="utf-8")
    parts, end = [], 0
    for block in FENCED.finditer(text):
        parts += [prose(text[end : block.start()]), block[0]]
        end = block.end()
    text = "".join([*parts, prose(text[end:])])
    return LISTED.sub(lambda item: re.sub(r"^ {3}", " " * 4, item[0], flags=re.MULTILINE), text)  # as Markdown wants it


def collect(folder: Path) -> list[str]:
    """Write every page of the site to a folder, the reference included, and return the pages of the reference."""
    for page, place in pages().items():
        (folder / place).write_text(site_text(page), encoding="utf-8")
    for extra in ("pictures", "javascripts"):
        shutil.copytree(ROOT / "docs" / extra, folder / extra)
    (folder / "reference").mkdir()
    made = []
    for title, names in groups().items():
        place = f"reference/{re.sub(r'[^a-z]+', '-', title.lower()).strip('-')}.md"
        intro = f"# {title}\n\nExamples are in [The public names](../api.md#{_anchor(title)}).\n\n"
        (folder / place).write_text(intro + "\n\n".join(f"::: rlx_ort.{name}" for name in names), encoding="utf-8")
        made.append(place)
    return made


def _anchor(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def build(out: Path) -> None:
    """Build the site into a folder; raises `mkdocs.exceptions.Abort` on a warning."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    with tempfile.TemporaryDirectory() as made:
        sources, package = Path(made, "pages"), Path(made, "package")
        sources.mkdir()
        reference = collect(sources)
        for name, source in SETTINGS["tool"]["setuptools"]["package-dir"].items():  # as it is installed
            place = package / name.replace(".", "/")
            shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
        more = {"docs_dir": str(sources), "site_dir": str(out), "repo_url": os.environ.get("REPOSITORY_URL")}
        config: Any = load_config(str(ROOT / "mkdocs.yml"), strict=True, **more)
        config.site_name += f" {SETTINGS['project']['version']}"
        if config.repo_url:
            config.extra["version"] = {"provider": "mike"}  # reads versions.json, which the release workflow writes
        config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(package)]
        section = next(each for each in config.nav if isinstance(each, dict) and "Reference" in each)
        section["Reference"] += reference
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build_site(config)
        finally:
            config.plugins.on_shutdown()


class _Page(HTMLParser):
    """The ids of a page, its links, and the files that it loads."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note the targets of a tag's attributes."""
        values = {name: value for name, value in attrs if value is not None}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        refers = [values[name] for name in ("href", "src") if name in values]
        (self.links if tag == "a" else self.loaded).extend(refers)


def broken(out: Path) -> Iterator[str]:
    """Yield each reference to something that is not there or that needs a network, and each name without an entry."""
    read = {page.resolve(): _Page(page) for page in out.rglob("*.html")}
    described = {name for path, page in read.items() if path.parent.name == "reference" for name in page.ids}
    for name in (name for names in groups().values() for name in names):
        if f"rlx_ort.{name}" not in described:
            yield f"reference: nothing about {name}"
    for path, page in read.items():
        where = path.relative_to(out.resolve())
        for link in (*page.links, *page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loaded and parts.scheme != "data":
                    yield f"{where} loads {link}"
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.exists() and where.name != "404.html":  # its links begin with the root of a server
                yield f"{where}: {link}"
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].ids:
                yield f"{where}: no anchor {link}"


def main() -> int:
    """Build the site and check the links of its pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write the site to")
    out = parser.parse_args().out.resolve()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    begun = time.perf_counter()
    build(out)
    problems = sorted(set(broken(out)))
    print(*problems, sep="\n")
    count, seconds = len(list(out.rglob("*.html"))), time.perf_counter() - begun
    print(f"{count} pages in {seconds:.1f} s, {len(problems)} broken references")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
