"""Exported programs of PyTorch (`.pt2`) as bundles, without unpickling or executing anything that is in the file.

`torch.export.load` trusts a file completely (torch 2.13, `torch/export/pt2_archive/_package.py` and
`torch/_export/serde/serialize.py`): it unpickles the sample inputs and every weight marked `use_pickle`, evaluates
symbolic sizes as Python, executes guards as Python, imports classes of input trees, calls any function of `torch`
that a node names, and loads compiled libraries. So a program only passes if every operator, size, name and tree in it
is of a known harmless kind, and pickles and guards never reach PyTorch.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from rlx_ort.converters.bundle import ModelBundle
from rlx_ort.converters.from_torch import export_program, quiet
from rlx_ort.converters.onnx_ir_bridge import foreign_errors, optional_module
from rlx_ort.errors import ConversionError
from rlx_ort.storage import parse_json

_IN_MEMORY_BYTES = 256 << 20
_MAX_TABLE_BYTES = 1 << 30
_MAX_MEMBERS = 1 << 20
_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_TABLES = {
    "data/weights/": ("data/weights/model_weights_config.json", "the weights"),
    "data/constants/": ("data/constants/model_constants_config.json", "the constants"),
}
_PLAIN = re.compile(
    r"archive_format|archive_version|byteorder|\.data/version|data/(weights/weight|constants/tensor)_\d+"
)
_OPERATOR = re.compile(r"torch\.ops\.(aten|prims|quantized_decomposed|torchvision)\.(\w+)\.([A-Za-z]\w*)")
_BITWISE = {f"__{i}{name}__" for i in ("", "i") for name in ("and", "or", "xor", "lshift", "rshift")}
_CONTROL = {"cond", "while_loop", "wrap_with_set_grad_enabled", "wrap_with_autocast"}
_FUNCTION = re.compile(
    r"_operator\.(add|sub|mul|truediv|floordiv|mod|pow|neg|pos|eq|ne|lt|le|gt|ge|and_|or_|getitem)"
    r"|math\.(trunc|ceil|floor|sqrt)"
    r"|torch\.(sym_(float|int|ite|max|min|not|sum)|_sym_sqrt)"
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_PATH = re.compile(r"(\w+(\.\w+)*)?", re.ASCII)
_FUNCTIONS = {
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Mod", "Abs", "And", "Or", "Not",
    "Equality", "Unequality", "LessThan", "StrictLessThan", "GreaterThan", "StrictGreaterThan", "Where", "Identity",
    "FloorDiv", "CleanDiv", "CeilDiv", "ModularIndexing", "PythonMod", "IntTrueDiv", "FloatTrueDiv", "TrueDiv",
    "ToFloat", "FloorToInt", "CeilToInt", "RoundToInt", "RoundDecimal", "TruncToInt", "TruncToFloat",
}  # fmt: skip
_ASSUMPTIONS = {"positive", "nonnegative", "integer", "real", "precision"}
_SYMBOL_OR_NUMBER = re.compile(r"[a-z]{1,4}\d+|-?\d+(\.\d+)?([eE][-+]?\d+)?")
_CONSTANTS = {"true", "false", "oo", "int_oo"}
_MAX_EXPRESSION = 4000
_MAX_EXPONENT = 8
_MAX_POWERS = 4
_TREES = {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}


def open_pt2(path: Path, *, opset: int | None = None) -> ModelBundle:
    """Return an exported program as a bundle, through PyTorch's own ONNX exporter.

    PyTorch gets a copy of the archive that holds the program, checked, and its weights as plain bytes: no pickle, no
    guard, no compiled library. The copy is in memory up to 256 MiB, then in a temporary file. Takes seconds for a small
    program. The file must come from `torch.export.save` of torch 2.8 or newer. If `opset` is None, PyTorch chooses the
    ai.onnx opset.

    Raises:
        ConversionError: the file is damaged, needs something unpickled or executed, or holds an operator that is not
            known to be harmless; or torch or onnxscript is not installed, or cannot read or export the program.
    """
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES) as copy:
        try:
            with zipfile.ZipFile(path) as archive:
                _copy_checked(archive, copy, path.stat().st_size)
        except (zipfile.BadZipFile, OSError, ValueError, EOFError, NotImplementedError, RuntimeError, KeyError) as err:
            raise ConversionError(f"{path} is not a complete exported program: {err}") from err
        except ConversionError as err:
            raise ConversionError(f"{path}: {err}") from err
        copy.seek(0)
        torch = optional_module("torch", "torch", "reading an exported program of PyTorch")
        hint = "; a program is best read by the version that wrote it"
        with quiet(), foreign_errors(f"{path}: PyTorch {torch.__version__} cannot read the program", hint):
            program = torch.export.load(copy)
    return export_program(program, str(path), opset)


def _copy_checked(archive: zipfile.ZipFile, copy: IO[bytes], size: int) -> None:
    """Copy the harmless members of an archive to another one; raise where one is missing or not harmless."""
    members = dict(_members(archive, size))
    if "serialized_exported_program.json" in members or _PROGRAM not in members:
        raise ConversionError(
            "it has no models/model.json, as torch.export.save of torch 2.8 and newer writes it; older ones kept their "
            "weights as pickles. Save the program again with a newer torch"
        )
    new = {_PROGRAM: checked_program(_read(archive, members[_PROGRAM])), _SAMPLES: b""}
    for folder, (table, what) in _TABLES.items():
        if table not in members:
            raise ConversionError(f"it has no {table}: its weights are pickles of an older torch; save it again")
        config = checked_config(_read(archive, members[table]), what)
        for name, entry in config.items():
            if f"{folder}{entry['path_name']}" not in members:
                raise ConversionError(f"{what}: the bytes of {name!r} are missing")
        new[table] = json.dumps({"config": config}).encode("utf-8")
    with zipfile.ZipFile(copy, "w", zipfile.ZIP_STORED) as target:
        for name, text in new.items():
            target.writestr(f"program/{name}", text)
        for name, info in members.items():
            if _PLAIN.fullmatch(name):
                with archive.open(info) as source, target.open(f"program/{name}", "w", force_zip64=True) as stream:
                    shutil.copyfileobj(source, stream, 1 << 20)


def _members(archive: zipfile.ZipFile, size: int) -> Iterator[tuple[str, zipfile.ZipInfo]]:
    """Yield the members by their name below the archive's one folder."""
    infos = archive.infolist()
    roots = {info.filename.partition("/")[0] for info in infos}
    if len(infos) > _MAX_MEMBERS or sum(info.file_size for info in infos) > size:
        raise ConversionError("its members are larger than the file; PyTorch does not compress the files that it saves")
    if len({info.filename for info in infos}) != len(infos):
        raise ConversionError("it has a member twice")
    for info in infos:
        inner = info.filename.partition("/")[2] if len(roots) == 1 else info.filename
        yield inner, info


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Any:
    if info.file_size > _MAX_TABLE_BYTES:
        raise ConversionError(f"{info.filename} has {info.file_size} bytes, at most {_MAX_TABLE_BYTES} are read")
    return archive.read(info)


