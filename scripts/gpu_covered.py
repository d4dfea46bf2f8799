"""The subject of the GPU gate's record: the models that ops become for CUDA, the verdicts about them, and the session.

A change that computes the same on the same terms keeps the record; `covered_digest` sees through names and the order of
nodes, and does not look at the source.

    python scripts/gpu_covered.py        print it
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from op_tests.cases import CASES, graphs_of  # noqa: E402  # a folder of the tests

from rlx_ort.device import Device  # noqa: E402
from rlx_ort.options.compile_options import CompileOptions, Precision  # noqa: E402
from rlx_ort.providers.claims import list_text  # noqa: E402
from rlx_ort.providers.registry import provider_of  # noqa: E402
from rlx_ort.selection.support import model_for, support_of  # noqa: E402

_CUDA = Device("cuda")
_PRECISIONS = (Precision.F32, Precision.F16)
_SETTINGS = (
    CompileOptions(),
    CompileOptions(precision=Precision.TF32),
    CompileOptions(device_graph=False),
    CompileOptions(device_memory_limit_bytes=1 << 30),
    CompileOptions(intra_op_threads=2, provider_options={"cudnn_conv_algo_search": "HEURISTIC"}),
)


def covered_digest() -> str:
    """Return a hash of every op's test graphs as CUDA gets them, the verdicts by its kernel list, and its sessions."""
    digest = hashlib.sha256()
    for line in covered():
        digest.update(line.encode())
    return digest.hexdigest()


def covered() -> Iterator[str]:
    """Yield the text that is hashed, a line for each graph, kernel list and set of options."""
    provider = provider_of(_CUDA)
    assert provider is not None
    for path in sorted((ROOT / "providers" / "kernel_lists").glob("*.txt")):
        ep_name, _, version = path.stem.rpartition("-")
        major, minor = map(int, version.split("."))
        yield f"{path.name} {_hash(list_text(ep_name, (major, minor)))}"
    for options in _SETTINGS:
        recipe = provider.recipe(_CUDA, options)  # type: ignore[attr-defined]  # it is an OrtProvider
        entries = [sorted(each.items()) for each in (recipe.options, recipe.run_config, recipe.config)]
        yield f"{recipe.ep_name} {entries} {recipe.keeps} {recipe.leaves_out}"
    for name, case in CASES.items():
        for dtype, graph in graphs_of(case):
            for precision in _PRECISIONS:
                options = CompileOptions(precision=precision)
                model = model_for(provider, graph, options.on(_CUDA))
                support = support_of(_CUDA, graph, options, ask=False)
                refused = [node.index for node in support.unsupported]
                made = "" if model is None else _model(model.model)
                yield f"{name} {dtype.value} {precision.value} {made} {refused} {sorted(support.cpu_nodes)}"


def _model(model: onnx.ModelProto) -> str:
    versions = sorted((entry.domain, entry.version) for entry in model.opset_import)
    return _hash(versions, _graph(model.graph, {}))


def _graph(graph: onnx.GraphProto, outer: Mapping[str, str]) -> str:
    """Return a hash of the computation of the outputs, whatever values are called and whichever node is first."""
    values = dict(outer) | {"": ""}
    for place, value in enumerate(graph.input):
        values[value.name] = _hash("input", place, value.type.SerializeToString(deterministic=True).hex())
    for tensor in graph.initializer:
        data = onnx.TensorProto()
        data.CopyFrom(tensor)
        data.ClearField("name")
        values[tensor.name] = _hash("weight", data.SerializeToString(deterministic=True).hex())
    for node in graph.node:
        attributes = sorted((each.name, _attribute(each, values)) for each in node.attribute)
        made = _hash(node.domain, node.op_type, attributes, [values[name] for name in node.input])
        values.update((name, _hash(made, place)) for place, name in enumerate(node.output))
    return _hash([(value.name if not outer else "", values[value.name]) for value in graph.output])


def _attribute(attribute: onnx.AttributeProto, values: Mapping[str, str]) -> str:
    if attribute.type == onnx.AttributeProto.GRAPH:
        return _graph(attribute.g, values)
    data = onnx.AttributeProto()
    data.CopyFrom(attribute)
    if data.HasField("t"):
        data.t.ClearField("name")
    return str(data.SerializeToString(deterministic=True).hex())


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


if __name__ == "__main__":
    sys.stdout.write(f"{covered_digest()}\n")
