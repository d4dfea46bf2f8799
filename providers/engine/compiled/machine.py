"""What compiled models depend on besides the model: the processor's instructions and the builds of the engine."""

from __future__ import annotations

import functools
import os
import platform
import sys
from pathlib import Path

__all__ = ["cpu_facts", "read_cpu_facts"]

# The instructions by which the CPU kernels of ONNX Runtime choose how weights are laid out (core/mlas/lib/platform.cpp
# and core/common/cpuid_info.cc); others are left out, since a new kernel lists them anew without changing a layout.
_INSTRUCTIONS = """
    sse4_1 avx avx2 fma f16c avx_vnni avx512f avx512vl avx512bw avx512dq avx512_vnni avx512_bf16 avx512_fp16
    amx_tile amx_int8 amx_bf16 asimd asimddp i8mm svei8mm bf16 sve sve2 sme fphp asimdhp
"""


@functools.cache
def cpu_facts() -> dict[str, str]:
    """Return the parts of a key that describe the processor: its name, and the instructions it has."""
    return read_cpu_facts(Path("/proc/cpuinfo"))


def read_cpu_facts(table: Path) -> dict[str, str]:
    """Return the facts that a file such as `/proc/cpuinfo` tells of its first processor.

    Where there is none, as on Windows and macOS, the system's name for the processor, which holds family, model and
    stepping, stands for both.
    """
    found: dict[str, str] = {}
    try:
        with table.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                name, _, value = line.partition(":")
                if not name.strip() and found:
                    break  # the first processor's block is over
                found.setdefault(name.strip().lower(), value.strip())
    except OSError:
        pass
    words = set(found.get("flags", found.get("features", "")).split())
    name = found.get("model name", found.get("model", "")) or platform.processor() or platform.machine()
    isa = (
        " ".join(sorted(words.intersection(_INSTRUCTIONS.split())))
        or os.environ.get("PROCESSOR_IDENTIFIER", "")
        or name
    )
    return {"cpu": name, "cpu_instructions": isa, "system": f"{sys.platform} {platform.machine()}"}
