"""Run every ONNX backend case on the CPU, through the library and in plain ONNX Runtime, and compare the outcomes.

    python scripts/onnx_cases.py --out FILE.json

A case that ends the process has failed, and the next one gets another process. Cases that fail on both sides stand in
the file with the library's reason.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "helpers"), str(ROOT)]

from onnx_suite.cases import Case, all_cases  # noqa: E402  # a folder of the tests
from onnx_suite.compare import failure  # noqa: E402
from onnx_suite.plain import engine_exceptions, run_plain, run_with_rlx  # noqa: E402

from rlx_ort.errors import RlxError  # noqa: E402

FIRST_LINE = 200
ENDED = "the process ended"


def main() -> int:
    """Run the cases, write the file and return 1 if plain ONNX Runtime passes a case that the library fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    cases = all_cases()
    ours, plain = outcomes(cases, "ours"), outcomes(cases, "plain")
    lost = {name: why for name, why in ours.items() if why and not plain[name]}
    document = {
        "onnxruntime": onnxruntime.__version__,
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(terse=True),
        "cases": len(cases),
        "pass": {"rlx_ort": sum(not why for why in ours.values()), "plain": sum(not why for why in plain.values())},
        "only plain passes": lost,
        "only rlx_ort passes": sorted(name for name, why in ours.items() if not why and plain[name]),
        "both fail": {name: why for name, why in sorted(ours.items()) if why and plain[name]},
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"onnxruntime {onnxruntime.__version__}: {document['pass']} of {len(cases)}, {len(lost)} only in plain")
    return int(bool(lost))


def outcomes(cases: tuple[Case, ...], way: str) -> dict[str, str]:
    """Return why each case fails, by its name; empty for one that passes."""
    found: dict[str, str] = {}
    spawning = multiprocessing.get_context("spawn")
    while len(found) < len(cases):
        with ProcessPoolExecutor(1, mp_context=spawning) as pool:
            try:
                for number in range(len(found), len(cases)):
                    found[cases[number].id] = pool.submit(outcome, number, way).result()
            except BrokenProcessPool:
                found[cases[len(found)].id] = ENDED
    return found


def outcome(number: int, way: str) -> str:
    """Return why a case fails in one way of running it, or an empty string."""
    run: Any = run_with_rlx if way == "ours" else run_plain
    expected = (RlxError,) if way == "ours" else engine_exceptions()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the sources of the cases divide by zero and overflow on purpose
        case = all_cases()[number]
        try:
            return " ".join(failure(case, run, expected).split())[:FIRST_LINE]
        except Exception as err:  # an untyped error of the library, or a case that a plain session cannot be fed
            return f"untyped {type(err).__name__}: {err}"[:FIRST_LINE]


if __name__ == "__main__":
    sys.exit(main())
