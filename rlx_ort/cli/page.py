"""The options `--html`, `--open`, `--trace` and `--plot`, and the contents of the page and the trace."""

from __future__ import annotations

import functools
import json
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import note, progress, replacing

if TYPE_CHECKING:
    from rlx_ort.report.trace import TracedRun


class Page(NamedTuple):
    """A page that is asked for: its file, and whether it is shown in the browser."""

    path: Path
    show: bool


def _page(html_path: Path | None, show: bool) -> Page | None:
    if show and html_path is None:
        raise click.UsageError(
            "--open shows the page that --html writes; give --html PATH too (`report --sessions` opens sessions)"
        )
    return None if html_path is None else Page(html_path, show)


HTML_AND_OPEN: Any = options.joined(
    _page,
    html_path=options.written("--html", "Write a page with the graph, its costs and its splits; runs the model."),
    show=options.flag("--open", "Show the page of --html in the browser."),
)
"""A `Page`, or None where none is asked for; --open alone is wrong usage."""

TRACE: Any = options.written("--trace", "Write a trace of the run for Perfetto or chrome://tracing.")


def plot(what: str) -> Any:
    """Return the row of --plot, which draws this to a file."""
    return options.written("--plot", f"Draw {what}; needs the extra `plot`.")


def views_of(
    runner: rlx_ort.GraphDevices, feeds: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[TracedRun], dict[rlx_ort.Device, str]]:
    """Run the graph on each device that may be chosen, the automatic choice first; return views, traces and failures.

    A device that several names stand for is run once.
    """
    from rlx_ort.report.document import view_of
    from rlx_ort.selection.candidates import Candidates
    from rlx_ort.selection.predict import dims_of

    graph, chosen = runner.graph, runner.options
    candidates = Candidates(graph, runner.policy, chosen, feeds)
    dims = {**chosen.dims, **dims_of(graph, feeds)}
    views: list[dict[str, Any]] = []
    traces: list[TracedRun] = []

    def failure(choose: Callable[[], rlx_ort.Device], name: str) -> str:
        try:
            with progress(f"running on {name}"):
                view, traced = view_of(graph, choose, chosen, feeds, dims)
        except rlx_ort.RlxError as err:  # one device's failure is a row of the report
            return str(err)
        views.append(view)
        traces.append(traced)
        return ""

    first = failure(candidates.fastest, "the device that is chosen")  # before anything about the graph is remembered
    failures: dict[rlx_ort.Device, str] = {}
    for device in options.each_once(candidates.ranked(), named=False):
        choose = functools.partial(rlx_ort.Device, device)
        failures[device] = failure(choose, device.label) if failures else first
    return views, traces, {device: why for device, why in failures.items() if why}


def write_page(page: Page, reports: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any] | None = None) -> None:
    """Write the page of one report or two, and show it in the browser if that is asked for."""
    from rlx_ort.report.page import rendered

    with replacing(page.path) as stream:
        stream.write(rendered(reports, comparison).encode("utf-8"))
    note(f"page written to {page.path}")
    if page.show:
        webbrowser.open(page.path.resolve().as_uri())


def write_trace(path: Path, traced: Sequence[TracedRun]) -> None:
    """Write a trace of some runs."""
    from rlx_ort.report.trace import trace_document

    with replacing(path) as stream:
        stream.write(json.dumps(trace_document(traced)).encode("utf-8"))
    note(f"trace written to {path}; open it at https://ui.perfetto.dev or chrome://tracing")


def write_bench(
    page: Page | None,
    trace_path: Path | None,
    title: str,
    runner: rlx_ort.GraphDevices,
    feeds: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Run each device of a benchmark once more with a profile, and write the page and the trace that are asked for."""
    from rlx_ort.report.document import document, splits_of, view_of
    from rlx_ort.selection.predict import dims_of

    graph, compile_options = runner.graph, runner.options
    dims = dims_of(graph, feeds)
    views, traces = [], []
    for row in rows:
        if not row["failure"]:
            with progress(f"profiling on {row['device']}"):
                choose = functools.partial(rlx_ort.Device, row["device"])
                view, traced = view_of(graph, choose, compile_options, feeds, dims, measured_ns=row["p50_ns"])
            views.append(view)
            traces.append(traced)
    if trace_path is not None:
        write_trace(trace_path, traces)
    if page is not None:
        splits = splits_of(graph, (rlx_ort.Device(row["device"]) for row in rows), compile_options, dims)
        shown = [{**row, "failure": str(row["failure"])} for row in rows]
        write_page(page, [document(title, shown, views, splits, dims=dims)])


def write_comparison(
    page: Page,
    models: Sequence[Path],
    devices: Sequence[rlx_ort.Device],
    compile_options: rlx_ort.CompileOptions,
    feeds: Mapping[str, Any],
    comparison: Mapping[str, Any],
) -> None:
    """Write a page with the reports of two models, or of one on two devices, side by side."""
    from rlx_ort.report.document import document, splits_of, view_of
    from rlx_ort.selection.predict import dims_of

    reports = []
    for model, device in zip(models, devices, strict=True):
        graph, settings = options.read_model(model, compile_options)
        dims = {**settings.dims, **dims_of(graph, feeds)}
        with progress(f"running {model.name} on {device.label}"):
            view, _ = view_of(graph, functools.partial(rlx_ort.Device, device), settings, feeds, dims)
        row = {"device": device.label, "predicted_ns": view["predicted_ns"], "profile_source": view["source"]}
        splits = splits_of(graph, [device], settings, dims)
        reports.append(document(f"{model.name} on {device.label}", [row], [view], splits, dims=dims))
    write_page(page, reports, comparison)
