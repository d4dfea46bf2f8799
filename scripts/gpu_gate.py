"""The GPU gate: the tests that CI cannot run, on a machine with a GPU in one go or part by part.

    python scripts/gpu_gate.py --out FOLDER [--commit HASH] [--device cuda] [--limits suite=270,webgpu=150]
    python scripts/gpu_gate.py --out FOLDER --parts webgpu,figures --record FOLDER/gpu-gate.json --covered DIGEST

Runs the backend tests on the device and, beside them, the truth of the capability answers over the ONNX backend cases
on the device and the CPU. Then the truth of WebGPU, the tests that calibrate, and the figures of `bench.py cuda`, each
alone. The parts `models`, users' models by `model_runs.py`, and `generated`, cases of `generate_cases.py`, are run if
they are named: `--parts models,generated`. Writes gpu-gate.json after each part, with the commit, the versions, the
counts and the figures; `--record` adds the parts to those of an earlier call, each with its commit, if both are about
the same models, verdicts and sessions (`gpu_covered.py`). Its copy in docs/results/ is the record. A test compares it
with the code as it is. The exit code is 1 when something fails that is not listed as known.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_covered import covered_digest  # makes the helpers of the tests known
from outcomes import read_outcomes  # one of them

ROOT = Path(__file__).resolve().parents[1]
LIMITS_S = {
    "suite": 240,
    "truth": 180,
    "webgpu": 110,
    "calibration": 70,
    "figures": 90,
    "models": 240,
    "generated": 120,
}
"""The parts in order -> seconds after which each is stopped and keeps its results so far."""
NAMED = ("models", "generated")  # run only if they are named: with them a call takes longer than ten minutes
BESIDE = ("suite", "truth")  # run side by side: neither measures time, and neither uses WebGPU much
OUTCOMES = ("passed", "failed", "skipped", "xfailed")
TAIL = 1500
GRACE_S = 30  # to end the case that a stopped process is at
TRUTH = {"cpu": 2, "webgpu": 12}  # processes; others than these have 8, and compare the automatic choice as well
LEAST = {"webgpu": 0.985}  # agreement; others than these 0.995
ALONE = "tests/backend/calibration/"
"""Tests that time the machine: beside other processes a calibration of a second or two has no time for anything."""

_ABSOLUTE = re.compile(r"(?<![\w.-])/?(?:usr|opt|work|tmp|home|root)/(?:[\w.+-]+/)*")
"""Folders of the machine, which a record that is committed does not name."""

SLOW = {
    "tests/backend/ops/test_dtypes.py": 8,
    "tests/backend/user_models/test_user_models.py": 8,
    "tests/backend/execution/test_crashes.py": 4,
    "tests/backend/providers/test_compile_cache.py": 2,
}  # processes


def main() -> int:
    """Run the parts and return 0 when nothing failed that is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="the commit that is tested, where git is not at hand")
    parser.add_argument("--covered", default="", help="the digest of gpu_covered.py, to save the GPU machine's time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(part for part in LIMITS_S if part not in NAMED))
    parser.add_argument("--limits", default="", metavar="PART=SECONDS,...", help=f"other than {LIMITS_S}")
    parser.add_argument("--record", type=Path, help="the gpu-gate.json of an earlier call, to add these parts to")
    parser.add_argument("--families", default="cuda", help="of bench.py, for the figures")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    given = [pair.split("=") for pair in options.limits.split(",") if pair]
    limits = LIMITS_S | {part: float(seconds) for part, seconds in given}
    parts = options.parts.split(",")
    if unknown := {*limits, *parts} - LIMITS_S.keys():
        parser.error(f"unknown part {', '.join(sorted(unknown))}; known are {', '.join(LIMITS_S)}")
    git = ["git", "rev-parse", "HEAD"]
    record: dict[str, Any] = {
        "commit": options.commit or subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "covered": options.covered or covered_digest(),
        "device": options.device,
        "machine": machine(options.device),
    }
    if options.record is not None:
        earlier = json.loads(options.record.read_text(encoding="utf-8"))
        if _subject(earlier) != _subject(record):
            parser.error(f"{options.record} is of {_subject(earlier)}, this call of {_subject(record)}: run all parts")
        record = {**earlier, "commit": record["commit"]}
    record["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    run: dict[str, Callable[[float], dict[str, Any]]] = {
        "suite": lambda limit_s: suite(options.device, options.out, options.workers, limit_s),
        "calibration": lambda limit_s: suite(options.device, options.out, 1, limit_s, alone=True),
        "truth": lambda limit_s: truth([options.device, "cpu"], options.out, limit_s),
        "webgpu": lambda limit_s: truth(["webgpu"], options.out, limit_s),
        "models": lambda limit_s: models(options.device, options.out, limit_s),
        "generated": lambda limit_s: generated(options.device, options.out, limit_s),
        "figures": lambda limit_s: figures(options.out, options.families, limit_s),
    }

    def keep(part: str, result: dict[str, Any]) -> None:
        record[part] = {"commit": record["commit"], **result}
        (options.out / "gpu-gate.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shown = {key: value for key, value in result.items() if not isinstance(value, list | dict)}
        print(part, json.dumps(shown), flush=True)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {pool.submit(_timed, run[part], limits[part]): part for part in parts if part in BESIDE}
        for future in concurrent.futures.as_completed(started):
            keep(started[future], future.result())
    for part in LIMITS_S:
        if part in parts and part not in BESIDE:
            keep(part, _timed(run[part], limits[part]))
    return 0 if all(record[part].get("ok") for part in parts) else 1


def _subject(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the subject of a record; its parts share it."""
    machine = record["machine"]
    return record["covered"], record["device"], machine["hardware"], machine["onnxruntime"]


def _timed(part: Callable[[float], dict[str, Any]], limit_s: float) -> dict[str, Any]:
    start = time.perf_counter()
    return {**part(limit_s), "seconds": round(time.perf_counter() - start, 1)}


def machine(device: str) -> dict[str, str]:
    """Return the facts that the results depend on."""
    program = (
        "import json, onnxruntime, rlx_ort; from rlx_ort.providers.registry import availability; "
        f"a = availability({device!r}); "
        "print(json.dumps({'onnxruntime': onnxruntime.__version__, 'hardware': a.hardware, 'driver': a.driver, "
        "'available': str(a.available), 'reason': a.reason}))"
    )
    _, out, err = _run(["-c", program], 60)
    lines = out.strip().splitlines()
    facts = json.loads(lines[-1]) if lines else {"reason": err[-TAIL:]}
    return {"python": platform.python_version(), "cores": str(os.cpu_count()), **facts}


def suite(device: str, out: Path, workers: int, limit_s: float, *, alone: bool = False) -> dict[str, Any]:
    """Run the backend tests on the device, a few files at a time, and return the counts and every failure.

    Those of `ALONE` time the machine, and are left out unless they are all that is run.
    """
    deadline = time.monotonic() + limit_s
    folder = out / "outcomes"
    folder.mkdir(exist_ok=True)
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests" / "backend").rglob("test_*.py"))]
    names = [name for name in names if name.startswith(ALONE) == alone]
    names.sort(key=lambda name: -SLOW.get(name, 0))
    shards = [(name, f"{at}/{SLOW.get(name, 1)}") for name in names for at in range(SLOW.get(name, 1))]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda shard: _pytest(shard[0], shard[1], device, folder, deadline), shards))
    counts = {outcome: sum(result[outcome] for result in results) for outcome in OUTCOMES}
    failures = [failure for result in results for failure in result["failures"]]
    times = {" ".join(shard): result["seconds"] for shard, result in zip(shards, results, strict=True)}
    longest = dict(sorted(times.items(), key=lambda item: -item[1])[:5])
    return {"ok": not failures, **counts, "failures": failures, "longest_s": longest}


def _pytest(name: str, shard: str, device: str, folder: Path, deadline: float) -> dict[str, Any]:
    log = folder / f"{name.replace('/', '.')}.{shard.replace('/', '-')}.jsonl"
    log.unlink(missing_ok=True)  # tests that ended in an earlier call are not run again
    start = time.perf_counter()
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", name, "--device", device, "--shard", shard]
    command += [f"--outcomes={log}", "--tb=short", "-o", "faulthandler_timeout=60"]
    # In pytest's own folder, processes remove old folders while others list them.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        code, out, err = _run([*command, f"--basetemp={own}/tests"], deadline - time.monotonic())
    tests = read_outcomes(log)
    result = {outcome: sum(test["outcome"] == outcome for test in tests) for outcome in OUTCOMES}
    failed = [test for test in tests if test["outcome"] == "failed"]
    failures = [{"test": test["test"], "why": _ABSOLUTE.sub("", test["why"])[-700:]} for test in failed]
    if code not in (0, 1, 5) or (code == 1 and not failures):
        last = max(map(err.rfind, ("Timeout (", "Fatal Python error")))  # the stacks of a test that took long, or died
        text = out[-TAIL:] + (err[-TAIL:] if last < 0 else err[last : last + TAIL])
        failures.append({"test": name, "why": _ABSOLUTE.sub("", text)[-2 * TAIL :]})
        result["failed"] += 1
    return {**result, "failures": failures, "seconds": round(time.perf_counter() - start, 1)}


def truth(names: Sequence[str], out: Path, limit_s: float) -> dict[str, Any]:
    """Return how often the capability answers agree with a strict run, over the cases that the time allows."""
    from capability_truth import joined

    def answered(job: tuple[str, int]) -> tuple[list[dict[str, Any]], str]:
        name, start = job
        folder = out / f"truth-{name}-{start}"
        program = ["scripts/capability_truth.py", "--devices", name, "--out", str(folder), "--seconds", str(limit_s)]
        program += ["--every", str(TRUTH.get(name, 8)), "--start", str(start), *["--no-choice"] * (name in TRUTH)]
        code, _, err = _run(program, limit_s + GRACE_S, RLX_CACHE_DIR=str(folder / "cache"))
        path = folder / "capability.json"
        rows = json.loads(path.read_text(encoding="utf-8"))["devices"] if path.exists() else []
        return rows, "" if rows and code == 0 else f"{folder.name}: {err[-TAIL:]}"

    jobs = [(name, start) for name in dict.fromkeys(names) for start in range(TRUTH.get(name, 8))]
    with concurrent.futures.ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(answered, jobs))
    errors = [error for _, error in results if error]
    shards: dict[str, list[dict[str, Any]]] = {}
    for (name, _), (part, _) in zip(jobs, results, strict=True):
        shards.setdefault(name, []).extend(part)
    rows = {name: joined(part) for name, part in shards.items() if part}
    agreement = {f"{name}_agreement": row["agreement"] for name, row in rows.items()}
    wrong = sum(map(_wrong_choices, rows.values()))
    right = all(name in rows and rows[name]["agreement"] >= LEAST.get(name, 0.995) for name in names)
    ok = right and not wrong and not errors
    return {"ok": ok, **agreement, "wrong_choices": wrong, "errors": errors, "rows": rows}


def _wrong_choices(row: dict[str, Any]) -> int:
    """Return how many choices gave no answer, or refused late, where the answer before was not wrong already."""
    listed = {entry["case"] for entry in row["wrong"]}
    return len([entry for entry in row["automatic"] if entry["kind"] != "failed" and entry["case"] not in listed])


def models(device: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run the models of users on the device, as many as the time allows; none may be left."""
    table = out / "user_models.json"
    program = ["scripts/model_runs.py", device, "--out", str(table), "--seconds", str(limit_s - GRACE_S)]
    code, text, err = _run(program, limit_s)
    (out / "user_models.txt").write_text(text, encoding="utf-8")
    content = json.loads(table.read_text(encoding="utf-8")) if table.exists() else {}
    return {"ok": code == 0, "error": err[-TAIL:] if code not in (0, 1) else "", **content}


def generated(device: str, out: Path, limit_s: float) -> dict[str, Any]:
    """Run generated graphs in every way for the time, and keep the counts and the failures."""
    failures = out / "generated.json"
    minutes = str(round((limit_s - GRACE_S) / 60, 2))
    program = ["scripts/generate_cases.py", "--device", device, "--minutes", minutes, "--failures", str(failures)]
    code, text, err = _run(program, limit_s)
    counts = next((line for line in text.splitlines() if line.startswith(f"{device}: ")), "")
    kept = json.loads(failures.read_text(encoding="utf-8")) if failures.exists() else []
    error = "" if code in (0, 1) else text[-TAIL:] + err[-TAIL:]
    return {"ok": code == 0, "counts": counts, "failures": kept, "error": error}


def figures(out: Path, families: str, limit_s: float) -> dict[str, Any]:
    """Measure the figures of a GPU."""
    code, text, err = _run(["scripts/bench.py", *families.split(","), "--json"], limit_s)
    (out / "figures.jsonl").write_text(text, encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    missed = [row["figure"] for row in rows if row.get("ok") is False]
    failed = code != 0 and not (code == 1 and missed)
    return {"ok": not failed, "missed": missed, "error": err[-TAIL:] if failed else "", "rows": rows}


def _run(program: Sequence[str], limit_s: float, **variables: str) -> tuple[int, str, str]:
    """Return the exit code of a Python program and its output until it ended or was stopped; -1 if stopped."""
    command = [sys.executable, *program]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # pipes wait for children that outlive it
        try:
            limit_s, env = max(1.0, limit_s), {**environment, **variables}
            done = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=err, timeout=limit_s)
            code, note = done.returncode, ""
        except subprocess.TimeoutExpired:
            code, note = -1, f"\nstopped after {limit_s:.0f} s"
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return code, texts[0], texts[1] + note


if __name__ == "__main__":
    sys.exit(main())
