"""BERT-base as PyTorch exports it: the same answers, as fast, in the same memory as ONNX Runtime by itself.

Needs torch, onnxscript and transformers. The export is kept in the system's folder for temporary files.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from figures.record import MEBIBYTE, Figure, fresh, peak_bytes, turns_of

BLOCKS, RUNS = 9, 3
MEMORY_REPEATS = 3
TOKENS = 128


def measure() -> Iterator[Figure]:
    """Yield the error against torch, and latency and peak memory against `InferenceSession`."""
    import torch

    from rlx_ort.converters.files import load_graph
    from rlx_ort.execution.session import Session

    model = _bert()
    path = exported(model)
    inputs = _inputs()
    compiled = Session("cpu").compile(load_graph(path))
    with torch.inference_mode():
        want = model(**{name: torch.from_numpy(array) for name, array in inputs.items()})[0].numpy()
    error = float(np.abs(compiled.run(inputs)[0] - want).max() / np.abs(want).max())
    yield Figure("BERT-110M on cpu, error against torch", error, "relative", 1e-4)
    engine = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    turns = turns_of(lambda: compiled.run(inputs), lambda: engine.run(None, inputs), BLOCKS, RUNS)
    detail = f"{turns.first * 1e3:.1f} ms against {turns.second * 1e3:.1f} ms, {TOKENS} tokens"
    yield Figure("BERT-110M on cpu, latency over InferenceSession", turns.ratio, "times", 1.03, detail)
    pairs = [(fresh(our_peak, str(path)), fresh(their_peak, str(path))) for _ in range(MEMORY_REPEATS)]
    ours, theirs = (statistics.median(side) / MEBIBYTE for side in zip(*pairs, strict=True))
    detail = f"{ours:.0f} MiB against {theirs:.0f} MiB"
    yield Figure("BERT-110M on cpu, peak memory over InferenceSession", ours / theirs, "times", 1.05, detail)


def our_peak(path: str) -> int:
    """Return the peak memory of a run by this library, in bytes."""
    from rlx_ort.converters.files import load_graph
    from rlx_ort.execution.session import Session

    Session("cpu").compile(load_graph(path)).run(_inputs())
    return peak_bytes()


def their_peak(path: str) -> int:
    """Return the peak memory of a run by ONNX Runtime alone, in bytes."""
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, _inputs())
    return peak_bytes()


def _inputs(batch: int = 1, tokens: int = TOKENS) -> dict[str, Any]:
    """Return token ids and a mask whose last eighth is padding."""
    mask = np.ones((batch, tokens), np.int64)
    mask[:, tokens - tokens // 8 :] = 0
    return {"input_ids": np.random.default_rng(0).integers(0, 30522, (batch, tokens)), "attention_mask": mask}


def _bert() -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(return_dict=False)).eval()


def exported(model: Any) -> Path:
    """Export the model with its weights in an external file, once a machine, and return the ONNX file's path."""
    import torch
    import transformers

    folder = Path(tempfile.gettempdir()) / f"rlx_ort-bert-{torch.__version__}-{transformers.__version__}"
    path = folder / "bert.onnx"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        inputs = {name: torch.from_numpy(array) for name, array in _inputs(2, 16).items()}
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=512)}
        shapes = dict.fromkeys(inputs, sizes)
        program = torch.onnx.export(model, kwargs=inputs, dynamic_shapes=shapes, dynamo=True, verbose=False)
        assert program is not None
        program.save(path.with_suffix(".part"), external_data=True)
        path.with_suffix(".part").replace(path)  # it names the weights' file, which keeps its name
    return path
