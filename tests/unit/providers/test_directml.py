"""Which adapter is behind an index of DirectML, by a DXGI that is played, and what keeps DirectML from working."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from onnx import parser

from rlx_ort import from_onnx
from rlx_ort.device import Device
from rlx_ort.providers import directml, hardware
from rlx_ort.providers.directml import Adapter, DirectMlProvider, _Description, _listed
from rlx_ort.providers.engine import runtime
from rlx_ort.selection.support import support_of

INTEGRATED = Adapter("Intel(R) Iris(R) Xe", "31.0.101.4502", 8 << 30, "LUID 0x00000000_0x0000d3f1", False)
LARGE = Adapter("Grafikkarte Ü 4090", "32.0.15.6094", 24 << 30, "LUID 0x00000001_0x0000e2a0", False)
BASIC = Adapter("Microsoft Basic Render Driver", "", 0, "LUID 0x00000000_0x0000fe01", True)
_NOT_FOUND = 0x887A0002 - (1 << 32)


class ComObject:
    """An object with a table of functions, as those of COM."""

    def __init__(self, methods: dict[int, tuple[Sequence[Any], Callable[..., int]]]) -> None:
        self.released = 0
        methods = {2: ((), self._release), **methods}
        self._functions = {
            place: ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *kinds)(call)
            for place, (kinds, call) in methods.items()
        }
        table = (ctypes.c_void_p * (max(methods) + 1))()
        for place, function in self._functions.items():
            table[place] = ctypes.cast(function, ctypes.c_void_p).value
        self._table = table
        self._memory = ctypes.c_void_p(ctypes.addressof(table))
        self.address = ctypes.addressof(self._memory)

    def _release(self, this: int) -> int:
        self.released += 1
        return 0


def _adapter(found: Adapter, **fields: int) -> ComObject:
    def describe(this: int, target: Any) -> int:
        made = _Description(**fields)
        words = found.name.encode("utf-16-le")
        ctypes.memmove(made.name, words, len(words))
        high, low = (int(part, 16) for part in found.luid.removeprefix("LUID ").split("_"))
        made.luid_high, made.luid_low = high, low
        ctypes.memmove(target, ctypes.byref(made), ctypes.sizeof(made))
        return 0

    def version(this: int, kind: Any, target: Any) -> int:
        if not found.driver:
            return _NOT_FOUND
        parts = [int(part) for part in found.driver.split(".")]
        value = sum(part << shift for part, shift in zip(parts, (48, 32, 16, 0), strict=True))
        ctypes.cast(target, ctypes.POINTER(ctypes.c_uint64))[0] = value
        return 0

    pointer = ctypes.c_void_p
    return ComObject({9: ((pointer, pointer), version), 10: ((pointer,), describe)})


class Dxgi:
    """The one function of `dxgi.dll` that is used."""

    def __init__(self, adapters: Sequence[ComObject]) -> None:
        def enumerate_adapters(this: int, index: int, target: Any) -> int:
            if index >= len(adapters):
                return _NOT_FOUND
            ctypes.cast(target, ctypes.POINTER(ctypes.c_void_p))[0] = adapters[index].address
            return 0

        self.factory = ComObject({12: ((ctypes.c_uint32, ctypes.c_void_p), enumerate_adapters)})

    def CreateDXGIFactory1(self, kind: bytes, target: Any) -> int:  # noqa: N802  # Windows' name
        """Return the factory."""
        assert len(kind) == 16
        target._obj.value = self.factory.address
        return 0


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Play Windows with two GPUs and the renderer that every Windows has."""
    monkeypatch.setattr(directml.sys, "platform", "win32")
    monkeypatch.setattr(directml, "loads", lambda name: True)
    monkeypatch.setattr(directml, "adapters", lambda: (INTEGRATED, LARGE, BASIC))
    monkeypatch.setattr(directml, "engine_library", lambda name: name)
    monkeypatch.setattr(DirectMlProvider, "_plugin", lambda self: None)
    return monkeypatch


def test_adapters_are_listed_in_the_order_of_dxgi() -> None:
    """With name, driver, memory and LUID; an integrated GPU has only shared memory, and nothing stays allocated."""
    made = [
        _adapter(INTEGRATED, shared_bytes=8 << 30, vendor=0x8086, device=0x9A49),
        _adapter(LARGE, video_bytes=24 << 30, shared_bytes=16 << 30, vendor=0x10DE, device=0x2684),
        _adapter(BASIC, vendor=0x1414, device=0x8C, shared_bytes=0),
        _adapter(BASIC, flags=2, vendor=1, device=1),
    ]
    dxgi = Dxgi(made)
    assert list(_listed(dxgi)) == [INTEGRATED, LARGE, BASIC, BASIC]
    assert [each.released for each in (*made, dxgi.factory)] == [1] * 5


