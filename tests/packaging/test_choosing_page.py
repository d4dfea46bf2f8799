"""docs/choosing.md matches what the code writes and reads."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

from rlx_ort import Device, environment
from rlx_ort.calibration.features import DEFAULT_DIM
from rlx_ort.calibration.kernels import KERNELS
from rlx_ort.calibration.model import ERRORS
from rlx_ort.calibration.profile import NOISY, SCHEMA, CalibrationProfile, ProfileKey, Row

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "choosing.md").read_text(encoding="utf-8")


def _rows(header: str) -> list[list[str]]:
    """Return the cells of each row of the table that starts with a header."""
    table = PAGE.split(header, 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines() if row[:3] == "| `"]


def test_the_fields_are_those_of_the_file() -> None:
    """Each field of a profile, of its key and of a row has a place in the table, and no other has."""
    document = json.loads(CalibrationProfile(ProfileKey("cpu", "EP", "H"), (Row("MatMul", (1, 1), 1.0),)).to_json())
    rows = {cells[0]: cells[1] for cells in _rows("| Field | Meaning |")}
    assert {name for cell in rows for name in re.findall(r"`(\w+)`", cell)} == set(document)
    assert set(re.findall(r"`(\w+)`", rows["`key`"])) == set(document["key"])
    assert re.findall(r"`(\w+)`", rows["`rows`"]) == [field.name for field in dataclasses.fields(Row)]
    assert len(document["rows"][0]) == len(dataclasses.fields(Row))


def test_the_numbers_are_those_of_the_code() -> None:
    """The schema, the limit of noise and the stand-in size."""
    rows = {cells[0]: cells[1] for cells in _rows("| Field | Meaning |")}
    assert rows["`schema`"].startswith(f"{SCHEMA};")
    assert f"spread above {NOISY}" in rows["`rows`"]
    assert f"A dim without a size counts as {DEFAULT_DIM}" in PAGE


def test_the_errors_are_those_of_the_model() -> None:
    """Each way to find a price has a row with its error, and no other has."""
    table = PAGE.split("| How it is known |", 1)[1].split("\n\n", 1)[0]
    cells = [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in table.splitlines()[2:]]
    assert {row[0]: row[-1] for row in cells} == {
        how: f"{error:.0%}".replace("%", " %") for how, error in ERRORS.items()
    }


def test_every_kernel_of_the_table_is_named() -> None:
    """By itself, or counted among the operators."""
    table = PAGE.split("| Kernels | Sizes |", 1)[1].split("\n\n", 1)[0]
    kernels = {kernel.name.partition(":")[0] for kernel in KERNELS}
    named = set(re.findall(r"`(\w+)`", table))
    assert named <= kernels
    assert f"`Add` and {len(kernels - named)} other operators" in table


def test_the_variables_exist() -> None:
    """Each variable that the page names is read."""
    assert set(re.findall(r"RLX_[A-Z_]+", PAGE)) <= set(environment.VARIABLES)


def test_every_device_that_runs_something_has_an_order() -> None:
    """Kinds without a provider have no index; all others are in the table."""
    named = {
        name for cells in _rows("| Devices | Order of the index |") for name in re.findall(r"`([\w-]+)`", cells[0])
    }
    assert named == {device.kind for device in Device.all()} - {"tpu", "opengl"}
