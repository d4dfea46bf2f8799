"""Writes attention and rotary embeddings as the fused operators of ONNX Runtime, for files that run there."""

from __future__ import annotations

from dataclasses import dataclass

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, graph_from_bundle
from rlx_ort.converters.fusion import fuse
from rlx_ort.converters.to_onnx.dispatch import KernelSet

_ANY = KernelSet("ONNX Runtime", None, lambda _, op_type, *__: op_type == "MultiHeadAttention")  # GroupNorm: CUDA alone


@dataclass(frozen=True, slots=True)
class FusionReport:
    """The result of `fused`: the names of the nodes that are MultiHeadAttention now."""

    attention: tuple[str, ...]


def fused(bundle: ModelBundle) -> tuple[ModelBundle, FusionReport]:
    """Return the model with MultiHeadAttention and RotaryEmbedding of `com.microsoft`, which only ONNX Runtime has.

    It is in normal form. The CPU, CUDA, DirectML and WebGPU have kernels of both, the CPU of attention in f32 only.

    Raises:
        ConversionError: the model cannot be imported or written again.
    """
    graph = graph_from_bundle(bundle)
    made, origins = fuse(graph, _ANY, graph.weights)
    names = [made.nodes[new].name for new in origins if made.nodes[new].op.describe().endswith("MultiHeadAttention-1")]
    before = {node.name for node in graph.nodes if node.op.describe().endswith("MultiHeadAttention-1")}
    return bundle_from_graph(made, origin=bundle.origin), FusionReport(
        tuple(each for each in names if each not in before)
    )
