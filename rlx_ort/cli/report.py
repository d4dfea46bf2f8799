"""`rlx-ort report MODEL`: which devices can run a model, how fast each should be, and what blocks the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rlx_ort.cli import options
from rlx_ort.cli.models import read_model
from rlx_ort.cli.show import duration, note, print_json, print_table, progress
from rlx_ort.errors import RlxError

if TYPE_CHECKING:
    from rlx_ort.device import Device
    from rlx_ort.execution.options import CompileOptions
    from rlx_ort.execution.placement import Placement
    from rlx_ort.ir.graph import Graph
    from rlx_ort.selection.legalize import KernelDispatchReport

__all__ = ["command"]


@click.command("report")
@options.model
@options.only
@options.deny
@options.prefer
@options.dims
@click.option("--open", "open_sessions", is_flag=True, help="Open a session on each device and read its placement.")
@click.option("--ops", "with_ops", is_flag=True, help="Say of each kind of op how it gets to the device.")
@options.as_json
def command(
    model: Path,
    only: str | None,
    deny: str | None,
    prefer: str | None,
    dims: dict[str, int],
    open_sessions: bool,
    with_ops: bool,
    as_json: bool,
) -> None:
    """Show which devices can run a model.

    For each: whether it takes MODEL, its predicted time, and what blocks it.

    Predictions need sizes: give the named dims with --dim, else each counts with the cost model's stand-in size.
    """
    from rlx_ort.execution.options import CompileOptions
    from rlx_ort.selection.candidates import device_report

    policy = options.policy_of(only, deny, prefer)
    graph = read_model(model)
    compile_options = CompileOptions(dims=dims)
    with progress("asking each device"):
        candidates = device_report(graph, policy, compile_options)
    rows = []
    for candidate in candidates:
        row: dict[str, Any] = {
            "device": candidate.label,
            "available": candidate.available,
            "supports_graph": candidate.supports_graph,
            "cpu_nodes": candidate.cpu_nodes,
            "predicted_ns": candidate.predicted_ns,
            "profile_source": candidate.profile_source,
            "recommended": candidate.recommended,
            "blocker": candidate.blocker,
            "hardware": candidate.hardware,
        }
        if open_sessions:
            with progress(f"opening a session on {candidate.label}"):
                placement, opened = None, _UNOPENED
                if candidate.supports_graph:
                    placement, opened = _opened(graph, candidate.device, compile_options)
                row |= opened
        else:
            placement = None
        if with_ops:
            row["dispatch"] = _dispatch(graph, candidate.device, compile_options, placement)
        rows.append(row)
    if as_json:
        shown = [{**row, "dispatch": _as_dict(row["dispatch"])} if with_ops else row for row in rows]
        print_json({"model": str(model), "dims": dims, "devices": shown})
    else:
        _print(rows, open_sessions)
        for row in rows:
            if with_ops and row["dispatch"] is not None:
                _print_ops(row["dispatch"])


_UNOPENED: dict[str, Any] = {"placement_share": None, "open_error": None}


def _opened(graph: Graph, device: Device, compile_options: CompileOptions) -> tuple[Placement | None, dict[str, Any]]:
    """Return where a session really puts the nodes, or why it does not open, and both as columns of the row."""
    from rlx_ort.execution.options import PlacementRule
    from rlx_ort.execution.session import Session

    assisted = compile_options.with_(placement=PlacementRule.ASSISTED)
    try:
        compiled = Session(device, assisted).compile(graph)
    except RlxError as err:  # one row's failure is what the report is there to show
        return None, {"placement_share": None, "open_error": str(err)}
    return compiled.placement, {"placement_share": compiled.placement.requested_share, "open_error": None}


def _dispatch(
    graph: Graph, device: Device, compile_options: CompileOptions, placement: Placement | None
) -> KernelDispatchReport | None:
    """Return how the ops get to the device, and where a session put them; None when nothing is known about it here."""
    from rlx_ort.errors import DeviceUnavailableError
    from rlx_ort.selection.legalize import dispatch_report_for_device_with_options, merge_placement

    try:
        report = dispatch_report_for_device_with_options(graph, device, compile_options)
    except DeviceUnavailableError:
        return None
    return report if placement is None else merge_placement(report, placement)


def _as_dict(report: KernelDispatchReport | None) -> dict[str, Any] | None:
    from rlx_ort.selection.legalize import report_as_dict

    return None if report is None else report_as_dict(report)


def _print_ops(report: KernelDispatchReport) -> None:
    from rlx_ort.selection.legalize import format_dispatch_report

    click.echo(format_dispatch_report(report))


def _print(rows: list[dict[str, Any]], opened: bool) -> None:
    columns = ["device", "available", "supports", "predicted", "recommended", "blocker"]
    if opened:
        columns.insert(3, "placed there")
    table = []
    for row in rows:
        cells = [
            row["device"],
            _yes(row["available"]),
            _yes(row["supports_graph"]),
            duration(row["predicted_ns"]),
            "<-" if row["recommended"] else "",
            row["blocker"] or row.get("open_error") or "",
        ]
        if opened:
            share = row["placement_share"]
            cells.insert(3, "-" if share is None else f"{share:.0%}")
        table.append(cells)
    print_table(columns, table)
    shipped = [row["device"] for row in rows if (row["profile_source"] or "").startswith("default")]
    if shipped:
        note(f"predicted from shipped default profiles, not measured on this machine: {', '.join(shipped)}")


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
