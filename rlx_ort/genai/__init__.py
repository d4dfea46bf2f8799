"""Language models in the folders of onnxruntime-genai, on the device that should be fastest for them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlx_ort.genai.choice import Choice, GenaiCandidate, TextSizes, rank
from rlx_ort.genai.config import GenaiConfig, read_config
from rlx_ort.genai.model import LanguageModel
from rlx_ort.genai.tokens import Tokenizer, tokenizer_of

if TYPE_CHECKING:
    from rlx_ort.converters.from_onnx.tensor_files import Folders
    from rlx_ort.device import Device
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.selection.policy import DevicePolicy

__all__ = [
    "Choice", "GenaiCandidate", "GenaiConfig", "LanguageModel", "TextSizes", "Tokenizer", "open", "rank", "read_config",
    "tokenizer_of",
]  # fmt: skip


def open(
    folder: str | os.PathLike[str],
    policy: DevicePolicy | None = None,
    options: CompileOptions | None = None,
    *,
    device: Device | str | None = None,
    engine: str = "auto",
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    max_length: int = 2048,
    trusted_links: Folders = (),
) -> LanguageModel:
    """Open a language model on the device where prompt and answer should take the least time.

    Every variant is judged on every device that the policy allows, once for the prompt and once for a token after it,
    and the pairs are tried in the order of their predicted times. onnxruntime-genai runs the model where it is
    installed and can use the device, else the decode loop of this package does. `LanguageModel` has the choice.

    Nodes that compute masks and positions may be left to the CPU. A device that is named must take every node that
    computes with floats, unless `options.placement` is assisted.

    Args:
        folder: a folder with a `genai_config.json`, or one of several such folders, the variants of one model.
        policy: which devices may be chosen; by default that of the `RLX_*` variables.
        options: how to compile. onnxruntime-genai takes threads, provider options and session config.
        device: the device to use, or fail; by default that of `RLX_DEVICE`, else the best.
        engine: `genai` for onnxruntime-genai alone, `rlx_ort` for the decode loop alone, `auto` for either.
        prompt_tokens: how many tokens of prompt to rank for; by default 256, or as many as the context allows.
        new_tokens: how many tokens of answer to rank for; by default 128.
        max_length: how many tokens the cache holds, at most the context of the model; see `LanguageModel.cache_bytes`.
        trusted_links: folders that links of the model's files may lead into; see `from_onnx`.

    Raises:
        ConversionError: a config or model cannot be read, or names an execution provider that does not exist.
        InputError: the sizes or the engine are wrong, or the model has no cache that the loop can use.
        NoViableDeviceError: no device may run the model; it lists the reasons.
        EngineError: no device opened it.
    """
    ranked = rank(
        folder,
        policy,
        options,
        device=device,
        engine=engine,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        trusted_links=trusted_links,
    )
    return LanguageModel(ranked, max_length, trusted_links)
