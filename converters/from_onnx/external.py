"""External data files of a model: checked before anything of them is read, then mapped into memory.

A model from elsewhere must not make this process read a file outside its folder, hang on a pipe, or read beyond the
end of a file, so each reference is refused unless it is a plain range of a plain file inside the folder.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rlx_ort.errors import ConversionError
from rlx_ort.ir.tensor import FileRange

if TYPE_CHECKING:
    import onnx

__all__ = ["ExternalFiles", "TensorFiles"]


class TensorFiles(Protocol):
    """Where the data of external tensors is had from."""

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[Any], FileRange | None]:
        """Return the bytes of a tensor, and where in a file they are if they are mapped.

        Raises:
            ConversionError: there are no such bytes.
        """


class ExternalFiles:
    """The data files beside one model; each is mapped once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._maps: dict[Path, tuple[npt.NDArray[np.uint8], tuple[int, ...]]] = {}

    def read(self, tensor: onnx.TensorProto, nbytes: int) -> tuple[npt.NDArray[Any], FileRange]:
        """Return the bytes of a tensor, as a view of the mapped file, and where in the file they are.

        Raises:
            ConversionError: the reference is no range of `nbytes` bytes of a file inside the model's folder.
        """
        entries = {entry.key: entry.value for entry in tensor.external_data}
        what = f"tensor {tensor.name!r}"
        location = entries.get("location", "")
        offset = _number(entries.get("offset", "0"), "offset", what)
        length = _number(entries.get("length", "0"), "length", what) or nbytes
        if length != nbytes:
            raise ConversionError(f"{what} needs {nbytes} bytes, its external data says {length}")
        path = self._checked(location, what)
        if path not in self._maps:
            self._maps[path] = _mapped(path, what)
        data, stamp = self._maps[path]
        if offset + length > data.size:
            raise ConversionError(
                f"{what} is bytes {offset} to {offset + length} of {path.name}, which has {data.size}; "
                "the file is truncated or belongs to another model"
            )
        return data[offset : offset + length], FileRange(str(path), offset, stamp)

    def _checked(self, location: str, what: str) -> Path:
        if self._folder is None:
            raise ConversionError(f"{what} is in the file {location!r}; pass base_dir to say in which folder that is")
        parts = PurePosixPath(location.replace("\\", "/")).parts
        rooted = PureWindowsPath(location).drive or PureWindowsPath(location).root or PurePosixPath(location).root
        if not parts or rooted or ".." in parts or "\0" in location:
            raise ConversionError(f"{what} is in {location!r}; external data must be a relative path inside the folder")
        try:
            folder = self._folder.resolve(strict=True)
            path = folder.joinpath(*parts).resolve(strict=True)
            status = path.stat()
        except (OSError, RuntimeError) as err:  # RuntimeError: a loop of symbolic links, before Python 3.13
            raise ConversionError(f"{what} is in {location!r}, which cannot be read: {err}") from err
        if not path.is_relative_to(folder):
            raise ConversionError(f"{what} is in {location!r}, a link that leaves {folder}; put the file itself there")
        if not stat.S_ISREG(status.st_mode):
            raise ConversionError(f"{what} is in {location!r}, which is no regular file")
        if status.st_nlink > 1:
            raise ConversionError(
                f"{what} is in {location!r}, which has {status.st_nlink} hard links, so it may be a file of somebody "
                "else under another name; copy it instead of linking it"
            )
        return path


def _mapped(path: Path, what: str) -> tuple[npt.NDArray[np.uint8], tuple[int, ...]]:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())  # of the file that was opened, whatever the name points to by now
            if not stat.S_ISREG(status.st_mode):
                raise ConversionError(f"{what} is in {path}, which is no regular file")
            data = np.memmap(file, np.uint8, "r") if status.st_size else np.empty(0, np.uint8)
            return data, FileRange.stamp_of(status)
    except OSError as err:
        raise ConversionError(f"{what} is in {path}, which cannot be read: {err}") from err


def _number(text: str, key: str, what: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ConversionError(f"the external data of {what} has {key} {text!r}, which is no size in bytes")
    return int(text)
