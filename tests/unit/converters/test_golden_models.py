"""The models that ops are exported as are those on record, to the byte.

They are keys of the compile cache, what calibrations measure, and what the GPU gate's record is about, so a change is a
decision: `python tests/unit/converters/test_golden_models.py` writes the record anew, and the changelog says why.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from op_tests.cases import CASES, Case, graphs_of  # noqa: E402  # a folder of the tests

from rlx_ort.converters.to_onnx.exporter import export_model  # noqa: E402
from rlx_ort.ir.dtype import DType  # noqa: E402
from rlx_ort.options.compile_options import CompileOptions, Precision  # noqa: E402

RECORD = ROOT / "tests" / "data" / "exported_models.txt"


def exported(case: Case) -> Iterator[bytes]:
    """Yield the models of a case in every dtype that it takes, in f32 also as narrowed to f16."""
    for dtype, graph in graphs_of(case):
        for precision in (Precision.F32, Precision.F16)[: 1 + (dtype is DType.F32)]:
            made = export_model(graph, CompileOptions(precision=precision))
            yield dtype.value.encode() + made.model.SerializeToString(deterministic=True)
            yield repr(sorted(made.stored_as.items())).encode()


def digests() -> list[str]:
    """Return a line for each case: its name, and the first digits of the SHA-256 of its models."""
    return [f"{name} {hashlib.sha256(b''.join(exported(case))).hexdigest()[:16]}" for name, case in CASES.items()]


def test_every_op_is_exported_as_the_same_model() -> None:
    """The nodes, names, types and weights of each model, over dtypes and precisions."""
    assert digests() == RECORD.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    RECORD.write_text("\n".join(digests()) + "\n", encoding="utf-8", newline="\n")
