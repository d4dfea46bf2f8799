"""Options of execution providers: for one device each, in ONNX Runtime's form too, and those that do not exist."""

from __future__ import annotations

import pickle
from typing import Any, ClassVar

import numpy as np
import pytest

import rlx_ort
from rlx_ort import CompileOptions, Device, DeviceFallbackError, DeviceParseError, DevicePolicy, GraphDevices, Session
from rlx_ort.errors import InputError, LegalizeError, NoViableDeviceError
from rlx_ort.providers import registry
from rlx_ort.providers.base import EngineSession, SessionRequest
from rlx_ort.providers.cpu import CpuProvider
from rlx_ort.providers.cuda import CudaProvider
from rlx_ort.providers.null import NullProvider

INPUTS = {"x": np.ones(4, np.float32)}
PAIR = ("NullExecutionProvider", {"speed": 2})


class Tuned(NullProvider):
    """A provider with one option, that keeps the options that it was opened with."""

    option_keys: ClassVar[frozenset[str] | None] = frozenset({"speed"})

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[tuple[str, dict[str, str]]] = []

    def open(self, request: SessionRequest) -> EngineSession:
        """Keep the options, and open a session."""
        self.opened.append((request.device.label, dict(request.options.provider_options)))
        return super().open(request)


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Tuned:
    """Return the provider, which is registered beside the CPU's and CUDA's."""
    provider = Tuned()
    known = registry.ProviderRegistry((CpuProvider(), CudaProvider(), provider))
    monkeypatch.setattr(registry, "default_registry", lambda: known)
    return provider


@pytest.fixture
def graph() -> rlx_ort.Graph:
    """Return `x + x`."""
    made = rlx_ort.Graph("added")
    x = made.input("x", [4])
    made.outputs = [x + x]
    return made


@pytest.mark.parametrize(
    "given", [{"null": {"speed": "2"}}, [PAIR, "CPUExecutionProvider"], PAIR], ids=["by device", "list", "pair"]
)
def test_each_device_gets_its_own_options(given: Any, tuned: Tuned, graph: rlx_ort.Graph) -> None:
    """As a mapping, or as the list that ONNX Runtime takes; the CPU has no options, and runs all the same."""
    runner = GraphDevices(graph, options=CompileOptions(provider_options=given))
    for device in ("null", "cpu"):
        assert runner.run(device, INPUTS).device == Device(device)
    assert tuned.opened == [("null", {"speed": "2"})]


def test_an_index_comes_before_its_kind() -> None:
    """As it does in `precisions`."""
    options = CompileOptions(provider_options={"cuda": {"use_tf32": 1}, "cuda:1": {"use_tf32": 0}})
    found = [dict(options.on(Device(label)).provider_options) for label in ("cuda", "cuda:1", "cuda:2", "cpu")]
    assert found == [{"use_tf32": "1"}, {"use_tf32": "0"}, {"use_tf32": "1"}, {}]
    twice = CompileOptions(
        provider_options=[("cuda", {"use_tf32": 1}), ("CUDAExecutionProvider", {"device_id": 0, "a": 2})]
    )
    assert twice.on(Device("cuda")).provider_options == {"a": "2", "use_tf32": "1"}
    assert pickle.loads(pickle.dumps(options)) == options  # our own bytes


