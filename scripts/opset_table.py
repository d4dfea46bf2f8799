"""Write `WIDENING` in converters/to_onnx/opset.py: which steps between ai.onnx opsets only ever add to an operator.

python scripts/opset_table.py            write the table
python scripts/opset_table.py --check    exit with 1 if it differs from what this onnx gives
"""

from __future__ import annotations

import argparse
import itertools
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import onnx.defs

from rlx_ort.converters.to_onnx.opset import BREAKS, MAX_OPSET

TARGET = Path(__file__).resolve().parents[1] / "converters" / "to_onnx" / "opset.py"
HEAD = "WIDENING: dict[str, str] = {\n"
TAIL = "\n}  # fmt: skip\n"


def main() -> int:
    """Write or check the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    old = TARGET.read_text(encoding="utf-8")
    before, _, rest = old.partition(HEAD)
    text = before + HEAD + render() + TAIL + rest.partition(TAIL)[2]
    if parser.parse_args().check:
        return int(old != text)
    TARGET.write_text(text, encoding="utf-8", newline="\n")
    return 0


def render() -> str:
    """Return the entries of the table."""
    versions: dict[str, list[onnx.defs.OpSchema]] = defaultdict(list)
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.since_version <= MAX_OPSET:
            versions[schema.name].append(schema)
    entries = []
    for name, schemas in sorted(versions.items()):
        schemas.sort(key=lambda schema: schema.since_version)
        steps = [str(schemas[0].since_version)]
        for old, new in itertools.pairwise(schemas):
            steps.append(f"{new.since_version}{'+' if adds_only(old, new) else ''}")
        entries.append(f'"{name}": "{" ".join(steps)}",')
    return textwrap.indent(textwrap.fill(" ".join(map(_unbroken, entries)), 116), "    ").replace("\0", " ")


def _unbroken(entry: str) -> str:
    """Return an entry that no line break splits."""
    return entry.replace(" ", "\0")


def adds_only(old: onnx.defs.OpSchema, new: onnx.defs.OpSchema) -> bool:
    """Return whether every node of the old version is a node of the new one and means the same."""
    if new.deprecated or any(change.version == new.since_version for change in BREAKS.get(new.name, ())):
        return False
    for name, attribute in old.attributes.items():
        after = new.attributes.get(name)
        if after is None or after.type != attribute.type or after.default_value != attribute.default_value:
            return False
        if after.required and not attribute.required:
            return False
    if any(attribute.required and name not in old.attributes for name, attribute in new.attributes.items()):
        return False
    return _formals_fit(old, new, old.inputs, new.inputs) and _formals_fit(old, new, old.outputs, new.outputs)


def _formals_fit(
    old: onnx.defs.OpSchema,
    new: onnx.defs.OpSchema,
    before: Sequence[onnx.defs.OpSchema.FormalParameter],
    after: Sequence[onnx.defs.OpSchema.FormalParameter],
) -> bool:
    if len(after) < len(before):
        return False
    for was, now in zip(before, after, strict=False):
        if was.name != now.name or was.option != now.option or not types(old, was) <= types(new, now):
            return False
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return all(formal.option != single for formal in after[len(before) :])


def types(schema: onnx.defs.OpSchema, formal: onnx.defs.OpSchema.FormalParameter) -> frozenset[str]:
    """Return the types that an input or output takes."""
    for constraint in schema.type_constraints:
        if constraint.type_param_str == formal.type_str:
            return frozenset(constraint.allowed_type_strs)
    return frozenset({formal.type_str})


if __name__ == "__main__":
    sys.exit(main())