def checked_program(text: bytes) -> bytes:
    """Return the JSON of a program without guards and notes; raise unless all of it is known to be harmless."""
    document = _parsed(text, "the program")
    if not isinstance(document.get("graph_module"), dict):
        raise ConversionError("the program has no graph")
    document["guards_code"] = []
    document["verifiers"] = [name for name in document.get("verifiers", []) if name in ("ATEN", "TRAINING")]
    _visit(document)
    return json.dumps(document).encode("utf-8")


def checked_config(text: bytes, what: str) -> dict[str, Any]:
    """Return the table of the weights or constants of a program, by name; raise where one of them is a pickle."""
    config = _parsed(text, what).get("config")
    if not isinstance(config, dict) or not all(isinstance(entry, dict) for entry in config.values()):
        raise ConversionError(f"{what} are not a table")
    for name, entry in config.items():
        path = entry.get("path_name")
        if not isinstance(path, str) or not re.fullmatch(r"(weight|tensor)_\d+", path) or entry.get("use_pickle"):
            raise ConversionError(
                f"{what}: {name!r} is stored as a pickle or as an object of Python. Reading it runs code that is in "
                "the file, so that is never done; export a module whose weights and constants are plain tensors"
            )
        if not isinstance(entry.get("tensor_meta"), dict):
            raise ConversionError(f"{what}: {name!r} does not say its dtype and shape")
        _visit(entry)
    return config


