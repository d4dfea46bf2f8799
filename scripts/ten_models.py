"""The first node in the way of ten ONNX models, as a machine without the GPU says it, beside what the GPU says.

    python scripts/ten_models.py --out FILE              by kernel lists, and by asking CUDA where it works
    python scripts/ten_models.py --check FILE            compare this machine's lists with a GPU's file, or gate record

Seven image classifiers of the ONNX wheel, the text classifier of the examples, and two models with operators that CUDA
lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx.backend.test

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import make_text_classifier  # noqa: E402  # a folder of the examples

import rlx_ort  # noqa: E402
from rlx_ort.options.compile_options import CompileOptions, PlacementRule  # noqa: E402
from rlx_ort.providers.registry import is_available  # noqa: E402
from rlx_ort.selection.support import support_of  # noqa: E402

LIGHT = ("bvlc_alexnet", "densenet121", "inception_v1", "resnet50", "shufflenet", "squeezenet", "zfnet512")
STRICT = CompileOptions(placement=PlacementRule.STRICT)


def main() -> int:
    """Write the answers, or compare them, and return 0 when they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    options = parser.parse_args()
    rows = {name: answers(graph) for name, graph in models()}
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    known = json.loads(options.check.read_text(encoding="utf-8")) if options.check is not None else rows
    known = known.get("checks", {}).get("models", known)  # the record of the GPU gate, or a file of --out
    wrong = 0
    for name, row in rows.items():
        asked = known[name].get("cuda asked", "-")
        wrong += asked not in ("-", row["cuda listed"])
        print(f"{name:16} cuda: {row['cuda listed']:24} asked: {asked:24} directx: {row['directx listed']}")
    return int(wrong > 0)


def models() -> Iterator[tuple[str, rlx_ort.Graph]]:
    """Yield ten models by name."""
    light = Path(onnx.backend.test.__file__).parent / "data" / "light"
    for name in LIGHT:
        yield name, rlx_ort.from_onnx((light / f"light_{name}.onnx").read_bytes())
    classifier = make_text_classifier.make_model(make_text_classifier.make_weights())
    yield "text_classifier", rlx_ort.from_onnx(classifier.SerializeToString())
    for operator in ("Atan", "Celu"):
        graph = rlx_ort.Graph(operator.lower())
        x = graph.input("x", ["batch", 16])
        hidden = x @ graph.param("w", [16, 16], data=np.eye(16, dtype=np.float32))
        (bent,) = graph.onnx_node(operator, [hidden], types=[hidden.type], name=f"bend_{operator.lower()}")
        graph.outputs = [graph.softmax(bent)]
        yield f"{operator.lower()}_layer", graph


def answers(graph: rlx_ort.Graph) -> dict[str, Any]:
    """Return the first node in the way by the shipped lists of CUDA and DirectML, and by asking CUDA where it works."""
    found = {
        f"{label} listed": _first(support_of(rlx_ort.Device(label), graph, STRICT, ask=False))
        for label in ("cuda", "directx")
    }
    if is_available("cuda"):
        found["cuda asked"] = _first(support_of(rlx_ort.Device("cuda"), graph, STRICT))
    return found


def _first(support: Any) -> str:
    return str(support.unsupported[0].name) if support.unsupported else support.reason or "none in the way"


if __name__ == "__main__":
    sys.exit(main())