def test_a_pair_is_a_device_wherever_one_is_taken(tuned: Tuned, graph: rlx_ort.Graph) -> None:
    """The options of a pair are those of the device's sessions from then on; `device_id` is its index."""
    cuda, cpu = ("CUDAExecutionProvider", {"device_id": "1"}), ("CPUExecutionProvider", {})
    assert Device(cuda) == Device("cuda:1")
    assert DevicePolicy.only([cuda, "CPUExecutionProvider"]).allow == (Device("cuda:1"), Device.CPU)
    assert Session(PAIR).compile(graph).run(INPUTS)
    runner = GraphDevices(graph)
    ways = [
        lambda: runner.run_try([cuda, PAIR], INPUTS)[1],
        lambda: runner.run_try(PAIR, INPUTS)[1],
        lambda: runner.run(PAIR, INPUTS),
        lambda: runner.run(INPUTS, PAIR),
        lambda: runner.run_resolved(INPUTS, PAIR),
        lambda: runner.run_chosen(INPUTS, PAIR)[1],
        lambda: runner.run_chain(INPUTS, PAIR)[1],
        lambda: runner.compile(PAIR).run_named(INPUTS),
    ]
    for way in ways:
        assert way().device == Device("null")
    assert tuned.opened == [("null", {"speed": "2"})] * 2  # the session of `Session`, and one of the runner
    assert runner.run_try([cpu], INPUTS)[1].device == Device.CPU
    runner.run(("null", {"speed": 3}), INPUTS)
    assert tuned.opened[2:] == [("null", {"speed": "3"})]


def test_a_policy_has_no_options() -> None:
    """Only `device_id` says which device it is; the message names the place of the others."""
    with pytest.raises(DeviceParseError, match=r"the options of cuda:1 \(speed\).*CompileOptions\(provider_options"):
        DevicePolicy.only(["cpu", ("cuda:1", {"speed": 2})])


@pytest.mark.parametrize("given", [{"null": {"sped": 1}}, [("null", {"sped": 1})]], ids=["by device", "list"])
def test_an_option_that_the_device_lacks_is_the_callers_mistake(given: Any, tuned: Tuned, graph: rlx_ort.Graph) -> None:
    """Before anything is opened, with the nearest option."""
    for make in (GraphDevices, lambda graph, options: Session("cpu", options)):
        with pytest.raises(InputError, match="null has no option 'sped'; did you mean 'speed'"):
            make(graph, options=CompileOptions(provider_options=given))
    with pytest.raises(InputError, match="did you mean 'speed'"):
        GraphDevices(graph).run(("null", {"sped": 1}), INPUTS)
    assert tuned.opened == []


def test_an_option_that_no_device_has_is_the_callers_mistake(tuned: Tuned, graph: rlx_ort.Graph) -> None:
    """A misspelt option blames neither the devices nor a node."""
    with pytest.raises(InputError, match="no device has the option 'cudnn_conv_algo_serch'; did you mean 'cudnn_conv"):
        GraphDevices(graph, options=CompileOptions(provider_options={"cudnn_conv_algo_serch": "HEURISTIC"}))


def test_a_device_without_an_option_of_every_device_is_not_used(tuned: Tuned, graph: rlx_ort.Graph) -> None:
    """The reason is the option, not a kernel that is missing."""
    runner = GraphDevices(graph, DevicePolicy.only("cpu"), CompileOptions(provider_options={"speed": "1"}))
    reason = r"cpu has no option 'speed'.*provider_options=\{'cuda'"
    for run, error in (
        (runner.run_fastest, NoViableDeviceError),
        (lambda inputs: runner.run_try(["cpu"], inputs), DeviceFallbackError),
        (lambda inputs: runner.run_resolved(inputs, "cpu"), LegalizeError),
    ):
        with pytest.raises(error, match=reason) as caught:
            run(INPUTS)
        assert "kernel for" not in str(caught.value)


@pytest.mark.parametrize("way", ["run_fastest", "run_resolved", "run_chain", "__call__"])
def test_a_wrong_session_config_is_the_callers_mistake(way: str, graph: rlx_ort.Graph) -> None:
    """Every device would refuse it, so that no other one is tried."""
    wrong = CompileOptions(session_config={"session.disable_prepackin": "1"})
    with pytest.raises(InputError, match=r"'session\.disable_prepackin' is unknown.*did you mean"):
        getattr(GraphDevices(graph, DevicePolicy.only("cpu"), wrong), way)(INPUTS)
