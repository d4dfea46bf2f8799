"""Three small PyTorch modules with random weights: an encoder, a decoder and a convnet. Import after torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["MODELS", "convnet", "decoder", "encoder"]

WIDTH, HEADS, VOCABULARY, LENGTH = 32, 4, 96, 6


class _Attention(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class _Block(nn.Module):
    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.attention = _Attention(causal)
        self.after = nn.LayerNorm(WIDTH)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        return x + self.narrow(nn.functional.gelu(self.widen(self.after(x))))


class _Transformer(nn.Module):
    """Token ids `(batch, LENGTH)` in; one vector a token out: features of an encoder, logits of a decoder."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 4)
        self.blocks = nn.Sequential(_Block(causal), _Block(causal))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY if causal else WIDTH, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.blocks(self.words(ids) + self.places)))
        return result


def encoder() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return an encoder and its example input."""
    torch.manual_seed(1)
    return _Transformer(causal=False).eval(), (torch.randint(0, VOCABULARY, (2, LENGTH)),)


def decoder() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a decoder with a causal mask, and its example input."""
    torch.manual_seed(2)
    return _Transformer(causal=True).eval(), (torch.randint(0, VOCABULARY, (2, LENGTH)),)


def convnet() -> tuple[nn.Module, tuple[Any, ...]]:
    """Return a convnet with batch norms, and its example input `(2, 3, 16, 16)`."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    for part in model:
        if isinstance(part, nn.BatchNorm2d):  # as after training, where these are not 0 and 1
            nn.init.normal_(part.running_mean, std=0.2)
            nn.init.uniform_(part.running_var, 0.5, 1.5)
    return model.eval(), (torch.randn(2, 3, 16, 16),)


MODELS = {"encoder": encoder, "decoder": decoder, "convnet": convnet}
