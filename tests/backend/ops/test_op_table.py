"""The table of ops in the docs is up to date, and what it says of this machine's providers is true."""

from __future__ import annotations

import importlib.metadata
import json
from types import ModuleType

import pytest
from developer_scripts import load_script
from op_tests.cases import CASES

from rlx_ort.device import Device


@pytest.fixture(scope="module")
def op_table() -> ModuleType:
    """Return the script as a module."""
    return load_script("op_table")


def test_the_table_is_up_to_date(op_table: ModuleType) -> None:
    """Who adds an op or changes its form runs `python scripts/op_table.py`."""
    assert op_table.TABLE.read_text(encoding="utf-8") == op_table.table()


def test_the_record_is_true_for_the_providers_it_was_made_of(op_table: ModuleType, device: Device) -> None:
    """With the versions that were recorded, each provider takes the very dtypes in the record."""
    known = json.loads(op_table.RECORD.read_text(encoding="utf-8"))
    here = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    for name, number in known["versions"].items():
        if here.get(name) != number or device.kind not in known:
            pytest.skip(f"the record is of {name} {number}")
    found = {name: op_table.recorded_dtypes(device.kind, case) for name, case in CASES.items()}
    assert found == known[device.kind]
