"""Decode loops with the cache on the device: against loops over IOBinding written by hand, and against the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime

from figures.record import SCRIPTS, Figure, step_turns_of
from rlx_ort.execution.decode import DecodeLoop
from rlx_ort.execution.session import Session
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.registry import is_available

sys.path.insert(0, str(SCRIPTS.parent / "examples"))

import tiny_llama  # the examples are no package
from reference_check import rotation

TARGET = 1 / 0.97

Loop = Callable[[], Iterator[Any]]
"""Yields the tokens of a step, or None when it is set up."""


@dataclass(frozen=True)
class _Case:
    """A decoder and a loop over it; small decoders show the cost of a step beside the arithmetic."""

    sizes: tiny_llama.Sizes
    prompt_tokens: int
    steps: int
    blocks: int


CASES = {
    "cpu": (
        # 128 tokens, a short answer: binding the handles and the first step take as long as 0.6 steps of width 64.
        _Case(tiny_llama.Sizes(256, 64, 2, 4, 2, 128, 160), 16, 128, 31),
        _Case(tiny_llama.Sizes(1024, 256, 4, 8, 4, 704, 160), 16, 128, 15),
        _Case(tiny_llama.Sizes(8192, 1024, 4, 16, 8, 2816, 64), 16, 16, 9),  # a quarter of the layers of a 1B model
    ),
    # In CI this is a GPU in software.
    "webgpu": (_Case(tiny_llama.Sizes(64, 32, 2, 4, 2, 48, 64), 4, 6, 25),),
    "cuda": (
        _Case(tiny_llama.Sizes(1024, 256, 4, 8, 4, 704, 128), 16, 64, 15),
        _Case(tiny_llama.Sizes(32000, 2048, 8, 16, 8, 5632, 1024), 512, 64, 9),
    ),
}


def measure() -> Iterator[Figure]:
    """Yield, for each device that is here, the time of a loop over that of the others."""
    for label, case in ((label, case) for label, cases in CASES.items() for case in cases if is_available(label)):
        prompt = np.random.default_rng(3).integers(0, case.sizes.vocabulary, (1, case.prompt_tokens))
        ours, by_hand, over_host = _moved_cache(case, prompt, label)
        yield _over("a hand-written IOBinding loop", ours, by_hand, label, case, TARGET)
        looped, shared = _shared_cache(case, prompt, label)
        yield _over("a hand-written loop over a shared cache", looped, shared, label, case, TARGET)
        # Elsewhere host memory is the device's memory, or the arithmetic takes all the time.
        target = 1 / 1.5 if label == "cuda" and case.sizes.width >= 1024 else None
        yield _over("a loop through the host", ours, over_host, label, case, target)


def _over(name: str, ours: Loop, other: Loop, label: str, case: _Case, target: float | None) -> Figure:
    drawn = [np.concatenate([token for token in loop() if token is not None], axis=1) for loop in (ours, other)]
    if not np.array_equal(*drawn):
        raise AssertionError(f"{name} on {label} draws other tokens")
    turns = step_turns_of(ours, other, case.blocks)
    detail = f"{case.steps / turns.first:.0f} against {case.steps / turns.second:.0f} tokens/s"
    title = f"decode on {label}, width {case.sizes.width}: time over {name}"
    return Figure(title, turns.ratio, "times", target, f"{detail}, least times {turns.least_ratio:.3f}")


def _moved_cache(case: _Case, prompt: Any, label: str) -> tuple[Loop, Loop, Loop]:
    """Return loops over handles, over IOBinding and through the host, each from the cache that the prompt left."""
    sizes, first = case.sizes, case.prompt_tokens
    decoder = tiny_llama.Decoder(sizes, tiny_llama.make_weights(sizes), label)
    cos, sin = (table.astype(np.float32) for table in rotation(sizes.longest, sizes.head))
    feeds = {"ids": prompt.astype(np.int32), "cos": cos[:first], "sin": sin[:first]}
    _, token, *cache = decoder.prefill.run(feeds)
    names = ["ids", *(f"{name}{layer}" for layer in range(sizes.layers) for name in ("k", "v"))]
    tensors = decoder.prefill.run_dlpack(feeds)[1:]
    outputs = list(decoder.decode.output_specs)[1:]
    session = decoder.decode.engine().session.raw  # the very session, so that only the loops differ
    rows = [{"cos": cos[at : at + 1], "sin": sin[at : at + 1]} for at in range(first, first + case.steps)]

    def ours() -> Iterator[Any]:
        for place, (name, tensor) in enumerate(zip(names, tensors, strict=True), 1):
            decoder.decode.bind_gpu_handle(name, tensor)
            decoder.decode.set_gpu_handle_feed(name, place)
        yield None
        for row in rows:
            yield decoder.decode.run_read_outputs(row, [1])[0]

    def by_hand() -> Iterator[Any]:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(array, label) for array in (token, *cache)]
        binding = session.io_binding()
        yield None
        for row in rows:
            for name, array in row.items():
                binding.bind_cpu_input(name, array)
            for name, value in zip(names, values, strict=True):
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name, label)  # ONNX Runtime calls the memory of these devices the same
            session.run_with_iobinding(binding)
            values = binding.get_outputs()
            yield values[0].numpy()

    def over_host() -> Iterator[Any]:
        held = [token, *cache]
        yield None
        for row in rows:
            held = session.run(outputs, {**row, **dict(zip(names, held, strict=True))})
            yield held[0]

    return ours, by_hand, over_host


def _shared_cache(case: _Case, prompt: Any, label: str) -> tuple[Loop, Loop]:
    """Return loops over one cache of the longest length: `DecodeLoop`, and a binding written by hand."""
    sizes, steps = case.sizes, case.steps
    graph = tiny_llama.build_in_place(sizes, tiny_llama.make_weights(sizes))
    compiled = Session(label, CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
    loop, session = DecodeLoop(compiled, sizes.longest), compiled.engine().session.raw
    make = onnxruntime.OrtValue.ortvalue_from_numpy
    zeros = np.zeros((1, sizes.kv_heads, sizes.longest, sizes.head), np.float32)
    cache = {f"{name}{layer}": make(zeros.copy(), label) for layer in range(sizes.layers) for name in ("k", "v")}
    logits = np.zeros((1, sizes.vocabulary), np.float32)

    def ours() -> Iterator[Any]:
        loop.reset()
        for token in loop.generate(prompt, steps + 1):
            yield token[None]

    def by_hand() -> Iterator[Any]:
        ids, past = prompt.astype(np.int64), 0
        for _ in range(steps + 1):
            binding = session.io_binding()
            for name, value in cache.items():
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(f"new_{name}", value)
            places = np.arange(past, past + ids.shape[1])[None]
            given = {"input_ids": ids, "past_length": np.array([past], np.int32), "position_ids": places}
            for name, array in given.items():
                binding.bind_cpu_input(name, array)
            binding.bind_ortvalue_output("logits", make(logits))
            session.run_with_iobinding(binding)
            past += ids.shape[1]
            ids = logits.argmax(-1)[None]
            yield ids

    return ours, by_hand
