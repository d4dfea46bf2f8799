"""`DevicePolicy`: builders, the environment, what is probed, and the order of candidates."""

from typing import Any

import pytest

from rlx_ort import environment
from rlx_ort.device import Device
from rlx_ort.errors import DeviceParseError
from rlx_ort.selection.policy import (
    Adaptive,
    Benchmark,
    CostModel,
    DevicePickStrategy,
    DevicePolicy,
    device_chain_from_env,
    device_from_env,
)

CPU, CUDA, GPU, METAL = Device.CPU, Device.CUDA, Device.GPU, Device.METAL


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine reaches a test."""
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def test_the_default_restricts_nothing_and_picks_by_cost() -> None:
    """`all()` is the default policy."""
    assert DevicePolicy.all() == DevicePolicy()
    assert DevicePolicy().pick_strategy() == CostModel()


def test_only_keeps_order_and_duplicates() -> None:
    """The allow list is exactly what was given."""
    assert DevicePolicy.only(["cpu", "cuda", "cpu"]).allow == (CPU, CUDA, CPU)


def test_only_nothing_means_that_nothing_is_viable() -> None:
    """An empty allow list is not the same as no allow list."""
    assert DevicePolicy.only([]).apply([CPU, CUDA]) == []
    assert DevicePolicy.only([]) != DevicePolicy.all()


def test_denials_accumulate() -> None:
    """A second `with_deny` adds to the first."""
    assert DevicePolicy.all().with_deny(["cuda"]).with_deny([GPU]).deny == (CUDA, GPU)


def test_preferences_accumulate_behind_earlier_ones() -> None:
    """A second `with_prefer` ranks after the first."""
    policy = DevicePolicy.all().with_prefer(["cpu"]).with_prefer(["gpu"])
    assert policy.apply([CUDA, GPU, CPU]) == [CPU, GPU, CUDA]


def test_a_builder_leaves_the_original_alone() -> None:
    """A policy is a value."""
    policy = DevicePolicy.all()
    policy.with_deny(["cuda"])
    assert policy == DevicePolicy()


def test_the_order_of_the_lists_matters_for_equality() -> None:
    """Two policies that prefer in another order are different policies."""
    assert DevicePolicy().with_prefer(["cpu", "gpu"]) != DevicePolicy().with_prefer(["gpu", "cpu"])
    assert DevicePolicy().with_prefer(["cpu", "gpu"]) == DevicePolicy().with_prefer(["cpu"]).with_prefer(["gpu"])


@pytest.mark.parametrize(("asked", "runs"), [(5, 5), (1, 1), (0, 1), (-3, 1)])
def test_a_benchmark_runs_at_least_once(asked: int, runs: int) -> None:
    """Fewer than one run counts as one."""
    assert DevicePolicy().with_benchmark_pick(asked).pick_strategy() == Benchmark(runs)
    assert Benchmark(asked).runs == runs


def test_strategies_are_equal_by_value() -> None:
    """Both strategies are plain values of one base."""
    assert CostModel() == CostModel()
    assert Benchmark(2) != Benchmark(3)
    assert isinstance(Benchmark(2), DevicePickStrategy)
    assert isinstance(CostModel(), DevicePickStrategy)


def test_the_probe_set_is_every_device_without_an_allow_list() -> None:
    """Denied devices are probed too, so that a report can say they are denied."""
    assert DevicePolicy().with_deny(["cuda"]).probe_set() == Device.all()


def test_the_probe_set_is_the_allow_list_as_given() -> None:
    """Order and duplicates stay, and denial is not applied."""
    assert DevicePolicy.only(["gpu", "cpu", "gpu"]).with_deny(["gpu"]).probe_set() == [GPU, CPU, GPU]


def test_candidates_come_by_platform_priority() -> None:
    """Without a preference the priority decides."""
    assert DevicePolicy().apply([CPU, METAL, CUDA]) == [CUDA, METAL, CPU]


def test_a_preference_comes_before_the_priority() -> None:
    """A preferred device is first, the others keep the priority."""
    assert DevicePolicy().with_prefer(["cpu"]).apply([METAL, CUDA, CPU]) == [CPU, CUDA, METAL]


def test_a_preference_adds_no_device() -> None:
    """What is no candidate stays none."""
    assert DevicePolicy().with_prefer(["cuda"]).apply([CPU]) == [CPU]


def test_denial_beats_allowance() -> None:
    """A device on both lists is denied."""
    assert DevicePolicy.only(["cpu", "cuda"]).with_deny(["cuda"]).apply([CUDA, CPU]) == [CPU]


def test_the_sort_is_stable_and_keeps_duplicates() -> None:
    """Devices of equal rank stay in the order they came in."""
    first, second = Device("cuda:2"), Device("cuda:1")
    assert DevicePolicy().apply([CPU, first, second, CPU, first]) == [first, second, first, CPU, CPU]


@pytest.mark.parametrize("field", ["allow", "deny", "prefer"])
def test_names_become_devices_in_the_constructor(field: str) -> None:
    """A string that is not parsed would never be equal to a device, so a denial would deny nothing."""
    assert getattr(DevicePolicy(**{field: ["webgpu", CPU]}), field) == (Device.WEBGPU, CPU)


@pytest.mark.parametrize("field", ["allow", "deny", "prefer"])
def test_one_string_is_a_list_of_names(field: str) -> None:
    """It is read as in a variable, not letter by letter."""
    assert getattr(DevicePolicy(**{field: "cuda, cpu"}), field) == (CUDA, CPU)
    assert DevicePolicy.only("cpu") == DevicePolicy.only(["cpu"])
    assert DevicePolicy.only(CPU) == DevicePolicy.only(["cpu"])


@pytest.mark.parametrize("field", ["allow", "deny", "prefer"])
@pytest.mark.parametrize("names", ["cudda", ["cudda"], "", [""]])
def test_a_name_that_is_no_device_raises_in_the_constructor(field: str, names: str | list[str]) -> None:
    """A typo must not widen what may run."""
    with pytest.raises(DeviceParseError):
        DevicePolicy(**{field: names})  # type: ignore[arg-type]  # the field's name is only known here


def test_denying_a_kind_denies_every_index_of_it() -> None:
    """`cuda` means CUDA, not its first card."""
    assert DevicePolicy(deny=["cuda"]).apply([CUDA, "cuda:1", "cuda:7", CPU]) == [CPU]


def test_denying_one_index_leaves_the_others() -> None:
    """`cuda:1` is one card."""
    assert DevicePolicy(deny=["cuda:1"]).apply(["cuda", "cuda:1", "cuda:2"]) == [CUDA, Device("cuda:2")]


@pytest.mark.parametrize("compiler", ["tensorrt", "nv-tensorrt-rtx"])
def test_denying_cuda_denies_the_compilers_for_the_same_gpu(compiler: str) -> None:
    """They run on what was denied; denying a compiler leaves CUDA alone."""
    assert not DevicePolicy(deny=["cuda"]).allows(compiler)
    assert not DevicePolicy(deny=["cuda:1"]).allows(f"{compiler}:1")
    assert DevicePolicy(deny=["cuda:1"]).allows(compiler)
    assert DevicePolicy(deny=[compiler]).allows("cuda")


@pytest.mark.parametrize("denied", ["gpu", "webgpu", "vulkan"])
def test_denying_one_name_of_the_gpu_denies_the_others(denied: str) -> None:
    """All three are served by one provider on one adapter."""
    assert DevicePolicy(deny=[denied]).apply(["gpu", "webgpu", "vulkan", "cpu"]) == [CPU]


def test_allowing_is_exact() -> None:
    """An allow list never lets more through than it names."""
    policy = DevicePolicy.only(["cuda", "webgpu"])
    assert policy.apply(["cuda", "cuda:1", "tensorrt", "webgpu", "gpu"]) == [CUDA, Device.WEBGPU]


def test_a_refusal_names_the_rule_that_hit() -> None:
    """Of several denials the one that covers the device."""
    policy = DevicePolicy(deny=["metal", "cuda"])
    assert policy.refusal("cuda") == "denied by the policy (deny: cuda)"
    assert policy.refusal("tensorrt:1") == "denied by the policy (deny: cuda, which covers tensorrt:1)"


def test_an_empty_environment_gives_the_default() -> None:
    """Nothing set, nothing restricted."""
    assert DevicePolicy.from_env() == DevicePolicy()


def test_the_environment_fills_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and pick are read."""
    monkeypatch.setenv("RLX_DEVICES", "cpu;cuda gpu")
    monkeypatch.setenv("RLX_DENY_DEVICES", "cuda")
    monkeypatch.setenv("RLX_PREFER_DEVICES", "gpu,cpu")
    monkeypatch.setenv("RLX_BENCHMARK_PICK", " 4 ")
    wanted = DevicePolicy.only([CPU, CUDA, GPU]).with_deny([CUDA]).with_prefer([GPU, CPU]).with_benchmark_pick(4)
    assert DevicePolicy.from_env() == wanted


