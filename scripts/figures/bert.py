"""A BERT of 110 million parameters in plain torch.nn, with seeded random weights, exported by torch.onnx.export."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import torch
from torch import nn

from figures.bert_inputs import VOCABULARY, sample_inputs

__all__ = ["Bert", "exported_file", "make"]

POSITIONS, WIDTH, HEADS, INNER, LAYERS = 512, 768, 12, 3072, 12
VERSION = 1
"""Part of the cached file's name; grows when the model or the export changes."""


class Attention(nn.Module):
    """Multi-head self-attention as BERT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the attended tokens."""
        batch, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(batch, tokens, HEADS, WIDTH // HEADS).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + bias
        mixed = torch.softmax(scores, dim=-1) @ v
        result: torch.Tensor = self.output(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return result


class Layer(nn.Module):
    """One post-norm encoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-12), nn.LayerNorm(WIDTH, eps=1e-12)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        x = self.norm1(x + self.attention(x, bias))
        result: torch.Tensor = self.norm2(x + self.down(nn.functional.gelu(self.up(x))))
        return result


class Bert(nn.Module):
    """Token ids and mask in; hidden states and the pooled first token out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states and the pooled vector."""
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.norm(self.words(input_ids) + self.places(places) + self.segments.weight[0])
        bias = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, bias)
        return x, torch.tanh(self.pooler(x[:, 0]))


def make() -> Bert:
    """Return the model with its seeded weights, ready for inference."""
    torch.manual_seed(0)
    model = Bert().eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def exported_file() -> Path:
    """Export the model with its weights in an external file, once a machine, and return the ONNX file's path."""
    folder = Path(tempfile.gettempdir()) / f"rlx_ort-bert-{VERSION}-torch{torch.__version__.replace('+', '-')}"
    path = folder / "bert.onnx"
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(dir=folder.parent) as partial:
        inputs = tuple(torch.from_numpy(array) for array in sample_inputs(2, 16).values())
        batch, tokens = torch.export.Dim("batch"), torch.export.Dim("tokens", max=POSITIONS)
        program = torch.onnx.export(
            make(),
            inputs,
            input_names=["input_ids", "attention_mask"],
            output_names=["hidden", "pooled"],
            dynamic_shapes=({0: batch, 1: tokens}, {0: batch, 1: tokens}),
            dynamo=True,
            verbose=False,
        )
        if program is None:
            raise RuntimeError("torch.onnx.export returned no program")
        program.save(Path(partial) / "bert.onnx", external_data=True)
        Path(partial).replace(folder)
        Path(partial).mkdir()  # what the block's end removes
    return path
