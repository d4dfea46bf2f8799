"""The options `--html`, `--open`, `--trace` and `--plot`, and the contents of the page and the trace."""

from __future__ import annotations

import functools
import json
import webbrowser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from rlx_ort.cli.show import note, progress, replacing
from rlx_ort.errors import RlxError

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.ir.graph import Graph
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.report.trace import TracedRun
    from rlx_ort.selection.policy import DevicePolicy

Command = TypeVar("Command", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, path_type=Path)

html = click.option(
    "--html", "html_path", type=_FILE, help="Write a page with the graph, its costs and its splits; runs the model."
)
trace = click.option(
    "--trace", "trace_path", type=_FILE, help="Write a trace of the run for Perfetto or chrome://tracing."
)


def plot(what: str) -> Callable[[Command], Command]:
    """Return the option `--plot`, which draws this to a file."""
    return click.option("--plot", "plot_path", type=_FILE, help=f"Draw {what}; needs the extra `plot`.")


def html_and_open(command: Command) -> Command:
    """Add `--html` and `--open`; the command gets the path and `show`, and `--open` alone is wrong usage."""

    @html
    @click.option("--open", "show", is_flag=True, help="Show the page of --html in the browser.")
    @functools.wraps(command)
    def with_page(*args: Any, html_path: Path | None, show: bool, **given: Any) -> Any:
        if show and html_path is None:
            raise click.UsageError("--open shows the page that --html writes; give --html PATH too")
        return command(*args, html_path=html_path, show=show, **given)

    return with_page  # type: ignore[return-value]  # a command of the same name and options


def views_of(
    graph: Graph, policy: DevicePolicy, options: CompileOptions, feeds: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[TracedRun], dict[Device, str]]:
    """Run a graph on each device that may be chosen, the automatic choice first; return views, traces and failures.

    A device that several names stand for is run once.
    """
    from rlx_ort.device import Device
    from rlx_ort.providers.registry import provider_of
    from rlx_ort.report.document import view_of
    from rlx_ort.selection.candidates import Candidates
    from rlx_ort.selection.predict import dims_of

    candidates = Candidates(graph, policy, options, feeds)
    dims = {**options.dims, **dims_of(graph, feeds)}
    views: list[dict[str, Any]] = []
    traces: list[TracedRun] = []

    def failure(choose: Callable[[], Device], name: str) -> str:
        try:
            with progress(f"running on {name}"):
                view, traced = view_of(graph, choose, options, feeds, dims)
        except RlxError as err:  # one device's failure is a row of the report
            return str(err)
        views.append(view)
        traces.append(traced)
        return ""

    first = failure(candidates.fastest, "the device that is chosen")  # before anything about the graph is remembered
    failures: dict[Device, str] = {}
    seen: set[tuple[object, int]] = set()
    for device in candidates.ranked():
        provider = provider_of(device)
        place = (provider and provider.name, device.index)
        if place not in seen:
            failures[device] = failure(functools.partial(Device, device), device.label) if seen else first
            seen.add(place)
    return views, traces, {device: why for device, why in failures.items() if why}


def write_page(
    path: Path, show: bool, reports: Sequence[Mapping[str, Any]], comparison: Mapping[str, Any] | None = None
) -> None:
    """Write the page of one report or two, and show it in the browser if that is asked for."""
    from rlx_ort.report.page import rendered

    with replacing(path) as stream:
        stream.write(rendered(reports, comparison).encode("utf-8"))
    note(f"page written to {path}")
    if show:
        webbrowser.open(path.resolve().as_uri())


def write_trace(path: Path, traced: Sequence[TracedRun]) -> None:
    """Write a trace of some runs."""
    from rlx_ort.report.trace import trace_document

    with replacing(path) as stream:
        stream.write(json.dumps(trace_document(traced)).encode("utf-8"))
    note(f"trace written to {path}; open it at https://ui.perfetto.dev or chrome://tracing")


def write_bench(
    html_path: Path | None,
    trace_path: Path | None,
    show: bool,
    title: str,
    graph: Graph,
    compile_options: CompileOptions,
    feeds: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
) -> None:
    """Run each device of a benchmark once more with a profile, and write the page and the trace that are asked for."""
    from rlx_ort.device import Device
    from rlx_ort.report.document import document, splits_of, view_of
    from rlx_ort.selection.predict import dims_of

    dims = dims_of(graph, feeds)
    views, traces = [], []
    for row in rows:
        device = Device(row["device"])
        if not row["failure"]:
            with progress(f"profiling on {row['device']}"):
                view, traced = view_of(
                    graph, functools.partial(Device, device), compile_options, feeds, dims, measured_ns=row["p50_ns"]
                )
            views.append(view)
            traces.append(traced)
    if trace_path is not None:
        write_trace(trace_path, traces)
    if html_path is not None:
        splits = splits_of(graph, (Device(row["device"]) for row in rows), compile_options, dims)
        write_page(html_path, show, [document(title, rows, views, splits, dims=dims)])


def write_comparison(
    path: Path,
    show: bool,
    models: Sequence[Path],
    devices: Sequence[Device],
    compile_options: CompileOptions,
    feeds: Mapping[str, Any],
    comparison: Mapping[str, Any],
) -> None:
    """Write a page with the reports of two models, or of one on two devices, side by side."""
    from rlx_ort.cli.options import read_model, read_packaged
    from rlx_ort.device import Device
    from rlx_ort.report.document import document, splits_of, view_of
    from rlx_ort.selection.predict import dims_of

    reports = []
    for model, device in zip(models, devices, strict=True):
        graph, settings = read_packaged(model, compile_options) or (read_model(model), compile_options)
        dims = {**settings.dims, **dims_of(graph, feeds)}
        with progress(f"running {model.name} on {device.label}"):
            view, _ = view_of(graph, functools.partial(Device, device), settings, feeds, dims)
        row = {"device": device.label, "predicted_ns": view["predicted_ns"], "profile_source": view["source"]}
        splits = splits_of(graph, [device], settings, dims)
        reports.append(document(f"{model.name} on {device.label}", [row], [view], splits, dims=dims))
    write_page(path, show, reports, comparison)
