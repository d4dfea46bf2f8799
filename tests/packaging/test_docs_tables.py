"""The tables of docs/environment.md and docs/errors.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from rlx_ort import environment, errors

DOCS = Path(__file__).resolve().parents[2] / "docs"
ROW = re.compile(r"^\| `(\w+)` \| ([^|]*) \|", re.MULTILINE)


def test_every_variable_has_one_row() -> None:
    """No variable is missing, and none is there that nobody reads."""
    rows = ROW.findall((DOCS / "environment.md").read_text(encoding="utf-8"))
    assert sorted(name for name, _ in rows) == sorted(environment.VARIABLES)


def test_every_error_has_one_row_with_its_exit_code() -> None:
    """The classes and codes are those of `rlx_ort.errors`."""
    rows = ROW.findall((DOCS / "errors.md").read_text(encoding="utf-8"))
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, errors.RlxError)]
    assert sorted(rows) == sorted((item.__name__, str(item.exit_code)) for item in classes)


def test_errors_stand_under_their_base() -> None:
    """A base that is not `RlxError` is above them, in the same table."""
    for table in re.split(r"^## ", (DOCS / "errors.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        names = [name for name, _ in ROW.findall(table)]
        for name in names:
            bases = {base.__name__ for base in getattr(errors, name).__mro__[1:]} - {"RlxError"}
            above = set(names[: names.index(name)])
            assert not {base for base in bases if hasattr(errors, base)} or bases & above, name
