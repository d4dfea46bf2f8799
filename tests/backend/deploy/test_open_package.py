"""`open_package`: a packaged model runs, under its own policy and in the precision of each device."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from sample_packages.packages import X, files_of, flip, golden, make, reference

import rlx_ort
from rlx_ort import CompileOptions, DevicePolicy, GraphDevices, Precision
from rlx_ort.deploy import golden as golden_module
from rlx_ort.deploy.create import Recipe, create_package
from rlx_ort.deploy.golden import check_device
from rlx_ort.deploy.open import buckets_of, runner_of
from rlx_ort.deploy.package import Package, PackageTensor
from rlx_ort.errors import DeviceParseError, IntegrityError, NoViableDeviceError, PackageError
from rlx_ort.providers import registry
from rlx_ort.providers.base import CostProfile
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.engine.runtime import onnxruntime
from rlx_ort.providers.null import NullProvider
from rlx_ort.providers.registry import ProviderRegistry


def _used(runner: GraphDevices, name: str) -> bool:
    data = runner.weights.get(name)
    assert isinstance(data, PackageTensor)
    return data.is_verified


@pytest.mark.parametrize("private", [False, True], ids=["mapped", "private"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_package_runs(tmp_path: Path, folder: bool, private: bool) -> None:
    """Both forms give the output of the float64 reference, and only the run reads the weights."""
    with rlx_ort.open_package(make(tmp_path / "a.ortpackage", folder=folder), private=private) as runner:
        assert not _used(runner, "first")
        (found,) = runner.run("cpu", {"x": X})
        assert _used(runner, "first")
    np.testing.assert_allclose(found, reference(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_a_changed_weight_never_reaches_a_session(tmp_path: Path, folder: bool) -> None:
    """A bit that flips before the first run is an IntegrityError, and no session was opened."""
    path = make(tmp_path / "a.ortpackage", folder=folder)
    runner = rlx_ort.open_package(path)
    source = runner.graph.weights["second"].source
    assert source is not None
    flip(Path(source.path), source.offset + 77, 5)
    with pytest.raises(IntegrityError, match=Path(source.path).name):
        runner.run("cpu", {"x": X})
    assert runner.last_attempts == ()


def test_the_weights_of_a_precision_are_those_of_its_variant(tmp_path: Path) -> None:
    """With cpu:f16 a run on the CPU takes the stored f16 weights, and the f32 ones are not even read."""
    path = make(tmp_path / "a.ortpackage", variants={"cpu": Precision.F16})
    package = Package(path)
    with runner_of(package) as runner:
        (found,) = runner.run("cpu", {"x": X})
        assert not _used(runner, "first")
    assert package.tensor("cpu-f16/first").is_verified
    error = np.max(np.abs(found - reference(X))) / np.max(np.abs(reference(X)))
    assert 1e-6 < error < 1e-2  # rounded as f16 is, and not f32


def test_a_precision_without_weights_of_its_own_is_rounded_here(tmp_path: Path) -> None:
    """`precisions` only says how to run: the f32 weights are read and rounded."""
    path = make(tmp_path / "a.ortpackage", variants={"cuda": Precision.F32}, precisions={"cpu": Precision.F16})
    with rlx_ort.open_package(path) as runner:
        (found,) = runner.run("cpu", {"x": X})
        assert _used(runner, "first")
    assert np.max(np.abs(found - reference(X))) > 1e-6


def test_the_callers_precision_comes_first(tmp_path: Path) -> None:
    """Options given at opening overrule those of the package."""
    path = make(tmp_path / "a.ortpackage", variants={"cpu": Precision.F16})
    with rlx_ort.open_package(path, options=CompileOptions(precisions={"cpu": Precision.F32})) as runner:
        (found,) = runner.run("cpu", {"x": X})
    np.testing.assert_allclose(found, reference(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("policy", [None, DevicePolicy(), DevicePolicy.only("cpu")], ids=["none", "any", "cpu"])
@pytest.mark.parametrize("opened", [rlx_ort.open_package, rlx_ort.load])
def test_a_policy_narrows_that_of_the_package(tmp_path: Path, opened: Any, policy: DevicePolicy | None) -> None:
    """A device that the package denies is refused, whatever the caller allows; `set_policy` replaces both."""
    path = make(tmp_path / "a.ortpackage", policy=DevicePolicy().with_deny(["cpu"]))
    with opened(path, policy) as runner:
        with pytest.raises(NoViableDeviceError, match="denied"):
            runner.run("cpu", {"x": X})
        runner.set_policy(DevicePolicy())
        assert len(runner.run("cpu", {"x": X})) == 1


def test_fixed_dims_are_bound(tmp_path: Path) -> None:
    """A dim that the package fixes takes no other size."""
    with rlx_ort.open_package(make(tmp_path / "a.ortpackage", dims={"rows": 3})) as runner:
        assert runner.run("cpu", {"x": X})[0].shape == (3, 32)
        with pytest.raises(rlx_ort.InputError):
            runner.run("cpu", {"x": X[:2]})


BRANCHES = """
<ir_version: 8, opset_import: ["": 18]>
branches (bool c, float[300] x) => (float[300] y)
{
    k = Constant <value = float[300] VALUES> ()
    y = If (c) <
        then_branch = yes () => (float[300] a) { a = Add (x, k) },
        else_branch = no () => (float[300] b) { b = Mul (x, k) }
    >
}
"""


@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_constants_and_bodies_come_along(tmp_path: Path, folder: bool) -> None:
    """A model with a constant above 1 KB that its branches read gives the same from a package."""
    numbers = np.arange(300, dtype=np.float32)
    text = BRANCHES.replace("VALUES", "{" + ", ".join(f"{number:.1f}" for number in numbers) + "}")
    onnx.save(parser.parse_model(text), tmp_path / "branches.onnx")
    graph = rlx_ort.load(tmp_path / "branches.onnx").graph
    path = tmp_path / "a.ortpackage"
    create_package(graph, path, Recipe(), folder=folder)
    x = np.full(300, 2, np.float32)
    with rlx_ort.open_package(path) as runner:
        for choice, expected in ((True, x + numbers), (False, x * numbers)):
            (found,) = runner.run("cpu", {"c": np.array(choice), "x": x})
            np.testing.assert_array_equal(found, expected)


def test_buckets_pad_to_the_longest_of_a_range(tmp_path: Path) -> None:
    """Lengths of one range share one graph with the package's weights, and the padding is cut off again."""
    with Package(make(tmp_path / "a.ortpackage", buckets=("rows", ((1, 5), (5, 9))))) as package:
        cache, build = buckets_of(package)
        for rows in (2, 3):
            found = cache.run_padded(rows, rows, build, [("x", X[:rows], 32)], [32])
            assert found is not None
            assert found[0] == 4
            np.testing.assert_allclose(found[1][0], reference(X[:rows]), rtol=1e-5, atol=1e-5)
        assert cache.compiled_count == 1
    with Package(make(tmp_path / "b.ortpackage")) as plain, pytest.raises(PackageError, match="no buckets"):
        buckets_of(plain)