def _parsed(text: bytes, what: str) -> dict[str, Any]:
    try:
        document = parse_json(text)
    except ValueError as err:
        raise ConversionError(f"{what} is not JSON: {err}") from err
    if not isinstance(document, dict):
        raise ConversionError(f"{what} is not a JSON object")
    return document


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a JSON document, outer ones first."""
    waiting = [document]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            yield item
            waiting.extend(item.values())
        elif isinstance(item, list):
            waiting.extend(item)


def _visit(document: Any) -> None:
    """Check every entry of a document by its key; PyTorch gives keys one meaning everywhere."""
    for item in _objects(document):
        if "target" in item and "inputs" in item:
            item["metadata"] = {}
        for key, value in item.items():
            check = _CHECKS.get(key)
            if check is not None and value is not None:
                check(value)


def _check_target(text: Any) -> None:
    """Accept operators of PyTorch that compute on tensors and sizes, and nothing else that `torch` has."""
    if isinstance(text, dict):
        return  # an attribute of the signature that happens to have this key
    if isinstance(text, str):
        if match := _OPERATOR.fullmatch(text):
            if (not match[2].startswith("__") or match[2] in _BITWISE) and "__" not in match[3]:
                return
        elif text.removeprefix("torch.ops.higher_order.") in _CONTROL or _FUNCTION.fullmatch(text):
            return
    raise ConversionError(
        f"the program calls {str(text)[:200]!r}, which is not one of the operators known to be harmless; "
        "if you trust it, load it yourself and give the program to from_torch"
    )


def _check_expression(text: Any) -> None:
    """Accept nested calls of sympy's arithmetic, as PyTorch writes sizes and has them evaluated."""
    try:
        if not isinstance(text, str) or len(text) > _MAX_EXPRESSION:
            raise ValueError("it is not text, or too long")
        if text.count("Pow(") > _MAX_POWERS:
            raise ValueError("it has powers of powers")
        _check_call(ast.parse(text, mode="eval").body)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as err:
        raise ConversionError(f"the size {str(text)[:200]!r} of the program is not plain arithmetic: {err}") from err


def _check_call(node: ast.AST) -> None:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords) if name in _FUNCTIONS:
            if name == "Pow":
                _check_exponent(args)
            for argument in args:
                _check_call(argument)
            for keyword in keywords:
                if keyword.arg not in _ASSUMPTIONS or not isinstance(keyword.value, ast.Constant):
                    raise ValueError(f"it says {keyword.arg!r}")
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            pass
        case ast.Constant(value=int() | float()):
            pass
        case ast.Constant(value=str(text)) if _SYMBOL_OR_NUMBER.fullmatch(text):
            pass
        case ast.Name(id=name) if name in _CONSTANTS:
            pass
        case _:
            raise ValueError(f"it has {ast.unparse(node)[:80]!r}")


def _check_exponent(args: list[ast.expr]) -> None:
    """Accept small constant exponents: sympy computes powers of numbers at once, however large."""
    match args:
        case [_, ast.Call(func=ast.Name(id="Integer"), args=[exponent])]:
            number = ast.literal_eval(exponent)
            if isinstance(number, int) and abs(number) <= _MAX_EXPONENT:
                return
    raise ValueError(f"it has a power that is none of the constants up to {_MAX_EXPONENT}")


def _check_name(names: Any) -> None:
    """Accept a plain name, or a list of them: PyTorch writes those of values into Python code that it executes."""
    for text in names if isinstance(names, list) else (names,):
        if isinstance(text, str) and text and not _NAME.fullmatch(text):
            raise ConversionError(f"the program has a value named {text[:200]!r}, which is not a plain name")


def _check_path(text: Any) -> None:
    """Accept the dotted names that modules and their weights have."""
    if not isinstance(text, str) or not _PATH.fullmatch(text):
        raise ConversionError(
            f"the program has a module or weight named {str(text)[:200]!r}, which is not a dotted name"
        )


def _check_tree(text: Any) -> None:
    """Accept tuples, lists and dicts: for other containers PyTorch imports the module that is named."""
    try:
        for item in _objects(parse_json(text)):
            if "type" in item and item["type"] not in _TREES:
                raise ValueError(f"it holds a {item['type']}")
    except (ValueError, TypeError) as err:
        raise ConversionError(f"inputs or outputs of the program are not plain tuples, lists or dicts: {err}") from err


def _refuse(what: str) -> Callable[[Any], None]:
    def refuse(value: Any) -> None:
        raise ConversionError(f"the program holds {what}, which cannot be read without running code of the file")

    return refuse


_CHECKS: dict[str, Callable[[Any], None]] = {
    "target": _check_target,
    "as_operator": _check_target,
    "expr_str": _check_expression,
    "name": _check_name,
    "as_name": _check_name,
    "forward_arg_names": _check_name,
    "fqn": _check_path,
    "parameter_name": _check_path,
    "buffer_name": _check_path,
    "tensor_constant_name": _check_path,
    "in_spec": _check_tree,
    "out_spec": _check_tree,
    "treespec_namedtuple_fields": lambda value: _refuse("named tuples")(value) if value else None,
    "as_custom_obj": _refuse("an object of a C++ class"),
}
