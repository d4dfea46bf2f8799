"""Devices: a kind (`cuda`) and an index (`cuda:1`), their names, aliases and priority.

A `Device` is only a name. Whether it is compiled in, can be loaded here, and takes a graph are three other
questions, answered by `rlx_ort.selection`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, TypeGuard

from rlx_ort.errors import DeviceParseError


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A family of devices: its label, the name people read, and the spellings that are understood.

    `covers` are other kinds that reach the same hardware through it or under another name: denying this kind in a
    policy denies them as well. `gpu` says which GPU it is: the one of its index, or any that the provider chooses,
    which may be one that another kind runs on; empty for others than GPUs.
    """

    label: str
    display: str
    aliases: tuple[str, ...] = ()
    covers: tuple[str, ...] = ()
    gpu: Literal["", "numbered", "any"] = ""


# Order of `Device.all()`; the first twelve are the original runtime's enum, in its order.
_BUILT_IN_KINDS = (
    DeviceKind("cpu", "CPU"),
    DeviceKind("metal", "Metal", ("mtl", "mps"), gpu="any"),
    DeviceKind("mlx", "MLX"),
    DeviceKind("ane", "ANE", ("neural-engine", "coreml")),
    DeviceKind("cuda", "CUDA", ("nvidia",), covers=("tensorrt", "nv-tensorrt-rtx"), gpu="numbered"),
    DeviceKind("rocm", "ROCm", ("hip", "amd", "migraphx"), covers=("amdgpu",), gpu="numbered"),
    DeviceKind("tpu", "TPU"),
    DeviceKind("gpu", "GPU (wgpu)", ("wgpu",), covers=("vulkan", "webgpu"), gpu="any"),
    DeviceKind("vulkan", "Vulkan", ("vk",), covers=("gpu", "webgpu"), gpu="any"),
    DeviceKind("opengl", "OpenGL", ("gl",), gpu="any"),
    DeviceKind("directx", "DirectX 12", ("dx12", "d3d12", "directml", "dml"), gpu="numbered"),
    DeviceKind("webgpu", "WebGPU", covers=("gpu", "vulkan"), gpu="any"),
    DeviceKind("openvino", "OpenVINO"),
    DeviceKind("tensorrt", "TensorRT", ("trt",), gpu="numbered"),
    DeviceKind("nv-tensorrt-rtx", "TensorRT RTX", ("tensorrt-rtx", "trt-rtx"), gpu="numbered"),
    DeviceKind("qnn", "Qualcomm QNN", ("hexagon", "htp")),
    DeviceKind("amdgpu", "AMD GPU", covers=("rocm",), gpu="numbered"),
)

# Platform priority, best first, before any cost model speaks. The compilers that share a GPU or NPU with a plainer
# device come after it: they are worth it only when asked for, since they compile for seconds to minutes.
DEVICE_PRIORITY = (
    "tpu",
    "cuda",
    "rocm",
    "mlx",
    "metal",
    "ane",
    "gpu",
    "vulkan",
    "directx",
    "opengl",
    "webgpu",
    "nv-tensorrt-rtx",
    "tensorrt",
    "amdgpu",
    "openvino",
    "qnn",
    "cpu",
)

_EP_SUFFIX = "executionprovider"  # of ONNX Runtime's names, as in CUDAExecutionProvider

_kinds: dict[str, DeviceKind] = {}
_spellings: dict[str, str] = {}


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Device:
    """One device, by value: `Device("cuda:1")`, `Device("cuda", 1)` and `Device(Device.CUDA, 1)` are equal.

    Names of execution providers are understood: `Device("CUDAExecutionProvider")` is `Device("cuda")`, and
    `Device(("CUDAExecutionProvider", {"device_id": 1}))` is `Device("cuda:1")`.

    Raises:
        DeviceParseError: the kind is unknown, the index is not a whole number of at least 0, or a pair has options
            besides `device_id`; see `with_options`.
    """

    kind: str
    index: int

    CPU: ClassVar[Device]
    METAL: ClassVar[Device]
    MLX: ClassVar[Device]
    ANE: ClassVar[Device]
    CUDA: ClassVar[Device]
    ROCM: ClassVar[Device]
    TPU: ClassVar[Device]
    GPU: ClassVar[Device]
    VULKAN: ClassVar[Device]
    OPENGL: ClassVar[Device]
    DIRECTX: ClassVar[Device]
    WEBGPU: ClassVar[Device]
    OPENVINO: ClassVar[Device]
    TENSORRT: ClassVar[Device]
    NV_TENSORRT_RTX: ClassVar[Device]
    QNN: ClassVar[Device]

    def __init__(self, kind: DeviceLike, index: int | None = None) -> None:
        if isinstance(kind, Device):
            label, own_index = kind.kind, kind.index
        else:
            label, own_index = _parse(kind)
        chosen = own_index if index is None else index
        if isinstance(chosen, bool) or not isinstance(chosen, int) or chosen < 0:
            raise DeviceParseError(str(kind), f"device index must be a whole number of at least 0, not {index!r}")
        object.__setattr__(self, "kind", label)
        object.__setattr__(self, "index", chosen)

    @property
    def label(self) -> str:
        """The canonical token, `cuda` or `cuda:1`; it parses back to an equal device."""
        return self.kind if self.index == 0 else f"{self.kind}:{self.index}"

    @property
    def display(self) -> str:
        """The name people read together with the label, such as `CUDA (cuda:1)`."""
        name = _kinds[self.kind].display
        return name if name.lower() == self.label else f"{name} ({self.label})"

    @property
    def family(self) -> DeviceKind:
        """The device's family, with its display name and aliases."""
        return _kinds[self.kind]

    @classmethod
    def all(cls) -> list[Device]:
        """Every known kind at index 0, in the order of the table; kinds added by providers come last."""
        return [cls(label) for label in _kinds]

    def __str__(self) -> str:
        return self.label

    def __repr__(self) -> str:
        return f"Device({self.label!r})"


