"""onnxruntime-genai: which devices it can use here, and its model and generator on one of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx_ort.device import Device
from rlx_ort.errors import EngineError
from rlx_ort.options.compile_options import CompileOptions, PlacementRule
from rlx_ort.providers.engine import runtime
from rlx_ort.providers.plugins import plugin_for, register_plugin
from rlx_ort.providers.registry import provider_of

if TYPE_CHECKING:
    from rlx_ort.genai.config import GenaiConfig

_ON_HOST = ("cpu", "QNN")
"""Providers of which onnxruntime-genai keeps inputs and outputs in host memory."""
_AS_IT_IS = CompileOptions()
_FATAL = 4  # every failure is an exception already; ONNX Runtime's copy on stderr would be noise


def why_not(device: Device, options: CompileOptions) -> str:
    """Return why onnxruntime-genai cannot run a model on a device that works here; empty if it may."""
    problem = runtime.genai_problem()
    if problem is not None:
        return problem.reason
    provider = provider_of(device)
    if provider is None or not provider.genai_name:
        return f"onnxruntime-genai has no provider for {device.display}"
    if device.index:
        return "onnxruntime-genai is given the first device of a kind only"
    settings = options.on(device)
    fixed = ("precision", "precision_policy", "low_memory")
    if changed := [name for name in fixed if getattr(settings, name) != getattr(_AS_IT_IS, name)]:
        return f"onnxruntime-genai runs models as they are, and the options set {', '.join(changed)}"
    name = provider.genai_name
    if not getattr(runtime.genai(), f"is_{name.lower()}_available", lambda: True)():
        return f"this build of onnxruntime-genai does not support {name}"
    return ""


class GenaiEngine:
    """A model in onnxruntime-genai, with one generator that keeps the cache of the last text.

    Attributes:
        model: onnxruntime-genai's own `Model`.

    Raises:
        EngineError: onnxruntime-genai refuses the model, or runs it on the CPU in place of the device.
    """

    def __init__(self, config: GenaiConfig, device: Device, options: CompileOptions, length: int) -> None:
        self._length = length
        provider = provider_of(device)
        assert provider is not None  # noqa: S101  # `why_not` has looked
        self._turn = provider.run_lock
        genai = runtime.genai()
        plugin = plugin_for(provider.ep_name)
        if plugin is not None:
            problem = register_plugin(plugin, genai, (RuntimeError,))
            if problem is not None:
                raise EngineError(
                    f"onnxruntime-genai cannot use {device.display}: {problem.reason}\n  {problem.remedy}"
                )
        name = provider.genai_name
        try:
            with self._turn():
                settings = genai.Config(str(config.folder))
                settings.clear_providers()
                if name != "cpu":
                    settings.append_provider(name)
                for key, value in {**dict(config.providers).get(name.lower(), {}), **options.provider_options}.items():
                    settings.set_provider_option(name, key, value)
                settings.overlay(
                    json.dumps({"model": {"decoder": {"session_options": _session_options(name, options)}}})
                )
                self.model = genai.Model(settings)
                reported = str(self.model.device_type)
        except RuntimeError as err:
            raise EngineError(f"onnxruntime-genai did not open {config.folder}: {runtime.readable(err)}") from err
        if reported == "CPU" and name not in _ON_HOST:
            raise EngineError(f"onnxruntime-genai runs {config.folder} on the CPU and not on {device.display}")
        self._genai = genai
        self._generator: Any = None
        self._text: list[int] = []
        self._in_cache = 0  # tokens of the text; the last one that was generated is not in it

    @property
    def placement(self) -> None:
        """None, as onnxruntime-genai does not report where nodes are."""

    def generate(self, prompt: Sequence[int]) -> Iterator[int]:
        """Yield the tokens after a prompt, the best each time; tokens that the last text begins with too are kept."""
        try:
            with self._turn():
                kept = common_length(self._text[: self._in_cache], prompt)
                if self._generator is None or not kept:
                    self._generator, kept = self._made(), 0
                else:
                    self._generator.rewind_to(kept)
                self._text, self._in_cache = [*prompt], kept
                self._generator.append_tokens(list(prompt[kept:]))
                self._in_cache = len(prompt)
            while not self._generator.is_done():
                with self._turn():
                    self._generator.generate_next_token()
                    token = int(self._generator.get_next_tokens()[0])
                self._in_cache = len(self._text)
                self._text.append(token)
                yield token
        except RuntimeError as err:
            self._generator = None
            raise EngineError(f"onnxruntime-genai failed: {runtime.readable(err)}") from err

    def close(self) -> None:
        """Free the cache and the model; closing twice is harmless."""
        with self._turn():
            self._generator = None
            self.model = None

    def _made(self) -> Any:
        """Return a generator; it allocates the cache."""
        settings = self._genai.GeneratorParams(self.model)
        settings.set_search_options(
            max_length=self._length, do_sample=False, num_beams=1, min_length=0, repetition_penalty=1.0
        )
        return self._genai.Generator(self.model, settings)


def _session_options(provider: str, options: CompileOptions) -> Mapping[str, Any]:
    threads = {} if options.intra_op_threads is None else {"intra_op_num_threads": options.intra_op_threads}
    strict = provider != "cpu" and options.placement is PlacementRule.STRICT
    whole = {"session.disable_cpu_ep_fallback": "1"} if strict else {}  # refuses shapes on the CPU as well
    return {"log_severity_level": _FATAL, **threads, **whole, **options.session_config}


def common_length(text: Sequence[int], prompt: Sequence[int]) -> int:
    """Return how many tokens of a prompt are those of the text before; at least one is left to run."""
    most = min(len(text), len(prompt) - 1)
    return next((at for at in range(most) if text[at] != prompt[at]), max(most, 0))
