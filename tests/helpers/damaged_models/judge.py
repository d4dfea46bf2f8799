"""Opens, compiles and runs damaged models in this process, and compares the results with plain ONNX Runtime.

Run as a program: it reads a task a line, `["file", kind, number]` or `["operator", "", number]`, and writes a line when
each stage begins, so that whoever reads it knows at which one the process ended.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from damaged_models.files import damaged_file
from damaged_models.operators import damaged_operator

__all__ = ["feeds_of", "serve"]

_SYMBOL = 2
"""The size of an input's dim that has none."""
_LARGEST = 1 << 20
"""Elements of an input; a model that declares a larger one is opened and not run."""


def serve(limit_bytes: int) -> None:
    """Answer tasks from standard input until it ends."""
    _limit_memory(limit_bytes)
    warnings.simplefilter("ignore")
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    from rlx_ort.execution.session import Session

    session = Session("cpu")
    _said("ready")
    with tempfile.TemporaryDirectory() as folder:
        for line in sys.stdin:
            _judge(json.loads(line), session, Path(folder))


def _judge(task: Sequence[Any], session: Any, folder: Path) -> None:
    from rlx_ort.converters.bundle import graph_from_bundle
    from rlx_ort.converters.from_onnx import from_onnx
    from rlx_ort.converters.sources import open_source
    from rlx_ort.errors import RlxError

    source, kind, number = task
    inputs: list[Any] | None = None
    title = kind
    if source == "file":
        data = damaged_file(kind, number)
    else:
        title, data, inputs = damaged_operator(number)
    outcome = error = ""
    ours, feeds, ours_names = None, None, []
    try:
        _said("import", title=title)
        if number % 4:
            graph = from_onnx(data)
        else:  # the way of conversions, which reads files through a map
            path = folder / f"{number}.onnx"
            path.write_bytes(data)
            graph = graph_from_bundle(open_source(path))
        _said("compile")
        compiled = session.compile(graph)
        feeds = feeds_of(graph.inputs, inputs)
        if feeds is None:
            outcome = "opened"
        else:
            _said("run")
            ours = compiled.run(feeds)
            ours_names = [*compiled.output_specs]
            outcome = "answer"
    except RlxError as err:
        outcome, error = "typed error", f"{type(err).__name__}: {err}"
        if not str(err):
            outcome = "an error without a message"
    except Exception as err:  # any other one is what is looked for
        where = err.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        place = f"{where.tb_frame.f_code.co_filename.rpartition('/')[2]}:{where.tb_lineno}" if where else ""
        outcome, error = "untyped error", f"{type(err).__name__} at {place}: {err}"
    _said("plain", outcome=outcome, error=error)
    found = _beside_plain(data, ours, ours_names, feeds)
    _said("done", plain=found)


def _beside_plain(data: bytes, ours: list[Any] | None, ours_names: Sequence[str], feeds: dict[str, Any] | None) -> str:
    """Return how plain ONNX Runtime does on the same bytes: refuses, opens, answers, same, or what differs.

    Where plain ONNX Runtime answers twice with different numbers, as from memory that nobody wrote, it is `unstable`.
    """
    import onnxruntime
    from onnx_suite.compare import assert_similar
    from onnx_suite.plain import run_plain

    try:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        plain = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        names = [value.name for value in plain.get_outputs()]
        if feeds is None:
            return "opens"
        given = [feeds[value.name] for value in plain.get_inputs()]
        theirs = run_plain(data, given)
    except Exception as err:
        return f"refuses: {str(err)[:400]}"
    if ours is None:
        return "answers"
    try:
        assert ours_names == names, f"outputs {ours_names} instead of {names}"
        assert_similar(ours, theirs, 1e-3, 1e-5)
    except AssertionError as err:
        with contextlib.suppress(AssertionError):
            again = [run_plain(data, given) for _ in range(3)]
            for other in again:
                assert_similar(other, theirs, 1e-3, 1e-5)
            return f"differs: {' '.join(str(err).split())[:300]}"
        return "unstable"
    return "same"


def feeds_of(inputs: Sequence[Any], arrays: Sequence[Any] | None) -> dict[str, Any] | None:
    """Return something to feed each input of a graph: the arrays, or small numbers; None if an input has no dtype."""
    found: dict[str, Any] = {}
    for place, value in enumerate(inputs):
        if arrays is not None and place < len(arrays):
            found[value.name] = arrays[place]
            continue
        kind = value.type
        dtype, shape = getattr(kind, "dtype", None), getattr(kind, "shape", None)
        if dtype is None:
            return None
        sizes = [size if isinstance(size, int) else _SYMBOL for size in shape or ()]
        count = 1
        for size in sizes:
            count *= size
        if count > _LARGEST:
            return None
        if dtype.value == "string":
            array: npt.NDArray[Any] = np.array([f"text {i}" for i in range(count)], object)
        else:
            array = (np.arange(count) % 7 + 1).astype(dtype.numpy)
        found[value.name] = array.reshape(sizes)
    return found


def _limit_memory(limit_bytes: int) -> None:
    """Let allocations fail beyond a limit where the system can do that; elsewhere the parent watches the process."""
    try:
        import resource
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _said(stage: str, **facts: str) -> None:
    sys.stdout.write(json.dumps({"stage": stage, **facts}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
