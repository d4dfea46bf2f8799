"""`rlx-ort report MODEL`: which devices can run a model, how fast each should be, and the obstacles of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import rlx_ort
from rlx_ort.cli import options, page
from rlx_ort.cli.show import binary_size, duration, note, print_json, print_rest, print_table, progress

_COLUMNS = (
    *("available", "supports_graph", "cpu_nodes", "predicted_ns", "profile_source", "recommended", "blocker"),
    *("memory_bytes", "judged_by", "hardware"),
)


@options.command("report")
def command(
    model: Path = options.model(),
    policy: rlx_ort.DevicePolicy = options.policy(device_too=True),
    dims: dict[str, int] = options.DIMS,
    opens: bool = options.flag("--sessions", "Open a session on each device and read its placement."),
    html: page.Page | None = page.HTML_AND_OPEN,
    trace: Path | None = page.TRACE,
    why: bool = options.flag("--why", "Show the parts of each predicted time, and why the choice was made."),
    plot: Path | None = page.plot("a roofline for each device with the model's nodes on it"),
    all_rows: bool = options.ALL_ROWS,
    with_ops: bool = options.flag("--ops", "Show how each kind of op gets to the device."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Show which devices can run a model.

    For each: whether it takes MODEL, its predicted time, and the obstacle.

    Predictions need sizes: give the named dims with --dim, else they are those of the inputs that `run` makes up. With
    --html or --trace the model runs on such inputs.
    """
    from rlx_ort import made_up
    from rlx_ort.execution.placement import report_as_dict
    from rlx_ort.providers.registry import availability
    from rlx_ort.report.document import document, splits_of
    from rlx_ort.selection.candidates import Candidates
    from rlx_ort.selection.predict import dims_of
    from rlx_ort.selection.windows import fitting_sizes

    given = options.opened(model, policy, rlx_ort.CompileOptions(dims=dims))
    runner = click.get_current_context().with_resource(given)
    graph, policy, chosen = runner.graph, runner.policy, runner.options
    runs = html is not None or trace is not None
    if runs:
        feeds, assumed = options.random_inputs(graph, chosen.dims)
    else:
        feeds, assumed = made_up.shaped_inputs(graph.input_types, chosen.dims, fitting_sizes(graph, chosen.dims))
    views, traces, failures = page.views_of(runner, feeds) if runs else ([], [], {})
    with progress("asking each device"):
        candidates = Candidates(graph, policy, chosen, feeds).report()
    rows = []
    for candidate in candidates:
        row: dict[str, Any] = {
            "device": candidate.label,
            **{name: getattr(candidate, name) for name in _COLUMNS},
            "first_unsupported": None if candidate.first_unsupported is None else candidate.first_unsupported.name,
            "remedy": "" if candidate.available else availability(candidate.device).remedy,
            "assumed_dims": [*assumed, *candidate.assumed_dims],
        }
        placement = None
        if candidate.device in failures:
            row["open_error"] = failures[candidate.device]
        elif opens:
            error = None
            if candidate.supports_graph and policy.allows(candidate.device):
                with progress(f"opening a session on {candidate.label}"):
                    placement, error = _opened(runner, candidate.device)
            share = None if placement is None else placement.requested_share
            row |= {"placement_share": share, "open_error": error}
        if why:
            row |= _reasons(runner, candidate, feeds)
        if with_ops:
            row["dispatch"] = _dispatch(runner, candidate.device, placement)
        rows.append(row)
    _mark_names(rows)
    shown = [row for row in rows if row["same_as"] is None]
    if trace is not None:
        page.write_trace(trace, traces)
    if html is not None:
        sizes = {**dims, **dims_of(graph, feeds)}
        splits = splits_of(graph, (row.device for row in candidates), chosen, sizes)
        page.write_page(html, [document(model.name, shown, views, splits, dims=sizes)])
    if plot is not None:
        from rlx_ort.cli.plots import draw

        draw(graph, model.name, {**assumed, **dims}, shown, plot)
    if as_json:
        for row in rows:
            if row.get("dispatch") is not None:
                row["dispatch"] = report_as_dict(row["dispatch"])
        print_json({"model": str(model), "dims": dims, "assumed_dims": assumed, "devices": rows})
        return
    _print(rows, opens, all_rows or policy.allow is not None)
    options.note_assumed("predicted", assumed)
    if why:
        _print_reasons(shown, policy)
    for row in shown:
        if row.get("dispatch") is not None:
            click.echo(rlx_ort.format_dispatch_report(row["dispatch"]))


def _mark_names(rows: Sequence[dict[str, Any]]) -> None:
    """Set `same_as` of each row: the device of which it is another name and which is shown for both, or None."""
    from rlx_ort.providers.registry import same_hardware

    groups: dict[rlx_ort.Device, list[dict[str, Any]]] = {}
    for row in rows:
        device = rlx_ort.Device(row["device"])
        first = same_hardware(device)[0] if row["available"] else device
        groups.setdefault(first, []).append(row)
    for group in groups.values():
        shown = max(group, key=lambda row: (row["recommended"], row["predicted_ns"] is not None))
        for row in group:
            row["same_as"] = None if row is shown else shown["device"]


