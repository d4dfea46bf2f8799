"""`rlx-ort tune MODEL`: find the fastest way to run a model on a device, and keep it for later runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

import rlx_ort
from rlx_ort.cli import options
from rlx_ort.cli.show import binary_size, duration, emit, note, print_table, progress

if TYPE_CHECKING:
    from rlx_ort.tuning import Tuning


@options.command("tune")
def command(
    model: Path = options.model(),
    device: str | None = options.device("Tune for this device. Default: the one predicted to be fastest."),
    inputs: Path | None = options.inputs("random inputs are generated"),
    precision: rlx_ort.Precision | None = options.PRECISION,
    tolerance: float | None = options.number(
        "--tolerance", "The largest error of an output over its largest value. Default: by the precision."
    ),
    budget_s: float = options.seconds("--budget", "Seconds to spend, or a time such as 2min.", default=60.0),
    policy: rlx_ort.DevicePolicy = options.policy(),
    dims: dict[str, int] = options.DIMS,
    as_json: bool = options.AS_JSON,
) -> None:
    """Find the fastest way to run a model on a device, and keep it.

    Tries options of the device, one on top of the other, compares the results with those in f32, and times them in
    turns. Nothing computes in a lower precision than that of --precision. Later runs of the model on this machine, with
    the same options and versions, take the winner. The last rows show the gain of lower precisions.
    """
    with options.opened(model, policy, rlx_ort.CompileOptions(dims=dims), precision=precision) as runner:
        feeds, assumed = options.feeds(inputs, runner)
        with progress("tuning") as shown:
            say = None if shown is None else shown.update
            tuning = runner.tune(feeds, device, tolerance=tolerance, budget_s=budget_s, progress=say)
    emit({"model": str(model), **tuning.document(), "kept": tuning.kept}, as_json, lambda _: _print(tuning))
    options.note_assumed("tuned for", assumed)


def _print(tuning: Tuning) -> None:
    rows = []
    for trial in tuning.trials:
        ratio = "-" if trial.ratio is None else f"{trial.ratio:.2f}"
        error = "-" if trial.error is None else f"{trial.error:.0e}"
        memory = "-" if trial.memory_bytes is None else binary_size(trial.memory_bytes)
        outcome = trial.note or "taken"
        rows.append((trial.variant, duration(trial.run_ns), ratio, error, memory, duration(trial.open_ns), outcome))
    print_table(("variant", "run", "of the best's", "error", "memory", "to open", "outcome"), rows)
    times = f"{duration(tuning.run_ns)} a run, {duration(tuning.usual_ns)} with the options as they are"
    click.echo(
        f"{tuning.device.label}: {tuning.variant}: {times}, error {tuning.error:.0e} of {tuning.tolerance:.0e} allowed"
    )
    if not tuning.kept:
        note("the result could not be kept; the next run takes the options as they are")
