"""Compare the capability answer with the outcome: every ONNX backend case, compiled strictly on a device and run.

    python scripts/capability_truth.py --devices cpu,webgpu --out FOLDER [--every 5]

Writes capability.json: for each device how often the answer and the session agree, and each disagreement with its
reason. For each device but the CPU it also records whether the automatic choice answers, with the CPU and without.
Cases run in a child process: one that ends a fresh one does not run on the device, and the next gets another child.
`CURRENT_CASE` in the child's environment is the case, for what logs a driver's faults.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import sys
import time
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT / "scripts"), str(ROOT)]

from onnx_suite.cases import Case, all_cases  # noqa: E402  # a folder of the tests

import rlx_ort  # noqa: E402
from figures.record import Child  # noqa: E402
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
    parser.add_argument("--mixed", action="store_true", help="take the cases in a mixed order, always the same")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no case is begun after")
    parser.add_argument("--no-choice", action="store_true", help="leave the automatic choice out")
    parser.add_argument("--each", type=Path, help="a file that gets a line of JSON for each case, as it ends")
    parser.add_argument("--renew", type=int, default=0, metavar="N", help="take another child process after N cases")
    options = parser.parse_args()
    import onnxruntime  # not in the children, where rlx_ort is the first to load it

    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the suite's own sources overflow and divide by zero on purpose
        cases = all_cases()
    if options.mixed:
        cases = tuple(sorted(cases, key=lambda case: hashlib.sha256(case.id.encode()).digest()))
    cases = cases[options.start :: options.every]
    rows = [of_device(Device(name), cases, end, options) for name in options.devices.split(",")]
    versions = {"onnxruntime": onnxruntime.__version__, "python": platform.python_version()}
    document = json.dumps({"versions": versions, "devices": rows}, indent=1)
    (options.out / "capability.json").write_text(document + "\n", encoding="utf-8")
    print("\n".join(map(summary, rows)))
    return 0


def of_device(device: Device, cases: tuple[Case, ...], end: float, options: argparse.Namespace) -> dict[str, Any]:
    """Return how often the answer for a device is right over the cases, and where it is not."""
    start = time.perf_counter()
    counts = dict.fromkeys(("both yes", "both no", "false yes", "false no", "not imported"), 0)
    found: dict[str, Any] = {"counts": counts, "right_by_list": 0, "list_differs": [], "wrong": [], "automatic": []}
    child = Child(options.renew)
    for case in cases:
        if time.monotonic() > end:
            print(f"stopped after {sum(counts.values())} of {len(cases)} cases", file=sys.stderr)
            break
        answer = answer_of(child, case, device.label, not options.no_choice and device.kind != "cpu")
        kind = _count(case, answer, found)
        if options.each is not None:
            with options.each.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"device": device.label, "case": case.id, "kind": kind, **answer}) + "\n")
    child.close()
    return row_of(device.label, {**found, "seconds": round(time.perf_counter() - start, 1)})


def _count(case: Case, answer: dict[str, Any], found: dict[str, Any]) -> str:
    """Add the outcome of one case, and return its kind."""
    if not answer:
        found["counts"]["not imported"] += 1
        return "not imported"
    said, runs = answer["said"], answer["runs"]
    kind = ("both yes" if runs else "false yes") if said else ("false no" if runs else "both no")
    found["automatic"] += [{"case": case.id, **each} for each in answer["choice"]]
    found["counts"][kind] += 1
    found["right_by_list"] += answer["listed"] == runs
    if answer["differs"]:
        found["list_differs"].append({"case": case.id, **answer["differs"]})
    if kind.startswith("false"):
        found["wrong"].append({"case": case.id, "kind": kind, "reason": (answer["failure"] or answer["why"])})
    return kind


def row_of(label: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a device with its shares."""
    counts = found["counts"]
    judged = sum(counts.values()) - counts["not imported"]
    agreement = round((counts["both yes"] + counts["both no"]) / max(judged, 1), 4)
    by_list = round(found["right_by_list"] / max(judged, 1), 4)
    return {"device": label, "cases": judged, "agreement": agreement, "list_agreement": by_list, **found}


