"""Runs into arrays that are there before the run: `HostVectors`; and large outputs in lent memory: `LentOutputs`."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.providers.engine.replays import LENT_BYTES, NotRecordedError, Signature, signature, without_memory
from rlx_ort.providers.engine.values import Place

MOST_KNOWN = 128  # signatures
RUNS_BEFORE = 3  # of a signature, before pinned memory is allocated for it, which takes longer than a run may save


class HostVectors:
    """Runs a session from arrays into arrays, by ONNX Runtime's vectors of values.

    A binding would keep the session alive, and block other threads of Python while it copies inputs. ONNX Runtime
    (1.31.1) copies the options of such a run, so that it cannot be stopped once it has begun.

    Raises:
        NotRecordedError: the engine has no such vectors.
    """

    def __init__(self, engine: Any) -> None:
        inner: Any = type(getattr(engine.OrtValue.ortvalue_from_numpy(np.zeros(1)), "_ortvalue", None))
        vector, host = getattr(sys.modules.get(inner.__module__), "OrtValueVector", None), Place(engine, "cpu", 0).inner
        if vector is None or host is None:
            raise NotRecordedError("the engine has no vectors of values")
        self._value, self._vector, self._host = inner.ortvalue_from_numpy, vector, host

    def of(self, arrays: Sequence[npt.NDArray[Any]]) -> Any:
        """Return a vector of values that borrow contiguous arrays."""
        vector = self._vector()
        for array in arrays:
            vector.push_back(self._value(array, self._host))
        return vector

    def run(
        self,
        session: Any,
        options: Any,
        feeds: Mapping[str, npt.NDArray[Any]],
        names: Sequence[str],
        outputs: Any,
    ) -> None:
        """Run into the arrays of the vector `outputs`, which has one for each name."""
        ready = [array if array.flags.c_contiguous else array.copy() for array in feeds.values()]
        session.run_with_ortvaluevector(
            options, list(feeds), self.of(ready), list(names), outputs, [self._host] * len(names)
        )


class LentOutputs:
    """Plain runs of a session, those with large outputs into memory that the device writes at full speed.

    A new array has no pages yet, and the device writes to it through a buffer of the driver: of a run of DistilBERT
    with 16 texts of 128 tokens, which takes 5.8 ms, 0.55 go there (6 MB; H200, ONNX Runtime 1.31.1). The sizes of all
    outputs must follow from those of the inputs by inference: models declare some that they do not keep, and on CUDA
    ONNX Runtime compares no more than the number of elements.

    Args:
        session: ONNX Runtime's session.
        plain: its usual run: `(names, feeds, options)`.
        vectors: run it into arrays.
        handed_on: outputs that are inputs or weights themselves, which ONNX Runtime does not write.
        inferred: returns the shapes of outputs that follow from the shapes of inputs; asked once for a signature.
        lend: returns such memory.
        shared: the RunOptions of runs that are not stopped one by one.
        errors: what a run raises.
    """

    def __init__(
        self,
        session: Any,
        plain: Callable[..., list[Any]],
        vectors: HostVectors,
        handed_on: Set[str],
        inferred: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[int, ...]]],
        lend: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
        shared: Any,
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._session, self._plain, self._vectors = session, plain, vectors
        self._handed_on, self._inferred = handed_on, inferred
        self._lend, self._shared, self._errors = lend, shared, errors
        self._counts: OrderedDict[Signature, int] = OrderedDict()
        self._likes: OrderedDict[Signature, list[npt.NDArray[Any]]] = OrderedDict()  # empty where sizes may differ

    def run(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run once and return new arrays; one thread at a time."""
        if options is not self._shared:
            return self._plain(names, feeds, options)
        key = signature(0, names, feeds) if self._likes else None
        if key is not None and (likes := self._likes.get(key)):
            made = [(self._lend if like.nbytes >= LENT_BYTES else _new)(like) for like in likes]
            try:
                self._vectors.run(self._session, options, feeds, names, self._vectors.of(made))
            except self._errors:  # the usual run shows whether the sizes differ this time
                self._likes[key] = []
            else:
                return made
        results = self._plain(names, feeds, options)
        if any(isinstance(result, np.ndarray) and result.nbytes >= LENT_BYTES for result in results):
            self._count(names, feeds, results)
        return results

    def _count(self, names: Sequence[str], feeds: Mapping[str, Any], results: Sequence[Any]) -> None:
        """Count a plain run with large outputs; after some of a signature, note whether they may be lent."""
        key = signature(0, names, feeds)
        if key is None or key in self._likes:
            return
        count = self._counts.pop(key, 0) + 1
        if count < RUNS_BEFORE:
            self._counts[key] = count
        else:
            fit = self._fit(feeds, dict(zip(names, results, strict=True)))
            self._likes[key] = list(map(without_memory, results)) if fit else []
        for kept in (self._counts, self._likes):
            while len(kept) > MOST_KNOWN:
                kept.popitem(last=False)

    def _fit(self, feeds: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
        arrays = (*feeds.values(), *results.values())
        if not all(isinstance(array, np.ndarray) and array.dtype.kind in "biufc" for array in arrays):
            return False
        if not self._handed_on.isdisjoint(results):
            return False
        inferred = self._inferred({name: array.shape for name, array in feeds.items()})
        return all(inferred.get(name) == result.shape for name, result in results.items())


def _new(like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.empty(like.shape, like.dtype)
