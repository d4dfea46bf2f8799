"""`DevicePolicy`: builders, the environment, what is probed, and the order of candidates."""

from typing import Any

import pytest

from rlx_ort import Device, DeviceParseError, environment
from rlx_ort.selection.policy import (
    Adaptive,
    Benchmark,
    CostModel,
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


DENIED, ALL = DevicePolicy().with_deny(["cuda"]), DevicePolicy.all()
EQUAL = {
    "all restricts nothing": (ALL, DevicePolicy()),
    "the pick is by cost": (DevicePolicy().pick_strategy(), CostModel()),
    "a builder leaves the original alone": (ALL.with_deny(["cuda"]) and ALL, DevicePolicy()),
    "only keeps order and duplicates": (DevicePolicy.only(["cpu", "cuda", "cpu"]).allow, (CPU, CUDA, CPU)),
    "denials accumulate": (DENIED.with_deny([GPU]).deny, (CUDA, GPU)),
    "preferences accumulate": (
        DevicePolicy().with_prefer(["cpu", "gpu"]),
        DevicePolicy().with_prefer(["cpu"]).with_prefer(["gpu"]),
    ),
    "denied devices are probed, so that a report can name them": (DENIED.probe_set(), Device.all()),
    "the allow list is probed as given": (
        DevicePolicy.only(["gpu", "cpu", "gpu"]).with_deny(["gpu"]).probe_set(),
        [GPU, CPU, GPU],
    ),
}


@pytest.mark.parametrize(("made", "expected"), EQUAL.values(), ids=EQUAL)
def test_policies_that_are_made_alike_are_equal(made: Any, expected: Any) -> None:
    """A policy is a value, and so is a way to pick; the order of preference counts."""
    assert made == expected
    assert DevicePolicy().with_prefer(["cpu", "gpu"]) != DevicePolicy().with_prefer(["gpu", "cpu"])
    assert Benchmark(2) != Benchmark(3)


APPLIED: dict[str, tuple[DevicePolicy, list[str], list[str]]] = {
    "nothing is allowed": (DevicePolicy.only([]), ["cpu", "cuda"], []),
    "by platform priority": (DevicePolicy(), ["cpu", "metal", "cuda"], ["cuda", "metal", "cpu"]),
    "a preference comes first": (DevicePolicy(prefer=["cpu"]), ["metal", "cuda", "cpu"], ["cpu", "cuda", "metal"]),
    "a later preference comes after": (
        DevicePolicy(prefer=["cpu"]).with_prefer(["gpu"]),
        ["cuda", "gpu", "cpu"],
        ["cpu", "gpu", "cuda"],
    ),
    "a preference adds no device": (DevicePolicy(prefer=["cuda"]), ["cpu"], ["cpu"]),
    "denial beats allowance": (DevicePolicy.only(["cpu", "cuda"]).with_deny(["cuda"]), ["cuda", "cpu"], ["cpu"]),
    "equal ranks stay in order": (
        DevicePolicy(),
        ["cpu", "cuda:2", "cuda:1", "cpu", "cuda:2"],
        ["cuda:2", "cuda:1", "cuda:2", "cpu", "cpu"],
    ),
    "a kind is denied with every index": (DevicePolicy(deny=["cuda"]), ["cuda", "cuda:1", "cuda:7", "cpu"], ["cpu"]),
    "one index is denied alone": (DevicePolicy(deny=["cuda:1"]), ["cuda", "cuda:1", "cuda:2"], ["cuda", "cuda:2"]),
    **{
        f"{name} is one GPU under three names": (DevicePolicy(deny=[name]), ["gpu", "webgpu", "vulkan", "cpu"], ["cpu"])
        for name in ("gpu", "webgpu", "vulkan")
    },
    "allowing is exact": (
        DevicePolicy.only(["cuda", "webgpu"]),
        ["cuda", "cuda:1", "tensorrt", "webgpu", "gpu"],
        ["cuda", "webgpu"],
    ),
}


@pytest.mark.parametrize(("policy", "devices", "left"), APPLIED.values(), ids=APPLIED)
def test_candidates_are_filtered_and_ordered(policy: DevicePolicy, devices: list[str], left: list[str]) -> None:
    """What is denied or not allowed goes, and what is preferred comes first."""
    assert [device.label for device in policy.apply(devices)] == left


@pytest.mark.parametrize(("asked", "runs"), [(5, 5), (1, 1), (0, 1), (-3, 1)])
def test_a_benchmark_runs_at_least_once(asked: int, runs: int) -> None:
    """Fewer than one run counts as one."""
    assert DevicePolicy().with_benchmark_pick(asked).pick_strategy() == Benchmark(runs)
    assert Benchmark(asked).runs == runs


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


@pytest.mark.parametrize("compiler", ["tensorrt", "nv-tensorrt-rtx"])
def test_denying_cuda_denies_the_compilers_for_the_same_gpu(compiler: str) -> None:
    """They run on what was denied; denying a compiler leaves CUDA alone."""
    assert not DevicePolicy(deny=["cuda"]).allows(compiler)
    assert not DevicePolicy(deny=["cuda:1"]).allows(f"{compiler}:1")
    assert DevicePolicy(deny=["cuda:1"]).allows(compiler)
    assert DevicePolicy(deny=[compiler]).allows("cuda")


def test_a_refusal_names_the_rule_that_hit() -> None:
    """Of several denials the one that covers the device."""
    policy = DevicePolicy(deny=["metal", "cuda"])
    assert policy.refusal("cuda") == "denied by the policy (deny: cuda)"
    assert policy.refusal("tensorrt:1") == "denied by the policy (deny: cuda, which covers tensorrt:1)"


READ: dict[str, tuple[dict[str, str], Any, Any]] = {
    "nothing is the default": ({}, DevicePolicy.from_env, DevicePolicy()),
    "a prefix of your own is literal": (
        {"MYAPP_DEVICES": "cpu", "RLX_DENY_DEVICES": "cpu"},
        lambda: DevicePolicy.from_env("MYAPP"),
        DevicePolicy.only(["cpu"]),
    ),
    "the prefixed name of a prefix counts as well": (
        {"RLX_MYAPP_DEVICES": "gpu"},
        lambda: DevicePolicy.from_env("MYAPP"),
        DevicePolicy.only(["gpu"]),
    ),
    "the literal name comes first": (
        {"RLX_MYAPP_DEVICES": "gpu", "MYAPP_DEVICES": "cpu"},
        lambda: DevicePolicy.from_env("MYAPP"),
        DevicePolicy.only(["cpu"]),
    ),
    "one device": ({"RLX_DEVICE": "nvidia:1"}, device_from_env, Device("cuda:1")),
    "one device of a prefix": ({"MYAPP_DEVICE": "cpu"}, lambda: device_from_env("MYAPP"), CPU),
    "no device": ({}, device_from_env, None),
    "a chain in its order": ({"RLX_DEVICE_CHAIN": "metal, cuda cpu"}, device_chain_from_env, [METAL, CUDA, CPU]),
    "no chain": ({}, device_chain_from_env, []),
}


@pytest.mark.parametrize(("variables", "read", "expected"), READ.values(), ids=READ)
def test_what_is_set_in_the_environment_is_read(
    variables: dict[str, str], read: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, device and chain, each with the variables of its prefix."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert read() == expected


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


@pytest.mark.parametrize(
    ("variable", "value", "token"),
    [
        *((name, "cpu,cudda", "'cudda'") for name in ("RLX_DEVICES", "RLX_DENY_DEVICES", "RLX_PREFER_DEVICES")),
        ("RLX_DEVICES", ",", "empty"),
        ("RLX_DEVICE", "cudda", "'cudda'"),
        ("RLX_DEVICE_CHAIN", "cuda,cpuu", "'cpuu'"),
        *((f"RLX_{p}_PICK", v, v) for p in ("BENCHMARK", "ADAPTIVE") for v in ("five", "-1", "2.5", "1 2", "²")),
    ],
)
def test_a_malformed_variable_raises_and_names_itself_and_the_token(
    variable: str, value: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A typo must not widen what may run, as it did in the original."""
    read: Any = {"RLX_DEVICE": device_from_env, "RLX_DEVICE_CHAIN": device_chain_from_env}
    monkeypatch.setenv(variable, value)
    with pytest.raises(DeviceParseError, match=f"{variable}.*{token}"):
        read.get(variable, DevicePolicy.from_env)()


@pytest.mark.parametrize("value", ["", "  "])
def test_an_empty_variable_counts_as_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`RLX_DEVICES= command` is how a shell unsets a variable for one command."""
    lists = ("DEVICES", "DENY_DEVICES", "PREFER_DEVICES", "DEVICE_CHAIN")
    for key in (*lists, "BENCHMARK_PICK", "ADAPTIVE_PICK", "DEVICE"):
        monkeypatch.setenv(f"RLX_{key}", value)
    assert DevicePolicy.from_env() == DevicePolicy()
    assert device_from_env() is None
    assert device_chain_from_env() == []


@pytest.mark.parametrize("devices", [None, 3])
@pytest.mark.parametrize("make", [DevicePolicy.only, DevicePolicy().with_deny, DevicePolicy().with_prefer])
def test_what_is_no_list_of_devices_is_refused(make: Any, devices: Any) -> None:
    """The message says what a list is."""
    with pytest.raises(DeviceParseError, match="devices are a list"):
        make(devices)
