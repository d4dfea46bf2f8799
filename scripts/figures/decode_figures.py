"""Decode loops with the cache on the device: against loops over IOBinding written by hand, and against the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from figures.record import Figure, step_turns_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import tiny_llama  # the examples are no package
from reference_check import rotation

__all__ = ["measure"]

TARGET = 1 / 0.97


@dataclass(frozen=True)
class _Case:
    """A decoder and a loop over it; small decoders show what a step costs beside the arithmetic."""

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
    from rlx_ort.device import Device
    from rlx_ort.providers.registry import default_registry

    for label, cases in CASES.items():
        if default_registry().availability(Device(label)).available:
            for case in cases:
                yield from _measure_on(label, case)


def _measure_on(label: str, case: _Case) -> Iterator[Figure]:
    sizes, steps = case.sizes, case.steps
    decoder = tiny_llama.Decoder(sizes, tiny_llama.make_weights(sizes), label)
    prompt = np.random.default_rng(3).integers(0, sizes.vocabulary, (1, case.prompt_tokens))
    loops = _Loops(decoder, prompt, label, steps)
    expected = _drawn(loops.ours())
    for other in (loops.by_hand, loops.over_host):
        if not np.array_equal(_drawn(other()), expected):
            raise AssertionError(f"{other.__name__} on {label} draws other tokens")
    title = f"decode on {label}, width {sizes.width}: time over"

    def measured(name: str, other: Callable[[], Iterator[Any]], target: float | None) -> Figure:
        found = step_turns_of(loops.ours, other, case.blocks)
        detail = f"{steps / found.first:.0f} against {steps / found.second:.0f} tokens/s"
        return Figure(f"{title} {name}", found.ratio, "times", target, f"{detail}, least times {found.least_ratio:.3f}")

    yield measured("a hand-written IOBinding loop", loops.by_hand, TARGET)
    shared = _SharedLoops(sizes, prompt, label, steps)
    found = step_turns_of(shared.ours, shared.by_hand, case.blocks)
    if not np.array_equal(_drawn(shared.ours()), _drawn(shared.by_hand())):
        raise AssertionError(f"the loops over a shared cache on {label} draw different tokens")
    detail = (
        f"{steps / found.first:.0f} against {steps / found.second:.0f} tokens/s, least times {found.least_ratio:.3f}"
    )
    yield Figure(f"{title} a hand-written loop over a shared cache", found.ratio, "times", TARGET, detail)
    # Elsewhere host memory is the device's memory, or the arithmetic takes all the time.
    wide = sizes.width >= 1024
    yield measured("a loop through the host", loops.over_host, 1 / 1.5 if label == "cuda" and wide else None)


def _drawn(loop: Iterator[Any]) -> Any:
    return np.concatenate([token for token in loop if token is not None], axis=1)


class _Loops:
    """The same tokens in three ways, each from the cache that the prompt left.

    A loop yields None when it is set up, and the token of each step.
    """

    def __init__(self, decoder: tiny_llama.Decoder, prompt: Any, label: str, steps: int) -> None:
        self.decoder, self.steps = decoder, steps
        self.device = label  # ONNX Runtime calls the memory of these devices the same
        sizes = decoder.sizes
        self.first = prompt.shape[1]
        self.cos, self.sin = (table.astype(np.float32) for table in rotation(sizes.longest, sizes.head))
        feeds = {"ids": prompt.astype(np.int32), "cos": self.cos[: self.first], "sin": self.sin[: self.first]}
        _, self.token, *self.cache = decoder.prefill.run(feeds)
        self.names = [f"{name}{layer}" for layer in range(sizes.layers) for name in ("k", "v")]
        self.tensors = decoder.prefill.run_dlpack(feeds)[1:]
        self.outputs = list(decoder.decode.output_specs)
        # The very session the compiled graph runs, so that only the loops differ.
        engine = decoder.decode._slot.current
        if engine is None:
            raise RuntimeError("the decode graph is not open")
        self.session = engine.session.raw

    def ours(self) -> Iterator[Any]:
        """Loop over the compiled graph with handles on the device."""
        decode = self.decoder.decode
        for name, tensor in zip(["ids", *self.names], self.tensors, strict=True):
            decode.bind_gpu_handle(name, tensor)
        for place, name in enumerate(["ids", *self.names]):
            decode.set_gpu_handle_feed(name, place + 1)
        yield None
        for past in range(self.first, self.first + self.steps):
            rows = slice(past, past + 1)
            yield decode.run_read_outputs({"cos": self.cos[rows], "sin": self.sin[rows]}, [1])[0]

    def by_hand(self) -> Iterator[Any]:
        """Loop over ONNX Runtime's IOBinding, rebinding outputs as inputs."""
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        values = [make(array, self.device) for array in (self.token, *self.cache)]
        binding = self.session.io_binding()
        yield None
        for past in range(self.first, self.first + self.steps):
            rows = slice(past, past + 1)
            binding.bind_cpu_input("cos", self.cos[rows])
            binding.bind_cpu_input("sin", self.sin[rows])
            for name, value in zip(["ids", *self.names], values, strict=True):
                binding.bind_ortvalue_input(name, value)
            for name in self.outputs[1:]:
                binding.bind_output(name, self.device)
            self.session.run_with_iobinding(binding)
            values = binding.get_outputs()
            yield values[0].numpy()

    def over_host(self) -> Iterator[Any]:
        """Loop over plain runs, the cache going to the host and back in each."""
        token, cache = self.token, self.cache
        yield None
        for past in range(self.first, self.first + self.steps):
            rows = slice(past, past + 1)
            held = dict(zip(self.names, cache, strict=True))
            feeds = {"ids": token, "cos": self.cos[rows], "sin": self.sin[rows], **held}
            token, *cache = self.session.run(self.outputs[1:], feeds)
            yield token


