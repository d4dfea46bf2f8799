"""The page: reports, libraries and styles in one HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from rlx_ort.report.document import SCHEMA

_ASSETS = files("rlx_ort.report") / "assets"
OWN_SCRIPTS = ("elements.js", "layout.js", "graph.js", "page.js")
"""The page's own scripts, in the order in which they need each other; they are one script on the page."""
_SOURCE_MAP = re.compile(r"^//# sourceMappingURL=.*$", re.MULTILINE)  # a file that is not there


def vendored() -> dict[str, dict[str, str]]:
    """Return the table of the libraries: version, file, sha256, licence and where each comes from."""
    return tomllib.loads(_read("vendored.toml"))


def rendered(reports: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any] | None = None) -> str:
    """Return the page of one report, or of two side by side, with how far their outputs are apart.

    Scripts run by their hash only, so that no name in a model can become one. Takes about 0.3 MB and the reports.
    """
    content = {"schema": SCHEMA, "reports": reports, "comparison": comparison}
    scripts, licences = [], []
    for name, library in vendored().items():
        scripts.append(_SOURCE_MAP.sub("", _read(library["file"])))
        licences.append(f"<!-- {name} {library['version']}\n{_read(f'{name}.LICENSE.txt').replace('--', '- -')}-->")
    scripts.append("\n".join(map(_read, OWN_SCRIPTS)))
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return _read("page.html").format(
        hashes=" ".join(f"'sha256-{digest}'" for digest in hashes),
        title=html.escape(" and ".join(str(report["model"]) for report in reports)),
        style=_read("page.css"),
        data=json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        scripts="\n".join([*licences, *(f"<script>{script}</script>" for script in scripts)]),
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")
