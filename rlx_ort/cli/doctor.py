"""`rlx-ort doctor`: what is wrong with this installation, and how to repair it."""

from __future__ import annotations

__all__ = ["command"]