def test_the_index_of_a_device_is_that_of_the_adapter(windows: pytest.MonkeyPatch) -> None:
    """Which ONNX Runtime gets as `device_id`; what computes on the CPU is no device."""
    provider = DirectMlProvider()
    assert provider.devices() == (Device("directx", 0), Device("directx", 1))
    facts = provider.facts(Device("directx", 1))
    assert (facts.hardware, facts.driver, facts.memory_bytes, facts.identity) == LARGE[:4]
    assert provider.missing_libraries(Device("directx", 1)) is None


@pytest.mark.parametrize(
    ("index", "reason"), [(2, "Microsoft Basic Render Driver is a software adapter"), (3, "DXGI lists 3 adapters")]
)
def test_an_index_without_a_gpu_is_refused(windows: pytest.MonkeyPatch, index: int, reason: str) -> None:
    """By its name, before a session is opened."""
    problem = DirectMlProvider().missing_libraries(Device("directx", index))
    assert problem is not None
    assert problem.reason.startswith(reason)


def test_a_machine_without_a_gpu_driver_says_so(windows: pytest.MonkeyPatch) -> None:
    """Windows then lists its own renderer only."""
    windows.setattr(directml, "adapters", lambda: (BASIC,))
    provider = DirectMlProvider()
    assert provider.devices() == (Device("directx"),)
    problem = provider.missing_libraries(Device("directx"))
    assert problem is not None
    assert problem.reason == "DXGI lists Microsoft Basic Render Driver, and no GPU with a driver"
    assert "driver" in problem.remedy


@pytest.mark.parametrize(
    ("version", "refused"), [(None, "has none"), ((1, 8, 0, 0), "has 1.8.0.0"), ((1, 15, 4, 0), "")]
)
def test_an_old_directml_of_windows_is_no_stand_in(
    windows: pytest.MonkeyPatch, version: tuple[int, ...] | None, refused: str
) -> None:
    """It is used if the one of the package is gone, as after an update that failed half way."""
    windows.setattr(directml, "engine_library", lambda name: None)
    windows.setattr(directml, "file_version", lambda name: version)
    problem = DirectMlProvider().missing_libraries(Device("directx"))
    assert (refused in problem.reason) if problem else not refused


@pytest.mark.parametrize(
    ("missing", "reason"),
    [("msvcp140.dll", "lacks msvcp140.dll"), ("", "is 14.29.30133.0, 14.40 or newer is needed")],
    ids=["missing", "old"],
)
def test_a_runtime_of_visual_cpp_that_is_missing_or_old_is_named(
    monkeypatch: pytest.MonkeyPatch, missing: str, reason: str
) -> None:
    """Installing ONNX Runtime again would not help."""

    def failing(name: str) -> Any:
        raise ImportError("DLL load failed while importing onnxruntime_pybind11_state")

    monkeypatch.setattr(runtime.importlib, "import_module", failing)
    monkeypatch.setattr(runtime.sys, "platform", "win32")
    monkeypatch.setattr(hardware, "loads", lambda name: name != missing)
    monkeypatch.setattr(hardware, "file_version", lambda name: (14, 29, 30133, 0))
    problem = runtime._load()
    assert problem is not None
    assert "DLL load failed" in problem.reason
    assert reason in problem.reason
    assert problem.remedy == "install https://aka.ms/vs/17/release/vc_redist.x64.exe"


@pytest.mark.parametrize(
    ("node", "taken"),
    [
        ("Gelu (x)", True),
        ('Gelu <approximate = "tanh"> (x)', True),
        ('Resize <mode = "nearest", axes = [2, 3]> (x, , , s)', True),
        ('Resize <mode = "nearest", axes = [2, 3], keep_aspect_ratio_policy = "not_larger"> (x, , , s)', False),
    ],
)
def test_support_by_the_kernel_list_knows_forms_and_faults(node: str, taken: bool) -> None:
    """A Gelu of ONNX has other forms, and a Resize that keeps the ratio fails in the run."""
    text = f"(float[1,1,2,3] x) => (float[a,b,c,d] y) <int64[2] s = {{7, 8}}> {{ y = {node} }}"
    graph = from_onnx(parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {text}'))
    assert support_of(Device("directx"), graph, ask=False).supported == taken
