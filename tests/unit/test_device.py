"""Device names: the table, aliases, parsing, lists, indices and the platform priority."""

import pickle

import pytest

from rlx_ort.device import (
    DEVICE_PRIORITY,
    Device,
    DeviceKind,
    as_devices,
    device_label,
    parse_device,
    parse_device_list,
    priority_rank,
    register_kind,
)
from rlx_ort.errors import DeviceParseError

# Label, display name and accepted spellings of the contract's table, with the extra aliases of the design.
TABLE = [
    ("cpu", "CPU", ["cpu"]),
    ("metal", "Metal", ["metal", "mtl", "mps"]),
    ("mlx", "MLX", ["mlx"]),
    ("ane", "ANE", ["ane", "neural-engine", "coreml"]),
    ("cuda", "CUDA", ["cuda", "nvidia"]),
    ("rocm", "ROCm", ["rocm", "hip", "amd", "migraphx"]),
    ("tpu", "TPU", ["tpu"]),
    ("gpu", "GPU (wgpu)", ["gpu", "wgpu"]),
    ("vulkan", "Vulkan", ["vulkan", "vk"]),
    ("opengl", "OpenGL", ["opengl", "gl"]),
    ("directx", "DirectX 12", ["directx", "dx12", "d3d12", "directml", "dml"]),
    ("webgpu", "WebGPU", ["webgpu"]),
]
SPELLINGS = [(spelling, label) for label, _, spellings in TABLE for spelling in spellings]


def test_the_devices_of_the_contract_come_first_and_then_the_providers_of_onnx_runtime() -> None:
    """`Device.all()` starts with the twelve kinds of the contract, in its order."""
    providers = ["openvino", "tensorrt", "nv-tensorrt-rtx", "qnn", "amdgpu"]
    assert [device.label for device in Device.all()][:17] == [*(label for label, _, _ in TABLE), *providers]


@pytest.mark.parametrize(("spelling", "label"), SPELLINGS)
def test_every_spelling_parses_to_its_device(spelling: str, label: str) -> None:
    """Every alias of the table stands for its device."""
    assert parse_device(spelling).label == label


@pytest.mark.parametrize(("label", "display"), [(label, display) for label, display, _ in TABLE])
def test_every_kind_has_the_display_name_of_the_table(label: str, display: str) -> None:
    """Display names are those of the contract."""
    assert Device(label).family.display == display


@pytest.mark.parametrize("device", Device.all(), ids=str)
def test_every_label_parses_back_to_an_equal_device(device: Device) -> None:
    """Labels round-trip."""
    assert parse_device(device_label(device)) == device


def test_a_label_is_also_given_for_a_name() -> None:
    """As everywhere where a device is taken."""
    assert (device_label("CUDAExecutionProvider"), device_label("nvidia:1")) == ("cuda", "cuda:1")


def test_names_are_trimmed_and_compared_in_lower_case() -> None:
    """Case and surrounding white space do not matter."""
    assert parse_device("\t NVidia \n") == Device.CUDA


def test_an_index_is_part_of_a_device() -> None:
    """`cuda:1` is another device than `cuda`, which is `cuda:0`; the label has an index only where there is one."""
    first, second = Device.CUDA, Device("cuda:1")
    assert (second.kind, second.index, second.label, second.display) == ("cuda", 1, "cuda:1", "CUDA (cuda:1)")
    assert (first.label, Device("directx").display) == ("cuda", "DirectX 12 (directx)")
    assert {first, Device("cuda:0"), Device("cuda", 0)} == {first} != {second}
    assert {second, Device("cuda", 1), Device(first, 1), Device("nvidia:1")} == {second}


