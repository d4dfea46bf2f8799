"""Write docs/capability.md from the records in docs/results: how far the capability answers can be trusted.

    python scripts/capability_page.py

The text before the table stays as it is. The rows come from `capability_truth.py`: those of the GPU machine by way of
gpu-gate.json, the others from docs/results/capability/. A test compares the page with the records.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
PAGE, DEVICES = ROOT / "docs" / "capability.md", ROOT / "docs" / "devices.md"


def main() -> int:
    """Write the page, and the CUDA row of the support table."""
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
    lines = DEVICES.read_text(encoding="utf-8").splitlines()
    lines = [support_row() if line.startswith("| `cuda` |") else line for line in lines]
    DEVICES.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
    return 0


def support_row() -> str:
    """Return the CUDA row of the support table in docs/devices.md."""
    gate = json.loads((RESULTS / "gpu-gate.json").read_text(encoding="utf-8"))
    machine, suite = gate["machine"], gate["suite"]
    agreement = f"{gate['truth']['cuda_agreement']:.1%}"
    timing, beside = gate["calibration"], ""
    if "failed" in timing and not timing["ok"]:
        beside = f", and {timing['failed']} that time the machine failed beside other processes"
    tested = (
        f"by the GPU gate (`scripts/gpu_gate.py`) on an {machine['hardware']}, {gate['date']}: {suite['passed']:,} "
        f"backend tests, {suite['failed']} failed{beside}; "
        f"capability answers right in {agreement} of the ONNX cases ([capability](capability.md)); "
        "rules and options by unit tests in CI"
    )
    return f"| `cuda` | CUDA | extra `cuda` | {tested} |"


def page() -> str:
    """Return the text of the page."""
    lines: list[str] = []
    details: list[str] = []
    for where, row in rows():
        counts = row["counts"]
        by_list = f"{row['list_agreement']:.2%}" if row["device"] in ("cuda", "webgpu") else "-"
        share = f"{row['agreement']:.2%}"
        cells = (row["device"], where, row["cases"], share, counts["false yes"], counts["false no"], by_list)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        details += _details(where, row)
    head = re.match(r".*?^\| Device .*?\n\|---.*?\n", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert head is not None
    return "\n".join([head[0] + "\n".join(lines), *details, ""])


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield where each row was measured, and the row."""
    gate = json.loads((RESULTS / "gpu-gate.json").read_text(encoding="utf-8"))
    machine = gate["machine"]
    for row in (row for part in ("truth", "webgpu") if part in gate for row in gate[part]["rows"].values()):
        yield f"{machine['hardware']}, ONNX Runtime {machine['onnxruntime']}", row
    for path in sorted((RESULTS / "capability").glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        for row in document["devices"]:
            yield f"{document['where']}, ONNX Runtime {document['versions']['onnxruntime']}", row


def _details(where: str, row: dict[str, Any]) -> Iterator[str]:
    if not row["wrong"]:
        return
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in row["wrong"]:
        reason = " ".join(entry["reason"].replace("|", "/").split())
        grouped[entry["kind"], reason[:160]].append(entry["case"].partition("/")[2])
    yield f"\n## {row['device']} ({where})\n"
    for (kind, reason), cases in sorted(grouped.items()):
        yield f"- {kind}, {len(cases)}: `{'`, `'.join(cases[:12])}`{' and more' if len(cases) > 12 else ''}: {reason}"


if __name__ == "__main__":
    sys.exit(main())
