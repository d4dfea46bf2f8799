"""Write the tables of docs/ops.md: every op, its ONNX forms, which devices take it in which dtypes, and its tests.

    python scripts/op_table.py            write the tables
    python scripts/op_table.py --record   ask the providers here first which dtypes they take; needs CPU and WebGPU

The forms come from the exporter. The answers of the providers are kept in docs/op_dtypes.json with their versions, so
that the tables are the same on every machine. The text around the tables stays as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from op_tests.cases import CASES, DTYPES, Case, graphs_of, kind_of, plain, runnable_kinds  # noqa: E402  # a folder of the tests

from rlx_ort.converters.to_onnx.dispatch import KernelSet, has_choice  # noqa: E402
from rlx_ort.converters.to_onnx.exporter import export_model  # noqa: E402
from rlx_ort.device import Device  # noqa: E402
from rlx_ort.ir.graph import Graph  # noqa: E402
from rlx_ort.ir.op import op_class  # noqa: E402
from rlx_ort.ir.ops.onnx import REFUSED_KINDS  # noqa: E402

__all__ = ["RECORD", "TABLE", "recorded_dtypes", "table"]

TABLE = ROOT / "docs" / "ops.md"
RECORD = ROOT / "docs" / "op_dtypes.json"
DEVICES = ("cpu", "webgpu")
_SHOWN = 6


def main() -> int:
    """Write the table, after asking the providers if the command line says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="ask the providers of this machine first")
    if parser.parse_args().record:
        RECORD.write_text(json.dumps(record(), indent=1) + "\n", encoding="utf-8")
    TABLE.write_text(table(), encoding="utf-8")
    return 0


def record() -> dict[str, Any]:
    """Return the dtypes that each provider takes, by device and case, with the versions of the providers."""
    from importlib.metadata import version

    taken = {label: {name: recorded_dtypes(label, case) for name, case in CASES.items()} for label in DEVICES}
    versions = {name: version(name) for name in ("onnxruntime", "onnxruntime-ep-webgpu")}
    return {"versions": versions, **taken}


def recorded_dtypes(label: str, case: Case) -> str:
    """Return the dtypes in which the provider of a device has kernels for a case, whatever this machine's adapter."""
    from rlx_ort.selection.support import support_of

    device = Device(label)
    return " ".join(dtype.value for dtype, graph in graphs_of(case) if support_of(device, graph, ask=False).supported)


def table() -> str:
    """Return the page with new tables."""
    known = json.loads(RECORD.read_text(encoding="utf-8"))
    versions = " and ".join(f"{name} {number}" for name, number in known["versions"].items())
    cases: dict[str, list[Case]] = {}
    for case in CASES.values():
        cases.setdefault(kind_of(case), []).append(case)
    lines = [
        "| Op | Family | Native | Common | CPU | WebGPU | Tested in `tests/backend/ops` |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in sorted(set(runnable_kinds()) & set(cases), key=lambda kind: (_family(kind), kind)):
        native, common = _forms(cases[kind])
        dtypes = [_dtypes(cases[kind], known[label]) for label in DEVICES]
        tests = ", ".join(_tests(kind))
        lines.append(f"| {kind} | {_family(kind)} | {native or '-'} | {common} | {' | '.join(dtypes)} | {tests} |")
    refused = ["| Op | Why | What to do |", "|---|---|---|"]
    refused += [f"| {kind} | {why} | {remedy} |" for kind, (why, remedy) in sorted(REFUSED_KINDS.items())]
    tables = iter(["\n".join([*rows, ""]) for rows in (lines, refused)])
    text = re.sub(r"(?:^\|.*\n)+", lambda _: next(tables), TABLE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    text = re.sub(r"^Versions: .*$", f"Versions: {versions}.", text, flags=re.MULTILINE)
    rest = ", ".join(kind for kind in runnable_kinds() if kind not in cases)
    return re.sub(r"^(Leaves, and ops .*: ).*$", rf"\g<1>{rest}.", text, flags=re.MULTILINE)


def _family(kind: str) -> str:
    return op_class(kind).__module__.rsplit(".", 1)[-1]


def _forms(cases: list[Case]) -> tuple[str, str]:
    """Return the ONNX operators of both forms; the native one is empty where no case has a choice."""
    every = KernelSet("every kernel", None, lambda *_: True)
    native: dict[str, None] = {}
    common: dict[str, None] = {}
    for case in cases:
        graph, _ = plain(case)
        basic = _operators(graph, None)
        common |= dict.fromkeys(basic)
        if has_choice(graph) and (fused := _operators(graph, every)) != basic:
            native |= dict.fromkeys(fused)
    return _listed(native) if native != common else "", _listed(common)


def _operators(graph: Graph, kernels: KernelSet | None) -> list[str]:
    return [node.op_type for node in export_model(graph, kernels=kernels).nodes]


def _listed(operators: dict[str, None]) -> str:
    names = [*operators]
    return ", ".join(names) if len(names) <= _SHOWN else f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"


def _dtypes(cases: list[Case], taken: dict[str, str]) -> str:
    lists = [set(taken[case.name].split()) for case in cases]
    shown = []
    for dtype in DTYPES:
        if any(dtype.value in names for names in lists):
            whole = all(dtype.value in names for names in lists)
            shown.append(dtype.value if whole else f"[{dtype.value}]")
    return " ".join(shown) or "-"


def _tests(kind: str) -> list[str]:
    own = f"test_{_family(kind)}.py"
    return ["test_dtypes.py", *([own] if (ROOT / "tests" / "backend" / "ops" / own).exists() else [])]


if __name__ == "__main__":
    sys.exit(main())
