"""A tiny language model in a folder as onnxruntime-genai's builder writes it, and the tokens that it should give.

One layer of grouped-query attention between an embedding and a projection, of random weights in f32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

__all__ = ["CONTEXT", "STOP", "edit_config", "greedy_tokens", "write_folder", "write_tokenizer"]

VOCABULARY, WIDTH, HEADS, KV_HEADS, HEAD, CONTEXT = 33, 16, 2, 1, 8, 64
STOP = VOCABULARY - 1
_source = np.random.default_rng(5)
_WEIGHTS: dict[str, npt.NDArray[np.float32]] = {
    name: _source.normal(0, 0.6, shape).astype(np.float32)
    for name, shape in {
        "table": (VOCABULARY, WIDTH),
        "query": (WIDTH, HEADS * HEAD),
        "key": (WIDTH, KV_HEADS * HEAD),
        "value": (WIDTH, KV_HEADS * HEAD),
        "head": (WIDTH, VOCABULARY),
    }.items()
}

_WEIGHTS["head"][:, STOP] = 0  # never the largest logit, so that texts are as long as was asked for


def greedy_tokens(prompt: Sequence[int], count: int, gap: float = 1e-3) -> list[int]:
    """Return the tokens with the largest logits, one after the other, computed in float64 with numpy alone.

    The two largest logits must be `gap` apart, so that the choice does not depend on rounding.
    """
    w = {name: array.astype(np.float64) for name, array in _WEIGHTS.items()}
    text = list(prompt)
    for _ in range(count):
        x = w["table"][text]
        query = (x[-1] @ w["query"]).reshape(HEADS, HEAD)
        key, value = x @ w["key"], x @ w["value"]
        scores = np.exp(query @ key.T / np.sqrt(HEAD))
        attended = scores / scores.sum(-1, keepdims=True) @ value
        logits = (x[-1] + attended.reshape(-1)) @ w["head"]
        first, second = np.sort(logits)[[-1, -2]]
        assert first - second > gap, f"{first - second} after {text}"
        text.append(int(logits.argmax()))
    assert STOP not in text
    return text[len(prompt) :]


def write_folder(folder: Path, *, providers: Sequence[dict[str, Any]] = (), half: bool = False, **changes: Any) -> Path:
    """Write the folder and return it; `half` is f16, and `changes` replace entries of the config's `model.decoder`."""
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(
        _model(half), folder / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=128
    )
    config = {
        "model": {
            "bos_token_id": 0,
            "context_length": CONTEXT,
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": list(providers)},
                "filename": "model.onnx",
                "head_size": HEAD,
                "hidden_size": WIDTH,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
                "num_attention_heads": HEADS,
                "num_hidden_layers": 1,
                "num_key_value_heads": KV_HEADS,
                **changes,
            },
            "eos_token_id": STOP,
            "pad_token_id": 0,
            "type": "llama",
            "vocab_size": VOCABULARY,
        },
        "search": {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": True},
    }
    (folder / "genai_config.json").write_text(json.dumps(config, indent=4), encoding="utf-8")
    return folder


def edit_config(folder: Path, **entries: Any) -> None:
    """Replace entries of the config's `model`; None takes one out."""
    path = folder / "genai_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["model"] = {key: value for key, value in (config["model"] | entries).items() if value is not None}
    path.write_text(json.dumps(config), encoding="utf-8")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of the letters a to z, as the package `tokenizers` does; other text is unknown."""
    letters = {letter: at for at, letter in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": letters,
            "merges": [],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    settings = {"tokenizer_class": "TokenizersBackend", "model_max_length": CONTEXT}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _model(half: bool) -> onnx.ModelProto:
    dtype, weight_dtype = (TensorProto.FLOAT16, np.float16) if half else (TensorProto.FLOAT, np.float32)

    def value(name: str, kind: int, *shape: int | str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    def cache(name: str, length: str) -> onnx.ValueInfoProto:
        return value(name, dtype, "batch_size", KV_HEADS, length, "kv_cache_dim")

    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"], name="embed"),
        *(
            helper.make_node("MatMul", ["x", name], [name[0]], name=f"{name}_proj")
            for name in ("query", "key", "value")
        ),
        # As the builder writes it: the length of each text without its last token, and the longest length.
        helper.make_node("ReduceSum", ["attention_mask", "axis"], ["lengths"], name="mask/ReduceSum", keepdims=1),
        helper.make_node("Sub", ["lengths", "one"], ["before_last"], name="mask/Sub"),
        helper.make_node("Cast", ["before_last"], ["seqlens_k"], name="mask/Cast", to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask_shape"], name="mask/Shape"),
        helper.make_node("Gather", ["mask_shape", "second"], ["longest"], name="mask/Gather", axis=0),
        helper.make_node("Cast", ["longest"], ["total_seq_len"], name="mask/Cast_1", to=TensorProto.INT32),
        helper.make_node(
            "GroupQueryAttention",
            ["q", "k", "v", "past_key_values.0.key", "past_key_values.0.value", "seqlens_k", "total_seq_len"],
            ["attended", "present.0.key", "present.0.value"],
            name="attention",
            domain="com.microsoft",
            num_heads=HEADS,
            kv_num_heads=KV_HEADS,
        ),
        helper.make_node("Add", ["x", "attended"], ["y"], name="residual"),
        helper.make_node("MatMul", ["y", "head"], ["logits"], name="lm_head"),
    ]
    weights = {name: array.astype(weight_dtype) for name, array in _WEIGHTS.items()}
    constants = {"axis": np.array([1]), "one": np.array([1]), "second": np.array(1)}
    graph = helper.make_graph(
        nodes,
        "main_graph",
        [
            value("input_ids", TensorProto.INT64, "batch_size", "sequence_length"),
            value("attention_mask", TensorProto.INT64, "batch_size", "total_sequence_length"),
            *(cache(f"past_key_values.0.{part}", "past_sequence_length") for part in ("key", "value")),
        ],
        [
            value("logits", dtype, "batch_size", "sequence_length", VOCABULARY),
            *(cache(f"present.0.{part}", "total_sequence_length") for part in ("key", "value")),
        ],
        [onnx.numpy_helper.from_array(array, name) for name, array in {**weights, **constants}.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
