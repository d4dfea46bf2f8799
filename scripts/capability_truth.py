"""Compare the capability answer with the outcome: every ONNX backend case, compiled strictly on a device and run.

    python scripts/capability_truth.py --devices cpu,webgpu --out FOLDER [--every 5]

Writes capability.json: for each device how often the answer and the session agree, and each disagreement with its
reason. For each device but the CPU it also records whether the automatic choice answers, with the CPU and without.
Cases run in a child process: one that ends it does not run on the device, and the next one gets another child.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import platform
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

from onnx_suite.cases import Case, all_cases  # noqa: E402  # a folder of the tests

import rlx_ort  # noqa: E402
from rlx_ort.device import Device  # noqa: E402
from rlx_ort.errors import NoViableDeviceError, RlxError  # noqa: E402
from rlx_ort.ir.graph import Graph  # noqa: E402
from rlx_ort.selection.support import Support, support_of  # noqa: E402

FIRST_LINE = 300


def main() -> int:
    """Run the comparison and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", type=int, default=1, help="take each nth case only")
    parser.add_argument("--start", type=int, default=0, help="with --every, the first case; for processes side by side")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after")
    parser.add_argument("--no-choice", action="store_true", help="leave the automatic choice out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    document = truth(
        [Device(name) for name in options.devices.split(",")],
        (options.start, options.every),
        choice=not options.no_choice,
        seconds=options.seconds,
    )
    (options.out / "capability.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in document["devices"]:
        print(summary(row))
    return 0


def truth(
    devices: list[Device], taken: tuple[int, int] = (0, 1), *, choice: bool = True, seconds: float = math.inf
) -> dict[str, Any]:
    """Return the comparison for each device, with the versions it depends on."""
    import onnxruntime

    end = time.monotonic() + seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own sources overflow and divide by zero on purpose
        cases = all_cases()[taken[0] :: taken[1]]
    versions = {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    return {"versions": versions, "devices": [of_device(device, cases, choice, end) for device in devices]}


def of_device(device: Device, cases: tuple[Case, ...], choice: bool, end: float) -> dict[str, Any]:
    """Return how often the answer for a device is right over the cases, and where it is not."""
    start = time.perf_counter()
    counts = {"both yes": 0, "both no": 0, "false yes": 0, "false no": 0, "not imported": 0}
    row: dict[str, Any] = {"counts": counts, "right_by_list": 0, "list_differs": [], "wrong": [], "automatic": []}
    with Child() as child:
        for case in cases:
            if time.monotonic() > end:
                print(f"stopped after {sum(counts.values())} of {len(cases)} cases", file=sys.stderr)
                break
            _count(case, device, row, child, choice)
    return row_of(device.label, {**row, "seconds": round(time.perf_counter() - start, 1)})


def _count(case: Case, device: Device, row: dict[str, Any], child: Child, choice: bool) -> None:
    """Add the outcome of one case."""
    counts = row["counts"]
    try:
        model, sets = case.load()
        graph = rlx_ort.from_onnx(model)
    except RlxError:
        counts["not imported"] += 1
        return
    inputs = dict(zip([value.name for value in graph.inputs], sets[0][0], strict=False))
    try:
        support, listed = support_of(device, graph), support_of(device, graph, ask=False)
    except RlxError as err:
        support = listed = Support(reason=str(err))
    said, why = support.supported, support.blocker or ""
    runs, failure = child.strict_run(device.label, model, inputs)
    kind = ("both yes" if runs else "false yes") if said else ("false no" if runs else "both no")
    if choice and device.kind != "cpu":
        row["automatic"] += choice_failures(case, device, graph, inputs)
    counts[kind] += 1
    row["right_by_list"] += listed.supported == runs
    if listed.supported != said or _first(listed) != _first(support):
        entry = {"case": case.id, "list": listed.blocker or "yes", "asked": why or "yes"}
        row["list_differs"].append({key: value[:FIRST_LINE] for key, value in entry.items()})
    if kind.startswith("false"):
        row["wrong"].append({"case": case.id, "kind": kind, "reason": (failure or why)[:FIRST_LINE]})


def row_of(label: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a device with its shares."""
    counts = row["counts"]
    judged = sum(counts.values()) - counts["not imported"]
    agreement = round((counts["both yes"] + counts["both no"]) / max(judged, 1), 4)
    by_list = round(row["right_by_list"] / max(judged, 1), 4)
    return {"device": label, "cases": judged, "agreement": agreement, "list_agreement": by_list, **row}


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for the rows of processes that took different cases of a device."""
    whole: dict[str, Any] = {"counts": {kind: sum(row["counts"][kind] for row in rows) for kind in rows[0]["counts"]}}
    whole["right_by_list"] = sum(row["right_by_list"] for row in rows)
    for key in ("list_differs", "wrong", "automatic"):
        whole[key] = [entry for row in rows for entry in row[key]]
    whole["seconds"] = max(row["seconds"] for row in rows)
    return row_of(rows[0]["device"], whole)


def _first(support: Support) -> str:
    return str(support.unsupported[0].name) if support.unsupported else ""


class Child:
    """A process that runs cases within a `with` block, started again after a case that ended it."""

    def __enter__(self) -> Child:
        """Start it."""
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self._pool.shutdown(cancel_futures=True)

    def strict_run(self, device: str, model: bytes, inputs: dict[str, Any]) -> tuple[bool, str]:
        """Return whether a model compiles strictly on a device and runs, and why not."""
        try:
            return self._pool.submit(run_model, device, model, inputs).result()
        except BrokenProcessPool:
            self.__exit__()
            self.__enter__()
            return False, "the case ended the process"


def run_model(device: str, model: bytes, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Return the result of `strict_run` for a model; runs in the child."""
    return strict_run(Device(device), rlx_ort.from_onnx(model), inputs)


def strict_run(device: Device, graph: Graph, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a graph compiles strictly on a device and runs, and why not."""
    try:
        rlx_ort.Session(device).compile(graph).run(inputs)
    except RlxError as err:
        return False, f"{type(err).__name__}: {err}"
    return True, ""


def choice_failures(case: Case, device: Device, graph: Graph, inputs: dict[str, Any]) -> list[dict[str, str]]:
    """Return the faults of the automatic choice: no answer where the CPU has one, or a late refusal without it."""
    failures = []
    if strict_run(Device.CPU, graph, inputs)[0]:
        policy = rlx_ort.DevicePolicy.only([device, "cpu"])
        try:
            rlx_ort.GraphDevices(graph, policy).run_fastest(inputs)
        except RlxError as err:
            failures.append(
                {"case": case.id, "kind": "no answer", "reason": f"{type(err).__name__}: {err}"[:FIRST_LINE]}
            )
    runner = rlx_ort.GraphDevices(graph, rlx_ort.DevicePolicy.only([device]))
    try:
        runner.run_fastest(inputs)
    except NoViableDeviceError as err:
        if runner.last_attempts:  # else refused before the user's session was opened
            failures.append({"case": case.id, "kind": "late refusal", "reason": str(err)[:FIRST_LINE]})
    except RlxError as err:
        failures.append({"case": case.id, "kind": "failed", "reason": f"{type(err).__name__}: {err}"[:FIRST_LINE]})
    return failures


def summary(row: dict[str, Any]) -> str:
    """Return one line about a device."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
    late = {kind: sum(entry["kind"] == kind for entry in row["automatic"]) for kind in ("no answer", "late refusal")}
    return f"{row['device']}: {row['agreement']:.2%} of {row['cases']} ({kinds}); automatic {late}; {row['seconds']} s"


if __name__ == "__main__":
    sys.exit(main())