class _SharedLoops:
    """The same tokens twice over one cache of the longest length: by `DecodeLoop`, and by a binding written by hand."""

    def __init__(self, sizes: tiny_llama.Sizes, prompt: Any, label: str, steps: int) -> None:
        from rlx_ort.execution.decode import DecodeLoop
        from rlx_ort.execution.session import Session
        from rlx_ort.options.compile_options import CompileOptions, PlacementRule

        graph = tiny_llama.build_in_place(sizes, tiny_llama.make_weights(sizes))
        compiled = Session(label, CompileOptions(placement=PlacementRule.ASSISTED)).compile(graph)
        self.loop = DecodeLoop(compiled, sizes.longest)
        self.prompt, self.device, self.steps = prompt, label, steps
        self.session = compiled.engine().session.raw
        self.names = [f"{name}{layer}" for layer in range(sizes.layers) for name in ("k", "v")]
        shape = (1, sizes.kv_heads, sizes.longest, sizes.head)
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        self.cache = {name: make(np.zeros(shape, np.float32), label) for name in self.names}
        self.logits = np.zeros((1, sizes.vocabulary), np.float32)

    def ours(self) -> Iterator[Any]:
        """Loop over the compiled graph."""
        self.loop.reset()
        for token in self.loop.generate(self.prompt, self.steps + 1):
            yield token[None]

    def by_hand(self) -> Iterator[Any]:
        """Loop over ONNX Runtime's IOBinding, past and present bound to the same memory."""
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        past = self.prompt.shape[1]
        for count, ids in ((0, self.prompt.astype(np.int64)), *((past + step, None) for step in range(self.steps))):
            binding = self.session.io_binding()
            for name, value in self.cache.items():
                binding.bind_ortvalue_input(name, value)
                binding.bind_ortvalue_output(f"new_{name}", value)
            new = self.logits.argmax(-1)[None] if ids is None else ids
            before, places = np.array([count], np.int32), np.arange(count, count + new.shape[1])[None]
            for name, array in (("input_ids", new), ("past_length", before), ("position_ids", places)):
                binding.bind_cpu_input(name, array)
            binding.bind_ortvalue_output("logits", make(self.logits))
            self.session.run_with_iobinding(binding)
            yield self.logits.argmax(-1)[None]
