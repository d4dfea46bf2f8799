"""Targets: each writes a `ModelBundle` to files, whole or not at all. One file a format; the suffix chooses."""

from __future__ import annotations

from rlx_ort.converters.targets.options import EngineSaver, TargetOptions
from rlx_ort.converters.targets.write import SUFFIXES, write_target

__all__ = ["SUFFIXES", "EngineSaver", "TargetOptions", "write_target"]
