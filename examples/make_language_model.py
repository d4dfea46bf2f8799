r"""Make a small language model of random weights, and its onnxruntime-genai folders, for tests and measurements.

    python examples/make_language_model.py FOLDER                          llama512: 8 layers, 512 wide
    python examples/make_language_model.py FOLDER --name llama64 --hidden 64 --layers 1 --heads 4 --kv-heads 2 \
        --intermediate 176 --vocabulary 512

Needs torch, transformers, tokenizers, onnx-ir and onnxruntime-genai. It makes, with NAME from --name:

    NAME-hf/             a Llama checkpoint of Hugging Face's form, with a byte-level BPE tokenizer trained on docs/*.md
    NAME-VARIANT/        for each of --variants, what onnxruntime-genai's builder exports from it
    NAME-prompt.npy      16 token ids (int64)
    NAME-tokens.npy      the 64 tokens that torch generates greedily after them (int64)
    NAME.md              how they were made, and how close the best two logits come

The same arguments make the same weights and prompt. Folders that exist are written again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROMPT_LENGTH, NEW_TOKENS = 16, 64
VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": ("-p", "fp32", "-e", "cpu"),
    "int4": ("-p", "int4", "-e", "cpu"),
    "webgpu-fp32": ("-p", "fp32", "-e", "webgpu", "--extra_options", "use_webgpu_fp32=1"),
    "webgpu-int4": ("-p", "int4", "-e", "webgpu", "--extra_options", "use_webgpu_fp32=1"),
    "webgpu-fp16": ("-p", "fp16", "-e", "webgpu"),
    "cuda-fp16": ("-p", "fp16", "-e", "cuda"),
    "cuda-int4": ("-p", "int4", "-e", "cuda"),
}
"""Name of a folder -> arguments of the builder. The first two run on the CPU; WebGPU in f32, for GPUs in software."""


def main() -> None:
    """Make the checkpoint, the tokens that torch generates, and the folders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="llama512")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--intermediate", type=int, default=1408)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--context", type=int, default=4096, help="the longest text, in tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", help="of the checkpoint; its tokens are computed in it")
    parser.add_argument("--variants", nargs="*", choices=tuple(VARIANTS), default=["fp32", "int4"])
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    base = options.folder / options.name
    checkpoint = base.with_name(f"{options.name}-hf")
    gap = make_checkpoint(options, checkpoint, base)
    for variant in options.variants:
        folder = base.with_name(f"{options.name}-{variant}")
        shutil.rmtree(folder, ignore_errors=True)
        arguments = [*VARIANTS[variant], "-i", str(checkpoint), "-o", str(folder), "-c", str(options.folder / "cache")]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *arguments], check=True)  # noqa: S603
    shutil.rmtree(options.folder / "cache", ignore_errors=True)
    (genai,) = set(importlib.metadata.packages_distributions()["onnxruntime_genai"])  # a package for each engine
    packages = ("torch", "transformers", "tokenizers", "onnx-ir", genai)
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    lines = [
        f"# {options.name}",
        "",
        "A Llama checkpoint of random weights and its onnxruntime-genai folders, made by",
        "",
        f"    python examples/make_language_model.py FOLDER {' '.join(sys.argv[2:])}".rstrip(),
        "",
        f"with {versions}.",
        "",
        f"{options.name}-tokens.npy has torch's {NEW_TOKENS} greedy tokens after {options.name}-prompt.npy. The best",
        f"two logits of a step are at least {gap:.2g} apart, so that f32 on any device should give the same tokens.",
    ]
    base.with_name(f"{options.name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_checkpoint(options: argparse.Namespace, checkpoint: Path, base: Path) -> float:
    """Save the checkpoint, a prompt and torch's tokens; return the smallest gap between the best two logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    config = LlamaConfig(
        hidden_size=options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        intermediate_size=options.intermediate,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.context,
        initializer_range=0.1,  # wide enough that the best two logits are not close
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        architectures=["LlamaForCausalLM"],
        torch_dtype=options.dtype,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, options.dtype)).eval()
    shutil.rmtree(checkpoint, ignore_errors=True)
    model.save_pretrained(checkpoint)
    make_tokenizer(checkpoint, options.vocabulary, options.context)
    prompt = np.random.default_rng(options.seed).integers(2, options.vocabulary, (1, PROMPT_LENGTH))
    tokens, gap = greedy(model, prompt)
    if 1 in tokens:
        raise SystemExit(f"the text ends after {tokens.index(1)} tokens: choose another --seed")
    np.save(f"{base}-prompt.npy", prompt.reshape(-1).astype(np.int64))
    np.save(f"{base}-tokens.npy", np.array(tokens, np.int64))
    return gap


def greedy(model: Any, prompt: np.ndarray) -> tuple[list[int], float]:
    """Return the tokens with the highest logit, one after the other, and the smallest gap to the second."""
    import torch

    tokens: list[int] = []
    gap = float("inf")
    with torch.no_grad():
        state = model(torch.from_numpy(prompt), use_cache=True)
        for _ in range(NEW_TOKENS):
            best = state.logits[0, -1].float().topk(2)
            tokens.append(int(best.indices[0]))
            gap = min(gap, float(best.values[0] - best.values[1]))
            state = model(torch.tensor([[tokens[-1]]]), past_key_values=state.past_key_values, use_cache=True)
    return tokens, gap


def make_tokenizer(checkpoint: Path, vocabulary: int, context: int) -> None:
    """Save a byte-level BPE tokenizer, trained on the pages of this project, in Hugging Face's files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    tokenizer.train_from_iterator(pages, trainer)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
