"""docs/rlx-names.md maps RLX's names to names that exist, and has a place for every public one."""

from __future__ import annotations

import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import rlx_ort
from rlx_ort import compat

PUBLIC = {*rlx_ort.__all__, *compat.__all__}
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rlx-names.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.endswith("| Here | Note |")
]
NAMES = re.findall(r"`([^`]+)`", " ".join(row[1] for row in ROWS))
BUILDERS = PAGE.split("```text\n")[1].split("```")[0].split()
IN_MODULES = ("environment.", "ir.")


def _plain(name: str) -> str:
    return name.partition("(")[0]


def _found(name: str) -> Any:
    return pkgutil.resolve_name(f"rlx_ort.{_plain(name)}")


def _takes_keywords(name: str) -> bool:
    """Return whether a name exists; one with parentheses must take the keywords in them."""
    try:
        found = _found(name)
    except (ImportError, AttributeError):
        return False
    return "(" not in name or set(re.findall(r"(\w+)=", name)) <= set(inspect.signature(found).parameters)


def test_the_page_has_rows() -> None:
    """The tests below are not empty, and every row has its three cells."""
    assert len(ROWS) > 100
    assert len(BUILDERS) > 100
    assert [row for row in ROWS if len(row) != 3] == []


def test_names_on_the_right_exist_and_take_the_keywords() -> None:
    """Each name resolves from `rlx_ort`, and takes the keyword arguments that the page shows."""
    assert [name for name in NAMES if not _takes_keywords(name)] == []


def test_names_on_the_right_are_public() -> None:
    """What a dotted name starts from is a public name, of RLX's too, but for a few that stay in their modules."""
    roots = {_plain(name).partition(".")[0] for name in NAMES if not name.startswith(IN_MODULES)}
    assert roots - PUBLIC == set()


def test_every_public_name_has_a_place_on_the_page() -> None:
    """A reader of the page misses nothing that `rlx_ort` has."""
    named = {_plain(name) for cells in ROWS for name in re.findall(r"`([^`]+)`", " ".join(cells[1:]))}
    assert {name for name in PUBLIC if not any(found.partition(".")[0] == name for found in named)} == set()


def test_what_is_missing_is_explained() -> None:
    """A row without a name of ours says `none` and what to do instead."""
    assert [row for row in ROWS if "`" not in row[1] and (row[1] != "none" or not row[2])] == []


def test_the_builders_of_the_same_name_exist() -> None:
    """Each name of the list is a method of `Graph`, and is listed once."""
    assert [name for name in BUILDERS if not callable(getattr(rlx_ort.Graph, name, None))] == []
    assert len(set(BUILDERS)) == len(BUILDERS)


def test_overload_families_are_one_function() -> None:
    """No public name is a Rust twin, whose options are keyword arguments here."""
    assert [name for name in PUBLIC if re.search(r"_with_(options|policy|report)$", name)] == []


def test_a_name_is_loaded_when_it_is_first_used() -> None:
    """Importing the package loads neither ONNX Runtime nor ONNX, nor any module of a public name."""
    code = (
        "import sys, rlx_ort\n"
        "print(*(name for name in sys.modules if name.startswith(('onnx', 'rlx_ort.', 'numpy'))))\n"
        "rlx_ort.parse_device\n"
        "print('onnxruntime' in sys.modules, 'onnx' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["", "False False"]
