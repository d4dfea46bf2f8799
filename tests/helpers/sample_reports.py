"""A report that no model stands behind, of any size, with a split between two devices."""

from __future__ import annotations

from typing import Any

from rlx_ort.report.document import SCHEMA

DEVICE, HOST = "WebGpuExecutionProvider", "CPUExecutionProvider"


def sample_report(layers: int, each: int, title: str = "sample.onnx", name: str = "node") -> dict[str, Any]:
    """Return a report of `layers` equal layers of `each` nodes; the second node of each layer is on the CPU."""
    nodes: list[dict[str, Any]] = []
    edges: list[tuple[int, int, int]] = []
    crossings: list[dict[str, Any]] = []
    for layer in range(layers):
        for at in range(each):
            number = layer * each + at
            nodes.append(
                {
                    "name": f"{name}_{layer}_{at}",
                    "module": f"layers.{layer}",
                    "op": "MatMul" if at % 3 else "Add",
                    "out": "f32(8, 64)",
                    "ep": HOST if at == 1 else DEVICE,
                    "predicted_ns": 1000.0 + at,
                    "measured_ns": 1500.0 + at,
                    "group": layer,
                }
            )
            if number:
                crossing = -1
                if at in (1, 2):
                    crossing = len(crossings)
                    row = {"value": f"v{number}", "to_device": at == 2, "to": DEVICE if at == 2 else HOST}
                    crossings.append({**row, "nbytes": 2048, "predicted_ns": 7000.0})
                edges.append((number - 1, number, crossing))
            if at > 2:
                edges.append((number - 3, number, -1))
    phases = ("choose", "export", "open", "copy in", "run", "copy out")
    view = {
        "device": "webgpu",
        "hardware": "SwiftShader",
        "ep": DEVICE,
        "predicted_ns": 2e6,
        "error": 0.3,
        "source": "default: sample",
        "measured_ns": 3e6,
        "placement_share": 0.9,
        "nodes": nodes,
        "folded": 2,
        "edges": edges,
        "groups": [
            {"label": f"layers.{layer}", "first": layer * each, "count": each, "parent": None}
            for layer in range(layers)
        ],
        "crossings": crossings,
        "added": [{"op": "MemcpyToHost", "ep": DEVICE, "count": layers, "measured_ns": 4000.0}],
        "parts": [
            {"part": part, "count": layers, "predicted_ns": 1e6, "how": ["measured"], "measured_ns": 1.5e6}
            for part in ("MatMul", "Add")
        ],
        "roofline": {
            "limits": "calibration", "rates": "measured", "peak": 200.0, "bandwidth": 20.0, "total_ns": 2e6,
            "kinds": {"MatMul": [(8.0, 90.0, 1e6)], "Add": [(0.1, 2.0, 1e6)]},
        },
        "timeline": [{"name": phase, "start_ns": at * 1e6, "ns": 1e6} for at, phase in enumerate(phases)],
    }  # fmt: skip
    row = {"device": "webgpu", "predicted_ns": 2e6, "profile_source": "default: sample", "recommended": True}
    split = {"device": "webgpu", "reason": "no kernel", "nodes": ["node_0_1 (Add)"], "repairs": ["--dim batch=4"]}
    return {
        "schema": SCHEMA, "model": title, "runtime": "onnxruntime 1.31.1", "version": "0.1.0",
        "machine": "a CPU, 2 threads; Linux x86_64", "python": "3.11.7", "date": "2026-11-26T01:00+00:00",
        "dims": {"batch": 4}, "notes": [],
        "devices": [row, {"device": "tpu", "blocker": "no provider"}], "views": [view], "splits": [split],
    }  # fmt: skip
