"""The GPU gate: what CI cannot see, run on a machine with a GPU in one go.

    python scripts/gpu_gate.py --out FOLDER [--commit HASH] [--device cuda] [--parts suite,truth,checks,figures]

Runs the backend tests on the device, the truth of the capability answers over the ONNX backend cases on the device,
the CPU and WebGPU, the checks of `gpu_checks.py` and `device_runs.py`, and the figures of `bench.py ask cuda`. Writes
gpu-gate.json with the commit, the versions, the counts and the figures. Its copy in docs/results/ is the record that a
test compares with the code. The exit code is 1 when something fails that is not listed as known.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("suite", "truth", "checks", "figures")
TAIL = 1500
LIMIT_S = 170  # a process of the tests; the comparison of capability answers is stopped then and keeps what it has
TRUTH = {"cpu": 2, "webgpu": 4}  # processes; others than these have 8, and compare the automatic choice as well
SLOW = {"tests/backend/ops/test_dtypes.py": 4, "tests/backend/providers/test_compile_cache.py": 2}  # processes

# Tests that time out beside the other processes of the gate, and pass alone: (test, why).
UNSTEADY = {
    "tests.backend.calibration.test_calibrate::test_a_gpu_in_software_is_predicted_to_be_slower_than_the_cpu": (
        "a quick calibration has no time beside fourteen other processes"
    ),
    "tests.backend.providers.test_devices::test_two_webgpu_sessions_in_two_threads_take_turns": (
        "two WebGPU sessions beside four other processes on the same GPU take more than two minutes"
    ),
}

# What the record is about: a change to one of these makes it out of date.
COVERED = (
    "converters/to_onnx",
    "providers/cuda.py",
    "providers/asking.py",
    "providers/answers.py",
    "providers/listed_kernels.py",
    "providers/kernel_lists",
    "rlx_ort/selection/support.py",
    "rlx_ort/selection/questions.py",
    "rlx_ort/selection/folding.py",
    "rlx_ort/selection/node_claims.py",
    "rlx_ort/selection/function_body.py",
)


def main() -> int:
    """Run the parts and return 0 when nothing failed that is not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="", help="the commit that is tested, where git is not at hand")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--families", default="ask,cuda", help="of bench.py, for the figures")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "commit": options.commit or _git_commit(),
        "covered": covered_digest(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": options.device,
        "machine": machine(options.device),
    }
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "suite": lambda: suite(options.device, options.out, options.workers),
        "truth": lambda: truth(options.device, options.out),
        "checks": lambda: checks(options.device, options.out),
        "figures": lambda: figures(options.out, options.families),
    }
    parts = options.parts.split(",")
    with concurrent.futures.ThreadPoolExecutor() as pool:  # tests and truth side by side, what is timed alone
        started = {part: pool.submit(_timed, run[part]) for part in parts if part in ("suite", "truth")}
        for part in started:
            started[part].exception()
    for part in parts:
        record[part] = started[part].result() if part in started else _timed(run[part])
        (options.out / "gpu-gate.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        shown = {key: value for key, value in record[part].items() if not isinstance(value, list | dict)}
        print(part, json.dumps(shown), flush=True)
    return 0 if all(record[part].get("ok") for part in parts) else 1


def _timed(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    return {**part(), "seconds": round(time.perf_counter() - start, 1)}


def covered_digest() -> str:
    """Return a hash of the covered code and data, without comments, docstrings and blank lines."""
    digest = hashlib.sha256()
    for path in covered_files():
        digest.update(path.relative_to(ROOT).as_posix().encode())
        for line in statements(path.read_text(encoding="utf-8")):
            digest.update(line.encode())
    return digest.hexdigest()


def statements(text: str) -> Iterator[str]:
    """Yield the lines of a file that are no comments, docstrings or blank; the same in every version of Python."""
    inside = False
    for line in text.splitlines():
        stripped = line.strip()
        opens = stripped.startswith('"""')
        if inside or opens:
            inside = stripped.count('"""') % 2 == 0 if inside else stripped.count('"""') == 1
        elif stripped and not stripped.startswith("#"):
            yield line.rstrip()


def covered_files() -> Iterator[Path]:
    """Yield the files that the record is about, in a fixed order."""
    for name in COVERED:
        path = ROOT / name
        found = [path] if path.is_file() else [*path.rglob("*.py"), *path.rglob("*.txt")]
        yield from sorted(found, key=lambda file: file.relative_to(ROOT).as_posix())


def machine(device: str) -> dict[str, str]:
    """Return what the results depend on."""
    program = (
        "import json, onnxruntime, rlx_ort; from rlx_ort.selection.availability import availability; "
        f"a = availability({device!r}); "
        "print(json.dumps({'onnxruntime': onnxruntime.__version__, 'hardware': a.hardware, 'driver': a.driver, "
        "'available': str(a.available), 'reason': a.reason}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=_environment(), capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if lines else {"reason": done.stderr[-TAIL:]}
    return {"python": platform.python_version(), "cores": str(os.cpu_count()), **found}


def suite(device: str, out: Path, workers: int) -> dict[str, Any]:
    """Run the backend tests on the device, a few files at a time, and return the counts and every failure."""
    folder = out / "junit"
    folder.mkdir(exist_ok=True)
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests" / "backend").rglob("test_*.py"))]
    names.sort(key=lambda name: -SLOW.get(name, 0))
    shards = [(name, f"{at}/{SLOW.get(name, 1)}") for name in names for at in range(SLOW.get(name, 1))]
    counts = {"passed": 0, "failed": 0, "skipped": 0, "xfailed": 0}
    failures: list[dict[str, str]] = []
    times: dict[str, float] = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for shard, found in pool.map(lambda shard: (shard, _pytest(shard[0], shard[1], device, folder)), shards):
            times[" ".join(shard)] = found["seconds"]
            for outcome in counts:
                counts[outcome] += found[outcome]
            failures += found["failures"]
    longest = dict(sorted(times.items(), key=lambda item: -item[1])[:5])
    return judged({**counts, "failures": failures, "longest_s": longest})


def judged(found: dict[str, Any]) -> dict[str, Any]:
    """Return the result of the tests with those apart that are known to fail beside other processes."""
    failures = [entry for entry in found["failures"] if entry["test"] not in UNSTEADY]
    unsteady = {entry["test"]: UNSTEADY[entry["test"]] for entry in found["failures"] if entry["test"] in UNSTEADY}
    return {**found, "ok": not failures, "failed": len(failures), "failures": failures, "unsteady": unsteady}


def _pytest(name: str, shard: str, device: str, folder: Path) -> dict[str, Any]:
    report = folder / f"{name.replace('/', '.')}.{shard.replace('/', '-')}.xml"
    start = time.perf_counter()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name, "--device", device]
    command += ["--shard", shard]
    try:
        done = subprocess.run(
            [*command, f"--junitxml={report}", "--tb=short", "-o", "faulthandler_timeout=60"],
            cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
        text, code = f"{done.stdout[-TAIL:]}{done.stderr[-TAIL:]}", done.returncode
    except subprocess.TimeoutExpired as err:
        text, code = f"took longer than {LIMIT_S} s: {str(err.stderr)[-TAIL:]}", -1
    found: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0, "xfailed": 0, "failures": []}
    cases = ET.parse(report).getroot().iter("testcase") if report.exists() else iter(())  # noqa: S314  # pytest's own
    for case in cases:
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        if wrong is not None:
            found["failed"] += 1
            test = f"{case.get('classname')}::{case.get('name')}"
            found["failures"].append({"test": test, "why": f"{wrong.get('message')}\n{wrong.text}"[-700:]})
        elif skipped is not None:
            found["xfailed" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
        else:
            found["passed"] += 1
    if code not in (0, 1, 5) or (code == 1 and not found["failures"]):
        found["failures"].append({"test": name, "why": text[-TAIL:]})
        found["failed"] += 1
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def truth(device: str, out: Path) -> dict[str, Any]:
    """Return how often the capability answers agree with a strict run, on the device, the CPU and WebGPU."""
    least = {"cpu": 0.995, device: 0.995, "webgpu": 0.985}
    jobs = []
    for name in dict.fromkeys([device, "webgpu", "cpu"]):
        for start in range(TRUTH.get(name, 8)):
            folder = out / f"truth-{name}-{start}"
            program = [sys.executable, "scripts/capability_truth.py", "--devices", name, "--out", str(folder)]
            program += ["--every", str(TRUTH.get(name, 8)), "--start", str(start)]
            program += ["--no-choice"] if name in TRUTH else []
            environment = {**_environment(), "RLX_CACHE_DIR": str(folder / "cache")}
            log = (out / f"{folder.name}.log").open("w", encoding="utf-8")
            jobs.append((name, folder, subprocess.Popen(program, cwd=ROOT, env=environment, stdout=log, stderr=log)))
    deadline = time.monotonic() + LIMIT_S
    found: dict[str, list[dict[str, Any]]] = {}
    errors = []
    for name, folder, job in jobs:
        try:
            job.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.send_signal(signal.SIGINT)
            job.wait(timeout=30)
        path = folder / "capability.json"
        if path.exists():
            found.setdefault(name, []).extend(json.loads(path.read_text(encoding="utf-8"))["devices"])
        if job.returncode or not path.exists():
            errors.append(f"{folder.name}: {(out / f'{folder.name}.log').read_text(encoding='utf-8')[-TAIL:]}")
    sys.path[:0] = [str(ROOT / "scripts")]
    from capability_truth import joined

    rows = {name: joined(shards) for name, shards in found.items()}
    agreement = {f"{name}_agreement": row["agreement"] for name, row in rows.items()}
    late = sum(map(_wrong_choices, rows.values()))
    right = all(name in rows and rows[name]["agreement"] >= share for name, share in least.items())
    ok = right and not late and not errors
    return {"ok": ok, **agreement, "wrong_choices": late, "errors": errors, "rows": rows}


def _wrong_choices(row: dict[str, Any]) -> int:
    """Return how many choices gave no answer, or refused late, where the answer before was not wrong already."""
    listed = {entry["case"] for entry in row["wrong"]}
    return len([entry for entry in row["automatic"] if entry["kind"] != "failed" and entry["case"] not in listed])


def checks(device: str, out: Path) -> dict[str, Any]:
    """Run the checks of the device that are no tests."""
    programs = {
        "gpu_checks": ["scripts/gpu_checks.py", "--out", str(out / "checks"), "--devices", device],
        "device_runs": ["scripts/device_runs.py", device],
    }
    found: dict[str, Any] = {}
    for name, program in programs.items():
        done = subprocess.run(
            [sys.executable, *program], cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300
        )
        found[name] = {"code": done.returncode, "lines": (done.stdout or done.stderr)[-TAIL:].splitlines()}
    models = out / "models.json"
    program = [sys.executable, "scripts/ten_models.py", "--out", str(models)]
    code = subprocess.run(program, cwd=ROOT, env=_environment(), stdout=subprocess.DEVNULL).returncode
    listed = json.loads(models.read_text(encoding="utf-8")) if models.exists() else {}
    ok = code == 0 and all(entry["code"] == 0 for entry in found.values())
    return {"ok": ok, "programs": found, "models": listed}


def figures(out: Path, families: str) -> dict[str, Any]:
    """Measure the figures of a GPU."""
    program = [sys.executable, "scripts/bench.py", *families.split(","), "--json"]
    done = subprocess.run(program, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300)
    (out / "figures.jsonl").write_text(done.stdout, encoding="utf-8")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    missed = [row["figure"] for row in rows if row.get("ok") is False]
    return {"ok": bool(rows), "missed": missed, "error": done.stderr[-TAIL:] if not rows else "", "rows": rows}


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUTF8": "1"}


def _git_commit() -> str:
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)  # noqa: S607
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
