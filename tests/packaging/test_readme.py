"""The tables of the README are those of the code; test_docs_pages.py runs its examples."""

from __future__ import annotations

import re
from pathlib import Path

from click.testing import CliRunner

from rlx_ort import Device, environment, errors
from rlx_ort.cli import main

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def _first_cells(header: str) -> list[str]:
    """Return the first cell of each row of the table that starts with a header."""
    table = README.split(header, 1)[1].split("\n\n", 1)[0]
    return [row.split("|")[1].strip().strip("`") for row in table.splitlines() if row.startswith("|")][1:]


def test_the_exit_codes_are_those_of_the_help_and_the_errors() -> None:
    """README, `--help` and the error classes agree about the exit codes."""
    documented = {int(cell) for cell in _first_cells("| Exit code | Meaning |")}
    shown = {
        int(code) for code in re.findall(r"^    (\d)  ", CliRunner().invoke(main, ["--help"]).stdout, re.MULTILINE)
    }
    raised = {item.exit_code for item in vars(errors).values() if isinstance(item, type) and hasattr(item, "exit_code")}
    assert documented == shown == {0, 1, 2, *raised}


def test_the_variables_are_those_that_are_read() -> None:
    """The table has a row for each variable of the package."""
    cells = _first_cells("| Variable | Meaning |")
    assert {name.strip(" `") for cell in cells for name in cell.split(",")} == set(environment.VARIABLES)


def test_the_support_table_has_every_device() -> None:
    """Each device kind stands in one row of the support table."""
    cells = _first_cells("| Device | Execution provider | Brought by | Tested |")
    assert sorted(name.strip(" `") for cell in cells for name in cell.split(",")) == sorted(map(str, Device.all()))
