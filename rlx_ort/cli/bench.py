"""`rlx-ort bench MODEL`: run a model on each device and compare the times with the predictions."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import click

import rlx_ort
from rlx_ort.cli import options, page
from rlx_ort.cli.show import bar, binary_size, duration, emit, first_line, note, print_table


@options.command("bench")
def command(
    model: Path = options.model(),
    names: str | None = options.devices(
        "--device --devices --only", "Devices to run on. Default: every device that can run the model."
    ),
    runs: int = options.whole("--runs", "Timed runs on each device.", least=1, default=30),
    inputs: Path | None = options.inputs("random inputs are generated"),
    shapes: dict[str, tuple[int, ...]] = options.mapping(
        *("--shape", "An input's sizes.", "NAME=SIZES", "(.+)=([0-9x, ]*)", "image=1,3,224,224"),
        read=lambda sizes: tuple(map(int, re.findall("[0-9]+", sizes))),
    ),
    dims: dict[str, int] = options.DIMS,
    precision: rlx_ort.Precision | None = options.PRECISION,
    plot: Path | None = page.plot("rooflines, and predicted against measured times, to this file"),
    html: page.Page | None = page.HTML_AND_OPEN,
    trace: Path | None = page.TRACE,
    faults: bool = options.flag("--faults", "Inject a failure on each device; time the failover and the recovery."),
    as_json: bool = options.AS_JSON,
) -> None:
    """Time a model on each device.

    Shows the median, 90th and 99th percentile of a run, the first run, opening the session, and the memory of this
    process it took, beside the predicted time. A device of --device must take every node; on the others the CPU may
    help.

    With --faults a driver error, out of memory and a run that hangs are made up on each device in turn, and the other
    devices answer.
    """
    from rlx_ort.ir.graph import check_dims
    from rlx_ort.selection.predict import dims_of

    if faults and (plot or html or trace):
        raise click.UsageError("--faults excludes --plot, --html and --trace")
    if inputs and (dims or shapes):
        raise click.UsageError("--inputs excludes --dim and --shape: its arrays have sizes")
    rule = rlx_ort.PlacementRule.STRICT if names else rlx_ort.PlacementRule.ASSISTED
    policy, compile_options = options.policy_of(names), rlx_ort.CompileOptions(placement=rule)
    rows = []
    with options.opened(model, policy, compile_options, precision=precision) as runner:
        graph = runner.graph
        check_dims(graph, dims)
        sizes = {**runner.options.dims, **dims, **_sizes(graph, shapes)}
        feeds, assumed = options.feeds(inputs, runner) if inputs else options.random_inputs(graph, sizes)
        devices = [*(options.each_once(policy.allow or ()) if names else runner.devices())]
        with bar("running", len(devices)) as shown:
            for done, device in enumerate(devices):
                if shown is not None:
                    shown(done, f"running on {device.label}")
                measured = runner, device, feeds, runs
                rows += _fault_rows(*measured) if faults else [_row(*measured)]
        runner.close()  # a package stays open for the page
        used, name = dims_of(graph, feeds), model.name
        if not faults:
            rows.sort(key=lambda row: (row["p50_ns"] is None, row["p50_ns"] or 0))
        if html or trace:
            page.write_bench(html, trace, name, runner, feeds, rows)
    if plot is not None:
        from rlx_ort.cli.plots import draw

        draw(graph, name, used, rows, plot)
    kind, show = ("faults", _print_faults) if faults else ("devices", _print)
    emit({"model": str(model), "dims": used, "runs": runs, kind: rows}, as_json, lambda _: show(rows))
    if not faults:
        options.note_assumed("run and predicted", assumed)
    failed = [row["failure"] for row in rows if row["failure"]]  # the rows have the reasons
    if failed and (names or len(failed) == len(rows)):
        click.get_current_context().exit(failed[0].exit_code)


def _sizes(graph: rlx_ort.Graph, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return the named dims that the given shapes of inputs decide."""
    from rlx_ort.ir.types import TensorType

    kinds = graph.input_types
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        kind = kinds.get(name)
        if not isinstance(kind, TensorType) or kind.shape is None:
            raise click.UsageError(f"the model has no input {name!r} with a shape; it has {', '.join(kinds)}")
        fits = len(shape) == len(kind.shape) and all(
            not isinstance(dim, int) or dim == size for dim, size in zip(kind.shape, shape, strict=True)
        )
        if not fits:
            raise click.UsageError(f"input {name!r} is {kind}, which has no shape {list(shape)}")
        sizes.update({dim: size for dim, size in zip(kind.shape, shape, strict=True) if isinstance(dim, str)})
    return sizes


