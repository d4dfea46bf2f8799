"""Large outputs of plain runs in lent memory, with ONNX Runtime on the CPU and memory of numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx_text import parsed

from rlx_ort.converters.protos import infer_proto
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.lent_outputs import RUNS_BEFORE, HostVectors, LentOutputs
from rlx_ort.providers.engine.replays import LENT_BYTES

ROWS = LENT_BYTES // 4 // 64
SHARED = ort.RunOptions()


def inferring(text: str) -> Any:
    """Return a function that infers the shapes of a model's outputs from those of its inputs."""

    def inferred(shapes: Any) -> dict[str, tuple[int, ...]]:
        model = parsed(text)
        for value in model.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                dim.dim_value = size
        for value in model.graph.output:
            value.type.tensor_type.ClearField("shape")
        shapes_of = {
            name: kind.shape for name, kind in infer_proto(model).items() if isinstance(kind, TensorType) and kind.shape
        }
        return {name: shape.static() for name, shape in shapes_of.items() if shape.is_static}

    return inferred


class Runs:
    """Runs of a model by `LentOutputs`, which keep what was lent, and count the usual runs."""

    def __init__(self, text: str, handed_on: frozenset[str] = frozenset(), inferred: Any = None) -> None:
        self.session: Any = ort.InferenceSession(parsed(text).SerializeToString(), providers=["CPUExecutionProvider"])
        self.lent: list[np.ndarray[Any, Any]] = []
        self.plain = 0
        vectors, errors = HostVectors(ort), (RuntimeError, Exception)
        found = LentOutputs(
            self.session, self.count, vectors, handed_on, inferred or inferring(text), self.lend, SHARED, errors
        )
        self.names, self.run = [each.name for each in self.session.get_outputs()], found.run

    def count(self, names: Any, feeds: Any, options: Any) -> list[Any]:
        """Run as usual."""
        self.plain += 1
        results: list[Any] = self.session.run(names, feeds, options)
        return results

    def lend(self, like: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return an array with other contents than the last one had."""
        self.lent.append(np.full(like.shape, 77, like.dtype))
        return self.lent[-1]

    def __call__(self, *arrays: np.ndarray[Any, Any], options: Any = SHARED) -> list[Any]:
        """Run on arrays in the order of the inputs."""
        names = [each.name for each in self.session.get_inputs()]
        return self.run(self.names, dict(zip(names, arrays, strict=True)), options)


def test_large_outputs_that_come_again_are_lent_and_stay_as_they_are() -> None:
    """Each run has memory of its own for them; a small output is a usual array."""
    runs = Runs("""(float[n, 64] x) => (float[n, 64] y, float[1, 64] least)
    { y = Neg (x) axis = Constant <value_ints=[0]> () least = ReduceMin (x, axis) }""")
    given = [np.full((ROWS, 64), value, np.float32) for value in range(6)]
    results = [runs(each) for each in given]
    assert (runs.plain, len(runs.lent)) == (RUNS_BEFORE, 6 - RUNS_BEFORE)
    assert results[-1][0] is runs.lent[-1]
    for (y, least), each in zip(results, given, strict=True):
        np.testing.assert_array_equal(y, -each)
        np.testing.assert_array_equal(least, each[:1])


def test_each_signature_counts_for_itself() -> None:
    """Memory for sizes that come once would be allocated for one run."""
    runs = Runs("(float[n, 64] x) => (float[n, 64] y) { y = Neg (x) }")
    for rows in range(ROWS, ROWS + 8):
        runs(np.ones((rows, 64), np.float32))
    assert not runs.lent


@pytest.mark.parametrize(
    ("text", "handed_on"),
    [
        ("(float[n, 64] x) => (float[n, 64] y) { y = Neg (x) }", frozenset("y")),
        ("(float[n, 64] x) => (string[n, 64] y) { y = Cast <to=8> (x) }", frozenset()),
    ],
)
def test_outputs_of_other_kinds_come_as_usual(text: str, handed_on: frozenset[str]) -> None:
    """Those that are inputs, and strings."""
    runs = Runs(text, handed_on)
    for _ in range(RUNS_BEFORE + 3):
        runs(np.ones((ROWS, 64), np.float32))
    assert (runs.plain, runs.lent) == (RUNS_BEFORE + 3, [])


@pytest.mark.parametrize(("rows", "lent"), [(ROWS, 3), (ROWS + 1, 0)])
def test_outputs_whose_size_is_inferred_from_the_inputs_are_lent(rows: int, lent: int) -> None:
    """Once for a signature, and only if the runs have given that size."""
    asked: list[Any] = []

    def inferred(shapes: Any) -> Any:
        asked.append(dict(shapes))
        return {"y": (rows, 64)}

    runs = Runs("(float[n, 64] x) => (float[m, 64] y) { y = Neg (x) }", inferred=inferred)
    for _ in range(RUNS_BEFORE + 3):
        (y,) = runs(np.ones((ROWS, 64), np.float32))
    np.testing.assert_array_equal(y, np.full((ROWS, 64), -1.0, np.float32))
    assert (len(runs.lent), asked) == (lent, [{"x": (ROWS, 64)}])


def test_a_size_that_values_decide_comes_as_usual() -> None:
    """The model declares that of `x`, and keeps it at first; a later output has as many elements in another shape."""
    text = "(float[n, 64] x, float[2] size) => (float[n, 64] y) { whole = Cast <to=7> (size) y = Reshape (x, whole) }"
    runs, x = Runs(text), np.arange(2 * ROWS * 64, dtype=np.float32).reshape(-1, 64)
    for shape in [x.shape] * (RUNS_BEFORE + 2) + [(64, 2 * ROWS)]:
        (y,) = runs(x, np.array(shape, np.float32))
        np.testing.assert_array_equal(y, x.reshape(shape))
    assert not runs.lent


def test_an_output_of_another_size_than_inferred_is_right() -> None:
    """The first runs give the inferred size, a later one fewer rows; then nothing more is lent for it."""
    text = "(float[n, 64] x, bool[n] kept) => (float[n, 64] y) { y = Compress <axis=0> (x, kept) }"
    runs = Runs(text, inferred=lambda shapes: {"y": shapes["x"]})
    x, kept = np.ones((2 * ROWS, 64), np.float32), np.ones(2 * ROWS, bool)
    for _ in range(RUNS_BEFORE + 1):
        runs(x, kept)
    assert runs.lent
    kept[::2] = False
    lent = len(runs.lent)
    for _ in range(2):
        (y,) = runs(x, kept)
        np.testing.assert_array_equal(y, x[::2])
    assert len(runs.lent) == lent + 1


def test_a_run_that_may_be_stopped_comes_as_usual() -> None:
    """ONNX Runtime copies the options of a run into arrays, so that they do not end it."""
    runs = Runs("(float[n, 64] x) => (float[n, 64] y) { y = Neg (x) }")
    x = np.ones((ROWS, 64), np.float32)
    for _ in range(RUNS_BEFORE + 1):
        runs(x)
    lent = len(runs.lent)
    runs(x, options=ort.RunOptions())
    assert len(runs.lent) == lent == 1


def test_inputs_need_not_be_contiguous() -> None:
    """A vector of values borrows contiguous arrays only."""
    runs = Runs("(float[n, 64] x) => (float[n, 64] y) { y = Neg (x) }")
    x = np.random.default_rng(3).standard_normal((64, ROWS)).astype(np.float32).T
    for _ in range(RUNS_BEFORE + 1):
        (y,) = runs(x)
    assert y is runs.lent[-1]
    np.testing.assert_array_equal(y, -x)
