"""A decode loop with its cache on the device: against a loop over IOBinding written by hand, and against the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from figures.record import Figure, in_turns

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import tiny_llama  # the examples are no package

__all__ = ["measure"]

BLOCKS, RUNS = 9, 1
SIZES = {
    "cpu": tiny_llama.Sizes(8192, 1024, 4, 16, 8, 2816, 64),  # a quarter of the layers' size of a 1B model
    "webgpu": tiny_llama.Sizes(64, 32, 2, 4, 2, 48, 64),  # in CI this is a GPU in software
    "cuda": tiny_llama.Sizes(32000, 2048, 8, 16, 8, 5632, 1024),
}
PROMPT_TOKENS = {"cpu": 16, "webgpu": 4, "cuda": 512}
STEPS = {"cpu": 16, "webgpu": 6, "cuda": 64}


def measure() -> Iterator[Figure]:
    """Yield, for each device that is here, the time of a loop over that of the others."""
    from rlx_ort.device import Device
    from rlx_ort.providers.registry import default_registry

    for label in SIZES:
        if default_registry().availability(Device(label)).available:
            yield from _measure_on(label)


def _measure_on(label: str) -> Iterator[Figure]:
    sizes, steps = SIZES[label], STEPS[label]
    decoder = tiny_llama.Decoder(sizes, tiny_llama.make_weights(sizes), label)
    prompt = np.random.default_rng(3).integers(0, sizes.vocabulary, (1, PROMPT_TOKENS[label]))
    loops = _Loops(decoder, prompt, label, steps)
    expected = loops.ours()
    for other in (loops.by_hand, loops.over_host):
        if not np.array_equal(other(), expected):
            raise AssertionError(f"{other.__name__} on {label} draws other tokens")
    ours, theirs, ratio = in_turns(loops.ours, loops.by_hand, BLOCKS, RUNS)
    detail = f"{steps / ours:.0f} against {steps / theirs:.0f} tokens/s"
    yield Figure(f"decode on {label}, time over a hand-written IOBinding loop", ratio, "times", 1 / 0.97, detail)
    ours, theirs, ratio = in_turns(loops.ours, loops.over_host, BLOCKS, RUNS)
    detail = f"{steps / ours:.0f} against {steps / theirs:.0f} tokens/s"
    # Elsewhere host memory is the device's memory, or the arithmetic takes all the time.
    target = 1 / 1.5 if label == "cuda" else None
    yield Figure(f"decode on {label}, time over a loop through the host", ratio, "times", target, detail)


class _Loops:
    """The same tokens in three ways, each from the cache that the prompt left."""

    def __init__(self, decoder: tiny_llama.Decoder, prompt: Any, label: str, steps: int) -> None:
        self.decoder, self.steps = decoder, steps
        self.device = label  # ONNX Runtime calls the memory of these devices the same
        sizes = decoder.sizes
        self.first = prompt.shape[1]
        self.cos, self.sin = (table.astype(np.float32) for table in tiny_llama.rotation(sizes))
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

    def ours(self) -> Any:
        """Loop over the compiled graph with handles on the device."""
        decode = self.decoder.decode
        for name, tensor in zip(["ids", *self.names], self.tensors, strict=True):
            decode.bind_gpu_handle(name, tensor)
        for place, name in enumerate(["ids", *self.names]):
            decode.set_gpu_handle_feed(name, place + 1)
        found = []
        for past in range(self.first, self.first + self.steps):
            rows = slice(past, past + 1)
            found += decode.run_read_outputs({"cos": self.cos[rows], "sin": self.sin[rows]}, [1])
        return np.concatenate(found, axis=1)

    def by_hand(self) -> Any:
        """Loop over ONNX Runtime's IOBinding, rebinding outputs as inputs."""
        make = onnxruntime.OrtValue.ortvalue_from_numpy
        values = [make(array, self.device) for array in (self.token, *self.cache)]
        binding = self.session.io_binding()
        found = []
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
            found.append(values[0].numpy())
        return np.concatenate(found, axis=1)

    def over_host(self) -> Any:
        """Loop over plain runs, the cache going to the host and back in each."""
        token, cache = self.token, self.cache
        found = []
        for past in range(self.first, self.first + self.steps):
            rows = slice(past, past + 1)
            held = dict(zip(self.names, cache, strict=True))
            feeds = {"ids": token, "cos": self.cos[rows], "sin": self.sin[rows], **held}
            token, *cache = self.session.run(self.outputs[1:], feeds)
            found.append(token)
        return np.concatenate(found, axis=1)
