"""The `RLX_*` variables are read by `load`, `open_package` and the command line; a typo in one raises in all three."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import Cli

import rlx_ort
from rlx_ort.errors import DeviceParseError, NoViableDeviceError

INPUTS = {"x": np.zeros((1, 2), np.float32)}


@pytest.fixture
def package(cli: Cli, add_one: Path, tmp_path: Path) -> Path:
    """Return a package of `add_one`."""
    assert cli("package", "create", add_one, "-o", tmp_path / "m.ortpackage").code == 0
    return tmp_path / "m.ortpackage"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLX_DEVICES", "cpuu"),
        ("RLX_DENY_DEVICES", "cudaa"),
        ("RLX_PREFER_DEVICES", "cudaa"),
        ("RLX_BENCHMARK_PICK", "many"),
        ("RLX_DEVICE", "cpuu"),
        ("RLX_DEVICE_CHAIN", "cuda,cpuu"),
        ("RLX_DENY_DEVICE", "cuda"),
        ("RLX_DEVCIES", "cpu"),
    ],
)
def test_a_typo_raises_everywhere(
    cli: Cli, add_one: Path, package: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """In a value and in a name: what may run must not become more than was meant."""
    monkeypatch.setenv(name, value)
    for opened in (lambda: rlx_ort.load(add_one), lambda: rlx_ort.open_package(package)):
        with pytest.raises(DeviceParseError, match=name):
            opened()
    for arguments in (("report", add_one), ("run", add_one), ("bench", add_one), ("run", package), ("devices",)):
        outcome = cli(*arguments)
        assert outcome.code == 2, arguments
        assert name in outcome.err
    rlx_ort.GraphDevices(rlx_ort.from_onnx(add_one)).run("cpu", INPUTS)  # reads none of them


def test_the_variables_hold_unless_a_policy_is_given(
    cli: Cli, add_one: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the environment denies does not run; a policy in code or `GraphDevices` itself is literal."""
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpu")
    for runner in (rlx_ort.load(add_one), rlx_ort.open_package(package)):
        with pytest.raises(NoViableDeviceError, match="denied"):
            runner.run("cpu", INPUTS)
    everything = rlx_ort.DevicePolicy.all()
    for runner in (rlx_ort.load(add_one, everything), rlx_ort.GraphDevices(rlx_ort.from_onnx(add_one))):
        assert runner.run("cpu", INPUTS)["y"].tolist() == [[1, 1]]
    assert cli("run", add_one, "--device", "cpu").code == 3


def test_a_prefix_of_a_program_is_no_typo(add_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLX_MYAPP_DEVICES` belongs to a policy with a prefix of its own."""
    monkeypatch.setenv("RLX_MYAPP_DEVICES", "cpu")
    rlx_ort.load(add_one)
