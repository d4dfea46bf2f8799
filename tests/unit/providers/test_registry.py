"""The registry: who serves a device, and answers that are remembered, and the provider without an engine."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import threading

import numpy as np
import pytest

from rlx_ort import CompileOptions, Device, DType
from rlx_ort.converters.to_onnx.exported import ExportedModel, ExportedNode
from rlx_ort.ir.types import Shape, TensorType
from rlx_ort.providers.base import Availability, SessionRequest
from rlx_ort.providers.null import NullProvider
from rlx_ort.providers.ort_provider import OrtProvider
from rlx_ort.providers.registry import ProviderRegistry, default_registry

_INSTALLED = [provider for provider in default_registry().providers() if isinstance(provider, OrtProvider)]


class Counting(NullProvider):
    """A null provider that counts its probes."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.probes = 0

    def probe(self, device: Device) -> Availability:
        self.probes += 1
        return super().probe(device)


def test_a_registered_provider_is_found_by_its_kind():
    """Registration makes the kind a device name."""
    provider = NullProvider()
    registry = ProviderRegistry((provider,))
    assert registry.for_device(Device("null")) is provider
    assert registry.for_device(Device("null:3")) is provider
    assert registry.providers() == (provider,)


def test_a_probe_is_remembered_until_it_is_forgotten():
    """One probe a device and process."""
    provider = Counting()
    registry = ProviderRegistry((provider,))
    assert registry.availability(Device("null")).available
    registry.availability(Device("null"))
    assert provider.probes == 1
    registry.forget()
    registry.availability(Device("null"))
    assert provider.probes == 2


def test_many_threads_cause_one_probe():
    """Questions that arrive together wait for one answer."""
    provider = Counting()
    registry = ProviderRegistry((provider,))
    threads = [threading.Thread(target=registry.availability, args=(Device("null"),)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert provider.probes == 1


@pytest.mark.parametrize("kind", ["", "Big", "a b", "a:1", "a,b"])
def test_a_kind_that_is_no_device_name_is_refused(kind):
    """Names must parse back."""
    provider = type("Odd", (NullProvider,), {"kinds": (kind,)})()
    with pytest.raises(ValueError, match="device kind"):
        ProviderRegistry((provider,))


@pytest.mark.parametrize("system", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("provider", _INSTALLED, ids=lambda provider: provider.name)
def test_a_remedy_with_pip_can_be_pasted_into_a_shell(provider, system, monkeypatch):
    """What follows the requirements is a comment of the shell, so pip is asked for packages only."""
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    for remedy in (provider.install_remedy(), provider.remedy):
        if remedy.startswith("pip "):
            pip, install, *wanted = shlex.split(remedy, comments=True)
            assert (pip, install) == ("pip", "install")
            assert wanted
            assert [
                name for name in wanted if not re.fullmatch(r"(\.\[\w+\]|onnxruntime[\w-]*|tensorrt)(>=[\d.]+)?", name)
            ] == []


NODES = tuple(ExportedNode.of(name, "", op, 21, 0, (), (), (), ()) for name, op in (("a", "Add"), ("b", "Shape")))


@pytest.fixture
def request_null() -> SessionRequest:
    """Return a request for a model with one named dim."""
    ProviderRegistry((NullProvider(),))
    model = ExportedModel(
        model=None,  # the null provider never looks at it
        params=(),
        nodes=NODES,
        origin_names={},
        input_types={"x": TensorType(DType.F32, Shape(("n", 3)))},
        output_types={"y": TensorType(DType.BF16, Shape((2, "n"))), "s": TensorType(DType.STRING, Shape((1,)))},
    )
    return SessionRequest(Device("null"), model, {}, CompileOptions())


def test_outputs_are_zeros_of_the_declared_type_with_dims_from_the_feeds(request_null):
    """A named dim takes the size the input has."""
    session = NullProvider().open(request_null)
    y, s = session.run(["y", "s"], {"x": np.ones((5, 3), np.float32)})
    assert (y.dtype, y.shape, y.astype(np.float32).sum()) == (DType.BF16.numpy, (2, 5), 0)
    assert s.tolist() == [""]


def test_nodes_it_does_not_take_are_on_the_cpu(request_null):
    """`takes` plays a provider without some kernels."""
    session = NullProvider(takes=lambda node: node.op_type == "Add").open(request_null)
    assert [node.provider for node in session.assignments] == ["NullExecutionProvider", "CPUExecutionProvider"]