def joined(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one row for the rows of processes that took different cases of a device."""
    found: dict[str, Any] = {"counts": {kind: sum(row["counts"][kind] for row in rows) for kind in rows[0]["counts"]}}
    found["right_by_list"] = sum(row["right_by_list"] for row in rows)
    for key in ("list_differs", "wrong", "automatic"):
        found[key] = [entry for row in rows for entry in row[key]]
    found["seconds"] = max(row["seconds"] for row in rows)
    return row_of(rows[0]["device"], found)


def _first(support: Support) -> str:
    return str(support.unsupported[0].name) if support.unsupported else ""


def answer_of(child: Child, case: Case, device: str, choice: bool) -> dict[str, Any]:
    """Return the result of `judged` for a case; a case that ends a process does not run."""
    model, sets = case.load()
    for run, choose in dict.fromkeys([(True, choice), (True, False), (False, False)]):
        with contextlib.suppress(BrokenProcessPool):
            answer = child.call(judged, device, case.id, model, sets[0][0], run, choose)
            if run and choose != choice and answer:
                answer["choice"] = [{"kind": "failed", "reason": "the choice ended the process"}]
            return answer
    raise RuntimeError(f"{case.id} ends the process before it is run")


def judged(device: str, case: str, model: bytes, arrays: list[Any], run: bool, choice: bool) -> dict[str, Any]:
    """Return the answer for a case, that of its list, and the outcome; nothing where it is not imported.

    Runs in the child. Without `run` the case is one that ends the process.
    """
    os.environ["CURRENT_CASE"] = case
    place = Device(device)
    try:
        graph = rlx_ort.from_onnx(model)
    except RlxError:
        return {}
    inputs = dict(zip([value.name for value in graph.inputs], arrays, strict=False))
    try:
        support, listed = support_of(place, graph), support_of(place, graph, ask=False)
    except RlxError as err:
        support = listed = Support(reason=str(err))
    runs, failure = strict_run(place, graph, inputs) if run else (False, "the case ended the process")
    differs = {}
    if listed.supported != support.supported or _first(listed) != _first(support):
        differs = {"list": (listed.blocker or "yes")[:FIRST_LINE], "asked": (support.blocker or "yes")[:FIRST_LINE]}
    return {
        "said": support.supported,
        "why": (support.blocker or "")[:FIRST_LINE],
        "listed": listed.supported,
        "differs": differs,
        "runs": runs,
        "failure": failure[:FIRST_LINE],
        "choice": choice_failures(place, graph, inputs) if choice else [],
    }


def strict_run(device: Device, graph: Graph, inputs: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a graph compiles strictly on a device and runs, and why not."""
    try:
        rlx_ort.Session(device).compile(graph).run(inputs)
    except RlxError as err:
        return False, f"{type(err).__name__}: {err}"
    return True, ""


def choice_failures(device: Device, graph: Graph, inputs: dict[str, Any]) -> list[dict[str, str]]:
    """Return the faults of the automatic choice: no answer where the CPU has one, or a late refusal without it."""
    found = []
    if strict_run(Device.CPU, graph, inputs)[0]:
        policy = rlx_ort.DevicePolicy.only([device, "cpu"])
        try:
            rlx_ort.GraphDevices(graph, policy).run_fastest(inputs)
        except RlxError as err:
            found.append({"kind": "no answer", "reason": f"{type(err).__name__}: {err}"[:FIRST_LINE]})
    runner = rlx_ort.GraphDevices(graph, rlx_ort.DevicePolicy.only([device]))
    try:
        runner.run_fastest(inputs)
    except NoViableDeviceError as err:
        if runner.last_attempts:  # else refused before the user's session was opened
            found.append({"kind": "late refusal", "reason": str(err)[:FIRST_LINE]})
    except RlxError as err:
        found.append({"kind": "failed", "reason": f"{type(err).__name__}: {err}"[:FIRST_LINE]})
    return found


def summary(row: dict[str, Any]) -> str:
    """Return one line about a device."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in row["counts"].items())
    late = {kind: sum(entry["kind"] == kind for entry in row["automatic"]) for kind in ("no answer", "late refusal")}
    return f"{row['device']}: {row['agreement']:.2%} of {row['cases']} ({kinds}); automatic {late}; {row['seconds']} s"


if __name__ == "__main__":
    sys.exit(main())