@pytest.mark.parametrize(("variable", "pick"), [("RLX_BENCHMARK_PICK", Benchmark), ("RLX_ADAPTIVE_PICK", Adaptive)])
@pytest.mark.parametrize(("value", "runs"), [("7", 7), (" 3 ", 3), ("0", 1)])
def test_a_pick_of_the_environment_has_its_number_of_runs(
    variable: str, pick: type[Benchmark | Adaptive], value: str, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is trimmed, and the minimum of one run holds for the variables as well."""
    monkeypatch.setenv(variable, value)
    assert DevicePolicy.from_env().pick_strategy() == pick(runs)


def test_two_picks_in_the_environment_raise_and_name_both_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither is dropped without a word."""
    monkeypatch.setenv("RLX_BENCHMARK_PICK", "4")
    monkeypatch.setenv("RLX_ADAPTIVE_PICK", "5")
    with pytest.raises(DeviceParseError, match=r"RLX_BENCHMARK_PICK=4 and RLX_ADAPTIVE_PICK=5"):
        DevicePolicy.from_env()


@pytest.mark.parametrize("variable", ["RLX_DEVICES", "RLX_DENY_DEVICES", "RLX_PREFER_DEVICES"])
def test_a_typo_in_a_list_raises_and_names_variable_and_token(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo must not widen what may run, as it did in the original."""
    monkeypatch.setenv(variable, "cpu,cudda")
    with pytest.raises(DeviceParseError, match=f"{variable}.*'cudda'"):
        DevicePolicy.from_env()


@pytest.mark.parametrize("variable", ["RLX_BENCHMARK_PICK", "RLX_ADAPTIVE_PICK"])
@pytest.mark.parametrize("value", ["five", "-1", "2.5", "1 2", "²"])
def test_a_bad_number_of_runs_raises_and_names_variable_and_value(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a whole number is a number of runs."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(DeviceParseError, match=f"{variable}.*{value}"):
        DevicePolicy.from_env()


def test_a_list_of_separators_only_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that names nothing is malformed."""
    monkeypatch.setenv("RLX_DEVICES", ",")
    with pytest.raises(DeviceParseError, match=r"RLX_DEVICES.*empty"):
        DevicePolicy.from_env()


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_counts_as_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLX_DEVICES= command` is how a shell unsets a variable for one command."""
    lists = ("DEVICES", "DENY_DEVICES", "PREFER_DEVICES", "DEVICE_CHAIN")
    for key in (*lists, "BENCHMARK_PICK", "ADAPTIVE_PICK", "DEVICE"):
        monkeypatch.setenv(f"RLX_{key}", value)
    assert DevicePolicy.from_env() == DevicePolicy()
    assert device_from_env() is None
    assert device_chain_from_env() == []


def test_a_prefix_of_your_own_is_literal(monkeypatch: pytest.MonkeyPatch) -> None:
    """`MYAPP` reads `MYAPP_DEVICES`, and `RLX_DEVICES` does not leak in."""
    monkeypatch.setenv("MYAPP_DEVICES", "cpu")
    monkeypatch.setenv("RLX_DENY_DEVICES", "cpu")
    assert DevicePolicy.from_env("MYAPP") == DevicePolicy.only(["cpu"])


def test_a_prefix_of_your_own_falls_back_to_the_prefixed_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLX_MYAPP_DEVICES` is read for compatibility, after the literal name."""
    monkeypatch.setenv("RLX_MYAPP_DEVICES", "gpu")
    assert DevicePolicy.from_env("MYAPP") == DevicePolicy.only(["gpu"])
    monkeypatch.setenv("MYAPP_DEVICES", "cpu")
    assert DevicePolicy.from_env("MYAPP") == DevicePolicy.only(["cpu"])


def test_the_device_of_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`<prefix>_DEVICE` names one device."""
    monkeypatch.setenv("RLX_DEVICE", "nvidia:1")
    monkeypatch.setenv("MYAPP_DEVICE", "cpu")
    assert device_from_env() == Device("cuda:1")
    assert device_from_env("MYAPP") == CPU


def test_an_unset_device_is_none() -> None:
    """No variable, no device."""
    assert device_from_env() is None


def test_a_malformed_device_raises_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A typo in the one device is an error, not a silent automatic choice."""
    monkeypatch.setenv("RLX_DEVICE", "cudda")
    with pytest.raises(DeviceParseError, match=r"RLX_DEVICE.*'cudda'"):
        device_from_env()


def test_the_chain_of_the_environment_keeps_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`<prefix>_DEVICE_CHAIN` is a list in the order of trying."""
    monkeypatch.setenv("RLX_DEVICE_CHAIN", "metal, cuda cpu")
    assert device_chain_from_env() == [METAL, CUDA, CPU]


def test_an_unset_chain_is_empty() -> None:
    """No variable, no chain."""
    assert device_chain_from_env() == []


def test_a_malformed_chain_raises_and_names_variable_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bad name fails the chain; it is not cut short."""
    monkeypatch.setenv("RLX_DEVICE_CHAIN", "cuda,cpuu")
    with pytest.raises(DeviceParseError, match=r"RLX_DEVICE_CHAIN.*'cpuu'"):
        device_chain_from_env()


@pytest.mark.parametrize("devices", [None, 3])
@pytest.mark.parametrize("make", [DevicePolicy.only, DevicePolicy().with_deny, DevicePolicy().with_prefer])
def test_what_is_no_list_of_devices_is_refused(make: Any, devices: Any) -> None:
    """The message says what a list is."""
    with pytest.raises(DeviceParseError, match="devices are a list"):
        make(devices)
