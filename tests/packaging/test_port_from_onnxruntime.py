"""The walk of somebody with a script for ONNX Runtime: the page's two programs, each on its own, give the same."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from doc_pages import BLOCK
from onnx import parser

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from-onnxruntime.md"
MODEL = """
<ir_version: 8, opset_import: ["": 18]>
double (float[batch, 4] x) => (float[batch, 4] y, float[batch] total)
<float[4] two = {2.0, 2.0, 2.0, 2.0}, int64[1] axes = {1}> {
    y = Mul (x, two)
    total = ReduceSum <keepdims: int = 0> (y, axes)
}
"""
MOST_MINUTES = 2
_log = logging.getLogger(__name__)


def _programs() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").split("## The program")[1].split("\n## ")[0]
    return [match[3] for match in BLOCK.finditer(section)]


def _lines(program: str) -> list[str]:
    return [line for line in program.splitlines() if line.strip()]


def test_a_script_of_thirty_lines_is_ported(tmp_path: Path) -> None:
    """It gets no longer, prints the same and writes the same arrays, within minutes, starting with nothing."""
    proto = parser.parse_model(MODEL)
    onnx.helper.set_model_props(proto, {"author": "somebody"})
    begun, printed, written = time.perf_counter(), [], []
    theirs, ours = _programs()
    assert 28 <= len(_lines(theirs)) <= 32
    assert len(_lines(ours)) <= len(_lines(theirs)) + 1
    for name, program in (("theirs", theirs), ("ours", ours)):
        folder = tmp_path / name
        folder.mkdir()
        onnx.save(proto, folder / "model.onnx")
        (folder / "script.py").write_text(program, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-P", "script.py"],
            cwd=folder,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "RLX_CACHE_DIR": str(folder / "cache")},
            check=False,
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
        with np.load(folder / "outputs.npz") as archive:
            written.append(dict(archive))
    minutes = (time.perf_counter() - begun) / 60
    _log.info("the walk took %.2f minutes", minutes)  # shown with --log-cli-level=info
    assert minutes < MOST_MINUTES
    results, again = ([line for line in lines if "float32" in line] for lines in printed)
    assert results == again
    assert [line.split()[0] for line in results] == ["y", "total"]
    for lines in printed:
        assert "metadata: {'author': 'somebody'}" in lines
        assert re.fullmatch(r"p50 [\d.]+ ms, p99 [\d.]+ ms", lines[-1])
    for name, array in written[0].items():
        np.testing.assert_array_equal(written[1].pop(name), array)
    assert written[1] == {}
    [where] = [line for line in printed[1] if "<Placement for" in line]
    assert where.split()[0] in ("cpu", "cuda")