def test_a_device_survives_pickling() -> None:
    """A device can be sent to another process."""
    assert pickle.loads(pickle.dumps(Device("rocm:2"))) == Device("rocm:2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty"),
        ("   ", "empty"),
        (" QUANTUM ", "'quantum'.*" + ".*".join(device.label for device in Device.all())),
        ("cudda", "did you mean 'cuda'"),
        *((f"cuda:{index}", "whole number") for index in ("", "x", "-1", "1.5", "1:2", "²")),
    ],
)
def test_a_name_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    """The message has the token in lower case, and names that are known or near; `input` is what was given."""
    with pytest.raises(DeviceParseError, match=says) as caught:
        parse_device(text)
    assert caught.value.input == text
    assert str(caught.value) == caught.value.message


@pytest.mark.parametrize("index", [-1, True, 1.0])
def test_a_bad_index_argument_is_refused(index: object) -> None:
    """The index is a whole number of at least 0; a bool is none."""
    with pytest.raises(DeviceParseError, match="whole number"):
        Device("cuda", index)  # type: ignore[arg-type]  # this is what is tested


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("cuda, cpu;;metal  vk,", ["cuda", "cpu", "metal", "vulkan"]),
        ("nvidia,cpu,cuda,cuda:1", ["cuda", "cpu", "cuda:1"]),
        ("\tcuda\t,\tcpu\n", ["cuda", "cpu"]),
    ],
    ids=["commas, semicolons and spaces separate", "later duplicates are dropped", "other white space is trimmed"],
)
def test_a_list_of_names_is_read(text: str, labels: list[str]) -> None:
    """The first place of a device counts, however it is spelled."""
    assert [device.label for device in parse_device_list(text)] == labels


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cpu,nope,cuda", "'nope'"),
        ("cuda\tcpu", "cuda"),
        ("", "list is empty"),
        (" ", "is empty"),
        (",;, ", "is empty"),
    ],
)
def test_a_list_that_cannot_be_read_is_refused(text: str, says: str) -> None:
    """The error names the token and keeps the whole list as its input; a tab does not separate."""
    with pytest.raises(DeviceParseError, match=says) as caught:
        parse_device_list(text)
    assert caught.value.input == text


def test_the_priority_is_that_of_the_contract_with_the_compilers_before_the_cpu() -> None:
    """The twelve keep their order; the later five stand between them and the CPU."""
    original = ["tpu", "cuda", "rocm", "mlx", "metal", "ane", "gpu", "vulkan", "directx", "opengl", "webgpu", "cpu"]
    assert [label for label in DEVICE_PRIORITY if label in original] == original
    assert DEVICE_PRIORITY[-1] == "cpu"


def test_every_built_in_kind_has_a_priority() -> None:
    """No built-in kind is left to the last place by accident."""
    assert sorted(DEVICE_PRIORITY) == sorted(device.kind for device in Device.all())


def test_names_and_devices_may_be_mixed() -> None:
    """`as_devices` keeps order and duplicates."""
    assert as_devices(["cpu", Device.CUDA, "cpu"]) == (Device.CPU, Device.CUDA, Device.CPU)


def test_a_registered_kind_is_known_and_comes_last() -> None:
    """It has no place in the priority; a module that is imported twice registers it twice, which is harmless."""
    for _ in range(2):
        register_kind(DeviceKind("npu9", "NPU 9", ("nine",)))
    assert Device("nine").label == "npu9"
    assert Device.all()[-1] == Device("npu9")
    assert Device.all().count(Device("npu9")) == 1
    assert priority_rank(Device("npu9")) == 255


def test_a_kind_cannot_take_a_name_that_means_something_else() -> None:
    """A provider cannot redirect an existing name to itself."""
    with pytest.raises(ValueError, match="already means 'cuda'"):
        register_kind(DeviceKind("npu9", "NPU 9", ("nvidia",)))
    assert "npu9" not in [device.kind for device in Device.all()]


def test_what_is_no_name_is_refused() -> None:
    """A graph where a device belongs is a typed error that names its class."""
    with pytest.raises(DeviceParseError, match="not by a list"):
        Device([])  # type: ignore[arg-type]
