"""How a result is compared with what a case expects: the rule of the suite's own runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from onnx_suite.cases import Case


def failure(case: Case, run: Callable[[bytes, Sequence[Any]], list[Any]], expected: tuple[type[Exception], ...]) -> str:
    """Return why a case fails, or an empty string when it passes; exceptions that are not expected are raised."""
    model, sets = case.load()
    for inputs, outputs in sets:
        try:
            assert_similar(run(model, inputs), list(outputs), case.rtol, case.atol)
        except (AssertionError, *expected) as err:
            return f"{type(err).__name__}: {err}"
    return ""


def assert_similar(got: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Fail unless a result has the expected structure, shape, dtype and values."""
    if isinstance(wanted, list | tuple):
        assert isinstance(got, list | tuple), f"expected a sequence, got {type(got).__name__}"
        assert len(got) == len(wanted), f"expected {len(wanted)} items, got {len(got)}"
        for mine, theirs in zip(got, wanted, strict=True):
            assert_similar(mine, theirs, rtol, atol)
        return
    if wanted is None or got is None:
        assert got is wanted, f"expected {wanted!r}, got {got!r}"
        return
    wanted = np.asarray(wanted)
    got = np.asarray(got)
    assert got.shape == wanted.shape, f"expected shape {wanted.shape}, got {got.shape}"
    if wanted.dtype == object or wanted.dtype.kind in "US":
        assert _texts(got) == _texts(wanted)
        return
    assert got.dtype == wanted.dtype, f"expected {wanted.dtype}, got {got.dtype}"
    if wanted.dtype.name == "bfloat16":
        rtol = max(rtol, 2**-6)  # two units in the last place of bfloat16
    if wanted.dtype.kind == "V" or wanted.dtype.name not in np.sctypeDict:
        # Types of ml_dtypes, which numpy cannot promote with a Python float; float32 holds all their values.
        got, wanted = got.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def _texts(array: Any) -> Sequence[str]:
    return [item.decode("utf-8") if isinstance(item, bytes) else str(item) for item in array.reshape(-1)]
