"""`open_source`: any model file as a bundle. `read_weights`: any weight file as a mapping of names to tensors.

The format of a file is detected by its content; the name does not matter.
"""

from __future__ import annotations

import enum
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rlx_ort.converters.bundle import ModelBundle, bundle_from_graph, take_out
from rlx_ort.converters.from_onnx.structure import check_model
from rlx_ort.converters.from_onnx.tensor_files import ExternalFiles, Folders, read_mapped, trusted_folders
from rlx_ort.converters.from_onnx.tensors import tensor_data
from rlx_ort.converters.sources.gguf_file import read_gguf
from rlx_ort.converters.sources.npz import read_npz
from rlx_ort.converters.sources.pt2 import open_pt2
from rlx_ort.converters.sources.weights import GgufAs, WeightFile, read_sharded
from rlx_ort.errors import ConversionError, GraphVerifyError, advice
from rlx_ort.ir.serde import load_json
from rlx_ort.ir.tensor import read_tensors
from rlx_ort.storage import parse_json


class Format(enum.Enum):
    """A file format; the value is its name in messages."""

    ONNX = "an ONNX model"
    IR_JSON = "a graph file of rlx_ort"
    PT2 = "an exported program of PyTorch (.pt2)"
    ORT = "a model in ONNX Runtime's own format (.ort)"
    SAFETENSORS = "a safetensors file"
    SAFETENSORS_INDEX = "an index of safetensors files"
    NPZ = "a numpy archive (.npz)"
    GGUF = "a GGUF file"
    PICKLE = "a pickle"
    TORCH_PICKLE = "a PyTorch checkpoint, which is a pickle"
    TORCHSCRIPT = "a TorchScript archive"
    FOREIGN = "a file of another program"
    UNKNOWN = "of an unknown format"


_HEAD_BYTES = 64
_JSON_LOOK_BYTES = 1 << 20
# Magic bytes, (offset, bytes, name), of formats that people may try: https://en.wikipedia.org/wiki/List_of_file_signatures
_FOREIGN = (
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras writes them)"),
    (4, b"TFL3", "a TensorFlow Lite model"),
    (0, b"<?xml", "an XML file (OpenVINO writes them)"),
    (0, b"\x93NUMPY", "a single numpy array (.npy); put it into an .npz"),
    (0, b"\x1f\x8b", "a gzip archive; unpack it"),
    (0, b"\x28\xb5\x2f\xfd", "a zstd archive; unpack it"),
    (0, b"version https://git-lfs", "a pointer of git-lfs, not the file itself; run: git lfs pull"),
)


def open_source(path: str | os.PathLike[str], *, opset: int | None = None, trusted_links: Folders = ()) -> ModelBundle:
    """Return the model in a file as a bundle; the content decides its format, not the name.

    Weights of ONNX and graph files stay in their files, mapped. Nothing in a file is unpickled or executed.

    Args:
        path: an ONNX file, a graph file of `rlx_ort`, or an exported program of PyTorch (`.pt2`).
        opset: the opset to export a program of PyTorch with; the other formats have theirs.
        trusted_links: folders that links of an ONNX file's external data may lead into; see `from_onnx`.

    Raises:
        ConversionError: there is no such file, it is no model or damaged, or a package it needs is not installed.
    """
    file = Path(path)
    kind, detail = format_of(file)
    match kind:
        case Format.ONNX:
            return _open_onnx(file, trusted_folders(trusted_links))
        case Format.IR_JSON:
            try:
                return bundle_from_graph(load_json(file), origin=str(file))
            except GraphVerifyError as err:
                raise ConversionError(f"{file}: {err}") from err
        case Format.PT2:
            return open_pt2(file, opset=opset)
        case Format.SAFETENSORS | Format.SAFETENSORS_INDEX | Format.NPZ | Format.GGUF:
            raise ConversionError(
                f"{file} is {kind.value}, which holds weights and no computation; give the model itself, and these as "
                f"its weights with {advice('apply_weights(model, read_weights(FILE))', '--params of `convert`')}"
            )
        case Format.ORT:
            known = "it cannot be turned back into ONNX; convert the ONNX model it was made from"
        case _:
            known = "known are ONNX, graph files of rlx_ort (.json) and exported programs of PyTorch (.pt2)"
    raise _refusal(file, kind, detail, "torch.export.export(...) as .pt2, or its weights as safetensors", known)


def read_weights(path: str | os.PathLike[str], *, gguf_as: GgufAs = "f32") -> WeightFile:
    """Return the tensors of a weight file by name; the content decides its format, not the name.

    Tensors of safetensors files, stored members of npz archives, initializers of ONNX models and plain tensors of
    GGUF files are mapped, not read. Compressed and quantised ones are made when they are asked for.

    Args:
        path: safetensors, an index of safetensors files, npz, GGUF, or an ONNX model, whose initializers are taken.
        gguf_as: the form in which quantised tensors of a GGUF file are read.

    Raises:
        ConversionError: there is no such file, it holds no weights or damaged ones, names files outside its folder,
            or a package it needs is not installed.
    """
    file = Path(path)
    kind, detail = format_of(file)
    match kind:
        case Format.SAFETENSORS:
            return WeightFile.of(str(file), read_tensors(file)[0])
        case Format.SAFETENSORS_INDEX:
            return read_sharded(file)
        case Format.NPZ:
            return read_npz(file)
        case Format.GGUF:
            return read_gguf(file, gguf_as)
        case Format.ONNX:
            return _initializers(file)
    advice = "known weight files are safetensors, npz, GGUF and ONNX"
    raise _refusal(file, kind, detail, "its weights with safetensors.torch.save_file", advice)


