"""Detects the format of a file by its content; the name does not matter."""

from __future__ import annotations

import enum
import json
import stat
import zipfile
from pathlib import Path

from rlx_ort.errors import ConversionError

__all__ = ["Format", "format_of"]


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
    UNKNOWN = "nothing known"

    @property
    def is_weights(self) -> bool:
        """Whether it holds weights and no model."""
        return self in (Format.SAFETENSORS, Format.SAFETENSORS_INDEX, Format.NPZ, Format.GGUF)


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
            raise ConversionError(f"{path} is no regular file")
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as err:
        raise ConversionError(f"{path} cannot be read: {err}") from err
    except ValueError as err:  # a null character in the name
        raise ConversionError(f"{str(path)!r} is no path: {err}") from err
    return _by_magic(path, head)


def _by_magic(path: Path, head: bytes) -> tuple[Format, str]:
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_format(path)
    if head.startswith(b"GGUF"):
        return Format.GGUF, ""
    if head[4:8] == b"ORTM":  # the file identifier of its flatbuffers schema
        return Format.ORT, ""
    if head[:1] == b"\x80" and head[1:2] in b"\x02\x03\x04\x05" and len(head) > 1:
        return Format.PICKLE, ""
    if len(head) > 8 and head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size - 8:
        return Format.SAFETENSORS, ""
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
    if names and all(name.endswith(".npy") for name in names):
        return Format.NPZ, ""
    if not names:
        return Format.NPZ, ""  # numpy writes one for no arrays
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
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return Format.IR_JSON, ""  # its reader reports where the text stops being JSON
    return Format.UNKNOWN, f"a JSON file with the entries {', '.join(sorted(map(str, document))[:6])}"


def _advice_on_folder(path: Path) -> str:
    found = [
        name for name in ("model.onnx", "model.safetensors.index.json", "model.safetensors") if (path / name).is_file()
    ]
    if found:
        return f": {path / found[0]}"
    if (path / "saved_model.pb").is_file():
        return "; this one is a TensorFlow SavedModel, which tf2onnx converts to ONNX"
    return ""
