"""`rlx-ort inspect MODEL`: inputs, outputs and contents of a model, and its memory. Opens no session of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, emit, print_facts, print_table, progress

_PARTS = (
    *("weights", "packed", "inputs", "cache", "activations", "arena", "work_space", "opening", "runtime", "process"),
    "correction",
)


@options.command("inspect")
def command(
    model: Path = options.model(),
    memory: bool = options.flag("--memory", "Count the memory that the model takes on each device that works here."),
    dims: dict[str, int] = options.DIMS,
    as_json: bool = options.AS_JSON,
) -> None:
    """Show the contents of a model.

    Its inputs, outputs, parameters, operators and named dims; of an ONNX file its size, opset, producer and metadata.
    """
    graph, chosen = options.read_model(model, rlx_ort.CompileOptions(dims=dims))
    with progress("exporting to the form that sessions get"):
        document = {"model": str(model), **_describe(graph), "file": _file(model), "metadata": dict(graph.metadata)}
    if memory:
        with progress("counting memory"):
            document["memory"] = _memory(graph, chosen)
    emit(document, as_json, _print)


def _memory(graph: rlx_ort.Graph, chosen: rlx_ort.CompileOptions) -> list[dict[str, Any]]:
    """Return the parts of the memory that the graph takes, device by device."""
    from rlx_ort.providers.registry import is_available, known_devices, memory_limit, same_hardware
    from rlx_ort.selection.memory import memory_need

    rows = []
    for device in known_devices(is_available):
        need = memory_need(graph, device, chosen.with_(dims={}), chosen.dims)
        if need is not None and same_hardware(device)[0] == device:
            parts = {part: getattr(need, part) for part in (*_PARTS, "total")}
            limit = memory_limit(device, chosen)
            rows.append({"device": device.label, **parts, "limit": limit, "assumed_dims": list(need.assumed)})
    return rows


def _describe(graph: rlx_ort.Graph) -> dict[str, Any]:
    from rlx_ort.converters.to_onnx.exporter import exported

    sizes = [(value.dtype, value.shape.num_elements or 0) for value in graph.params]
    opset = exported(graph, rlx_ort.CompileOptions()).opsets
    shapes = [shape for value in (*graph.inputs, *graph.outputs) if (shape := _shape(value)) is not None]
    return {
        "name": graph.name,
        "inputs": [_value(value, value.name) for value in graph.inputs],
        "outputs": [_value(value, name) for value, name in zip(graph.outputs, graph.output_names, strict=True)],
        "params": {
            "count": len(sizes),
            "elements": sum(count for _, count in sizes),
            "bytes": sum(dtype.nbytes(count) for dtype, count in sizes),
        },
        "ops": _counted(map(_operator, _nodes(graph))),
        "opset": {domain or "ai.onnx": version for domain, version in sorted(opset.items())},
        "dims": list(dict.fromkeys(symbol for shape in shapes for symbol in shape.symbols)),
    }


def _file(path: Path) -> dict[str, Any] | None:
    """Return the facts recorded in an ONNX file, before anything is rewritten; None for other formats."""
    from rlx_ort.converters.protos import nodes_of
    from rlx_ort.converters.sources import Format, format_of, open_source

    if not path.is_file() or format_of(path)[0] is not Format.ONNX:
        return None
    bundle = open_source(path, trusted_links=options.trusted_links())
    proto = bundle.proto
    return {
        "bytes": path.stat().st_size,
        "weight_bytes": sum(data.nbytes for data in bundle.weights.values()),
        "ir_version": proto.ir_version,
        "opset": {each.domain or "ai.onnx": each.version for each in proto.opset_import},
        "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
        "operators": _counted((node.domain or "ai.onnx", node.op_type) for node in nodes_of(proto)),
        "doc": proto.doc_string or proto.graph.doc_string,
    }


def _counted(operators: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    ops = sorted(Counter(operators).items(), key=lambda row: (-row[1], row[0]))
    return [{"domain": domain, "kind": kind, "count": count} for (domain, kind), count in ops]


def _shape(value: rlx_ort.Value) -> rlx_ort.Shape | None:
    return getattr(value.type, "shape", None)  # only tensors have one


def _value(value: rlx_ort.Value, name: str) -> dict[str, Any]:
    dtype = getattr(value.type, "dtype", None)
    return {"name": name, "type": str(value.type), "dtype": dtype and dtype.value, "shape": _shape(value)}


def _nodes(graph: rlx_ort.Graph) -> Iterator[rlx_ort.Node]:
    """Yield every node that computes something, those of bodies after their owner."""
    for node in graph.nodes:
        if not node.op.is_leaf:
            yield node
        for body in node.op.bodies():
            yield from _nodes(body)


def _operator(node: rlx_ort.Node) -> tuple[str, str]:
    """Return the domain and kind of a node; IR ops have the domain `ir`, and those of a family also its member."""
    from rlx_ort.ir.ops.onnx import OnnxNode

    if isinstance(node.op, OnnxNode):
        return node.op.domain or "ai.onnx", node.op.op_type
    function = getattr(node.op, "function", "")
    return "ir", f"{node.op.kind} ({function})" if isinstance(function, str) and function else node.op.kind


def _print(document: dict[str, Any]) -> None:
    params, opset, file = document["params"], document["opset"], document["file"]
    facts: list[tuple[str, object]] = []
    if file is not None:
        own = ", ".join(f"{domain} {version}" for domain, version in file["opset"].items())
        facts = [
            ("file", f"{binary_size(file['bytes'])}, ONNX of IR version {file['ir_version']}, opset {own}"),
            ("producer", file["producer"] or "not recorded"),
            *((("description", file["doc"]),) if file["doc"] else ()),
        ]
    print_facts(
        [
            ("model", document["model"]),
            ("name", document["name"]),
            *facts,
            ("parameters", f"{params['count']} with {params['elements']:,} elements, {binary_size(params['bytes'])}"),
            ("opset of sessions", ", ".join(f"{domain} {version}" for domain, version in opset.items())),
            ("named dims", ", ".join(document["dims"]) or "none"),
            *((f"metadata {name}", text) for name, text in document["metadata"].items()),
        ]
    )
    for side in ("inputs", "outputs"):
        print_table((side, "type"), [(row["name"], row["type"]) for row in document[side]])
    rows = document["ops"] if file is None else file["operators"]
    print_table(("count", "op", "domain"), [(row["count"], row["kind"], row["domain"]) for row in rows])
    if "memory" in document:
        from rlx_ort.calibration.features import DEFAULT_DIM

        needs = document["memory"]
        table = []
        for part in ("total", *_PARTS):
            sizes = (binary_size(row[part]) if row[part] else "" for row in needs)
            table.append((part.replace("_", " "), *sizes))
        print_table(("memory", *(row["device"] for row in needs)), table)
        assumed = [name for row in needs for name in row["assumed_dims"]]
        options.note_assumed("counted", dict.fromkeys(assumed, DEFAULT_DIM))
