"""Pictures: a roofline for each device with the model's nodes on it, and predicted against measured times."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.ir.graph import Graph

__all__ = ["draw"]


def draw(graph: Graph, dims: Mapping[str, int], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the devices of `rows` to a file whose suffix decides the format; `p50_ns` of a row may be missing.

    Raises:
        ClickException: matplotlib is not installed.
    """
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as err:
        raise click.ClickException(f"pictures need matplotlib ({err}); pip install 'rlx_ort[plot]'") from err
    from rlx_ort.device import Device

    pyplot.switch_backend("agg")
    devices = [Device(row["device"]) for row in rows if row.get("predicted_ns")]
    figure, axes = pyplot.subplots(1, len(devices) + 1, figsize=(5 * (len(devices) + 1), 4.5), layout="constrained")
    panels = list(axes) if devices else [axes]
    for device, panel in zip(devices, panels, strict=False):
        _roofline(panel, graph, device, dims)
    _compare(panels[-1], rows)
    figure.savefig(path)
    pyplot.close(figure)


def _roofline(panel: Any, graph: Graph, device: Device, dims: Mapping[str, int]) -> None:
    """Draw what the device reaches by operations a byte, and each kind of node where it stands."""
    from rlx_ort.selection.predict import cost_model, works_of

    model = cost_model(device)
    if model is None:
        return
    points: dict[str, tuple[list[float], list[float]]] = {}
    for work in works_of(graph, device, dims):
        if work.flops and work.nbytes:
            across, up = points.setdefault(work.kind if work.kind != "op" else "others", ([], []))
            across.append(work.flops / work.nbytes)
            up.append(work.flops / max(model.work_ns(work), 1.0))
    peak = max((model.sgemm_gflops(m, 1024, 1024) for m in (64, 1024, 4096)), default=1.0)
    bandwidth = model.memory_bw()
    everywhere = [value for across, _ in points.values() for value in across]
    knee = peak / bandwidth
    left, right = min([knee / 100, *everywhere]), max([knee * 100, *everywhere])
    panel.plot([left, knee, right], [left * bandwidth, peak, peak], color="black", linewidth=1)
    for kind, (across, up) in sorted(points.items()):
        panel.scatter(across, up, s=14, label=kind)
    panel.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="GFLOP/s, as predicted", title=device.label)
    if points:
        panel.legend(fontsize="small")


def _compare(panel: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw predicted against measured times, with the line on which they agree."""
    pairs = [(row["device"], row["p50_ns"], row["predicted_ns"]) for row in rows if row.get("p50_ns")]
    pairs = [pair for pair in pairs if pair[2]]
    for label, measured, predicted in pairs:
        panel.scatter([measured / 1e3], [predicted / 1e3], label=label)
    if pairs:
        ends = [min(min(pair[1:]) for pair in pairs) / 2e3, max(max(pair[1:]) for pair in pairs) / 5e2]
        panel.plot(ends, ends, color="black", linewidth=1)
        panel.legend(fontsize="small")
        panel.set(xscale="log", yscale="log")
    panel.set(xlabel="measured us", ylabel="predicted us", title="predicted against measured")
