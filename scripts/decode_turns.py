"""Tokens per second of one decoder in turns: `DecodeLoop`, onnxruntime-genai, and ONNX Runtime with a shared cache.

    python scripts/decode_turns.py FOLDER [--device cuda] [--prompt 16] [--steps 128] [--threads 1] [--texts 8]
    python scripts/decode_turns.py FOLDER --sessions 12 --texts 2      new sessions after every two texts
    python scripts/decode_turns.py FOLDER --handles      and handles of `CompiledGraph`, whose cache moves in each step

FOLDER holds a model of onnxruntime-genai's builder for the device, the CPU or CUDA (`scripts/make_genai_models.py`
makes them). All ways write the same text at a time, by turns of 16 tokens in an order that changes, so that they share
what else the machine does. Printed are the best and the median turn, and the median of the first line's ratios to
these, with the range that holds the true median in 95 of 100 runs: of the sessions' medians, or of the turns if there
is one session of each. On a CPU two sessions of one model differ by 1 to 2 %, whoever opened them, so one of each does
not tell ways apart that are closer than that. All must choose the same tokens. Needs onnxruntime-genai.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnxruntime

import rlx_ort
from rlx_ort.execution.decode import DecodeLoop
from rlx_ort.execution.session import Session
from rlx_ort.options.compile_options import CompileOptions

genai: Any = importlib.import_module("onnxruntime_genai")  # it has no types

Loop: TypeAlias = Callable[[], Iterator[int]]
"""Yields the token after the prompt, then one for each step."""
TURN = 16
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def main() -> int:
    """Measure and print; the exit code is 1 if two ways choose other tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=tuple(PROVIDERS), default="cpu")
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=8, help="of each session")
    parser.add_argument("--sessions", type=int, default=1)
    parser.add_argument("--handles", action="store_true")
    given = parser.parse_args()
    config = json.loads((given.folder / "genai_config.json").read_text(encoding="utf-8"))["model"]
    prompt = np.random.default_rng(0).integers(2, config["vocab_size"], (1, given.prompt))
    longest = given.prompt + given.steps + 1
    makers: dict[str, Callable[..., Loop]] = {
        "rlx_ort DecodeLoop": _ours,
        "onnxruntime-genai": _genai,
        "ONNX Runtime, shared cache": _plain,
    }
    if given.handles:
        makers["rlx_ort handles"] = _handles
    rates: dict[str, list[float]] = {name: [] for name in makers}
    differ: dict[str, int] = {}
    for _ in range(given.sessions):
        order = random.sample(list(makers), len(makers))  # which memory a session gets may depend on those before
        ways = {name: makers[name](given.folder, config, longest, given, prompt) for name in order}
        for text in range(given.texts + 1):
            tokens = _written(ways, given.steps // TURN, rates if text else None)  # the first one warms up
            expected = tokens["rlx_ort DecodeLoop"]
            for name, chosen in tokens.items():
                if chosen != expected:
                    differ[name] = sum(itertools.takewhile(bool, map(int.__eq__, chosen, expected)))
        del ways
    first = rates["rlx_ort DecodeLoop"]
    versions = f"onnxruntime {onnxruntime.__version__}, onnxruntime-genai {genai.__version__}"
    what = f"{given.folder.name} on {given.device}, prompt {given.prompt}, {given.threads} threads"
    sys.stdout.write(f"{what}, {given.sessions} sessions of {given.texts} texts, {versions}\n")
    for name, found in rates.items():
        ratios = [ours / other for ours, other in zip(first, found, strict=True)]
        if given.sessions > 1:
            of_one = len(ratios) // given.sessions
            ratios = [statistics.median(ratios[at : at + of_one]) for at in range(0, len(ratios), of_one)]
        ratios.sort()
        # The order statistics half of 1.96 times the square root of their number below and above the median.
        half = 0.98 * len(ratios) ** 0.5
        low, high = (ratios[min(max(round(len(ratios) / 2 + side), 0), len(ratios) - 1)] for side in (-half, half))
        sys.stdout.write(
            f"{name:28}{max(found):6.0f} / {statistics.median(found):.0f} tokens/s"
            f"{statistics.median(ratios):8.3f} ({low:.3f} to {high:.3f})\n"
        )
    for name, at in differ.items():
        sys.stderr.write(f"{name} chose another token than DecodeLoop after {at} of them\n")
    return int(bool(differ))


def _written(ways: dict[str, Loop], turns: int, rates: dict[str, list[float]] | None) -> dict[str, list[int]]:
    """Write one text in all ways by turns, and return its tokens."""
    loops = {name: way() for name, way in ways.items()}
    tokens: dict[str, list[int]] = {name: [next(loop)] for name, loop in loops.items()}
    for _ in range(turns):
        for name in random.sample(list(loops), len(loops)):
            start = time.perf_counter()
            tokens[name] += itertools.islice(loops[name], TURN)
            if rates is not None:
                rates[name].append(TURN / (time.perf_counter() - start))
    return tokens


def _ours(folder: Path, config: Any, longest: int, given: argparse.Namespace, prompt: Any) -> Loop:
    options = CompileOptions(intra_op_threads=given.threads)
    compiled = Session(given.device, options).compile(rlx_ort.from_onnx(folder / "model.onnx"))
    loop = DecodeLoop(compiled, longest)

    def run() -> Iterator[int]:
        loop.reset()
        for token in loop.generate(prompt):
            yield int(token[0])

    return run


def _handles(folder: Path, config: Any, longest: int, given: argparse.Namespace, prompt: Any) -> Loop:
    compiled = Session(given.device, CompileOptions(intra_op_threads=given.threads)).compile(
        rlx_ort.from_onnx(folder / "model.onnx")
    )
    outputs: list[str] = list(compiled.output_specs)
    types: Any = compiled.input_specs
    feeds = {
        f"past_key_values.{layer}.{part}": f"present.{layer}.{part}"
        for layer in range(config["decoder"]["num_hidden_layers"])
        for part in ("key", "value")
    }
    shape = (1, config["decoder"]["num_key_value_heads"], 0, config["decoder"]["head_size"])
    ones, logits = np.ones((1, longest), np.int64), [outputs.index("logits")]

    def run() -> Iterator[int]:
        for past, present in feeds.items():
            compiled.bind_gpu_handle(past, np.zeros(shape, types[past].dtype.numpy))
            compiled.set_gpu_handle_feed(past, outputs.index(present))
        ids = prompt
        for length in range(prompt.shape[1], longest + 1):
            inputs = {"input_ids": ids, "attention_mask": ones[:, :length]}
            (found,) = compiled.run_read_outputs(inputs, logits)
            ids = np.array([[found[0, -1].argmax()]], np.int64)
            yield int(ids[0, 0])

    return run


def _genai(folder: Path, config: Any, longest: int, given: argparse.Namespace, prompt: Any) -> Loop:
    settings = genai.Config(str(folder))
    threads = {"intra_op_num_threads": given.threads}
    settings.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
    model = genai.Model(settings)

    def run() -> Iterator[int]:
        params = genai.GeneratorParams(model)
        params.set_search_options(max_length=longest, min_length=longest, do_sample=False)
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt.astype(np.int32))
        while True:
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    return run


