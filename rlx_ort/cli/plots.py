"""Pictures: a roofline for each device with the model's nodes on it, and predicted against measured times."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import rlx_ort
from rlx_ort.cli.show import duration, note, replacing
from rlx_ort.errors import MissingExtraError, install_command

# Okabe and Ito's colours, which are distinguishable with every form of colour vision.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442")
_GREY = "#999999"
_LEAST_AREA, _MOST_AREA = 14.0, 400.0  # of a marker, in square points
_TARGET = 1.25  # half of all predictions should be within this factor of the measured time
_COLUMNS = 3


def draw(
    graph: rlx_ort.Graph, title: str, dims: Mapping[str, int], rows: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw the devices of `rows` that have a prediction to a file whose suffix decides the format.

    Rows that have a measured time, `p50_ns`, get a panel of their own. The file appears whole or not at all.

    Raises:
        ClickException: matplotlib does not know the format, or there is nothing to draw.
        MissingExtraError: matplotlib is not installed.
        WriteError: the file cannot be written.
    """
    try:
        # Not pyplot: that would pick a window system and keep the figure.
        figures = importlib.import_module("matplotlib.figure")
        tickers = importlib.import_module("matplotlib.ticker")
    except ImportError as err:
        raise MissingExtraError(f"pictures need matplotlib: {err}\n  {install_command('plot')}") from err
    priced = [row for row in rows if row.get("predicted_ns")]
    if not priced:
        raise click.ClickException("there is nothing to draw: no device has a prediction for the model")
    measured = [row for row in priced if row.get("p50_ns")]
    panels = len(priced) + bool(measured)
    columns = min(panels, _COLUMNS)
    lines = -(-panels // columns)
    figure = figures.Figure(figsize=(5.2 * columns, 4.8 * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    colours: dict[str, str] = {}
    for row, panel in zip(priced, axes, strict=False):
        _roofline(panel, graph, row, dims, colours)
    if measured:
        _compare(axes[len(priced)], measured, tickers)
    for panel in axes[panels:]:
        panel.set_axis_off()
    sizes = ", ".join(f"{name}={size}" for name, size in dims.items())
    figure.suptitle(f"{title} ({sizes})" if sizes else title, fontweight="bold")
    kind = path.suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        known = ", ".join(sorted(figure.canvas.get_supported_filetypes()))
        raise click.ClickException(f"{path.name} is of no known picture format; known are {known}")
    with replacing(path) as stream:
        figure.savefig(stream, format=kind, dpi=150)
    note(f"drawn to {path}")


def _roofline(
    panel: Any, graph: rlx_ort.Graph, row: Mapping[str, Any], dims: Mapping[str, int], colours: dict[str, str]
) -> None:
    """Draw the device's rate by operations a byte, and each kind of node where it stands.

    A marker's area is the share of the predicted time of all nodes that its nodes take. A kind that has a colour in
    `colours` keeps it; others get the next one.
    """
    from rlx_ort.report.document import OTHERS, roofline

    device = rlx_ort.Device(row["device"])
    model = rlx_ort.cost_model(device)
    if model is None:  # the row would have no prediction
        return
    peak, bandwidth, total_ns, kinds = roofline(graph, model, dims)
    knee = peak / bandwidth
    everywhere = [point.intensity for points in kinds.values() for point in points]
    left, right = min([knee / 30, *everywhere]) / 2, max([knee * 10, *everywhere]) * 2
    panel.plot([left, knee, right], [left * bandwidth, peak, peak], color="#333333", linewidth=1.5, zorder=1)
    roofs = f"best product {peak:.3g} GFLOP/s\nmemory {bandwidth:.3g} GB/s (above it: from caches)"
    panel.text(0.02, 0.98, roofs, transform=panel.transAxes, va="top", fontsize="small")
    for name, points in kinds.items():
        unused = [colour for colour in _COLOURS if colour not in colours.values()]
        colour = _GREY if name == OTHERS else colours.setdefault(name, unused[0] if unused else "#000000")
        intensity, rate, ns = zip(*points, strict=True)
        area = [max(_MOST_AREA * each / total_ns, _LEAST_AREA) for each in ns]
        label = f"{name}, {sum(ns) / total_ns:.0%}"
        panel.scatter(intensity, rate, s=area, color=colour, alpha=0.75, linewidth=0, label=label)
    panel.margins(y=0.2)
    panel.set(xscale="log", yscale="log", xlim=(left, right), ylabel="predicted rate (GFLOP/s)")
    panel.set_xlabel("operations per byte read or written (FLOP/byte)")
    panel.set_title(f"{device.label}: {duration(row['predicted_ns'])} a run", loc="left")
    if kinds:
        legend = panel.legend(
            fontsize="small", title="part of the nodes' time", title_fontsize="small", loc="lower right"
        )
        for handle in legend.legend_handles:
            handle.set_sizes([40])
    panel.grid(visible=True, which="major", alpha=0.25)


def _compare(panel: Any, rows: Sequence[Mapping[str, Any]], tickers: Any) -> None:
    """Draw predicted against measured times, and the line on which they agree."""
    times = [row[key] for row in rows for key in ("p50_ns", "predicted_ns")]
    ends = [min(times) / 3, max(times) * 3]
    panel.plot(ends, ends, color="#333333", linewidth=1.5, zorder=1)
    band = [[end * factor for end in ends] for factor in (1 / _TARGET, _TARGET)]
    panel.fill_between(ends, *band, color="#333333", alpha=0.12, linewidth=0, label=f"within {_TARGET - 1:.0%}")
    for row, colour in zip(rows, _COLOURS * len(rows), strict=False):
        label = f"{row['device']}: {row['predicted_ns'] / row['p50_ns']:.2g} x measured"
        panel.scatter([row["p50_ns"]], [row["predicted_ns"]], s=60, color=colour, alpha=0.75, zorder=3, label=label)
    panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured, median run", ylabel="predicted")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_formatter(tickers.FuncFormatter(lambda ns, _: duration(ns)))
        axis.set_minor_formatter(tickers.NullFormatter())
    panel.tick_params(axis="x", rotation=30)
    panel.set_title("predicted against measured", loc="left")
    panel.legend(fontsize="small", loc="upper left")
    panel.grid(visible=True, which="major", alpha=0.25)
