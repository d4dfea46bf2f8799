"""The folder of a language model as onnxruntime-genai lays it out: `genai_config.json`, read strictly, and its files.

onnxruntime-genai takes any text under `session_options` for an entry of ONNX Runtime's session config, and ONNX Runtime
ignores entries and provider options that it does not have. Some of its versions run on the CPU where they do not have
the provider that is named. So names that are not known are refused or noted here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from rlx_ort import fields
from rlx_ort.converters.from_onnx.tensor_files import file_inside
from rlx_ort.errors import ConversionError, near_names
from rlx_ort.fields import Fields
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.types import TensorType
from rlx_ort.providers.engine.cores import known_cores
from rlx_ort.providers.engine.recipe import names
from rlx_ort.storage import read_regular

CONFIG = "genai_config.json"
_SUFFIX = "executionprovider"
# NormalizeProviderName and SessionOptions_Element of
# https://github.com/microsoft/onnxruntime-genai/blob/main/src/config.cpp
_PROVIDERS = (
    *("amdgpu", "cpu", "cuda", "dml", "nvtensorrtrtx", "openvino", "qnn", "ryzenai", "vitisai", "webgpu"),
    *("azure", "coreml", "js", "migraphx", "snpe", "webnn", "xnnpack"),
)
_SESSION_OPTIONS = names(
    """
    log_id enable_profiling intra_op_num_threads inter_op_num_threads log_severity_level log_verbosity_level
    enable_cpu_mem_arena enable_mem_pattern graph_optimization_level provider_options
    """
)
# Options whose value is a file, a folder, a library, or an address in this process, by the words of their names:
# QNN's backend_path and op_packages, OpenVINO's load_config, TensorRT's trt_extra_plugin_lib_paths, caches of engines.
_FILE_WORDS = names(
    """
    path paths file files filepath folder dir dirs directory root lib libs library libraries dll plugin plugins package
    packages xclbin
    """
)
_FILE_OPTIONS = names(
    """
    load_config user_compute_stream gpu_external_alloc gpu_external_free gpu_external_empty_cache webgpuinstance
    webgpudevice dawnproctable
    """
)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
_LIBRARY = re.compile(r"\.(?:dll|so(?:\.\d+)*|dylib)$", re.IGNORECASE)
_LARGEST = (1 << 31) - 1
_MOST_LAYERS = 1 << 14  # each has two inputs and two outputs of the model, whose names are built from it
_TEXT_INPUTS = ("input_ids", "attention_mask", "position_ids")
_OTHER_PARTS = ("encoder", "encoder_decoder_init", "embedding", "vision", "speech")


@dataclass(frozen=True, slots=True)
class GenaiConfig:
    """The entries of a `genai_config.json` for a decoder that reads text.

    Attributes:
        folder: the folder of the file.
        kind: the architecture, such as `llama`.
        model: the decoder's file.
        context_length: the longest text, prompt included, in tokens.
        head_size: the width of one key or value.
        heads: the number of keys, and of values, of a token in a layer.
        layers: the number of layers.
        inputs: the role of an input -> its name in the model; a `%d` in it stands for the layer.
        outputs: the same of the outputs.
        stop_tokens: the tokens that end a text.
        providers: the execution providers that the file asks for, in lower case and without `ExecutionProvider`, with
            their options; none means the CPU.
        notes: settings that have no effect.
    """

    folder: Path
    kind: str
    model: Path
    context_length: int
    head_size: int
    heads: int
    layers: int
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    stop_tokens: frozenset[int]
    providers: tuple[tuple[str, Mapping[str, str]], ...]
    notes: tuple[str, ...]

    def cache_names(self) -> list[tuple[str, str]]:
        """Return each cache input of the model with the output that holds its new value."""
        pairs = []
        for layer in range(self.layers):
            for part in ("key", "value"):
                names = self.inputs[f"past_{part}_names"], self.outputs[f"present_{part}_names"]
                pairs.append((names[0].replace("%d", str(layer)), names[1].replace("%d", str(layer))))
        return pairs

    def dims(self, graph: Graph) -> dict[str, int]:
        """Return the sizes of named dims that the file fixes: those of one key, which exporters leave open."""
        shapes = [kind.shape for kind in self._cache_types(graph) if kind.shape is not None and len(kind.shape) == 4]
        places = ((1, self.heads), (3, self.head_size))
        return {dim: size for shape in shapes for axis, size in places if isinstance(dim := shape[axis], str)}

    def feeds(self, graph: Graph, new: int, past: int) -> dict[str, Any]:
        """Return arrays with the shapes of a run of `new` tokens after `past` others; they take no memory.

        Raises:
            ConversionError: the model has an input that a decoder of text does not have.
        """
        sizes = {
            self.inputs["input_ids"]: (1, new),
            self.inputs["attention_mask"]: (1, past + new),
            self.inputs["position_ids"]: (1, new),
            **dict.fromkeys((name for name, _ in self.cache_names()), (1, self.heads, past, self.head_size)),
        }
        unknown = [value.name for value in graph.inputs if value.name not in sizes]
        if unknown:
            raise ConversionError(
                f"{self.model} has the inputs {', '.join(map(repr, unknown))}, which {CONFIG} does not name; "
                "only decoders of text with a cache of keys and values can be judged"
            )
        zero = np.zeros(())
        return {value.name: np.broadcast_to(zero, sizes[value.name]) for value in graph.inputs}

    def cache_bytes(self, graph: Graph, length: int) -> int:
        """Return the bytes of the keys and values of `length` tokens."""
        row = sum(kind.dtype.numpy.itemsize for kind in self._cache_types(graph))
        return row * self.heads * self.head_size * length

    def _cache_types(self, graph: Graph) -> list[TensorType]:
        pasts = {past for past, _ in self.cache_names()}
        kinds = (value.type for value in graph.inputs if value.name in pasts)
        return [kind for kind in kinds if isinstance(kind, TensorType)]


def read_config(folder: str | os.PathLike[str], trusted: Sequence[Path] = ()) -> GenaiConfig:
    """Return the entries of the `genai_config.json` of a folder.

    Args:
        folder: the folder of the file and of the model.
        trusted: folders outside of it that links may lead into; see `trusted_folders`.

    Raises:
        ConversionError: there is no such file, it is no JSON, names an execution provider that does not exist, an
            entry is missing or of another type, or the model is no decoder of text.
    """
    base = Path(folder)
    path = base / CONFIG
    if not path.exists():
        raise ConversionError(f"{base} has no {CONFIG}; give the folder that onnxruntime-genai's builder wrote")
    try:
        data = read_regular(file_inside(base, CONFIG, f"the config of {base} is", trusted))
    except OSError as err:
        raise ConversionError(f"{path} is not a JSON file: {err}") from err
    model = fields.parse(data, str(path), ConversionError).fields("model")
    kind = model.name("type")
    others = [part for part in _OTHER_PARTS if isinstance(part_of := model.raw.get(part), dict) and part_of]
    if "decoder" not in model.raw or others:
        config = (
            f"has {' and '.join(map(repr, others))} beside its decoder" if "decoder" in model.raw else "has no decoder"
        )
        raise ConversionError(f"{path}: the model of type {kind!r} {config}; only decoders of text can be opened here")
    decoder = model.fields("decoder")
    if decoder.raw.get("pipeline"):
        raise ConversionError(
            f"{path}: the decoder is a pipeline of several models; only those of one file can be opened here"
        )
    inputs, outputs = decoder.fields("inputs"), decoder.fields("outputs")
    notes: list[str] = []
    session = decoder.fields("session_options")
    providers = _providers(session, notes)
    name = decoder.name("filename")
    file_inside(base, name, f"{path}: the decoder is", trusted)
    return GenaiConfig(
        folder=base,
        kind=kind,
        model=base / name,
        context_length=model.count("context_length", least=1, most=_LARGEST),
        head_size=decoder.count("head_size", least=1, most=_LARGEST),
        heads=decoder.count("num_key_value_heads", least=1, most=_LARGEST),
        layers=decoder.count("num_hidden_layers", least=1, most=_MOST_LAYERS),
        inputs={
            **{key: inputs.name(key, key) for key in _TEXT_INPUTS},
            "past_key_names": inputs.name("past_key_names", "past_key_values.%d.key"),
            "past_value_names": inputs.name("past_value_names", "past_key_values.%d.value"),
        },
        outputs={
            "logits": outputs.name("logits", "logits"),
            "present_key_names": outputs.name("present_key_names", "present.%d.key"),
            "present_value_names": outputs.name("present_value_names", "present.%d.value"),
        },
        stop_tokens=_tokens(model, "eos_token_id"),
        providers=providers,
        notes=tuple(notes),
    )


def _providers(session: Fields, notes: list[str]) -> tuple[tuple[str, Mapping[str, str]], ...]:
    """Return the providers that the session options name, and add settings without effect to the notes."""
    if "custom_ops_library" in session.raw:
        session.fail(
            "names a library, which is native code that would run in this process; if you trust it, take the entry out "
            "and name it in CompileOptions(custom_op_libraries=...)",
            "custom_ops_library",
        )
    # onnxruntime-genai brings an ONNX Runtime of its own, of any version.
    known = _SESSION_OPTIONS.union(*(core.config_keys for core in known_cores()))
    for key, value in session.raw.items():
        if _names_file(key, value):
            text = "a file or an address that the folder names and ONNX Runtime would use unchecked; take the entry out"
            session.fail(f"is {value!r}: {text}", key)
        if key not in known:
            near = near_names(key, known)
            notes.append(f"{session.at(key)} is not an ONNX Runtime option and has no effect; {near}")
    if not isinstance(session.raw.get("provider_options", []), list):
        session.fail('is not a list of objects, as in [{"cuda": {}}]', "provider_options")
    providers = []
    for entry in session.objects("provider_options"):
        for name, options in entry.each(Fields.fields).items():
            lowered = name.lower().removesuffix(_SUFFIX)
            if lowered not in _PROVIDERS:
                near = near_names(lowered, (*_PROVIDERS, *(known + _SUFFIX for known in _PROVIDERS)))
                entry.fail(f"names the execution provider {name!r}, which does not exist; {near}")
            for key, value in options.raw.items():
                if _names_file(key, value):
                    options.fail(
                        f"is {value!r}, a file or an address that the provider would load into this process; if you "
                        "trust it, take the entry out and give it in "
                        f"CompileOptions(provider_options={{{key!r}: ...}})",
                        key,
                    )
            providers.append((lowered, {key: value for key, value in options.raw.items() if isinstance(value, str)}))
    return tuple(providers)


def _names_file(key: str, value: object) -> bool:
    """Return whether an option is a file, a library or an address, by its name or by its value."""
    last = key.rpartition(".")[2]
    if last.lower() in _FILE_OPTIONS or not _FILE_WORDS.isdisjoint(word.lower() for word in _WORD.findall(last)):
        return True
    if not isinstance(value, str):
        return False
    windows = PureWindowsPath(value)
    rooted = windows.drive or windows.root or PurePosixPath(value).root
    return bool(rooted or ".." in windows.parts or _LIBRARY.search(value))


def _tokens(model: Fields, key: str) -> frozenset[int]:
    value = model.raw.get(key, [])
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        model.fail(f"is {value!r}, neither a token nor a list of tokens", key)
    return frozenset(listed)
