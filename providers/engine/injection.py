"""How weights reach a session without being copied.

Weights that are mapped from a file stay references to that file: ONNX Runtime maps it tensor by tensor and unmaps what
its kernels repack, so the peak is one copy and not two. All others are passed in memory.

ONNX Runtime 1.31 and newer borrow the buffers (`session.use_external_initializer_file_buffers_directly`). Older ones
silently ignore this key and copy, so they get a file in the compile cache that they map themselves. Neither keeps a
reference: the caller must hold the result of `prepare_weights` until the session is gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.converters.onnx_types import relocated
from rlx_ort.converters.to_onnx.exported import ExportedModel
from rlx_ort.converters.to_onnx.model import INLINE_BYTES
from rlx_ort.errors import ParamError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.storage import cache_folder, replacing

_log = logging.getLogger("rlx_ort.weights")

BORROWING_VERSION = (1, 31)
# Windows maps files in steps of 64 KiB; smaller tensors are copied, so their place does not matter.
_MAP_ALIGNMENT = 64 * 1024
_SMALL_ALIGNMENT = 64
_LARGE = 1024 * 1024
_KEEP_UNUSED_DAYS = 7
_FOLDER_KEY = "session.model_external_initializers_file_folder_path"
# ONNX Runtime takes references to files or a table of buffers, not both: a few others may go into the model itself.
_LARGEST_REST_BYTES = 16 * 1024 * 1024
_compared: dict[Path, tuple[int, ...]] = {}  # file -> its stamp when its bytes were compared


def prepare_weights(
    options: Any,
    model: ExportedModel,
    weights: Mapping[str, TensorData],
    version: tuple[int, ...],
    *,
    repacked: bool = True,
) -> tuple[bytes, list[npt.NDArray[Any]]]:
    """Make session options read weights in place; return the model to load and the buffers that the session needs.

    With `repacked`, kernels may keep copies of their own; without, all sessions share the mapping of the store.

    Raises:
        ParamError: a parameter has no data, data of another type, or a buffer that is not one run of bytes.
    """
    payload = model.model_bytes(weights)
    tensors = external_tensors(model, weights)
    if not tensors:
        return payload, []
    for name, tensor in tensors.items():
        buffer = tensor.buffer
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise ParamError(f"the buffer of {name!r} must be one contiguous run of bytes")
    borrows = version >= BORROWING_VERSION
    folder = _common_folder(tensors) if repacked or not borrows else None
    if folder is not None:
        return _from_files(options, payload, tensors, folder), []
    given = {name: tensor.buffer for name, tensor in tensors.items()}
    if borrows:
        return payload, _borrow(options, given)
    try:
        path, entries = write_weights_file(given, cache_folder("weights"))
    except OSError as err:
        _log.info("weights are copied into the session, since no file of them can be written: %s", err)
        return payload, _borrow(options, given)  # an older core takes the buffers too, copies them, and up to 2 GB
    options.add_session_config_entry(_FOLDER_KEY, str(path.parent))
    places = {name: (path.name, *entry) for name, entry in entries.items()}
    return relocated(payload, places, {}), []


def write_weights_file(
    weights: Mapping[str, npt.NDArray[Any]], folder: Path
) -> tuple[Path, dict[str, tuple[int, int]]]:
    """Write buffers to a file named by its content, once, and return it with the (offset, length) of each.

    The file appears whole or not at all, since mapping a truncated file kills the process. An existing one is compared
    with the buffers byte by byte, once per process unless it is written to.
    """
    import hashlib  # loads OpenSSL, which most processes do not need

    import filelock

    entries: dict[str, tuple[int, int]] = {}
    digest, size = hashlib.sha256(), 0
    for name, buffer in weights.items():
        step = _MAP_ALIGNMENT if buffer.nbytes >= _LARGE else _SMALL_ALIGNMENT
        entries[name] = (-(-size // step) * step, buffer.nbytes)
        size = sum(entries[name])
        digest.update(f"{name}\0{entries[name]}\0".encode())
        digest.update(buffer.data)
    path = folder / f"{digest.hexdigest()}.bin"
    with filelock.FileLock(f"{path}.lock"):
        if _holds(path, size, weights, entries):
            return path, entries
        _remove_unused(folder)
        with replacing(path) as file:
            for name, buffer in weights.items():
                file.seek(entries[name][0])
                file.write(buffer.data)
        _compared[path] = _stamp(path)
    return path, entries


def external_tensors(model: ExportedModel, weights: Mapping[str, TensorData]) -> dict[str, TensorData]:
    """Return the data of all parameters and constants that are not stored in the model itself; reads no data."""
    tensors = {name: weights[name] for name in model.params} | dict(model.constants)
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.dtype is not DType.STRING and tensor.nbytes >= INLINE_BYTES
    }


def _common_folder(tensors: Mapping[str, TensorData]) -> Path | None:
    """Return the folder of the files that hold all but a few tensors, if those files are unchanged since mapping."""
    sources = [tensor.source for tensor in tensors.values() if tensor.source is not None]
    rest_bytes = sum(tensor.nbytes for tensor in tensors.values() if tensor.source is None)
    folders = {Path(source.path).parent for source in sources}
    if any(source.pinned for source in sources) or len(folders) != 1 or rest_bytes > _LARGEST_REST_BYTES:
        return None
    one_per_file = {source.path: source for source in sources}.values()
    return folders.pop() if all(source.unchanged for source in one_per_file) else None


def _from_files(options: Any, payload: bytes, tensors: Mapping[str, TensorData], folder: Path) -> bytes:
    options.add_session_config_entry(_FOLDER_KEY, str(folder))
    places = {}
    for name, tensor in tensors.items():
        if tensor.source is not None:
            places[name] = (Path(tensor.source.path).name, tensor.source.offset, tensor.nbytes)
    return relocated(payload, places, {name: data for name, data in tensors.items() if name not in places})


def _borrow(options: Any, buffers: Mapping[str, npt.NDArray[Any]]) -> list[npt.NDArray[Any]]:
    kept = list(buffers.values())
    options.add_session_config_entry("session.use_external_initializer_file_buffers_directly", "1")
    sizes = [buffer.nbytes for buffer in kept]
    options.add_external_initializers_from_files_in_memory(list(buffers), kept, sizes)
    return kept


def _holds(
    path: Path, size: int, weights: Mapping[str, npt.NDArray[Any]], entries: Mapping[str, tuple[int, int]]
) -> bool:
    """Return whether a file holds the buffers, and note its use; reads it unless it is unchanged since."""
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
            return False
        if _compared.get(path) != _stamp(path):
            with path.open("rb") as file:
                stamp = _stamp(path)
                for name, buffer in weights.items():
                    file.seek(entries[name][0])
                    data = buffer.data
                    for begin in range(0, len(data), _LARGE):
                        part = data[begin : begin + _LARGE]
                        if file.read(len(part)) != part:
                            _log.warning("the weights in %s were changed, and are written again", path)
                            return False
            _compared[path] = stamp
        os.utime(path)
        _compared[path] = _stamp(path)
    except OSError as err:
        _log.info("the weights in %s cannot be used, and are written again: %s", path, err)
        return False
    return True


def _stamp(path: Path) -> tuple[int, ...]:
    status = path.stat()
    return (*FileRange.stamp_of(status), status.st_ctime_ns)


def _remove_unused(folder: Path) -> None:
    """Delete files that no session opened for a week; where the system forbids it, as on Windows, mapped ones stay."""
    oldest = time.time() - _KEEP_UNUSED_DAYS * 24 * 3600
    for path in folder.glob("*.bin"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()
