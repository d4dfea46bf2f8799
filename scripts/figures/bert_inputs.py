"""What the BERT figures are fed; apart from the model, so that a memory measurement need not load torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["VOCABULARY", "sample_inputs"]

VOCABULARY = 30522


def sample_inputs(batch: int = 1, tokens: int = 128) -> dict[str, npt.NDArray[Any]]:
    """Return token ids and a mask whose last eighth is padding."""
    mask = np.ones((batch, tokens), np.int64)
    mask[:, tokens - tokens // 8 :] = 0
    return {"input_ids": np.random.default_rng(0).integers(0, VOCABULARY, (batch, tokens)), "attention_mask": mask}
