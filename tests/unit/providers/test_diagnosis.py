"""The doctor, on situations that are put before it."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx_ort.errors import install_command
from rlx_ort.providers import diagnosis, hardware, webgpu
from rlx_ort.providers.diagnosis import Finding, Severity, diagnose
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.engine.runtime import Problem, find_problem
from rlx_ort.providers.hardware import CoreShare
from rlx_ort.providers.openvino import OpenVinoProvider
from rlx_ort.providers.plugins import Plugin
from rlx_ort.providers.registry import ProviderRegistry


@pytest.fixture
def absent(monkeypatch):
    """Play a machine without ONNX Runtime."""
    monkeypatch.setattr(runtime, "runtime_problem", lambda: Problem("ONNX Runtime is not installed", "pip it"))
    monkeypatch.setattr(diagnosis, "runtime_packages", dict)


def by_code(findings: list[Finding], code: str) -> Finding:
    return next(finding for finding in findings if finding.code == code)


def test_an_absent_runtime_is_an_error_with_a_command(absent):
    """The first finding is what stops everything."""
    found = diagnose(ProviderRegistry())[0]
    assert (found.code, found.severity, found.remedy) == ("runtime-absent", Severity.ERROR, "pip it")


def test_two_runtimes_in_one_folder_are_an_error(absent, monkeypatch):
    """The command removes both and installs the accelerated one again."""
    packages = {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}
    monkeypatch.setattr(diagnosis, "runtime_packages", lambda: packages)
    found = by_code(diagnose(ProviderRegistry()), "two-runtimes")
    assert "onnxruntime-gpu 1.30.0" in found.what
    assert found.remedy == (
        "pip uninstall -y onnxruntime onnxruntime-gpu && pip install --force-reinstall onnxruntime-gpu==1.30.0"
    )


def test_a_folder_left_by_an_uninstall_is_told_from_an_absent_runtime(monkeypatch, tmp_path):
    """A namespace package without files is broken, not absent."""
    (tmp_path / "onnxruntime").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setattr(runtime, "runtime_packages", lambda: {"onnxruntime": "1.31.1"})
    monkeypatch.delitem(__import__("sys").modules, "onnxruntime", raising=False)
    problem = find_problem()
    assert problem is not None
    assert "incomplete" in problem.reason
    assert "--force-reinstall onnxruntime==1.31.1" in problem.remedy


def test_an_empty_machine_has_nothing_installed(monkeypatch, tmp_path):
    """Without folder and package the answer is the install command."""
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(__import__("sys").modules, "onnxruntime", raising=False)
    assert find_problem() == Problem("ONNX Runtime is not installed", install_command("cpu"))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("ONNX Runtime 1.20 is too old", "runtime-too-old"),
        ("the onnxruntime folder is incomplete", "runtime-broken"),
        ("ONNX Runtime is not installed", "runtime-absent"),
    ],
)
def test_runtime_problems_have_codes(absent, monkeypatch, reason, code):
    """Scripts can tell them apart."""
    monkeypatch.setattr(runtime, "runtime_problem", lambda: Problem(reason, "x"))
    assert by_code(diagnose(ProviderRegistry()), code).severity is Severity.ERROR


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        ("x 1 needs a newer ONNX Runtime than 1.24", "plugin-newer"),
        ("x 1 is too old for ONNX Runtime 1.31", "plugin-older"),
        ("x 1 does not load: libvulkan.so.1", "plugin-broken"),
    ],
)
def test_plugin_problems_have_codes(monkeypatch, reason, code):
    """Older, newer and broken plugins are different findings."""
    monkeypatch.setattr(diagnosis, "register_plugin", lambda *_: Problem(reason, "do"))
    monkeypatch.setattr(runtime, "onnxruntime", lambda: None)
    monkeypatch.setattr(runtime, "engine_exceptions", tuple)
    (found,) = diagnosis._plugins((Plugin("x", "1"),), ProviderRegistry())
    assert (found.code, found.what, found.remedy) == (code, reason, "do")


def test_a_plugin_that_rejects_the_hardware_is_a_warning_with_what_helps(monkeypatch):
    """Installing what is installed would not help."""
    monkeypatch.setattr(diagnosis, "register_plugin", lambda *_: None)
    monkeypatch.setattr(diagnosis, "plugin_devices", lambda *_: ())
    monkeypatch.setattr(runtime, "onnxruntime", lambda: None)
    monkeypatch.setattr(runtime, "engine_exceptions", tuple)
    plugin = Plugin("onnxruntime-ep-openvino", "1.8.1", ("OpenVINOExecutionProvider",))
    (found,) = diagnosis._plugins((plugin,), ProviderRegistry((OpenVinoProvider(),)))
    assert (found.code, found.severity) == ("no-hardware", Severity.WARNING)
    assert "Intel" in found.remedy
    assert "pip install onnxruntime-ep-openvino" not in found.remedy


@pytest.mark.parametrize(
    ("environ", "allowed", "severity", "words"),
    [
        ({"ORT_DISABLE_TELEMETRY": "1"}, False, Severity.INFO, "is off"),
        ({}, True, Severity.INFO, "is on"),
        ({}, False, Severity.WARNING, "may be on"),
        ({"ORT_DISABLE_TELEMETRY": "0"}, False, Severity.WARNING, "may be on"),
    ],
)
def test_the_state_of_telemetry_is_told(monkeypatch, environ, allowed, severity, words):
    """Off, on because it was allowed, and on by accident."""
    monkeypatch.setattr(runtime, "telemetry_allowed", lambda: allowed)
    found = diagnosis._telemetry(environ)
    assert found.severity is severity
    assert words in found.what


def test_a_container_with_fewer_cores_is_a_warning():
    """Both the quota and the affinity are named."""
    (found,) = diagnosis._cores(CoreShare(16, 8, 4, 2.5))
    assert (found.code, found.severity) == ("cores-limited", Severity.WARNING)
    assert "2 of 8" in found.what
    assert "2.5" in found.what


def test_all_cores_are_no_warning():
    """Nothing limits the process."""
    (found,) = diagnosis._cores(CoreShare(16, 8, 16, None))
    assert found.severity is Severity.INFO


def test_errors_come_first(absent):
    """What stops everything is read first."""
    severities = [finding.severity for finding in diagnose(ProviderRegistry())]
    assert severities == sorted(severities, key=list(Severity).index)


def test_every_missing_library_is_named(monkeypatch):
    """The report of ldd is read to its end, and what Python has loaded already counts as found."""
    report = "\tlibcublas.so.13 => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x0)\n\tlibcurand.so.10 => not found\n"

    class Done:
        stdout = report

    monkeypatch.setattr(hardware.sys, "platform", "linux")
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/ldd")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: Done)
    monkeypatch.setattr(hardware, "loads", lambda name: False)
    assert hardware.missing_libraries(Path("x.so")) == ("libcublas.so.13", "libcurand.so.10")


def test_on_windows_each_required_dll_is_tried(monkeypatch):
    """The loader of Windows names nothing, so the known names are."""
    monkeypatch.setattr(hardware.sys, "platform", "win32")
    monkeypatch.setattr(hardware, "loads", lambda name: name == "a.dll")
    assert hardware.missing_libraries(Path("x.dll"), ("a.dll", "b.dll", "c.dll")) == ("b.dll", "c.dll")


def test_a_missing_driver_and_missing_libraries_have_their_own_remedies(monkeypatch):
    """The driver brings libcuda, the rest comes from wheels."""
    from rlx_ort.providers import cuda

    monkeypatch.setattr(cuda, "engine_library", lambda name: Path("libonnxruntime_providers_cuda.so"))
    monkeypatch.setattr(cuda, "missing_libraries", lambda *_: ("libcublas.so.13", "libcuda.so.1"))
    monkeypatch.setattr(cuda, "_preload_from_wheels", lambda: None)
    problem = cuda.cuda_libraries_problem("onnxruntime_providers_cuda")
    assert problem is not None
    assert "libcublas.so.13, libcuda.so.1" in problem.reason
    assert "NVIDIA driver" in problem.remedy
    assert shlex.split(problem.remedy, comments=True) == ["pip", "install", "onnxruntime-gpu[cuda,cudnn]"]


def test_no_vulkan_loader_and_no_driver_are_told_apart(monkeypatch, tmp_path):
    """Each has its own package to install."""
    monkeypatch.setattr(webgpu, "loads", lambda _: False)
    assert "libvulkan1" in webgpu.vulkan_problem().remedy
    monkeypatch.setattr(webgpu, "loads", lambda _: True)
    monkeypatch.setattr(webgpu, "vulkan_drivers", tuple)
    monkeypatch.delenv("VK_DRIVER_FILES", raising=False)
    monkeypatch.delenv("VK_ICD_FILENAMES", raising=False)
    assert "no Vulkan driver" in webgpu.vulkan_problem().reason
    monkeypatch.setenv("VK_DRIVER_FILES", str(tmp_path / "gone.json"))
    assert "gone.json" in webgpu.vulkan_problem().reason


def test_a_folder_that_cannot_be_written_is_a_warning(monkeypatch, tmp_path):
    """Nothing would be kept between runs, and the remedy names the variable."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = by_code(diagnose(ProviderRegistry()), "cache-unwritable")
    assert found.severity is Severity.WARNING
    assert "RLX_CACHE_DIR" in found.remedy
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path / "new"))
    assert by_code(diagnose(ProviderRegistry()), "cache").severity is Severity.INFO


