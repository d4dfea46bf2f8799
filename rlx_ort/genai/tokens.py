"""Text to tokens and back, by onnxruntime-genai's tokenizer or by the package `tokenizers`, whichever is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx_ort.converters.from_onnx.tensor_files import file_inside
from rlx_ort.errors import ConversionError, MissingExtraError, install_command
from rlx_ort.providers.engine import runtime

_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Tokenizer:
    """Turns text into tokens and back.

    Attributes:
        made_by: the package that does.
        encode: returns the tokens of a text.
        pieces: returns a function that takes one token after the other and returns the text that each completes, which
            is empty where a letter is still incomplete.
    """

    made_by: str
    encode: Callable[[str], list[int]]
    pieces: Callable[[], Callable[[int], str]]


def tokenizer_of(folder: Path, trusted: Sequence[Path] = ()) -> Tokenizer:
    """Return the tokenizer of a folder.

    Raises:
        ConversionError: the folder has none, or it is damaged.
        EngineError: neither onnxruntime-genai nor tokenizers is installed.
    """
    if not (folder / _FILE).exists():
        raise ConversionError(f"{folder} has no {_FILE}; give tokens instead of text")
    path = file_inside(folder, _FILE, f"the tokenizer of {folder} is", trusted)
    if runtime.genai_problem() is None:
        return _of_genai(folder)
    try:
        return _of_file(importlib.import_module("tokenizers"), path)
    except ModuleNotFoundError as err:
        raise MissingExtraError(
            f"text needs a tokenizer, and neither onnxruntime-genai nor tokenizers is installed\n  "
            f"{install_command('genai')}\n  pip install tokenizers  # is enough; or give tokens instead of text"
        ) from err


def _of_genai(folder: Path) -> Tokenizer:
    try:
        tokenizer = runtime.genai().Tokenizer(str(folder))
    except RuntimeError as err:
        raise ConversionError(f"onnxruntime-genai cannot read the tokenizer of {folder}: {err}") from err

    def pieces() -> Callable[[int], str]:
        stream = tokenizer.create_stream()
        return lambda token: str(stream.decode(token))

    return Tokenizer("onnxruntime-genai", lambda text: [int(token) for token in tokenizer.encode(text)], pieces)


def _of_file(package: Any, path: Path) -> Tokenizer:
    """Return the tokenizer of a file in the format of Hugging Face, read by its package."""
    try:
        tokenizer = package.Tokenizer.from_file(str(path))
    except Exception as err:  # it raises `Exception` itself
        raise ConversionError(f"{path} is not a tokenizer: {err}") from err

    def pieces() -> Callable[[int], str]:
        stream = package.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(tokenizer, token) or ""

    return Tokenizer("tokenizers", lambda text: list(tokenizer.encode(text).ids), pieces)