def _refusal(file: Path, kind: Format, detail: str, saved: str, advice: str) -> ConversionError:
    what = detail if kind is Format.FOREIGN else kind.value
    if kind in (Format.PICKLE, Format.TORCH_PICKLE, Format.TORCHSCRIPT):
        advice = f"load it in PyTorch yourself, if you trust it, and save {saved}"
        what += ". Reading one runs code that is in the file, so that is never done"
    elif kind is Format.UNKNOWN:
        what += f": {detail}"
    return ConversionError(f"{file} is {what}; {advice}")


def _open_onnx(path: Path, trusted: Sequence[Path] = ()) -> ModelBundle:
    """Return a model file as a bundle; its weights stay in the file, mapped, and are not read."""
    model, files = read_mapped(path, trusted)
    try:
        check_model(model)
        light, weights = take_out(model, files)
    except UnicodeDecodeError as err:
        # Protobuf decodes a text when it is looked at, so this may come from anywhere.
        raise ConversionError(f"{path} is damaged: a name in it is not UTF-8 text: {err}") from err
    except ConversionError as err:
        raise ConversionError(f"{path}: {err}") from err
    return ModelBundle(light, weights, str(path))


def _initializers(path: Path) -> WeightFile:
    bundle = _open_onnx(path)
    inside = {
        tensor.name: tensor_data(tensor, ExternalFiles(None))
        for tensor in bundle.proto.graph.initializer
        if tensor.name not in bundle.weights
    }
    return WeightFile.of(str(path), {**bundle.weights, **inside})


def format_of(path: Path) -> tuple[Format, str]:
    """Return the format of a file, and details for messages; reads its first bytes, or a zip's directory.

    Raises:
        ConversionError: there is no such file, it is a folder or something else, or it cannot be read.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConversionError(f"{path} is a folder; give the path of a file in it{_advice_on_folder(path)}")
        if not stat.S_ISREG(mode):
            raise ConversionError(f"{path} is not a regular file")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except ValueError as err:  # a null character in the name
        raise ConversionError(f"{str(path)!r} is not a path: {err}") from err
    return _by_magic(path, head)


def _by_magic(path: Path, head: bytes) -> tuple[Format, str]:
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_format(path)
    if head.startswith(b"GGUF"):
        return Format.GGUF, ""
    if head[4:8] == b"ORTM":  # the file identifier of its flatbuffers schema
        return Format.ORT, ""
    # Before pickles: a header of 640 bytes begins with 80 02, too.
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size - 8:
        return Format.SAFETENSORS, ""
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        return Format.PICKLE, ""
    for offset, magic, name in _FOREIGN:
        if head[offset : offset + len(magic)] == magic:
            return Format.FOREIGN, name
    # An ONNX file starts with a protobuf key, never with a brace: 0x7b would be a field with the removed group type.
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{":
        return _json_format(path)
    if head[:1] and head[0] & 7 in (0, 2) and 0 < head[0] >> 3 <= 25:  # the numbers of ModelProto's fields
        return Format.ONNX, ""
    return Format.UNKNOWN, f"it begins with {head[:8].hex(' ')}" if head else "it is empty"


def _zip_format(path: Path) -> tuple[Format, str]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, UnicodeDecodeError) as err:
        return Format.UNKNOWN, f"a damaged zip archive: {err}"
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner or "archive_format" in names or "serialized_exported_program.json" in names:
        return Format.PT2, ""
    if "constants.pkl" in inner:
        return Format.TORCHSCRIPT, ""
    if "data.pkl" in inner or "data.pkl" in names:
        return Format.TORCH_PICKLE, ""
    if all(name.endswith(".npy") for name in names):  # numpy writes an empty archive for no arrays
        return Format.NPZ, ""
    shown = ", ".join(sorted(names)[:4])
    return Format.UNKNOWN, f"a zip archive of {len(names)} files: {shown}{' ...' if len(names) > 4 else ''}"


def _json_format(path: Path) -> tuple[Format, str]:
    """Distinguish a graph from an index by entries that are near the beginning unless the file is small."""
    with path.open("rb") as file:
        text = file.read(_JSON_LOOK_BYTES).decode("utf-8", "replace")
    if '"weight_map"' in text and '"format": "rlx_ort graph"' not in text:
        return Format.SAFETENSORS_INDEX, ""
    if '"format"' in text and "rlx_ort graph" in text:
        return Format.IR_JSON, ""
    try:
        document = parse_json(text)
    except ValueError:
        return Format.IR_JSON, ""  # its reader reports where the text stops being JSON
    if not isinstance(document, dict):
        return Format.UNKNOWN, "a JSON file that holds no object"
    return Format.UNKNOWN, f"a JSON file with the entries {', '.join(sorted(map(str, document))[:6])}"


def _advice_on_folder(path: Path) -> str:
    for name in ("model.onnx", "model.safetensors.index.json", "model.safetensors"):
        if (path / name).is_file():
            return f": {path / name}"
    if (path / "saved_model.pb").is_file():
        return "; this one is a TensorFlow SavedModel, which tf2onnx converts to ONNX"
    return ""
