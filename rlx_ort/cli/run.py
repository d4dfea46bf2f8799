"""`rlx-ort run MODEL`: run a model once, and print where it ran."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import rlx_ort
from rlx_ort.cli import options, page, split
from rlx_ort.cli.show import duration, emit, note, print_facts, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.options.split_plan import SplitPlan

_SOON_NS = 5_000_000_000  # a model whose first run takes longer is not run again for its time


@options.command("run")
def command(
    model: Path = options.model(),
    chain: str | None = options.devices(
        "--chain", "Run on the first of these devices that works, as in cuda,webgpu,cpu."
    ),
    strict: bool | None = options.option(
        "--strict/--assisted",
        "Whether every node must be on the device, or the CPU may help. "
        "Default: strict for a device you name, assisted for an automatic choice.",
        default=None,
    ),
    resilient: bool = options.flag(
        "--resilient",
        "Let another device answer where one fails, and print the health of each. RLX_RESILIENCE has settings.",
    ),
    plan: SplitPlan | str | None = options.option(
        "--split",
        "Run in stages on several devices, by a plan of `rlx-ort split`, or plan where memory asks for it (auto).",
        metavar="PLAN",
        read=split.read,
    ),
    trace: Path | None = page.TRACE,
    inputs: Path | None = options.inputs("random inputs are generated"),
    outputs: Path | None = options.OUTPUTS,
    device: str | None = options.device("Run on this device, or fail."),
    policy: rlx_ort.DevicePolicy = options.policy(),
    dims: dict[str, int] = options.DIMS,
    precision: rlx_ort.Precision | None = options.PRECISION,
    as_json: bool = options.AS_JSON,
) -> None:
    """Run a model once, and print where it ran, how long that took, and the first values of each output.

    Without --device or --chain: RLX_DEVICE_CHAIN, RLX_DEVICE, else the device with the smallest predicted time.
    """
    if (device is not None) + (chain is not None) + resilient > 1:
        raise click.UsageError("--device, --chain and --resilient exclude each other")
    if plan is not None and (device is not None or chain is not None or trace is not None):
        raise click.UsageError("--split names the devices by its plan, without --device, --chain and --trace")
    if trace is not None and (chain is not None or resilient):
        raise click.UsageError("--trace is of a run on one device, without --chain and --resilient")
    from rlx_ort.report.trace import traced_run

    named = None if device is None else rlx_ort.parse_device(device)
    tries = rlx_ort.device_chain_from_env() if chain is None else rlx_ort.parse_device_list(chain)
    rule = options.placement_of(strict)
    # One run does not outlive a bridge: the device that opens would never answer.
    resilience = rlx_ort.Resilience.from_env() or rlx_ort.Resilience(bridge=False) if resilient else None
    settings = rlx_ort.CompileOptions(placement=rule, dims=dims).with_(split=plan)
    with options.opened(model, policy, settings, resilience, admit=True, precision=precision) as runner:
        graph = runner.graph
        feeds = _feeds(graph, inputs, runner.options.dims)
        refused: list[tuple[rlx_ort.Device, str]] = []
        values: list[Any]

        def answer() -> tuple[rlx_ort.Device, list[Any]]:
            if named is not None:
                return named, runner.run(named, feeds)
            if tries and not resilient and plan is None:
                return runner.run_try(tries, feeds)
            return runner.run_chosen(feeds)

        begun, again_ns = time.perf_counter_ns(), None
        with progress("running"):
            if trace is not None:
                how = runner.options.with_(placement=rule or options.placement_of(named is not None))
                traced = traced_run(graph, feeds, lambda: runner.resolve_with_inputs(feeds, named), how)
                page.write_trace(trace, [traced])
                used, values = traced.device, traced.outputs
            else:
                used, values = answer()
                if named is None:
                    failed = () if runner.last_run is None else runner.last_run.attempts
                    refused = [*runner.last_attempts, *((attempt.device, attempt.reason) for attempt in failed)]
            took_ns = time.perf_counter_ns() - begun
            if trace is None and not resilient and took_ns < _SOON_NS:
                begun = time.perf_counter_ns()
                with contextlib.suppress(rlx_ort.RlxError):  # the first run has answered
                    answer()
                    again_ns = time.perf_counter_ns() - begun
        results = dict(zip((value.name for value in graph.outputs), values, strict=True))
        placement = getattr(values, "placement", None) or runner.placement(used)
        devices = [device.label for device in getattr(placement, "devices", (used,))]
        variant = runner.variant(used)
        health: list[dict[str, Any]] = [
            {"device": row.device.label, "state": row.state.value, "failures": row.failures, "reason": row.reason}
            for row in (runner.health() if resilient else ())
        ]
    document = {
        "model": str(model),
        "device": used.label,
        "devices": devices,
        "tuned": None if variant is None else str(variant),
        "took_ns": took_ns,
        "again_ns": again_ns,
        **refusals(refused),
        **({"health": health} if resilient else {}),
        "placement": _placement(placement),
        "inputs": "random" if inputs is None else str(inputs),
        **written(results, outputs),
    }
    again = "" if again_ns is None else duration(again_ns)
    nodes = ", ".join(f"{count} on {provider}" for provider, count in document["placement"]["nodes"].items())
    facts = [
        ("ran on", ", ".join(devices)),
        *([("tuned", str(variant))] if variant is not None else []),
        ("time", f"{duration(took_ns)} with choosing and opening{again and f'; {again} for a second run'}"),
        ("placement", f"{placement.requested_share:.0%} on {placement.requested}; nodes: {nodes or 'none'}"),
        ("copies between devices", str(placement.boundary_copies)),
        *((str(row["device"]), f"{row['state']}{row['reason'] and ': '}{row['reason']}") for row in health),
    ]
    emit(document, as_json, lambda document: print_run(document, facts))


def _feeds(graph: rlx_ort.Graph, path: Path | None, dims: Mapping[str, int]) -> Mapping[str, Any]:
    from rlx_ort.made_up import SEED

    if path is not None:
        return options.read_inputs(path, graph.input_types)
    feeds, assumed = options.random_inputs(graph, dims)
    shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
    note(f"no --inputs: using random inputs with seed {SEED} ({shapes or 'the model takes none'})")
    options.note_assumed("run", assumed)
    return feeds


def _placement(placement: rlx_ort.Placement) -> dict[str, Any]:
    return {
        "requested": placement.requested,
        "share": placement.requested_share,
        "nodes": {provider: len(nodes) for provider, nodes in placement.nodes_by_ep.items()},
        "strays": [node.origin or node.name for node in placement.strays],
        "boundary_copies": placement.boundary_copies,
    }


def refusals(refused: Iterable[tuple[rlx_ort.Device, str]]) -> dict[str, Any]:
    """Return the entry of the document that lists the devices that refused."""
    return {"refused": [{"device": tried.label, "reason": reason} for tried, reason in refused]}


def written(results: Mapping[str, Any], path: Path | None) -> dict[str, Any]:
    """Write the outputs to an npz file if one is given, as `flattened`, and return their entries of the document.

    Raises:
        InputError: two outputs would have the same name in the file.
    """
    from rlx_ort.cli.arrays import first_values, flattened, write_npz

    if path is not None:
        write_npz(path, flattened(results))
    outputs = [
        {
            "name": name,
            "dtype": str(result.dtype) if hasattr(result, "dtype") else type(result).__name__,
            "shape": list(result.shape) if hasattr(result, "dtype") else None,
            "first": first_values(result),
        }
        for name, result in results.items()
    ]
    return {"outputs": outputs, "outputs_file": None if path is None else str(path)}


def print_run(document: dict[str, Any], facts: Sequence[tuple[str, object]]) -> None:
    """Print the devices that refused, the facts of a run, and its outputs."""
    for row in document["refused"]:
        note(f"{row['device']} refused: {row['reason']}")
    file = document["outputs_file"]
    print_facts([*facts, ("written to", file)] if file else facts)
    rows = [(row["name"], row["dtype"], row["shape"], ", ".join(map(str, row["first"]))) for row in document["outputs"]]
    print_table(("output", "dtype", "shape", "first values"), rows)
