"""Messages and pages are in plain words: no phrase that a reader has to read twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rlx_ort", "providers", "converters", "calibration")
RIDDLES = re.compile(
    r"(?<![Tt]here )\b(is|are) no (?!longer\b|more\b)|bear (this|it) out|here that is one|such a while"
    r"|get .* again from where it came|what is (no|refused)\b"
)


def _texts(path: Path) -> Iterator[str]:
    """Yield the strings of a module that are no docstrings; a value in one is a space."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else " " for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | alone:
            yield node.value


def test_no_message_is_a_riddle() -> None:
    """`X is no Y` and the like are written `X is not a Y`."""
    found = [
        (path.relative_to(ROOT).as_posix(), text)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for text in _texts(path)
        if RIDDLES.search(text)
    ]
    assert found == []


def test_the_phrases_are_found() -> None:
    """Those of the messages that were rewritten."""
    for text in ("a.onnx is no file", "the kernels need not bear this out", "here that is one", "what is refused"):
        assert RIDDLES.search(text)
    for text in ("there is no model", "it is no longer used", "a.onnx is not a file"):
        assert not RIDDLES.search(text)
