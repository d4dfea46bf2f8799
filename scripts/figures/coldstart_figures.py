"""From the start of a process to its first result: a warmed package against plain ONNX Runtime on the same model."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures.bert import exported_file
from figures.record import Figure, seconds_of

__all__ = ["measure"]

REPEATS = 15
TARGET = 0.5
MOST_ALONE = 0.1
"""The share of its weights that a second process may have for itself."""
BATCH, TOKENS = 1, 16

FEEDS = f"""
import numpy as np
feeds = {{"input_ids": np.arange({BATCH * TOKENS}, dtype=np.int64).reshape({BATCH}, {TOKENS}),
         "attention_mask": np.ones(({BATCH}, {TOKENS}), np.int64)}}
"""
PLAIN = f"""
import sys
import onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
{FEEDS}
hidden = session.run(None, feeds)[0]
"""
WARMED = f"""
import sys
from rlx_ort.deploy.start import start_package
package = start_package(sys.argv[1])
{FEEDS}
hidden = package.run(feeds)[0]
assert package.quick
"""
OPENED = f"""
import sys
import rlx_ort
runner = rlx_ort.open_package(sys.argv[1])
{FEEDS}
hidden = runner.run("cpu", feeds)[0]
assert "started" in repr(runner)
"""
COMPILED = f"""
import sys
import rlx_ort
runner = rlx_ort.open_package(sys.argv[1])
{FEEDS}
hidden = runner.compile("cpu").run(feeds)[0]
"""
IMPORTED = """
import rlx_ort.graph_devices
"""
BARE = """
import numpy
"""
SAVED = "np.save(sys.argv[2], hidden)"
HELD = """
import json
def memory():
    found = {"anonymous": 0, "Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    weights = False
    for line in open("/proc/self/smaps", encoding="utf-8"):
        name, _, rest = line.partition(":")
        if "-" in name:  # the head of a mapping ends with its file
            weights = line.rstrip().endswith("weights.bin")
        elif name == "Anonymous":
            found["anonymous"] += int(rest.split()[0]) * 1024
        elif weights and name in found:
            found[name] += int(rest.split()[0]) * 1024
    return found
for _ in range(int(sys.argv[2])):
    package.run(feeds)
if package._quick._packing is not None:
    package._quick._packing.join()
    package.run(feeds)
print("ready", flush=True)
while sys.stdin.readline():
    print(json.dumps(memory()), flush=True)
"""


def measure() -> Iterator[Figure]:
    """Yield the starts in turns, the difference of the results, and the memory of a second process."""
    model = exported_file()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode, so the checkout may too
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLX_CACHE_DIR"] = str(Path(folder) / "cache")
        package = _warmed_package(model, Path(folder) / "bert.ortpackage")
        programs = {
            "plain": (PLAIN, model),
            "warmed": (WARMED, package),
            "opened": (OPENED, package),
            "compiled": (COMPILED, package),
            "bare": (BARE, model),
            "imported": (IMPORTED, model),
        }
        times: dict[str, list[float]] = {name: [] for name in programs}
        for repeat in range(-1, REPEATS):  # one turn before, for the page cache
            for name, (program, path) in programs.items():
                seconds = seconds_of([sys.executable, "-c", program, str(path)])
                if repeat >= 0:
                    times[name].append(seconds)
        yield from _starts(times)
        yield _difference(model, package, Path(folder))
        if sys.platform == "linux":  # other systems do not report which memory processes share
            yield _shared(package, 0, "as it starts")
            yield _shared(package, 4, "with packed weights")


def _warmed_package(model: Path, target: Path) -> Path:
    from rlx_ort.converters.files import load_graph
    from rlx_ort.deploy.create import Recipe, create_package
    from rlx_ort.deploy.open import warm_package
    from rlx_ort.device import Device

    create_package(load_graph(model), target, Recipe(name="bert"))
    (row,) = warm_package(target, [Device.CPU])
    if not row.starts:
        raise RuntimeError(f"the package was not warmed: {row.problem}")
    return target


def _starts(times: dict[str, list[float]]) -> Iterator[Figure]:
    plain = statistics.median(times["plain"])
    for name, what, target in (
        ("warmed", "a warmed package by start_package", TARGET),
        ("opened", "the same by open_package and run", TARGET),
        ("compiled", "the same by open_package and compile, which decodes the graph", None),
    ):
        ratio = statistics.median(mine / other for mine, other in zip(times[name], times["plain"], strict=True))
        detail = (
            f"{statistics.median(times[name]):.3f} s against {plain:.3f} s, medians of {REPEATS}; {BATCH} x {TOKENS}"
        )
        yield Figure(f"process start to first result, {what}, over InferenceSession", ratio, "times", target, detail)
    more = statistics.median(mine - other for mine, other in zip(times["imported"], times["bare"], strict=True))
    detail = f"{statistics.median(times['imported']):.3f} s, medians of {REPEATS} processes"
    yield Figure("import rlx_ort.graph_devices, beyond numpy", more, "s", detail=detail)


def _difference(model: Path, package: Path, folder: Path) -> Figure:
    import numpy as np

    results = []
    for number, (program, path) in enumerate(((PLAIN, model), (WARMED, package), (OPENED, package))):
        saved = folder / f"{number}.npy"
        seconds_of([sys.executable, "-c", program + SAVED, str(path), str(saved)])
        results.append(np.load(saved))
    scale = np.abs(results[0]).max()
    largest = float(max(np.abs(results[0] - other).max() for other in results[1:]) / scale)
    return Figure("largest difference of the results, relative to the largest value", largest, "", 1e-4)


def _shared(package: Path, runs: int, when: str) -> Figure:
    """Return what a second process has for itself of the weights that the first one maps."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-c", WARMED + HELD, str(package), str(runs)],
                cwd=tempfile.gettempdir(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
            _line(process)
        found = []
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            found.append(json.loads(_line(process)))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    second = found[1]
    if not second["Rss"]:
        raise RuntimeError("the second process maps no weights.bin")
    share = (second["Private_Clean"] + second["Private_Dirty"]) / second["Rss"]
    detail = f"weights mapped: Rss {second['Rss'] / 2**20:.0f}, Pss {second['Pss'] / 2**20:.0f} MiB; anonymous "
    detail += f"in total: {second['anonymous'] / 2**20:.0f} MiB; while the first one runs"
    return Figure(f"share of its weights that a second process has alone, {when}", share, "", MOST_ALONE, detail)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()
