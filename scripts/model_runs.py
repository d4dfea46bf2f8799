"""Run every model of `tests/data/user_models` on a device: is it right, refused, recorded, and how fast.

    python scripts/model_runs.py                          CUDA
    python scripts/model_runs.py webgpu --out FILE        another device; the table as JSON
    python scripts/model_runs.py cpu --only bert,lstm --seconds 60

Outputs are compared with the framework's for the three cases of each model: on the device that is named, with the
CPU's help if it refuses, and on the device that is chosen. At batch 1 and 16, the default `run` is timed against
`InferenceSession.run` in the same precision, both in a steady state. One line for each model. The exit code is 1 if an
output is wrong, an error is not typed, the device and its capability differ about a model, or if the time was too
short for all models. Each model runs in a child process, since a driver may end it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers"), str(ROOT / "scripts")]

from model_corpus import UserModel, corpus  # noqa: E402  # a helper of the tests

import rlx_ort  # noqa: E402
from figures.record import Child, turns_of  # noqa: E402
from rlx_ort.device import Device  # noqa: E402
from rlx_ort.errors import LegalizeError, PlacementError, RlxError  # noqa: E402
from rlx_ort.execution.compiled import CompiledGraph  # noqa: E402
from rlx_ort.options.compile_options import CompileOptions, PlacementRule  # noqa: E402
from rlx_ort.selection.support import supports_graph  # noqa: E402

BOUND = 1e-4
TIMED = {0: "batch_1", 2: "batch_16"}  # cases
WARM_RUNS = 40
WARM_S, MOST_WARM_S = 0.3, 4.0  # launches are recorded after some runs
MOST_SETTLED_S = 4.0
BLOCKS, BLOCK_S = 7, 0.03


def main() -> int:
    """Write the table and return 0 when nothing in it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--out", type=Path, help="where the table goes, after each model")
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--seconds", type=float, default=200, help="no model is begun after this time")
    parser.add_argument("--no-times", action="store_true", help="only compare and place")
    parser.add_argument("--renew", type=int, default=0, metavar="N", help="take another child process after N models")
    options = parser.parse_args()
    chosen = [each for each in corpus() if each.name.startswith(tuple(options.only.split(",")))]
    end = time.monotonic() + options.seconds
    rows: dict[str, dict[str, Any]] = {}
    table = summary(rows, len(chosen))
    child = Child(options.renew)
    for model in chosen:
        if time.monotonic() > end:
            break
        start = time.perf_counter()
        try:
            row = child.call(judged, model, Device(options.device), not options.no_times)
        except BrokenProcessPool:
            row = {"wrong": ["the process ended"], "refused": ""}
        rows[model.name] = {**row, "seconds": round(time.perf_counter() - start, 2)}
        shown = {key: value for key, value in row.items() if value}
        print(f"{model.name:32} {'WRONG' if row['wrong'] else 'ok':6} {json.dumps(shown)}", flush=True)
        table = summary(rows, len(chosen))
        if options.out is not None:
            options.out.write_text(json.dumps({**table, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    child.close()
    print(json.dumps(table), flush=True)
    return int(bool(table["wrong"]) or bool(table["not_reached"]))


def summary(rows: Mapping[str, dict[str, Any]], count: int) -> dict[str, Any]:
    """Return the sums over the rows."""
    table: dict[str, Any] = {
        "models": len(rows),
        "not_reached": count - len(rows),
        "wrong": {name: row["wrong"] for name, row in rows.items() if row["wrong"]},
        "refused": {name: row["refused"] for name, row in rows.items() if row["refused"]},
        "recorded": sum(bool(row.get("recorded")) for row in rows.values()),
    }
    for batch in TIMED.values():
        if ratios := [row[batch]["ratio"] for row in rows.values() if batch in row]:
            table |= {f"{batch}_ratio": round(statistics.geometric_mean(ratios), 3), f"{batch}_most": max(ratios)}
    return table


def judged(model: UserModel, device: Device, timed: bool) -> dict[str, Any]:
    """Return one row of the table. `CURRENT_CASE` in the environment is the model, for logs of a driver's faults."""
    os.environ["CURRENT_CASE"] = model.name
    row: dict[str, Any] = {"wrong": [], "refused": "", "error": 0.0}
    content = model.model()
    rule = PlacementRule.STRICT
    with rlx_ort.load(content) as runner:
        supported = supports_graph(device, runner.graph)
        try:
            runner.run(device, model.feeds(model.cases[0]))
        except (PlacementError, LegalizeError) as err:
            strays = getattr(getattr(err, "placement", None), "strays", ())
            row["refused"] = " ".join(sorted({node.op_type for node in strays})) or first_line(err)
            rule = PlacementRule.ASSISTED
        except RlxError as err:
            row["wrong"].append(f"{device.label}: {first_line(err)}")
        if supported == bool(row["refused"]):
            row["wrong"].append(f"supports_graph says {supported}")
    with rlx_ort.load(content, options=CompileOptions(placement=rule)) as runner:
        ran = _compare(row, model, rule.value, lambda feeds: runner.run(device, feeds))
        if timed and ran and not row["wrong"]:
            compiled = runner.compile(device)
            for case, batch in TIMED.items():
                feeds = model.feeds(model.cases[case])
                row[batch] = times(lambda: runner.run(device, feeds), compiled, content, device, feeds)  # noqa: B023  # now
            report = compiled.device_graph_report()
            row["recorded"] = len(report.recorded)
            row["why_not"] = report.reason or "; ".join(dict.fromkeys(report.refused.values()))
            row["sized"] = [f"{each.state} {each.reason}".strip() for each in report.sized or ()]
    with rlx_ort.load(content) as runner:
        _compare(row, model, "chosen", runner.run_fastest)
        row["chosen"] = [runner.fastest(model.feeds(model.cases[case])).label for case in TIMED]
    return row


def _compare(row: dict[str, Any], model: UserModel, way: str, run: Callable[[Any], Any]) -> bool:
    """Put the largest error and every wrong answer into a row; return whether the model ran."""
    for case, sizes in enumerate(model.cases):
        try:
            outputs = run(model.feeds(sizes))
        except PlacementError:
            if way != PlacementRule.ASSISTED.value:
                row["wrong"].append(f"{way}, {dict(sizes)}: refused after it ran")
            return False  # with no node on the device the CPU does not help
        except Exception as err:  # every error is to be typed
            typed = "" if isinstance(err, RlxError) else "not typed: "
            row["wrong"].append(f"{way}, {dict(sizes)}: {typed}{first_line(err)}")
            return False
        error = max(want.error(got) for got, want in zip(outputs, model.expected(case), strict=True))
        row["error"] = max(row["error"], float(f"{error:.1e}"))
        if not error <= BOUND:
            row["wrong"].append(f"{way}, {dict(sizes)}: off by {error:.1e}")
    return True


def times(
    ours: Callable[[], Any], compiled: CompiledGraph, content: bytes, device: Device, feeds: Mapping[str, Any]
) -> dict[str, Any]:
    """Return microseconds of a run and of `InferenceSession.run`, and the ratio of both in turns."""
    plain = plain_session(content, device)
    wanted = {each.name for each in plain.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in wanted}
    took = max(_warmed(lambda: plain.run(None, given)), _settled(ours, compiled))
    runs = max(1, min(30, int(BLOCK_S / took)))
    turns = turns_of(ours, lambda: plain.run(None, given), BLOCKS if took < BLOCK_S else 2, runs)
    run_us, plain_us = (round(seconds * 1e6, 1) for seconds in (turns.first, turns.second))
    return {"run_us": run_us, "plain_us": plain_us, "ratio": round(turns.ratio, 4)}


def _settled(run: Callable[[], Any], compiled: CompiledGraph) -> float:
    """Run until no session is opened in the background either, and return the seconds of the last run."""
    end = time.monotonic() + MOST_SETTLED_S
    _warmed(run, WARM_S)
    while time.monotonic() < end and any(
        each.state == "opening" for each in compiled.device_graph_report().sized or ()
    ):
        time.sleep(0.01)  # for the thread that opens it
        run()
    return _warmed(run)


def _warmed(run: Callable[[], Any], least_s: float = 0.0) -> float:
    """Run until a steady state and return the seconds of the last run."""
    start = time.perf_counter()
    runs, before, now = 0, start, start
    while now - start < MOST_WARM_S and (runs < WARM_RUNS or now - start < least_s):
        run()
        runs, before, now = runs + 1, now, time.perf_counter()
    return now - before


def plain_session(content: bytes, device: Device) -> Any:
    """Return an `InferenceSession` as users open one, with the precision that is ours by default."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # warnings about sizes that an export declares wrongly would be timed
    if device.kind in ("cuda", "cpu"):
        names: list[Any] = ["CPUExecutionProvider"]
        if device.kind == "cuda":
            names.insert(0, ("CUDAExecutionProvider", {"use_tf32": "0", "device_id": str(device.index)}))
        return onnxruntime.InferenceSession(content, options, providers=names)
    plugins = [each for each in onnxruntime.get_ep_devices() if each.ep_name.lower().startswith(device.kind)]
    options.add_provider_for_devices(plugins[:1], {})  # registered when the device was opened
    return onnxruntime.InferenceSession(content, options)


def first_line(err: BaseException) -> str:
    """Return an error in a line."""
    return f"{type(err).__name__}: {str(err).splitlines()[0][:200] if str(err) else ''}"


if __name__ == "__main__":
    sys.exit(main())
