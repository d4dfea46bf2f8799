"""PyTorch modules through its own exporter: the results are PyTorch's, after round trips too."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx_ort import ConversionError, Device, Graph, GraphDevices
from rlx_ort.converters.bundle import bundle_from_graph, graph_from_bundle
from rlx_ort.converters.files import save_bundle
from rlx_ort.converters.from_torch import from_torch as graph_from_torch
from rlx_ort.converters.sources import apply_weights, from_torch, open_source, read_weights
from rlx_ort.ir.serde import save_json

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("onnx_ir")

Module = Any


def encoder() -> tuple[Module, Any]:
    """Return two layers of self-attention, and x `(2, 7, 32)`."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
    with warnings.catch_warnings(action="ignore"):
        return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(2, 7, 32)


def decoder() -> tuple[Module, Any]:
    """Return an embedding, causal attention by hand and a head, and token numbers `(2, 9)`."""

    class Decoder(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch has no types in CI
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(50, 32)
            self.qkv = torch.nn.Linear(32, 96)
            self.norm = torch.nn.LayerNorm(32)
            self.head = torch.nn.Linear(32, 50, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.embed(ids)
            q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.head(x + y.transpose(1, 2).flatten(2))

    return Decoder(), torch.randint(0, 50, (2, 9))


def convnet() -> tuple[Module, Any]:
    """Return two convolutions with batch norm and a head, and images `(2, 3, 16, 16)`."""
    net = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 10),
    )
    return net, torch.randn(2, 3, 16, 16)


def relative(found: Any, expected: Any) -> float:
    """Return the largest error relative to the largest value."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def results(graph: Graph, x: Any) -> Any:
    (name,) = (value.name for value in graph.inputs)
    (found,) = GraphDevices(graph).run(Device.CPU, {name: x.numpy()})
    return found


@pytest.mark.parametrize("make", [encoder, decoder, convnet])
def test_round_trips_keep_the_results_of_pytorch(make: Callable[[], tuple[Module, Any]], tmp_path: Path) -> None:
    """PyTorch -> ONNX -> graph file -> ONNX: each within 1e-5 of PyTorch, on a batch that was not the example."""
    torch.manual_seed(1)
    module, x = make()
    module = module.eval()
    batch = torch.cat([x, x.flip(0), x[:1]])
    with torch.no_grad():
        expected = module(batch).numpy()
    bundle = from_torch(module, (x,), dynamic=({0: "batch"},))
    save_bundle(bundle, tmp_path / "first.onnx")
    first = open_source(tmp_path / "first.onnx")
    assert relative(results(graph_from_bundle(first), batch), expected) < 1e-5
    save_json(graph_from_bundle(first), tmp_path / "second.json")
    second = open_source(tmp_path / "second.json")
    assert relative(results(graph_from_bundle(second), batch), expected) < 1e-5
    save_bundle(bundle_from_graph(graph_from_bundle(second)), tmp_path / "third.onnx", external_data=True)
    assert relative(results(graph_from_bundle(open_source(tmp_path / "third.onnx")), batch), expected) < 1e-5


def test_weights_are_those_of_the_module_in_its_own_memory() -> None:
    """Under the names of its state, without a copy, where the exporter is not asked to fold them."""
    module, x = decoder()
    bundle = from_torch(module.eval(), (x,), optimize=False)
    state = module.state_dict()
    for name in ("embed.weight", "qkv.weight", "head.weight"):
        assert bundle.weights[name].buffer.ctypes.data == state[name].data_ptr()


def test_a_checkpoint_fits_the_module_it_is_of(tmp_path: Path) -> None:
    """Weights saved as safetensors replace those of another instance, by their own names."""
    library = pytest.importorskip("safetensors.torch")
    torch.manual_seed(2)
    trained, x = convnet()
    other, _ = convnet()
    library.save_file(trained.state_dict(), tmp_path / "weights")
    graph = graph_from_torch(other.eval(), (x,), optimize=False)
    apply_weights(graph, read_weights(tmp_path / "weights"), required=["0.*", "3.*", "6.*"])
    with torch.no_grad():
        expected = trained.eval()(x).numpy()
    assert relative(results(graph, x), expected) < 1e-5


def test_a_saved_program_gives_the_results_of_its_module(tmp_path: Path) -> None:
    """Through the checks that keep PyTorch from executing what is in the file."""
    module, x = encoder()
    module = module.eval()
    with warnings.catch_warnings(action="ignore"):
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "net.pt2")
    with torch.no_grad():
        expected = module(x).numpy()
    assert relative(results(graph_from_bundle(open_source(tmp_path / "net.pt2")), x), expected) < 1e-5


def test_a_module_that_cannot_be_traced_is_a_conversion_error() -> None:
    """With what PyTorch says about it, and without its pages of advice."""

    class Untraceable(torch.nn.Module):  # type: ignore[misc, name-defined]  # torch has no types in CI
        def forward(self, x: Any) -> Any:
            return x * float(open("nowhere").read())  # noqa: PTH123  # anything that fails

    with pytest.raises(ConversionError, match=r"cannot export .*Untraceable") as caught:
        from_torch(Untraceable().eval(), (torch.zeros(2),))
    assert len(str(caught.value)) < 2000


def test_what_is_no_module_is_refused() -> None:
    """A state is weights alone."""
    with pytest.raises(ConversionError, match="got a dict"):
        from_torch({}, ())
