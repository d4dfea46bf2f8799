"""Write `rlx_ort/ir/builders.pyi`, the types of the builders of `Graph`, from the builders that op families add.

python scripts/builder_stubs.py          writes the file
python scripts/builder_stubs.py --check  exits with 1 if the file would be written in another way
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap
from pathlib import Path

from rlx_ort.ir.graph import Graph

STUBS = Path(__file__).resolve().parents[1] / "rlx_ort" / "ir" / "builders.pyi"
HEAD = '''"""The builders of all ops, with their types. Written by `scripts/builder_stubs.py`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import numpy.typing as npt

from rlx_ort.ir.core import Graph, NodeArgs, Operand, Value
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.op import Sizes
from rlx_ort.ir.ops.control import Body
from rlx_ort.ir.ops.onnx import AttributeValue
from rlx_ort.ir.tensor import TensorData
from rlx_ort.ir.types import Dim, TensorType, ValueType

class Builders:
    """Methods that add a node each and return its value."""

    __slots__ = ()
'''
WIDTH = 120


def text() -> str:
    """Return the stubs, laid out as the formatter does it."""
    names = sorted(name for name in vars(Graph.__mro__[1]) if not name.startswith("_"))
    return HEAD + "".join(f"\n{_stub(name)}" for name in names)


def _stub(name: str) -> str:
    method = getattr(Graph, name)
    signature = inspect.signature(method)
    _, *others = signature.parameters.values()
    rows, keywords = ["self"], False
    for parameter in others:
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            rows.append("*")
            keywords = True
        default = "" if parameter.default is parameter.empty else f" = {_literal(parameter.default)}"
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        rows.append(f"{stars}{parameter.name}: {parameter.annotation}{default}")
    tail = f") -> {signature.return_annotation}:"
    line = f"def {name}({', '.join(rows)}{tail}"
    if len(line) + 4 > WIDTH:
        joined = ", ".join(rows)
        parts = [f"{row}," for row in rows] if len(joined) + 8 > WIDTH else [joined]
        line = "\n".join([f"def {name}(", *(f"    {part}" for part in parts), tail])
    doc = inspect.cleandoc(method.__doc__ or "").split("\n")
    body = [f'"""{doc[0]}', *doc[1:]]
    body = [f'{body[0]}"""'] if len(body) == 1 else [*body, '"""']
    return textwrap.indent("\n".join([line, *(f"    {row}" if row else "" for row in body)]), "    ") + "\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else f"DType.{value.name}" if hasattr(value, "name") else repr(value)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, and say whether the file is up to date")
    arguments = parser.parse_args()
    if not arguments.check:
        STUBS.write_text(text(), encoding="utf-8")
    elif not STUBS.exists() or STUBS.read_text(encoding="utf-8") != text():
        print(f"{STUBS} is out of date; python scripts/builder_stubs.py writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
