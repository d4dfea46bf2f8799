"""`LanguageModel`: a decoder on its device, which writes a text token by token."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx_ort.converters.from_onnx.tensor_files import Folders, trusted_folders
from rlx_ort.errors import InputError, RunError
from rlx_ort.execution.background import run_in_background
from rlx_ort.execution.decode import DecodeLoop
from rlx_ort.faults import first_that_works
from rlx_ort.genai.choice import Choice, GenaiCandidate, Variant
from rlx_ort.genai.package import GenaiEngine, common_length
from rlx_ort.genai.tokens import Tokenizer, tokenizer_of
from rlx_ort.graph_devices import GraphDevices
from rlx_ort.selection.candidates import automatic
from rlx_ort.selection.policy import DevicePolicy

if TYPE_CHECKING:
    from rlx_ort.execution.placement import Placement


class LanguageModel:
    """A decoder of text on one device; `rlx_ort.genai.open` makes it, or from a ranking this class does.

    There is one text at a time: the next one ends that before it. It may be used from several threads.

    Args:
        choice: a ranking; the candidates are tried in its order.
        max_length: how many tokens the cache holds, at most the context of the model.
        trusted_links: as in `rlx_ort.genai.open`.

    Attributes:
        choice: the ranking of the variants and devices that it was chosen from.
        chosen: the variant and device in use.
        engine: `genai` for onnxruntime-genai, or `rlx_ort` for the decode loop of this package.
        refused: the candidates before it that failed to open, each with its engine and the reason.
        max_length: how many tokens the cache holds, prompt included.

    Raises:
        NoViableDeviceError: no candidate may be chosen.
        EngineError: none opened.
    """

    def __init__(self, choice: Choice, max_length: int = 2048, trusted_links: Folders = ()) -> None:
        choice.best()
        self.choice = choice
        self.refused: list[tuple[GenaiCandidate, str, str]] = []
        self._trusted = trusted_folders(trusted_links)
        self._lock = threading.Lock()
        self._text: Iterator[int] | None = None
        self._closed = False
        self.chosen, self.engine, self._engine = self._opened(choice, max_length)
        self.max_length = min(max_length, self._variant.config.context_length)

    @property
    def cache_bytes(self) -> int:
        """The bytes of the cache; it is allocated when the first text begins."""
        return self.chosen.cache_bytes * self.max_length

    @property
    def placement(self) -> Placement | None:
        """Where each node is; None in onnxruntime-genai, which does not report it."""
        return self._engine.placement

    @property
    def og_model(self) -> Any:
        """The `onnxruntime_genai.Model`, for other features, such as sampling; None in the decode loop."""
        return self._engine.model

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the folder.

        Raises:
            ConversionError: the folder has none, or it is damaged.
            EngineError: no package that reads it is installed.
        """
        return tokenizer_of(self._variant.config.folder, self._trusted)

    def generate(
        self, prompt: Sequence[int] | str, max_new_tokens: int | None = None, *, stop_tokens: Collection[int] = ()
    ) -> Iterator[int]:
        """Yield the tokens after a prompt, the most probable each time, the last one a stop token if there is one.

        The cache keeps the text: a common beginning of the next prompt is not run again.

        Args:
            prompt: tokens or text.
            max_new_tokens: how many to yield at most; None for as many as the cache has room for.
            stop_tokens: tokens that end the text, besides those of the model.

        Raises:
            InputError: the prompt is empty or too long for the cache, or has a negative token.
            EngineError: a run failed.
            RunError: another text was begun meanwhile, or the model was closed.
        """
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        if not 0 < len(tokens) < self.max_length:
            raise InputError(f"the prompt has {len(tokens)} tokens; the cache takes 1 to {self.max_length - 1}")
        if min(tokens) < 0:  # as a tokenizer gives them for unknown text
            raise InputError(
                f"token {tokens.index(min(tokens))} of the prompt is {min(tokens)}, which is not a valid token"
            )
        stops = self._variant.config.stop_tokens | set(stop_tokens)
        room = self.max_length - len(tokens)
        count = room if max_new_tokens is None else min(max_new_tokens, room)
        return self._generated(tokens, count, stops)

    async def stream(
        self, prompt: Sequence[int] | str, max_new_tokens: int | None = None, *, stop_tokens: Collection[int] = ()
    ) -> AsyncIterator[int]:
        """Yield tokens as `generate` does, each computed in a thread; cancelling the task ends the text.

        Raises:
            InputError: the prompt is empty or too long for the cache.
            EngineError: a run failed.
        """
        tokens = self.generate(prompt, max_new_tokens, stop_tokens=stop_tokens)
        while (piece := await run_in_background(lambda: next(tokens, None))) is not None:
            yield piece

    def close(self) -> None:
        """Free the cache, the session and the weights, after the token being computed; closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._engine.close()

    def __enter__(self) -> LanguageModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<LanguageModel {self._variant.config.kind} on {self.chosen.device.label}, by {self.engine}>"

    @property
    def _variant(self) -> Variant:
        return self.choice.variants[self.chosen.variant]

    def _generated(self, tokens: list[int], count: int, stops: Collection[int]) -> Iterator[int]:
        with self._lock:
            text = self._text = self._engine.generate(tokens)
        for _ in range(count):
            with self._lock:
                if self._closed:
                    raise RunError("the language model is closed; open it again")
                if self._text is not text:
                    raise RunError(
                        "another text was started on this model, whose cache holds one; open the model twice"
                    )
                token = next(text, None)
            if token is None:
                return
            yield token
            if token in stops:
                return

    def _opened(self, choice: Choice, max_length: int) -> tuple[GenaiCandidate, str, _OwnEngine | GenaiEngine]:
        """Return the first candidate that opens, the name of its engine, and that; the last one's error is raised."""
        errors: list[Exception] = []

        def opened(candidate: tuple[GenaiCandidate, str]) -> _OwnEngine | GenaiEngine:
            row, name = candidate
            variant = choice.variants[row.variant]
            length = min(max_length, variant.config.context_length)
            if name == "rlx_ort":
                return _OwnEngine(variant, row, length)
            return GenaiEngine(variant.config, row.device, variant.options, length)

        def failed(candidate: tuple[GenaiCandidate, str], error: Exception) -> None:
            errors[:] = [error]
            self.refused.append((*candidate, str(error)))

        found = first_that_works(((row, name) for row in choice.ranked for name in row.engines), opened, failed)
        if found is not None:
            return *found[0], found[1]
        raise errors.pop()  # which has frames with this list, and would keep sessions until garbage is collected


class _OwnEngine:
    """A decoder in the decode loop of this package."""

    model = None

    def __init__(self, variant: Variant, row: GenaiCandidate, length: int) -> None:
        policy = DevicePolicy(allow=(row.device,))
        self._runner = GraphDevices(variant.graph, policy, automatic(variant.options))
        try:
            self._compiled = self._runner.compile(row.device)
            pairs = dict(variant.config.cache_names())
            self._loop = DecodeLoop(self._compiled, length, cache=pairs)
        except BaseException:
            self._runner.close()
            raise
        self._text: list[int] = []

    @property
    def placement(self) -> Placement:
        return self._compiled.placement

    def generate(self, prompt: Sequence[int]) -> Iterator[int]:
        kept = common_length(self._text[: self._loop.length], prompt)
        self._loop.reset(kept)
        self._text = [*prompt]
        for [token] in self._loop.generate(np.array([prompt[self._loop.length :]], np.int64)):
            self._text.append(int(token))
            yield int(token)

    def close(self) -> None:
        self._loop.close()
        self._runner.close()
