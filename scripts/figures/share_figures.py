"""How many nodes of exported models become IR ops, and which ones stay as they are."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import onnx
import torch
from torch import nn

from figures import bert
from figures.record import Figure
from rlx_ort.converters.from_onnx import from_onnx
from rlx_ort.ir.graph import Graph
from rlx_ort.ir.ops.onnx import OnnxNode

__all__ = ["measure", "models"]

SHOWN = 6


class ConvNet(nn.Module):
    """A small residual network of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 1), nn.Hardswish()
        )
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.stem(x)
        x = self.up(x + self.body(x))
        x = nn.functional.avg_pool2d(x, 2)
        result: torch.Tensor = torch.log_softmax(self.head(x.mean((2, 3))), -1)
        return result


class Decoder(nn.Module):
    """Two decoder layers with rotary embedding, causal attention, RMS normalisation and a gated feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, 100, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each token."""
        x = self.words(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
        angles = place / 100.0 ** (torch.arange(4) / 4)
        for layer in self.layers:
            x = layer(x, torch.cos(angles), torch.sin(angles))
        result: torch.Tensor = self.head(self.norm(x))
        return result


class DecoderLayer(nn.Module):
    """One pre-norm layer of 4 heads of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the layer's output."""
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 4, 8).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(turned(q, cos, sin), turned(k, cos, sin), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 32))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x with the halves of each head rotated."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def models() -> Iterator[tuple[str, bytes | Path]]:
    """Yield the models: those that the onnx package brings, and what torch exports."""
    light = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    for path in sorted(light.glob("*.onnx")):
        yield path.stem, path
    yield "BERT (torch)", bert.exported_file()
    yield "ConvNet (torch)", exported(ConvNet(), torch.zeros(1, 3, 32, 32))
    yield "Decoder (torch)", exported(Decoder(), torch.zeros(1, 7, dtype=torch.int64))


def exported(module: nn.Module, example: torch.Tensor) -> bytes:
    """Return what torch writes for a module, with an open batch."""
    program = torch.onnx.export(
        module.eval(), (example,), dynamic_shapes=({0: torch.export.Dim("batch")},), dynamo=True, verbose=False
    )
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    stream = io.BytesIO()
    program.save(stream)
    return stream.getvalue()


def counted(graph: Graph) -> tuple[int, Counter[str]]:
    """Return how many nodes are IR ops, and the others by operator; bodies count with their graph."""
    mapped, left = 0, Counter[str]()
    for node in graph.nodes:
        if isinstance(node.op, OnnxNode):
            left[node.op.op_type] += 1
        elif not node.op.is_leaf:
            mapped += 1
        for body in node.op.bodies():
            inner, others = counted(body)
            mapped, left = mapped + inner, left + others
    return mapped, left


def measure() -> Iterator[Figure]:
    """Yield the share of IR ops for each model, with the operators that stay."""
    for name, source in models():
        mapped, left = counted(from_onnx(source))
        total = mapped + left.total()
        rest = ", ".join(f"{count} {kind}" for kind, count in left.most_common(SHOWN))
        detail = f"{mapped} of {total}; stay: {rest or 'none'}"
        yield Figure(f"nodes that become IR ops: {name}", 100 * mapped / total, "%", None, detail)
