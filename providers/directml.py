"""DirectML: any Direct3D 12 GPU or NPU on Windows; the `onnxruntime-directml` package brings it."""

from __future__ import annotations

import ctypes
import functools
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from rlx_ort.device import Device
from rlx_ort.errors import install_command
from rlx_ort.options.compile_options import CompileOptions
from rlx_ort.options.variant import Variant, variants_of
from rlx_ort.providers.base import Availability, CostProfile
from rlx_ort.providers.engine.recipe import SessionRecipe
from rlx_ort.providers.engine.runtime import Problem, reinstall_command, runtime_packages
from rlx_ort.providers.engine.stopping import Turns
from rlx_ort.providers.hardware import engine_library, file_version, loads
from rlx_ort.providers.kernel_limits import KernelLimit
from rlx_ort.providers.ort_provider import OrtProvider


class DirectMlProvider(OrtProvider):
    """GPUs through Direct3D 12; the index is the adapter's place in DXGI's list, not in that of performance."""

    name: ClassVar[str] = "directml"
    kinds: ClassVar[tuple[str, ...]] = ("directx",)
    ep_name: ClassVar[str] = "DmlExecutionProvider"
    genai_name: ClassVar[str] = "DML"
    title: ClassVar[str] = "DirectML"
    extra: ClassVar[str] = "directml"
    plugin: ClassVar[bool] = True
    # https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html
    option_keys: ClassVar[frozenset[str] | None] = frozenset(
        ("device_id", "performance_preference", "device_filter", "disable_metacommands")
    )

    def missing_libraries(self, device: Device) -> Problem | None:
        """Return whether Direct3D 12, DirectML itself or the adapter is not there, or is too old."""
        missing = [name for name in ("d3d12.dll", "dxgi.dll") if sys.platform == "win32" and not loads(name)]
        if missing:
            return Problem(f"{', '.join(missing)} not found", "update Windows to version 1903 or newer")
        return None if self._plugin() else _library_problem() or _adapter_problem(device.index)

    def facts(self, device: Device) -> Availability:
        """Return the adapter's name, driver, memory and LUID, as DXGI has them."""
        if self._plugin() or device.index >= len(adapters()):
            return super().facts(device)
        adapter = adapters()[device.index]
        remedy = self.install_remedy()
        return Availability(False, "", remedy, adapter.name, adapter.driver, adapter.memory_bytes, adapter.luid)

    def devices(self) -> Sequence[Device]:
        """Return one device for each adapter that DirectML takes, or index 0 if there is none."""
        indexes = [index for index, each in enumerate(adapters()) if not each.is_software]
        return super().devices() if self._plugin() else tuple(Device("directx", index) for index in indexes or [0])

    def install_remedy(self) -> str:
        """Return the command on Windows; elsewhere nothing brings DirectML."""
        return install_command(self.extra) if sys.platform == "win32" else "DirectML exists on Windows only"

    def recipe(self, device: Device, options: CompileOptions) -> SessionRecipe:
        """Return a recipe without memory patterns, which the provider refuses, and with one run at a time."""
        # https://onnxruntime.ai/docs/execution-providers/DirectML-ExecutionProvider.html#configuration-options:
        # memory patterns and parallel execution are not supported, and a session must not run in two threads.
        # AMD's plugin (https://github.com/onnxruntime/onnxruntime-ep-amdgpu) takes the device itself and no options.
        # From opset 20 on, they make ONNX's Gelu of erf and products. The provider has no kernel for it, so that ONNX
        # Runtime (1.24.4) runs it on the CPU.
        fusions = ("GeluFusionL1", "GeluFusionL2")
        lock = Turns()
        recipe = replace(super().recipe(device, options), mem_pattern=False, run_lock=lambda: lock, leaves_out=fusions)
        if recipe.ep_devices:
            return replace(recipe, option_keys=frozenset())
        return replace(recipe, options={"device_id": str(device.index)})

    # It takes the sizes as they are, against the shape that ONNX infers, and fails as the session is opened, or in the
    # run where sizes are open (ONNX Runtime 1.24.4, under Wine).
    limits: ClassVar[Sequence[KernelLimit]] = (
        KernelLimit(
            "Resize",
            lambda node, given: given.get("keep_aspect_ratio_policy", "stretch") != "stretch",
            "it keeps no aspect ratio",
        ),
    )
    # For Reshape see `imported._reshaped`; GroupNorm was never run here.
    distrusted_kernels: ClassVar[frozenset[tuple[str, str]]] = frozenset(
        {("", "Reshape"), ("com.microsoft", "GroupNorm")}
    )

    def variants(self, device: Device, options: CompileOptions) -> Sequence[Variant]:
        """Return runs without the driver's own kernels, without fusing the graph, and with fused attention."""
        return (
            *variants_of("provider_options.disable_metacommands", ["1"]),
            *variants_of("session_config.ep.dml.disable_graph_fusion", ["1"]),
            *variants_of("fusion", [True], ["Softmax", "Attention"]),
        )

    # Free dims compile slowly and fall out of graph fusion; bind them with `CompileOptions.dims`.

    profile: ClassVar[CostProfile | None] = CostProfile.shipped(
        "middling desktop GPU, assumed", gflops=(2_500, 1_500), bytes_per_ns=(120, 5), ns=(10_000, 150_000)
    )