def test_the_memory_limit_of_a_container_is_a_warning(monkeypatch):
    """512 MiB of 23 GiB is what models have to fit into."""
    monkeypatch.setattr("rlx_ort.providers.diagnosis.host_memory_bytes", lambda: 23 << 30)
    monkeypatch.setattr("rlx_ort.providers.diagnosis.memory_bytes", lambda: 512 << 20)
    found = by_code(diagnose(ProviderRegistry()), "memory-limited")
    assert found.severity is Severity.WARNING
    assert "0.5 GiB of the machine's 23 GiB" in found.what


def test_a_library_that_lacks_none_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each session asks; one that lacks a library is looked at again, since the user may install it meanwhile."""
    outputs = {"good.so": "libc.so.6 => /lib/libc.so.6", "bad.so": "libnone.so.1 => not found"}
    asked: list[str] = []

    def ran(tool: str, library: str, timeout_s: float) -> SimpleNamespace:
        asked.append(library)
        return SimpleNamespace(stdout=f"\t{outputs[library]}\n")

    monkeypatch.setattr(hardware.sys, "platform", "linux")
    monkeypatch.setattr(hardware, "_ran", ran)
    monkeypatch.setattr(hardware, "_complete", set())
    for library in ("good.so", "good.so", "bad.so", "bad.so"):
        assert hardware.missing_libraries(Path(library)) == (("libnone.so.1",) if library == "bad.so" else ())
    assert asked == ["good.so", "bad.so", "bad.so"]