DeviceLike: TypeAlias = Device | str | tuple[str, Mapping[str, object]]
"""A device, its name, or a pair of a name and provider options, as ONNX Runtime takes providers."""

DeviceEntry: TypeAlias = DeviceLike | Sequence[object]
"""An entry of a list of devices: type checkers take a list of pairs and names for one of sequences."""


def register_kind(kind: DeviceKind) -> None:
    """Make a device kind known; the same kind again is accepted, another one under a taken name is not.

    Raises:
        ValueError: the label or an alias already means something else.
    """
    known = _kinds.get(kind.label)
    if known == kind:
        return
    spellings = (kind.label, *kind.aliases)
    for spelling in spellings:
        if _spellings.get(spelling, kind.label) != kind.label:
            raise ValueError(f"device name {spelling!r} already means {_spellings[spelling]!r}")
    _parse_text.cache_clear()
    _kinds[kind.label] = kind
    _spellings.update(dict.fromkeys(spellings, kind.label))


def parse_device(text: str) -> Device:
    """Return the device a name stands for; names are trimmed and compared in lower case.

    Raises:
        DeviceParseError: the text is empty or names no known device; close names are suggested.
    """
    return Device(text)


def parse_device_list(text: str) -> list[Device]:
    """Return the devices of a list separated by commas, semicolons or spaces, without duplicates, in order.

    Raises:
        DeviceParseError: the list is empty, or one of its names does not parse; one bad name fails the whole list.
    """
    pieces = text.replace(";", ",").replace(" ", ",").split(",")
    devices = dict.fromkeys(_named(piece.strip(), text) for piece in pieces if piece.strip())
    if not devices:
        raise DeviceParseError(text, "device list is empty")
    return list(devices)


def device_label(device: Device | str) -> str:
    """Return the canonical token of a device.

    Raises:
        DeviceParseError: the name is no known device.
    """
    return Device(device).label


def with_options(device: DeviceLike) -> tuple[Device, dict[str, str]]:
    """Return a device, and the options of a pair `(name, options)` as ONNX Runtime takes providers, as text.

    The option `device_id` is the index of the device.

    Raises:
        DeviceParseError: the name is no known device, or the index is no whole number.
    """
    if not is_pair(device):
        return Device(device), {}
    name, given = device
    options = {str(key): str(value) for key, value in given.items()}
    index = options.pop("device_id", None)
    return Device(name) if index is None else Device(f"{Device(name).kind}:{index}"), options


def is_pair(value: object) -> TypeGuard[tuple[str, Mapping[str, object]]]:
    """Return whether this is a name with options, as ONNX Runtime takes providers."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping)


def as_devices(devices: DeviceLike | Iterable[DeviceEntry]) -> tuple[Device, ...]:
    """Return the given devices or names as devices, order and duplicates kept; one string is a list as in a variable.

    Raises:
        DeviceParseError: a name is no known device, the string names none, or it is no list.
    """
    if isinstance(devices, Device):
        return (devices,)
    if is_pair(devices):
        return (Device(devices),)
    if isinstance(devices, str):
        return tuple(parse_device_list(devices))
    if not isinstance(devices, Iterable):
        raise DeviceParseError(repr(devices), f"devices are a list such as ['cuda', 'cpu'], not {devices!r}")
    return tuple(Device(device) for device in devices)  # type: ignore[arg-type]  # the list is no pair


def priority_rank(device: Device) -> int:
    """Return the device's place in the platform priority; kinds that are not in it come last."""
    return DEVICE_PRIORITY.index(device.kind) if device.kind in DEVICE_PRIORITY else 255


def _named(piece: str, whole: str) -> Device:
    try:
        return Device(piece)
    except DeviceParseError as err:
        raise DeviceParseError(whole, f"{err.message} (in the list {whole!r})") from err


def _parse(text: object) -> tuple[str, int]:
    if is_pair(text):
        device, options = with_options(text)
        if options:
            raise DeviceParseError(
                repr(text),
                f"the options of {device.label} ({', '.join(options)}) belong to sessions: give them in "
                "CompileOptions(provider_options=...), which takes the same list, or in the device of a runner's run",
            )
        return device.kind, device.index
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DeviceParseError(
            repr(text),
            f"a device is given by its name, as in 'cuda:1', not by a {kind}; run takes (device, inputs), run_async "
            "and run_dlpack take (inputs, device), and runner(inputs)['y'] is output y from the device that is chosen",
        )
    return _parse_text(text)


@functools.lru_cache(256)
def _parse_text(text: str) -> tuple[str, int]:
    token = text.strip().lower()
    if not token:
        raise DeviceParseError(text, f"device name is empty; known devices: {', '.join(_kinds)}")
    name, colon, digits = token.partition(":")
    if colon and not (digits.isascii() and digits.isdigit()):
        raise DeviceParseError(text, f"device index in {token!r} must be a whole number, as in 'cuda:1'")
    if name.endswith(_EP_SUFFIX):
        plain = name.removesuffix(_EP_SUFFIX)
        name = next((spelling for spelling in _spellings if spelling.replace("-", "") == plain), name)
    if name not in _spellings:
        import difflib  # not needed by a program without errors

        close = difflib.get_close_matches(name, _spellings, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise DeviceParseError(text, f"unknown device {name!r}; {hint}known devices: {', '.join(_kinds)}")
    return _spellings[name], int(digits) if colon else 0


for _kind in _BUILT_IN_KINDS:
    register_kind(_kind)
    setattr(Device, _kind.label.upper().replace("-", "_"), Device(_kind.label))