def test_golden_outputs_are_those_of_the_cpu_when_none_are_given(tmp_path: Path) -> None:
    """Packing runs the inputs on the CPU, and they agree with the reference."""
    with Package(make(tmp_path / "a.ortpackage", golden=[({"x": X}, None)])) as package:
        (found,) = package.arrays(package.cases[0].outputs).values()
    np.testing.assert_allclose(found, reference(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [0, 1], ids=["right", "wrong"])
def test_the_golden_check_tells_right_from_wrong(tmp_path: Path, seed: int) -> None:
    """Outputs of the same weights are right, outputs of others are wrong, and the output is named."""
    with Package(make(tmp_path / "a.ortpackage", golden=[golden(seed)])) as package, runner_of(package) as runner:
        parity = check_device(package, runner, rlx_ort.Device("cpu"))
    assert parity.ok == (seed == 0)
    assert ("off by" in parity.verdict) == (seed == 1)


def test_a_device_that_is_not_here_is_not_wrong(tmp_path: Path) -> None:
    """A device that cannot run has a reason and no outputs."""
    with Package(make(tmp_path / "a.ortpackage")) as package, runner_of(package) as runner:
        parity = check_device(package, runner, rlx_ort.Device("tpu"))
    assert (parity.ok, parity.outputs) == (False, ())
    assert parity.reason


def test_a_machine_whose_devices_are_wrong_gets_no_runner(tmp_path: Path) -> None:
    """With golden outputs that nobody gives, opening fails and lists each device with its error."""
    path = make(tmp_path / "a.ortpackage", golden=[golden(1)], policy=DevicePolicy.only(["cpu"]))
    with pytest.raises(NoViableDeviceError, match=r"cpu: output .* is off by"):
        rlx_ort.open_package(path, verify_on_first_use=True)


def _run_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ran: list[str] = []

    def counting(package: Any, runner: Any, device: Any, *rest: Any) -> Any:
        ran.append(device.label)
        return check_device(package, runner, device, *rest)

    monkeypatch.setattr(golden_module, "check_device", counting)
    return ran


def test_the_first_use_is_checked_once_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second opening finds the result; another package, or another cache folder, is checked anew."""
    ran = _run_on(monkeypatch)
    policy = DevicePolicy.only(["cpu"])
    path = make(tmp_path / "a.ortpackage", verify_on_first_use=True, policy=policy)
    for _ in range(2):
        rlx_ort.open_package(path).close()
    assert ran == ["cpu"]
    rlx_ort.open_package(make(tmp_path / "b.ortpackage", verify_on_first_use=True, policy=policy, serial=6)).close()
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "elsewhere"))
    rlx_ort.open_package(path).close()
    assert ran == ["cpu"] * 3


def test_a_damaged_result_is_checked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept is never trusted blindly: garbage in it means that the check runs again."""
    path = make(tmp_path / "a.ortpackage", verify_on_first_use=True, policy=DevicePolicy.only(["cpu"]))
    rlx_ort.open_package(path).close()
    ran = _run_on(monkeypatch)
    (kept,) = (tmp_path / "cache" / "first-use").iterdir()
    for text in ("", "[]", json.dumps({"schema": 1, "refused": 0})):
        kept.write_text(text, encoding="utf-8")
        rlx_ort.open_package(path).close()
    assert ran == ["cpu"] * 3


def test_a_result_that_cannot_be_kept_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package opens, and the cache folder holds no half-written file."""

    def full(source: Path, target: Path) -> None:
        raise OSError(28, "no space left", str(target))

    path = make(tmp_path / "a.ortpackage", verify_on_first_use=True, policy=DevicePolicy.only(["cpu"]))
    monkeypatch.setattr(os, "replace", full)
    rlx_ort.open_package(path).close()
    assert list((tmp_path / "cache" / "first-use").iterdir()) == []


@pytest.mark.webgpu
def test_a_wrong_device_gives_way_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The preferred device that fails the golden cases is denied with its reason, and the next one answers."""

    def wrong_on_webgpu(package: Any, runner: Any, device: Any, *rest: Any) -> Any:
        parity = check_device(package, runner, device, *rest)
        if device.label != "webgpu":
            return parity
        bad = [type(output)(output.name, output.case, 9.0, ok=False) for output in parity.outputs]
        return type(parity)(device, parity.precision, parity.tolerance, tuple(bad))

    monkeypatch.setattr(golden_module, "check_device", wrong_on_webgpu)
    policy = DevicePolicy.only(["webgpu", "cpu"]).with_deny([])
    monkeypatch.setenv("RLX_DEVICE", "webgpu")
    path = make(tmp_path / "a.ortpackage", verify_on_first_use=True, policy=policy)
    with rlx_ort.open_package(path) as runner:
        assert runner.resolve().label == "cpu"
        ((device, reason),) = runner.last_attempts
    assert device.label == "webgpu"
    assert "off by 9" in reason


def test_a_device_that_does_not_open_is_refused_and_not_known_to_be_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the device that answered instead is not taken for its own, in this process or in the next."""
    fast = CostProfile(1e6, 1e6, 1e6, 1.0, 1.0, 0.0, 0.0)
    broken = NullProvider(open_failure="no memory", profile=fast)
    known = ProviderRegistry((CpuProvider(), broken))
    path = make(tmp_path / "a.ortpackage", verify_on_first_use=True, policy=DevicePolicy.only(["null", "cpu"]))
    monkeypatch.setattr(registry, "default_registry", lambda: known)
    ran = _run_on(monkeypatch)
    for _ in range(2):
        with rlx_ort.open_package(path) as runner:
            assert [(device.label, reason) for device, reason in runner.last_attempts] == [("null", "no memory")]
            np.testing.assert_allclose(runner.run_fastest({"x": X})[0], reference(X), rtol=1e-5, atol=1e-5)
    assert ran == ["null", "cpu", "null"]


def test_the_variables_narrow_the_policy_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A denied device does not run, unless a policy is given in their place; a typo raises."""
    path = make(tmp_path / "a.ortpackage")
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpu")
    with rlx_ort.open_package(path) as runner, pytest.raises(NoViableDeviceError, match="deny: cpu"):
        runner.run("cpu", {"x": X})
    with rlx_ort.open_package(path, DevicePolicy()) as runner:
        runner.run("cpu", {"x": X})
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpuu")
    with pytest.raises(DeviceParseError, match="RLX_DENY_DEVICES"):
        rlx_ort.open_package(path)


def test_a_package_without_golden_cases_cannot_be_checked(tmp_path: Path) -> None:
    """Asking for the check all the same is an error, not a silent yes."""
    with pytest.raises(PackageError, match="golden"):
        rlx_ort.open_package(make(tmp_path / "a.ortpackage", golden=[]), verify_on_first_use=True)


@pytest.mark.parametrize(("variant", "tolerance"), [("cpu-f32", 1e-5), ("cuda-f16", 1e-2)])
def test_plain_onnxruntime_runs_the_models_of_a_folder(tmp_path: Path, variant: str, tolerance: float) -> None:
    """Each variant's model opens with nothing but what `manifest.json` says, and agrees with the reference."""
    folder = make(tmp_path / "a.ortpackage", folder=True)
    manifest = json.loads(files_of(folder)["manifest.json"])
    info = manifest["components"]["model"]["variants"][variant]["executor_info"]["ort"]
    engine = onnxruntime()
    options = engine.SessionOptions()
    for key, uri in info["session_options"].items():
        options.add_session_config_entry(key, str(folder / "shared_assets" / uri.replace(":", "-")))
    session = engine.InferenceSession(folder / variant / info["model_file"], options, ["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": X})
    error = np.max(np.abs(found - reference(X))) / np.max(np.abs(reference(X)))
    assert error < tolerance


def test_a_package_may_be_resilient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the argument, or by the variable; runs have limits and the devices a health then."""
    path = make(tmp_path / "small.ortpackage")
    runner = rlx_ort.open_package(path, DevicePolicy.only(["cpu"]), resilience=rlx_ort.Resilience(timeout_s=30.0))
    runner.run_resolved({"x": X}, timeout_s=20.0)
    assert [row.device for row in runner.health()] == [rlx_ort.Device.CPU]
    monkeypatch.setenv("RLX_RESILIENCE", "on")
    assert rlx_ort.open_package(path, DevicePolicy.only(["cpu"])).health()
    monkeypatch.setenv("RLX_RESILIENCE", "timeout=1")
    with pytest.raises(DeviceParseError):
        rlx_ort.open_package(path)
