"""Text to tokens and back, by onnxruntime-genai's tokenizer or by the package `tokenizers`, whichever is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlx_ort.converters.from_onnx.tensor_files import file_inside
from rlx_ort.errors import ConversionError, EngineError, install_command
from rlx_ort.providers.engine import runtime

_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """Turns text into tokens and back. `made_by` is the package that does."""

    made_by: str

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    def pieces(self) -> Callable[[int], str]:
        """Return a function that takes one token after the other and returns the text that each completes.

        The text is empty where a letter is still incomplete.
        """


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
        return _GenaiTokenizer(folder)
    try:
        return _FileTokenizer(importlib.import_module("tokenizers"), path)
    except ModuleNotFoundError as err:
        raise EngineError(
            f"text needs a tokenizer, and neither onnxruntime-genai nor tokenizers is installed\n  "
            f"{install_command('genai')}\n  pip install tokenizers  # is enough; or give tokens instead of text"
        ) from err


class _GenaiTokenizer:
    """The tokenizer of onnxruntime-genai."""

    made_by = "onnxruntime-genai"

    def __init__(self, folder: Path) -> None:
        try:
            self._tokenizer = runtime.genai().Tokenizer(str(folder))
        except RuntimeError as err:
            raise ConversionError(f"onnxruntime-genai cannot read the tokenizer of {folder}: {err}") from err

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

    def pieces(self) -> Callable[[int], str]:
        stream = self._tokenizer.create_stream()
        return lambda token: str(stream.decode(token))


class _FileTokenizer:
    """The tokenizer of a file in the format of Hugging Face, read by its package."""

    made_by = "tokenizers"

    def __init__(self, package: Any, path: Path) -> None:
        self._package = package
        try:
            self._tokenizer = package.Tokenizer.from_file(str(path))
        except Exception as err:  # it raises `Exception` itself
            raise ConversionError(f"{path} is no tokenizer: {err}") from err

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def pieces(self) -> Callable[[int], str]:
        stream = self._package.decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""
