"""Chat with a language model on the best device of this machine; Ctrl-C ends an answer, an empty line the chat.

python examples/make_language_model.py models --name small --variants       a checkpoint of random weights
python examples/chat.py models/small-hf                                  or a folder with a genai_config.json
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

import rlx_ort.genai


def exported(checkpoint: Path) -> Path:
    """Return the folder of a checkpoint for onnxruntime-genai, whose builder makes it the first time."""
    if any(checkpoint.rglob("genai_config.json")):
        return checkpoint
    folder = checkpoint.with_name(f"{checkpoint.name}-genai")
    if not folder.exists():
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", "fp32", "-e", "cpu"]
        subprocess.run([*builder, "-i", str(checkpoint), "-o", str(folder)], check=True)  # noqa: S603  # the caller names both
    return folder


async def answer(model: rlx_ort.genai.LanguageModel, text: list[int]) -> None:
    """Print the answer to a text as it is made, and add it to the text."""
    piece = model.tokenizer.pieces()
    async for token in model.stream(text, max_new_tokens=100):
        text.append(token)
        print(piece(token), end="", flush=True)


def main() -> None:
    """Read lines and answer them; the text grows, and is cut to the half that the cache holds."""
    text: list[int] = []
    with rlx_ort.genai.open(exported(Path(sys.argv[1]))) as model, asyncio.Runner() as runner:
        print(f"{model}, cache of {model.cache_bytes >> 10} KiB")
        while line := input("\n> "):
            text = [*text, *model.tokenizer.encode(line)][-model.max_length // 2 :]
            with contextlib.suppress(KeyboardInterrupt):
                runner.run(answer(model, text))


if __name__ == "__main__":
    main()
