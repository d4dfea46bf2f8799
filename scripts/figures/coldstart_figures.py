"""From the start of a process to its first result: a warmed package against plain ONNX Runtime on the same model."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from figures.graphs import Maker
from figures.record import Figure, process_seconds

REPEATS = 15
TARGET = 0.5
WIDTH, HEADS, LAYERS, VOCABULARY, TOKENS = 768, 12, 12, 30522, 16

FEEDS = f"import numpy as np\nfeeds = {{'ids': np.arange({TOKENS}, dtype=np.int64)[None]}}\n"
FIRST = {
    "plain": "import sys, onnxruntime\n"
    "session = onnxruntime.InferenceSession(sys.argv[1], providers=['CPUExecutionProvider'])\n"
    f"{FEEDS}hidden = session.run(None, feeds)[0]",
    "a warmed package by start_package": "import sys\nfrom rlx_ort.deploy.start import start_package\n"
    f"package = start_package(sys.argv[1])\n{FEEDS}hidden = package.run(feeds)[0]\nassert package.quick",
    "the same by open_package and run": "import sys, rlx_ort\nrunner = rlx_ort.open_package(sys.argv[1])\n"
    f"{FEEDS}hidden = runner.run('cpu', feeds)[0]\nassert 'started' in repr(runner)",
    "the same by open_package and compile, which decodes the graph": "import sys, rlx_ort\n"
    f"runner = rlx_ort.open_package(sys.argv[1])\n{FEEDS}hidden = runner.compile('cpu').run(feeds)[0]",
}
"""Way -> the program, whose argument is the ONNX file for `plain` and else the package."""
PLAIN, WARMED, OPENED, _COMPILED = FIRST


def measure() -> Iterator[Figure]:
    """Yield the starts in turns, and the difference of the results."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have their bytecode, so the checkout may too
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["RLX_CACHE_DIR"] = str(folder / "cache")
        package, model = folder / "encoder.ortpackage", folder / "encoder.onnx"
        _write(model, package)
        times: dict[str, list[float]] = {way: [] for way in FIRST}
        for repeat in range(-1, REPEATS):  # one turn before, for the page cache
            for way, program in FIRST.items():
                seconds = process_seconds("-c", program, str(model if way == PLAIN else package))
                if repeat >= 0:
                    times[way].append(seconds)
        plain = statistics.median(times[PLAIN])
        for way in list(FIRST)[1:]:
            ratio = statistics.median(mine / other for mine, other in zip(times[way], times[PLAIN], strict=True))
            detail = f"{statistics.median(times[way]):.3f} s against {plain:.3f} s, medians of {REPEATS}"
            title = f"process start to first result, {way}, over InferenceSession"
            yield Figure(title, ratio, "times", TARGET if way in (WARMED, OPENED) else None, detail)
        results = []
        for number, way in enumerate((PLAIN, WARMED, OPENED)):
            saved = folder / f"{number}.npy"
            program = f"{FIRST[way]}\nnp.save(sys.argv[2], hidden)"
            process_seconds("-c", program, str(model if way == PLAIN else package), str(saved))
            results.append(np.load(saved))
        largest = max(np.abs(results[0] - other).max() for other in results[1:]) / np.abs(results[0]).max()
        yield Figure("largest difference of the results, relative to the largest value", float(largest), "", 1e-4)


def _write(model: Path, package: Path) -> None:
    """Write an encoder of the size of BERT-base as an ONNX file and as a warmed package."""
    from rlx_ort.converters.files import save_onnx
    from rlx_ort.deploy.create import Recipe, create_package
    from rlx_ort.deploy.open import warm_package
    from rlx_ort.device import Device
    from rlx_ort.ir.dtype import DType

    make = Maker("encoder")
    ids = make.graph.input("ids", ["batch", TOKENS], DType.I64)
    x = make.norm(make.graph.gather(make.weight(VOCABULARY, WIDTH, scale=0.02), ids, 0), WIDTH)
    make.graph.outputs = [make.encoder(x, WIDTH, HEADS, LAYERS)]
    save_onnx(make.graph, model, external_data=True)
    create_package(make.graph, package, Recipe(name="encoder"))
    (row,) = warm_package(package, [Device.CPU])
    if not row.starts:
        raise RuntimeError(f"the package was not warmed: {row.problem}")
