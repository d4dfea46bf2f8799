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
    from rlx_ort.ir.graph import Graph

__all__ = ["command"]


@click.command("report")
@options.model
@options.only
@options.deny
@options.prefer
@options.dims
@click.option("--open", "open_sessions", is_flag=True, help="Open a session on each device and read its placement.")
@options.as_json
def command(
    model: Path,
    only: str | None,
    deny: str | None,
    prefer: str | None,
    dims: dict[str, int],
    open_sessions: bool,
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
        row = {
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
                row |= _opened(graph, candidate.device, compile_options) if candidate.supports_graph else _UNOPENED
        rows.append(row)
    if as_json:
        print_json({"model": str(model), "dims": dims, "devices": rows})
    else:
        _print(rows, open_sessions)


_UNOPENED: dict[str, Any] = {"placement_share": None, "open_error": None}


def _opened(graph: Graph, device: Device, compile_options: CompileOptions) -> dict[str, Any]:
    """Return the share of nodes that a session really puts on the device, or why it does not open."""
    from rlx_ort.execution.options import PlacementRule
    from rlx_ort.execution.session import Session

    assisted = compile_options.with_(placement=PlacementRule.ASSISTED)
    try:
        compiled = Session(device, assisted).compile(graph)
    except RlxError as err:  # one row's failure is what the report is there to show
        return {"placement_share": None, "open_error": str(err)}
    return {"placement_share": compiled.placement.requested_share, "open_error": None}


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
