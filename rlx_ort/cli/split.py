"""`rlx-ort split MODEL`: cut a model into stages for several devices, within their memory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, duration, emit, note, print_table, replacing

if TYPE_CHECKING:
    from rlx_ort.options.split_plan import SplitPlan


@options.command("split")
def command(
    model: Path = options.model(),
    budgets: str | None = options.option(
        "--budget",
        "Memory of the devices, such as cuda=8GB,cpu=16GB. Default: all that each device that works here has.",
        metavar="BUDGETS",
    ),
    overlap: bool = options.flag(
        "--overlap", "Plan for many runs, whose stages work at the same time, and not for the time of one."
    ),
    out: Path | None = options.written("--out", "Write the plan to this JSON file, which may be edited."),
    inputs: Path | None = options.inputs("sizes are taken from --dim, or made up"),
    policy: rlx_ort.DevicePolicy = options.policy(),
    dims: dict[str, int] = options.DIMS,
    precision: rlx_ort.Precision | None = options.PRECISION,
    as_json: bool = options.AS_JSON,
) -> None:
    """Cut a model into stages for several devices, within their memory, and print the plan.

    Nothing is opened. `rlx-ort run MODEL --split plan.json` runs by a plan, and so does CompileOptions(split=plan).
    """
    from rlx_ort.selection.predict import dims_of, predicted_ns

    with options.opened(model, policy, rlx_ort.CompileOptions(dims=dims), precision=precision) as runner:
        feeds, assumed = options.feeds(inputs, runner)
        plan = runner.plan(feeds, budgets, overlap=overlap)
        sizes = dims_of(runner.graph, feeds)
        alone = {device: predicted_ns(runner.graph, device, runner.options, sizes) for device, _ in plan.budgets}
    if out is not None:
        with replacing(out) as stream:
            stream.write((json.dumps(plan.document(), indent=1) + "\n").encode())
    times = {device.label: time for device, time in alone.items()}
    document = {"model": str(model), "plan": plan.document(), "alone_ns": times, "written": out and str(out)}
    emit(document, as_json, lambda _: _print(plan, alone))
    options.note_assumed("planned for", assumed)
    if out is not None:
        note(f"written to {out}; rlx-ort run {model} --split {out}")


def _print(plan: SplitPlan, alone: Mapping[rlx_ort.Device, float | None]) -> None:
    budgets = dict(plan.budgets)
    rows = []
    for number, stage in enumerate(plan.stages, 1):
        budget = budgets.get(stage.device)
        share = "" if budget is None else f", {stage.memory_bytes / budget:.0%} of {binary_size(budget)}"
        moved = binary_size(stage.moved_bytes) if stage.moved_bytes else "-"
        facts = (f"{binary_size(stage.memory_bytes)}{share}", duration(stage.run_ns), moved)
        rows.append((number, stage.device.label, stage.last, *facts))
    print_table(("stage", "device", "up to node", "memory", "run", "moved into it"), rows)
    others = ", ".join(f"{device.label} alone {duration(time)}" for device, time in alone.items())
    click.echo(f"predicted: {duration(plan.run_ns)} a run; where memory did not count: {others}")
    if plan.streams:
        note("no plan keeps all stages open: each run opens them one after the other")


def read(path: str | None) -> SplitPlan | str | None:
    """Return the value of `--split`: `auto`, or the plan of a file.

    Raises:
        InputError: the file is no plan.
    """
    if path is None or path == "auto":
        return path
    from rlx_ort.options.split_plan import SplitPlan
    from rlx_ort.storage import read_regular

    try:
        return SplitPlan.read(read_regular(path), path)
    except OSError as err:
        raise rlx_ort.InputError(f"the plan {path} cannot be read: {err}; write it with rlx-ort split --out") from err