def _plain(folder: Path, config: Any, longest: int, given: argparse.Namespace, prompt: Any) -> Loop:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = given.threads
    providers = [PROVIDERS[given.device]]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=providers)
    decoder = config["decoder"]
    shape = (1, decoder["num_key_value_heads"], longest, decoder["head_size"])
    parts = [f"{layer}.{part}" for layer in range(decoder["num_hidden_layers"]) for part in ("key", "value")]
    value_of = onnxruntime.OrtValue.ortvalue_from_numpy
    kinds = {value.name: np.float16 if "16" in value.type else np.float32 for value in session.get_outputs()}
    cache = {part: value_of(np.zeros(shape, kinds[f"present.{part}"]), given.device, 0) for part in parts}
    count = prompt.shape[1]
    token, logits = np.zeros((1, 1), np.int64), np.zeros((1, 1, config["vocab_size"]), kinds["logits"])
    ones = np.ones((1, longest), np.int64)

    def bound() -> Any:
        binding = session.io_binding()
        for part, value in cache.items():
            binding.bind_ortvalue_input(f"past_key_values.{part}", value)
            binding.bind_ortvalue_output(f"present.{part}", value)
        return binding

    def run() -> Iterator[int]:
        binding = bound()
        binding.bind_cpu_input("input_ids", prompt)
        binding.bind_cpu_input("attention_mask", ones[:, :count])
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        yield int(binding.get_outputs()[-1].numpy()[0, -1].argmax())
        token[0, 0] = int(binding.get_outputs()[-1].numpy()[0, -1].argmax())
        binding = bound()
        fixed = value_of(token), value_of(logits)
        binding.bind_ortvalue_input("input_ids", fixed[0])
        binding.bind_ortvalue_output("logits", fixed[1])
        for past in range(count, longest):
            if given.device != "cpu":  # ONNX Runtime copies to a device when an input is bound
                binding.bind_cpu_input("input_ids", token)
            binding.bind_ortvalue_input("attention_mask", value_of(ones[:, : past + 1]))
            session.run_with_iobinding(binding)
            token[0, 0] = logits.argmax()
            yield int(token[0, 0])

    return run


if __name__ == "__main__":
    sys.exit(main())