class Adapter(NamedTuple):
    """A GPU as DXGI lists it: `luid` differs between equal ones until the machine restarts."""

    name: str
    driver: str
    memory_bytes: int
    luid: str
    is_software: bool


class _Description(ctypes.Structure):
    """`DXGI_ADAPTER_DESC1`, https://learn.microsoft.com/windows/win32/api/dxgi/ns-dxgi-dxgi_adapter_desc1 ."""

    _fields_ = (
        ("name", ctypes.c_uint16 * 128),
        *((name, ctypes.c_uint32) for name in ("vendor", "device", "subsystem", "revision")),
        *((name, ctypes.c_size_t) for name in ("video_bytes", "system_bytes", "shared_bytes")),
        *(("luid_low", ctypes.c_uint32), ("luid_high", ctypes.c_int32), ("flags", ctypes.c_uint32)),
    )


_FACTORY = uuid.UUID("770aae78-f26f-4dba-a829-253c83d1b387").bytes_le  # IDXGIFactory1
_DXGI_DEVICE = uuid.UUID("54ec77fa-1377-44e6-8c32-88fd5f44c84c").bytes_le  # IDXGIDevice
# Places of methods in their tables, https://github.com/microsoft/win32metadata: those of the bases come first.
_RELEASE, _ENUM_ADAPTERS1, _CHECK_INTERFACE_SUPPORT, _GET_DESC1 = 2, 12, 9, 10
_SOFTWARE, _BASIC_RENDER_DRIVER = 2, (0x1414, 0x8C)
_OLDEST_DIRECTML = (1, 15)


@functools.cache
def adapters() -> tuple[Adapter, ...]:
    """Return the adapters in the order of DXGI, which is that of ONNX Runtime's `device_id`; none except on Windows."""
    if sys.platform != "win32":
        return ()
    return tuple(_listed(ctypes.WinDLL("dxgi")))


def _listed(dxgi: Any) -> Iterator[Adapter]:
    factory = ctypes.c_void_p()
    if dxgi.CreateDXGIFactory1(_FACTORY, ctypes.byref(factory)):
        return
    adapter, index = ctypes.c_void_p(), 0
    while _call(factory, _ENUM_ADAPTERS1, ctypes.c_uint32(index), ctypes.byref(adapter)) == 0:
        described, version = _Description(), ctypes.c_uint64(0)
        _call(adapter, _GET_DESC1, ctypes.byref(described))
        _call(adapter, _CHECK_INTERFACE_SUPPORT, _DXGI_DEVICE, ctypes.byref(version))
        name = bytes(described.name).decode("utf-16-le", "replace").partition("\0")[0]
        driver = ".".join(str(version.value >> shift & 0xFFFF) for shift in (48, 32, 16, 0)) if version.value else ""
        # As ONNX Runtime refuses them (core/providers/dml/dml_provider_factory.cc).
        software = described.flags == _SOFTWARE or (described.vendor, described.device) == _BASIC_RENDER_DRIVER
        luid = f"LUID 0x{described.luid_high & 0xFFFFFFFF:08x}_0x{described.luid_low:08x}"
        yield Adapter(name, driver, described.video_bytes or described.shared_bytes, luid, software)
        _call(adapter, _RELEASE)
        index += 1
    _call(factory, _RELEASE)


def _call(made: ctypes.c_void_p, place: int, *arguments: Any) -> int:
    """Call a method of a COM object by its place in the object's table."""
    table = ctypes.cast(made, ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p)))[0]
    return int(ctypes.CFUNCTYPE(ctypes.c_int32)(table[place] or 0)(made, *arguments))


def _library_problem() -> Problem | None:
    """Return whether the package's own DirectML is gone, and Windows' copy, which is then used, is too old."""
    if sys.platform != "win32" or engine_library("DirectML") is not None:
        return None
    version = file_version("DirectML.dll")
    if version is not None and version >= _OLDEST_DIRECTML:
        return None
    has = "has none" if version is None else f"has {'.'.join(map(str, version))}"
    wanted = ".".join(map(str, _OLDEST_DIRECTML))
    reason = f"the DirectML.dll of ONNX Runtime's package is not there, and Windows {has}; {wanted} or newer is needed"
    return Problem(reason, reinstall_command(runtime_packages()))


def _adapter_problem(index: int) -> Problem | None:
    """Return why DirectML does not take the adapter of an index."""
    listed = adapters()
    if all(each.is_software for each in listed):
        names = ", ".join(each.name for each in listed) or "no adapter"
        reason = f"DXGI lists {names}, and no GPU with a driver"
        return Problem(reason, "install the driver of the GPU's vendor") if sys.platform == "win32" else None
    if index >= len(listed):
        return Problem(f"DXGI lists {len(listed)} adapters, counted from 0", "rlx-ort devices lists them")
    if listed[index].is_software:
        return Problem(
            f"{listed[index].name} is a software adapter, which DirectML does not support", "use the device cpu"
        )
    return None
