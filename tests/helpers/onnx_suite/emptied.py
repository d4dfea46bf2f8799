"""The cases of the ONNX backend suite on tensors without elements, which engines are seldom tried with.

Each dim of each input is 0 in turn, and so are all dims of one size at once; the model's dims are open, without names.
"""

from __future__ import annotations

import collections
import faulthandler
import functools
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from onnx_suite.cases import all_cases
from onnx_suite.compare import assert_similar
from rlx_ort import GraphDevices, RlxError, from_onnx
from rlx_ort.faults import Fault, fault_of

__all__ = ["Emptied", "emptied_cases", "verdicts"]

_SCAN = """<ir_version: 8, opset_import: ["": 17]> g (float[n,3] s, float[n,l,3] x) => (t, y) {
  t, y = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], body = b (float[n,3] p, float[n,3] c)
    => (float[n,3] q, float[n,3] f) { q = Add(p, c) f = Neg(q) }> (s, x)
}"""
_JOIN = """<ir_version: 8, opset_import: ["": 17]> g (float[b,h,p,d] past, float[n,s,w] x) => (y) {
  sizes = Constant <value_ints = [0, 0, 3, 2]> ()
  split = Reshape(x, sizes) heads = Transpose <perm = [0, 2, 1, 3]> (split)
  joined = Concat <axis = 2> (past, heads) y = Neg(joined)
}"""
_RANDOM_OR_TEXT = ("bernoulli", "dropout", "multinomial", "random", "regex", "string", "strnorm")
_TOLERANCE = 1e-2
_STUCK_S = 60.0


class Emptied(NamedTuple):
    """A model, and inputs of which some have no elements."""

    name: str
    model: bytes
    feeds: Mapping[str, Any]


def emptied_cases(*, each: bool = False) -> Iterator[Emptied]:
    """Yield the cases of numbers: one for each operator and place without elements, or every one.

    No case of the suite scans along another axis than the first, and none of one operator joins computed dims.
    """
    scanned = {"s": np.ones((2, 3), np.float32), "x": np.ones((2, 4, 3), np.float32)}
    joined = {"past": np.ones((2, 3, 4, 2), np.float32), "x": np.ones((2, 5, 6), np.float32)}
    for name, text, whole in (("scan along the second axis", _SCAN, scanned), ("join of split heads", _JOIN, joined)):
        model = onnx.parser.parse_model(text).SerializeToString()
        yield from (Emptied(f"{name}, {place}", model, emptied) for place, emptied in _emptied(whole))
    seen = set()
    for case in all_cases():
        if case.kind != "node" or any(word in case.name for word in _RANDOM_OR_TEXT):
            continue
        data, sets = case.load()
        model, arrays = onnx.ModelProto.FromString(data), sets[0][0]
        plain = all(isinstance(item, np.ndarray) and item.dtype.kind in "fiub" for item in arrays)
        if not plain or len(arrays) != len(model.graph.input) or (len(model.graph.node) > 1 and not each):
            continue
        opened = _with_open_dims(model)
        feeds = {value.name: array for value, array in zip(model.graph.input, arrays, strict=True)}
        for place, emptied in _emptied(feeds):
            key = case.name if each else (model.graph.node[0].op_type, len(arrays)), place
            if key not in seen:
                seen.add(key)
                yield Emptied(f"{case.name}, {place}", opened, emptied)


def _with_open_dims(model: onnx.ModelProto) -> bytes:
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    for value in (*model.graph.output, *model.graph.value_info):
        value.type.tensor_type.ClearField("shape")
    return model.SerializeToString()


def _emptied(feeds: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, array in feeds.items():
        for axis in range(array.ndim):
            yield f"{name}[{axis}]", {**feeds, name: np.take(array, [], axis=axis)}
    for size in sorted({size for array in feeds.values() for size in array.shape}):
        shapes = {name: [0 if dim == size else dim for dim in array.shape] for name, array in feeds.items()}
        yield f"all of size {size}", {name: np.resize(array, shapes[name]) for name, array in feeds.items()}


def verdicts(device: str, cases: Iterable[Emptied]) -> tuple[collections.Counter[str], list[str]]:
    """Run cases on a device in a process beside this one, and return how many ended how, and the failures.

    A case is `equal` to the result of the reference evaluator of `onnx`, `unjudged` where that has none, or `refused`
    by a typed error. It failed if it is `WRONG`, if the error has no type of ours (`UNTYPED`) or puts the device at
    fault (`LOST`), or if the process died or did not answer (`ENDED`).
    """
    counts, failures = collections.Counter[str](), []
    started = functools.partial(ProcessPoolExecutor, 1, mp_context=multiprocessing.get_context("spawn"))
    pool = started()
    for case in cases:
        try:
            verdict, text = pool.submit(_verdict, device, case).result()
        except BrokenProcessPool:
            verdict, text = "ENDED", ""
        if verdict in ("ENDED", "LOST"):
            pool.shutdown()
            pool = started()
        counts[verdict] += 1
        if verdict.isupper():
            failures.append(f"{verdict}: {case.name} on {device}: {text}")
    pool.shutdown()
    return counts, failures


def _verdict(device: str, case: Emptied) -> tuple[str, str]:
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
    try:
        results = [*_runner(case.model).run(device, case.feeds)]
    except RlxError as err:
        lost = fault_of(err)[0] is Fault.DEVICE
        return ("LOST", str(err)[:300]) if lost else ("refused", "")
    except Exception as err:
        return "UNTYPED", f"{type(err).__name__}: {err}"
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        with np.errstate(all="ignore"):
            wanted: Any = ReferenceEvaluator(onnx.ModelProto.FromString(case.model)).run(None, dict(case.feeds))
    except Exception:  # whatever it is, this is no reference
        return "unjudged", ""
    try:
        assert_similar(results, [*wanted], _TOLERANCE, _TOLERANCE)
    except AssertionError as err:
        return "WRONG", " ".join(str(err).split())[:300]
    return "equal", ""


@functools.lru_cache(maxsize=1)
def _runner(model: bytes) -> GraphDevices:
    return GraphDevices(from_onnx(model))