def _row(runner: rlx_ort.GraphDevices, device: rlx_ort.Device, feeds: Mapping[str, Any], runs: int) -> dict[str, Any]:
    import psutil

    from rlx_ort.selection.predict import dims_of, explain
    from rlx_ort.timing import in_row, timed

    row: dict[str, Any] = {"device": device.label, "p50_ns": None, "failure": ""}
    try:
        estimate = explain(runner.graph, device, runner.options, dims_of(runner.graph, feeds))
        row["predicted_ns"] = None if estimate is None else estimate.total_ns
        row["profile_source"] = None if estimate is None else estimate.source
        process = psutil.Process()
        before_bytes = process.memory_info().rss
        compiled, row["create_ns"] = timed(lambda: runner.compile(device))
        row["first_run_ns"], *times = in_row(lambda: compiled.run(feeds), 1 + runs)
        row["host_memory_bytes"] = max(process.memory_info().rss - before_bytes, 0)
        row["placement_share"] = compiled.placement.requested_share
    except rlx_ort.RlxError as err:  # one device's failure is a row of the answer
        return row | {"failure": err}
    row["times_ns"] = list(times)
    times.sort()
    row |= {f"p{share}_ns": times[math.ceil(share / 100 * runs) - 1] for share in (50, 90, 99)}
    return row


def _fault_rows(
    given: rlx_ort.GraphDevices, device: rlx_ort.Device, feeds: Mapping[str, Any], runs: int
) -> list[dict[str, Any]]:
    """Let a device fail in each way; return the time of the run that meets the fault, and until the device is back."""
    from rlx_ort import environment
    from rlx_ort.timing import in_row, timed

    rows = []
    resilience = rlx_ort.Resilience(bridge=False, backoff_s=_BACKOFF_S)
    runner = rlx_ort.GraphDevices(given.graph, given.policy, resilience=resilience)
    with runner, environment.override({"DEVICE": device.label}):
        runner.warm_all()  # so that no answer waits for a session that opens
        for fault, run in _FAULTS.items():
            row: dict[str, Any] = {"device": device.label, "fault": fault, "failure": ""}
            rows.append(row)
            try:
                compiled = runner.compile(device)
                for name, call in (("plain_ns", compiled.run), ("resilient_ns", runner.run_resolved)):
                    row[name] = statistics.median(in_row(partial(call, feeds), runs))
                limit_s = max(_SHORTEST_S, 5e-9 * row["plain_ns"])
                compiled.engine().run = run
                _, row["answer_ns"] = timed(partial(runner.run_resolved, feeds, timeout_s=limit_s))
                answered = runner.last_run
                row["answered_by"] = answered and answered.device and answered.device.label
                begun = time.perf_counter_ns()
                while time.perf_counter_ns() - begun < _BACK_NS:
                    runner.run_resolved(feeds)
                    if runner.last_run is not None and runner.last_run.device == device:
                        row["back_ns"] = time.perf_counter_ns() - begun
                        break
            except rlx_ort.RlxError as err:
                row["failure"] = err
    return rows


def _fail(text: str) -> Callable[..., list[Any]]:
    def run(*arguments: Any) -> list[Any]:
        raise rlx_ort.EngineError(text)

    return run


def _hang(*arguments: Any) -> list[Any]:
    from rlx_ort.providers.engine.stopping import check_stopped

    while True:
        time.sleep(0.001)
        check_stopped()


_FAULTS: Mapping[str, Callable[..., list[Any]]] = {
    "driver error": _fail("CUDA failure 719: made up"),
    "out of memory": _fail("Failed to allocate memory for requested buffer: made up"),
    "hang": _hang,
}
_BACKOFF_S = 0.05
_SHORTEST_S = 0.1  # time limit of the run that hangs
_BACK_NS = 10_000_000_000


def _print_faults(rows: list[dict[str, Any]]) -> None:
    times = ("plain_ns", "resilient_ns", "answer_ns", "back_ns")
    table = []
    for row in rows:
        answer = (row.get("answered_by") or "-", first_line(row["failure"]))
        table.append((row["device"], row["fault"], *(duration(row.get(key)) for key in times), *answer))
    print_table(("device", "fault", "plain", "resilient", "failing run", "back after", "answered by", "failure"), table)


def _print(rows: list[dict[str, Any]]) -> None:
    times = ("p50", "p90", "p99", "first run", "to open")
    columns = ("device", *times, "host memory", "placed there", "predicted", "failure")
    table = []
    for row in rows:
        memory, share = row.get("host_memory_bytes"), row.get("placement_share")
        spent = (duration(row.get(key)) for key in ("p50_ns", "p90_ns", "p99_ns", "first_run_ns", "create_ns"))
        placed = ("-" if memory is None else binary_size(memory), "-" if share is None else f"{share:.0%}")
        predicted = duration(row.get("predicted_ns"))
        table.append((row["device"], *spent, *placed, predicted, first_line(row["failure"])))
    print_table(columns, table)
    for row in rows:
        if "\n" in str(row["failure"]):
            note(f"{row['device']}: {row['failure']}")
    shipped = [row["device"] for row in rows if (row.get("profile_source") or "").startswith("default")]
    options.note_shipped(shipped, "run `rlx-ort calibrate`")
