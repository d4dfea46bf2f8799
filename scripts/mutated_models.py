"""Opens, compiles and runs thousands of damaged ONNX models in child processes, and counts what came of them by kind.

```
python scripts/mutated_models.py --files 200 --operators 4000
python scripts/mutated_models.py --only "4-bit data" --start 17 --files 1
```

The exit code is 1 if a model ended or blocked its process, or raised an error outside of the error tree, or if the
results differ from those of plain ONNX Runtime.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from damaged_models.files import KINDS  # noqa: E402  # a folder of the tests
from damaged_models.pool import Verdict, judged, sample  # noqa: E402

COLUMNS = ("typed error", "same", "only here", "only plain", "opened", "differs", "untyped", "crash", "hang", "memory")


def column(verdict: Verdict) -> str:
    """Return the column in which a verdict is counted."""
    if verdict.outcome == "answer":
        return {"same": "same", "diff": "differs"}.get(verdict.plain[:4], "only here")
    if verdict.outcome == "typed error" and verdict.plain == "answers":
        return "only plain"
    found = verdict.outcome.split(" (")[0].split(" at ")[0]
    return "untyped" if found in ("untyped error", "an error without a message") else found


def main() -> int:
    """Judge the models, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=50, help="files of each kind")
    parser.add_argument("--operators", type=int, default=1000, help="models of one operator")
    parser.add_argument("--start", type=int, default=0, help="the first number")
    parser.add_argument("--only", action="append", help="a kind; repeat for several")
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for all verdicts, one JSON line each")
    args = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    defects: list[Verdict] = []
    lines = []
    for verdict in judged(sample(args.only or [*KINDS], args.files, args.operators, args.start), args.children):
        kind = verdict.title if verdict.task[0] == "file" else "single operator"
        counts[kind, column(verdict)] += 1
        lines.append(json.dumps([*verdict.task, verdict.title, verdict.outcome, verdict.error, verdict.plain]))
        if verdict.is_defect:
            defects.append(verdict)
            print(verdict, flush=True)
    if args.out:
        args.out.write_text("\n".join(lines), encoding="utf-8")
    print(f"{'kind':22}" + "".join(f"{name:>13}" for name in COLUMNS))
    for kind in dict.fromkeys(kind for kind, _ in counts):
        print(f"{kind:22}" + "".join(f"{counts[kind, name]:13}" for name in COLUMNS))
    totals = {name: sum(count for (_, place), count in counts.items() if place == name) for name in COLUMNS}
    print(f"{'all':22}" + "".join(f"{totals[name]:13}" for name in COLUMNS))
    return 1 if defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
