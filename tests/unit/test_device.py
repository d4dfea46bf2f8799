"""Device names: the table, aliases, parsing, lists, indices and the platform priority."""

import pickle

import pytest

from rlx_ort import device as device_module
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


@pytest.fixture
def kinds_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds that a test registers are forgotten after it."""
    monkeypatch.setattr(device_module, "_kinds", dict(device_module._kinds))
    monkeypatch.setattr(device_module, "_spellings", dict(device_module._spellings))


def test_the_first_twelve_devices_come_in_the_order_of_the_table() -> None:
    """`Device.all()` starts with the twelve kinds of the contract, in its order."""
    assert [device.label for device in Device.all()][:12] == [label for label, _, _ in TABLE]


def test_the_providers_of_onnx_runtime_follow_the_twelve() -> None:
    """Five kinds stand behind the original ones."""
    assert [device.label for device in Device.all()][12:17] == [
        "openvino",
        "tensorrt",
        "nv-tensorrt-rtx",
        "qnn",
        "amdgpu",
    ]


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


def test_an_index_is_part_of_the_name_and_of_equality() -> None:
    """`cuda:1` is another device than `cuda`, and `cuda:0` is the same."""
    assert (Device("cuda:1").kind, Device("cuda:1").index) == ("cuda", 1)
    assert Device("cuda:1") != Device.CUDA
    assert Device("cuda:0") == Device.CUDA


def test_equal_devices_are_one_key() -> None:
    """Devices hash by value, however they were written."""
    assert len({Device("cuda:1"), Device("cuda", 1), Device(Device.CUDA, 1), Device("nvidia:1")}) == 1


def test_the_label_shows_the_index_only_when_there_is_one() -> None:
    """The first device of a kind is called by the kind alone."""
    assert (Device("cuda", 0).label, Device("cuda", 1).label) == ("cuda", "cuda:1")


def test_the_display_shows_name_and_label_together() -> None:
    """A message never has to choose between the two naming systems."""
    assert Device("cuda:1").display == "CUDA (cuda:1)"
    assert Device("directx").display == "DirectX 12 (directx)"


def test_a_device_cannot_be_changed() -> None:
    """A device is a frozen value."""
    with pytest.raises(AttributeError):
        Device.CPU.kind = "cuda"  # type: ignore[misc]  # this is what is tested


def test_a_device_survives_pickling() -> None:
    """A device can be sent to another process."""
    assert pickle.loads(pickle.dumps(Device("rocm:2"))) == Device("rocm:2")


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_name_has_a_message_of_its_own(text: str) -> None:
    """An empty name is not reported as an unknown one."""
    with pytest.raises(DeviceParseError, match="empty"):
        parse_device(text)


def test_an_unknown_name_is_reported_in_lower_case_with_known_ones() -> None:
    """The message has the token and the list of names one may use."""
    with pytest.raises(DeviceParseError) as caught:
        parse_device(" QUANTUM ")
    assert "'quantum'" in str(caught.value)
    assert [device.label for device in Device.all() if device.label not in str(caught.value)] == []


def test_a_parse_error_keeps_the_text_as_it_was_given() -> None:
    """`input` is the original string, and the message is the text of the error."""
    with pytest.raises(DeviceParseError) as caught:
        parse_device(" QUANTUM ")
    assert caught.value.input == " QUANTUM "
    assert str(caught.value) == caught.value.message


def test_a_typo_gets_a_suggestion() -> None:
    """A near miss names what was probably meant."""
    with pytest.raises(DeviceParseError, match="did you mean 'cuda'"):
        parse_device("cudda")


@pytest.mark.parametrize("text", ["cuda:", "cuda:x", "cuda:-1", "cuda:1.5", "cuda:1:2", "cuda:²"])
def test_a_bad_index_in_a_name_is_refused(text: str) -> None:
    """The index is digits and nothing else."""
    with pytest.raises(DeviceParseError, match="whole number"):
        parse_device(text)


@pytest.mark.parametrize("index", [-1, True, 1.0])
def test_a_bad_index_argument_is_refused(index: object) -> None:
    """The index is a whole number of at least 0; a bool is none."""
    with pytest.raises(DeviceParseError, match="whole number"):
        Device("cuda", index)  # type: ignore[arg-type]  # this is what is tested


def test_a_list_is_separated_by_commas_semicolons_and_spaces() -> None:
    """The three separators may be mixed, and empty pieces are skipped."""
    assert parse_device_list("cuda, cpu;;metal  vk,") == [Device.CUDA, Device.CPU, Device.METAL, Device.VULKAN]


def test_a_list_drops_later_duplicates_however_they_are_spelled() -> None:
    """The first place of a device counts."""
    assert parse_device_list("nvidia,cpu,cuda,cuda:1") == [Device.CUDA, Device.CPU, Device("cuda:1")]


def test_a_tab_does_not_separate_but_is_trimmed_at_the_ends_of_a_piece() -> None:
    """Only the space character separates among white space."""
    assert parse_device_list("\tcuda\t,\tcpu\n") == [Device.CUDA, Device.CPU]
    with pytest.raises(DeviceParseError):
        parse_device_list("cuda\tcpu")


def test_one_bad_name_fails_the_whole_list() -> None:
    """The error names the token and keeps the whole list as its input."""
    with pytest.raises(DeviceParseError, match="'nope'") as caught:
        parse_device_list("cpu,nope,cuda")
    assert caught.value.input == "cpu,nope,cuda"


@pytest.mark.parametrize("text", ["", " ", ",;, "])
def test_a_list_without_names_is_an_error(text: str) -> None:
    """Nothing left after splitting is not an empty list but an error."""
    with pytest.raises(DeviceParseError, match="list is empty"):
        parse_device_list(text)


def test_the_priority_is_that_of_the_contract_with_the_compilers_before_the_cpu() -> None:
    """The twelve keep their order; the later five stand between them and the CPU."""
    original = ["tpu", "cuda", "rocm", "mlx", "metal", "ane", "gpu", "vulkan", "directx", "opengl", "webgpu", "cpu"]
    assert [label for label in DEVICE_PRIORITY if label in original] == original
    assert DEVICE_PRIORITY[-1] == "cpu"


def test_every_built_in_kind_has_a_priority() -> None:
    """No built-in kind is left to the last place by accident."""
    assert sorted(DEVICE_PRIORITY) == sorted(device.kind for device in Device.all())


def test_kinds_are_constants_of_the_class() -> None:
    """Each built-in kind has a name on `Device`."""
    assert Device("nv-tensorrt-rtx") == Device.NV_TENSORRT_RTX


def test_names_and_devices_may_be_mixed() -> None:
    """`as_devices` keeps order and duplicates."""
    assert as_devices(["cpu", Device.CUDA, "cpu"]) == (Device.CPU, Device.CUDA, Device.CPU)


@pytest.mark.usefixtures("kinds_restored")
def test_a_registered_kind_is_known_and_comes_last() -> None:
    """A provider may bring a kind of its own, which has no place in the priority."""
    register_kind(DeviceKind("npu9", "NPU 9", ("nine",)))
    assert Device("nine").label == "npu9"
    assert Device.all()[-1] == Device("npu9")
    assert priority_rank(Device("npu9")) == 255


@pytest.mark.usefixtures("kinds_restored")
def test_registering_the_same_kind_twice_is_harmless() -> None:
    """A module that is imported twice does no damage."""
    register_kind(DeviceKind("npu9", "NPU 9"))
    register_kind(DeviceKind("npu9", "NPU 9"))
    assert Device.all().count(Device("npu9")) == 1


@pytest.mark.usefixtures("kinds_restored")
def test_a_kind_cannot_take_a_name_that_means_something_else() -> None:
    """A provider cannot redirect an existing name to itself."""
    with pytest.raises(ValueError, match="already means 'cuda'"):
        register_kind(DeviceKind("npu9", "NPU 9", ("nvidia",)))
    assert "npu9" not in [device.kind for device in Device.all()]


def test_what_is_no_name_is_refused() -> None:
    """A graph where a device belongs is a typed error that names its class."""
    with pytest.raises(DeviceParseError, match="not by a list"):
        Device([])  # type: ignore[arg-type]