def _reasons(
    runner: rlx_ort.GraphDevices, candidate: rlx_ort.DeviceCandidate, inputs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the parts of a predicted time, the error to expect of it, and why it is not from a calibration."""
    from rlx_ort.calibration import store
    from rlx_ort.selection.candidates import automatic
    from rlx_ort.selection.predict import dims_of

    estimate = None
    if candidate.predicted_ns is not None:
        dims = dims_of(runner.graph, inputs)
        estimate = rlx_ort.explain(runner.graph, candidate.device, automatic(runner.options), dims)
    if estimate is None:
        return {"terms": [], "error": None, "uncalibrated": ""}
    why = store.find(candidate.device).reason if (candidate.profile_source or "").startswith("default") else ""
    return {"terms": [asdict(term) for term in estimate.explain()], "error": estimate.error, "uncalibrated": why}


def _print_reasons(rows: list[dict[str, Any]], policy: rlx_ort.DevicePolicy) -> None:
    priced = sorted((row for row in rows if row["terms"]), key=lambda row: row["predicted_ns"])
    for row in priced:
        total_ns = row["predicted_ns"]
        parts = [
            (term["name"], term["count"], duration(term["ns"]), f"{term['ns'] / total_ns:.0%}", term["how"])
            for term in row["terms"]
            if term["ns"] > 0
        ]
        title = f"{row['device']}: {duration(total_ns)} a run, give or take {row['error']:.0%}"
        print_table(("part", "number", "time", "share", "how it is known"), parts, title=title)
        click.echo(f"from {row['profile_source']}" + (f" ({row['uncalibrated']})" if row["uncalibrated"] else ""))
    chosen = next((row for row in priced if row["recommended"]), None)
    if chosen is not None:
        click.echo(_why_chosen(chosen, priced, policy))


def _why_chosen(chosen: dict[str, Any], priced: list[dict[str, Any]], policy: rlx_ort.DevicePolicy) -> str:
    """Return why the device was chosen: its prediction or a preference, and which others may be as fast."""
    from rlx_ort.selection.policy import labels

    time_ns = chosen["predicted_ns"]
    text = f"chosen: {chosen['device']}, predicted to take {duration(time_ns)}"
    others = [row for row in priced if row is not chosen]
    if not others:
        return f"{text}; no other device may run it"
    best = others[0]
    if best["predicted_ns"] < time_ns:
        close = f"{(time_ns / best['predicted_ns'] - 1):.1%} behind {best['device']}"
        text += f"; it is preferred (prefer: {labels(policy.prefer)}) and {close}, which counts as equal"
    else:
        text += f"; next is {best['device']} with {duration(best['predicted_ns'])}"
    limit_ns = time_ns * (1 + chosen["error"])
    rivals = [row["device"] for row in others if row["predicted_ns"] / (1 + row["error"]) <= limit_ns]
    if rivals:
        text += f"\nwithin the error of the predictions, {', '.join(rivals)} may be as fast; `rlx-ort bench` measures"
    return text


def _opened(runner: rlx_ort.GraphDevices, device: rlx_ort.Device) -> tuple[rlx_ort.Placement | None, str | None]:
    """Return where a session really puts the nodes, or why it does not open."""
    assisted = runner.options.with_(placement=rlx_ort.PlacementRule.ASSISTED)
    try:
        return rlx_ort.Session(device, assisted).compile(runner.graph).placement, None
    except rlx_ort.RlxError as err:  # one row's failure is a row of the report
        return None, str(err)


def _dispatch(
    runner: rlx_ort.GraphDevices, device: rlx_ort.Device, placement: rlx_ort.Placement | None
) -> rlx_ort.KernelDispatchReport | None:
    """Return how the ops get to the device, and where a session put them; None when nothing is known about it here."""
    from rlx_ort.execution.placement import merge_placement

    try:
        report = rlx_ort.dispatch_report_for_device(runner.graph, device, runner.options)
    except rlx_ort.DeviceUnavailableError:
        return None
    return report if placement is None else merge_placement(report, placement)


def _print(rows: list[dict[str, Any]], opened: bool, all_rows: bool) -> None:
    from rlx_ort.calibration.features import DEFAULT_DIM

    columns = ("device", "supports", *["placed there"] * opened, "predicted", "memory", "recommended", "blocker")
    table = []
    here = [row for row in rows if row["available"] and row["same_as"] is None]
    for row in here:
        share = row.get("placement_share")
        placed = ["-" if share is None else f"{share:.0%}"] * opened
        memory = "" if row["memory_bytes"] is None else binary_size(row["memory_bytes"])
        chosen = (duration(row["predicted_ns"]), memory, "<-" if row["recommended"] else "")
        blocker = row["blocker"] or row.get("open_error") or ""
        table.append((row["device"], "yes" if row["supports_graph"] else "no", *placed, *chosen, blocker))
    if here:
        print_table(columns, table)
    names: dict[str, list[str]] = {}
    for row in rows:
        if row["same_as"] is not None:
            names.setdefault(row["same_as"], []).append(row["device"])
    for device, others in names.items():
        click.echo(f"other names of {device}: {', '.join(others)}")
    away = [(row["device"], row["blocker"] or "", row["remedy"]) for row in rows if not row["available"]]
    print_rest("not here", [(name, why.replace(f"; {remedy}", ""), remedy) for name, why, remedy in away], all_rows)
    options.note_shipped(row["device"] for row in here if (row["profile_source"] or "").startswith("default"))
    nameless = dict.fromkeys(name for row in rows for name in row["assumed_dims"] if name.endswith("]"))
    if nameless:
        note(f"predicted with {DEFAULT_DIM} for dims without a name: {', '.join(nameless)}")
