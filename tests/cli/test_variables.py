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
    target = add_one.with_name("made.onnx")
    for arguments in (
        *(("report", add_one), ("run", add_one), ("bench", add_one), ("run", package), ("devices",)),
        *(("compare", add_one, add_one), ("convert", add_one, target), ("inspect", add_one), ("cache", "list")),
        ("package", "create", add_one, "-o", add_one.with_name("made.ortpackage")),
    ):
        outcome = cli(*arguments)
        assert outcome.code == 2, arguments
        assert name in outcome.err
    assert not target.exists()
    assert cli("compare", "--help").code == cli("package", "create", "-h").code == 0
    findings = cli("doctor", "--json").document["findings"]
    assert [name in finding["what"] for finding in findings if finding["code"] == "variable"] == [True]
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


@pytest.mark.parametrize(("name", "value"), [("RLX_DENY_DEVICES", "cpu"), ("RLX_DEVICES", "webgpu")])
def test_commands_that_name_a_device_respect_the_variables(
    cli: Cli, add_one: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    """`compare` runs on no device that is not allowed, its default included, and nor does the target of `convert`."""
    monkeypatch.setenv(name, value)
    for arguments in (
        ("compare", add_one, add_one),
        ("convert", add_one, add_one.with_name("o.ort"), "--device", "cpu"),
    ):
        outcome = cli(*arguments)
        assert outcome.code == 3, arguments
        assert "cpu: " in outcome.err
    assert not add_one.with_name("o.ort").exists()


def test_the_reference_of_a_conversion_is_on_the_cpu_whatever_is_set(
    cli: Cli, add_one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Denying the CPU is about running models, and leaves conversions checked."""
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpu")
    assert cli("convert", add_one, add_one.with_name("o.onnx"), "--json").document["verified"] is True


def test_a_prefix_of_a_program_is_no_typo(add_one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLX_MYAPP_DEVICES` belongs to a policy with a prefix of its own."""
    monkeypatch.setenv("RLX_MYAPP_DEVICES", "cpu")
    rlx_ort.load(add_one)
