"""The tables of docs/environment.md, errors.md, command-line.md and devices.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from rlx_ort import Device, environment, errors
from rlx_ort.cli import main

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


def _first_cells(page: str, header: str) -> list[str]:
    """Return the first cell of each row of the table with a header."""
    table = (DOCS / page).read_text(encoding="utf-8").split(header, 1)[1].split("\n\n", 1)[0]
    return [row.split("|")[1].strip().strip("`") for row in table.splitlines() if row.startswith("|")][1:]


def test_the_exit_codes_are_those_of_the_help_and_the_errors() -> None:
    """The page, `--help` and the error classes agree about the exit codes."""
    documented = {int(cell) for cell in _first_cells("command-line.md", "| Exit code | Meaning |")}
    shown = {
        int(code) for code in re.findall(r"^    (\d\d?)  ", CliRunner().invoke(main, ["--help"]).stdout, re.MULTILINE)
    }
    raised = {item.exit_code for item in vars(errors).values() if isinstance(item, type) and hasattr(item, "exit_code")}
    assert documented == shown == {0, 1, 2, *raised}


def test_the_support_table_has_every_device() -> None:
    """Each device kind stands in one row of the support table."""
    cells = _first_cells("devices.md", "| Device | Execution provider | Brought by | Tested |")
    assert sorted(name.strip(" `") for cell in cells for name in cell.split(",")) == sorted(map(str, Device.all()))
