"""`PackageTensor`: a tensor in a file of a package that is verified before its bytes are used."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from rlx_ort.deploy.open_file import OpenFile
from rlx_ort.errors import IntegrityError
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData

__all__ = ["PackageTensor"]


class PackageTensor(TensorData):
    """A tensor in a package, whose bytes cannot be had before they were verified.

    The first use of `buffer` hashes the bytes, in a time that goes with their number; making one reads nothing.

    Attributes:
        sha256: the digest that the package promises.

    Args:
        dtype: as in `TensorData`.
        shape: as in `TensorData`.
        name: what to call it in messages.
        file: where the bytes are.
        offset: first byte in the file.
        sha256: the digest they must have.
        private: whether to copy them into memory of this process and to hash the copy, which no write to the file can
            reach any more.
    """

    # The base class has slots and is frozen, so attributes are set once and past its guard.

    def __init__(
        self,
        dtype: DType,
        shape: tuple[int, ...],
        name: str,
        file: OpenFile,
        offset: int,
        sha256: str,
        *,
        private: bool = False,
    ) -> None:
        source = None if private else FileRange(str(file.path.absolute()), offset, file.stamp, pinned=True)
        values: dict[str, Any] = {"dtype": dtype, "shape": shape, "source": source, "sha256": sha256}
        values |= {"_name": name, "_file": file, "_offset": offset, "_private": private, "_verified": None}
        values["_lock"] = threading.Lock()
        for key, value in values.items():
            object.__setattr__(self, key, value)

    sha256: str
    _name: str
    _file: OpenFile
    _offset: int
    _private: bool
    _verified: npt.NDArray[np.uint8] | None
    _lock: threading.Lock

    @property
    def nbytes(self) -> int:
        """The bytes the elements take; reads nothing."""
        return self.dtype.nbytes(self.num_elements)

    @property
    def is_verified(self) -> bool:
        """Whether the bytes were hashed and are right."""
        return self._verified is not None

    @property
    def buffer(self) -> npt.NDArray[Any]:
        """The bytes, hashed before they are handed out for the first time.

        Raises:
            IntegrityError: they are not what the package promises, or the file was changed.
        """
        found = self._verified
        if found is None:
            with self._lock:
                found = self._verified
                if found is None:
                    found = self._load()
                    object.__setattr__(self, "_verified", found)
        return found

    def check(self) -> None:
        """Hash the bytes in the file again, whether they were verified before or not.

        Raises:
            IntegrityError: they are not what the package promises.
        """
        self._compare(self._file.sha256(self._offset, self.nbytes))

    def _load(self) -> npt.NDArray[np.uint8]:
        size = self.nbytes
        if self._private:
            data = np.empty(size, np.uint8)
            self._file.read_into(self._offset, data.data)
            data.flags.writeable = False
            digest = hashlib.sha256(data.data).hexdigest()
        else:
            digest = self._file.sha256(self._offset, size)
            data = self._file.view(self._offset, size) if size else np.empty(0, np.uint8)
            self._file.check_unchanged()
        self._compare(digest)
        return data

    def _compare(self, digest: str) -> None:
        if digest != self.sha256:
            raise IntegrityError(
                f"{self._file.name}: the bytes of {self._name} are not those that were packed (SHA-256 {digest[:12]}, "
                f"promised {self.sha256[:12]}); get the package again from where it came"
            )
