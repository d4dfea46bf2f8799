"""`Package`: a package whose structure was checked, and whose bytes are verified before they are returned.

Signatures are by OpenSSF `model-signing` with plain EC keys; they work offline and need the extra `sign`. Signed is the
list of (name, SHA-256) of every file but the signature: those of the index, and that of the index itself.
`model_signing sign` signs the same list for the folder form, so each tool verifies signatures of the other. The list
comes from the index here, and bytes are compared with the index when they are read. A signature is therefore checked
without reading gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlx_ort.deploy.container import Container, OpenFile, compare_files, open_container, read_file, read_index
from rlx_ort.deploy.index import REQUIRABLE, Case, Index
from rlx_ort.deploy.names import INDEX, MANIFEST, SIGNATURE
from rlx_ort.deploy.ort_manifest import check_manifest
from rlx_ort.errors import ConversionError, IntegrityError, MissingExtraError, PackageError, install_command
from rlx_ort.ir.dtype import DType
from rlx_ort.ir.tensor import FileRange, TensorData
from rlx_ort.providers.engine.stopping import holding
from rlx_ort.storage import temporary_folder

if TYPE_CHECKING:
    from rlx_ort.deploy.copies import PackageCopy
    from rlx_ort.deploy.write import Content
    from rlx_ort.ir.graph import Graph

_EAGER_BYTES = 4 << 20
_LARGEST_TEXT_BYTES = 1 << 30
_LARGEST_SIGNATURE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20


class Package:
    """An open package, in either form. Use it as a context manager, or let it go: maps live as long as their tensors.

    Opening reads the index, compares names and sizes with it, and hashes every file up to 4 MiB that holds no tensors.
    Larger files are hashed when they are read, and each tensor at the first access to its bytes. `key` is the PEM file
    of the public key that must have signed the package; None asks for no signature. `sha256`, hexadecimal, pins the
    index, and `min_serial` refuses older packages put back. With `private`, tensors are copied into memory of this
    process instead of mapped; see `PackageTensor`.

    Raises:
        PackageError: there is no package, or it needs newer versions than are here.
        IntegrityError: its contents do not match its index; the message names the file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        key: str | os.PathLike[str] | None = None,
        sha256: str | None = None,
        min_serial: int = 0,
        private: bool = False,
    ) -> None:
        self.path = Path(path)
        self._private = private
        self._verified = key is not None
        self._tensors: dict[str, PackageTensor] = {}
        self._container: Container = open_container(self.path, hard_links=private)
        try:
            self._raw = raw = read_index(self._container)
            self.sha256 = hashlib.sha256(raw).hexdigest()
            self._vouch = partial(_vouch, self._container, self.sha256)
            if sha256 is not None and self.sha256 != sha256.lower():
                raise IntegrityError(f"{self.path} is another package: SHA-256 {self.sha256}, wanted {sha256}")
            self.index = Index.from_bytes(raw)
            listed = {name: (entry.size, entry.crc32) for name, entry in self.index.files.items()}
            compare_files(self._container, listed)
            if MANIFEST not in listed:
                raise IntegrityError(f"{INDEX} of {self.path} does not list {MANIFEST}")
            if key is not None:
                check_signature(self, Path(key))
            if self.index.serial < min_serial:
                raise IntegrityError(
                    f"{self.path} has serial number {self.index.serial}; at least {min_serial} is required, so this is "
                    "an older package"
                )
            data_files = {entry.file for entry in self.index.tensors.values()}
            for name, entry in self.index.files.items():
                if entry.size <= _EAGER_BYTES and name not in data_files:
                    self.check_file(name)
            check_manifest(self.read(MANIFEST), self.index.files)
            _check_versions(self.index.requires, self.path)
        except BaseException:
            self._container.close()
            raise

    def __repr__(self) -> str:
        return f"<Package {str(self.path)[-80:]!r}, {len(self.index.tensors)} tensors>"

    @property
    def is_signed(self) -> bool:
        """Whether there is a signature, right or wrong."""
        return SIGNATURE in self._container.sizes

    @property
    def signature_state(self) -> str:
        """`verified` by the key it was opened with, `present, not checked`, or `none`."""
        return "verified" if self._verified else "present, not checked" if self.is_signed else "none"

    @property
    def is_folder(self) -> bool:
        """Whether the package is a folder."""
        return not self._container.crcs

    @property
    def names(self) -> list[str]:
        """The names of all files, the index and the signature included, sorted."""
        return sorted(self._container.sizes)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file, verified.

        Raises:
            IntegrityError: they contradict the index, or too many to be one.
        """
        entry = self.index.files.get(name)
        if entry is None or entry.size > _LARGEST_TEXT_BYTES:
            raise IntegrityError(f"{name} is not one of the files of {self.path} that are read whole")
        data = read_file(self._container, name)
        self._compare(name, hashlib.sha256(data).hexdigest())
        return data

    def contents(self) -> dict[str, Content]:
        """Return every file, the index and the signature included, as something that can be written again.

        The index is the one that was checked at opening. All others are hashed while they are read: a file that was
        changed raises an `IntegrityError` at its end, and the copy must then be discarded.
        """
        from rlx_ort.deploy.write import Content

        contents = {
            name: Content(entry.size, entry.crc32, partial(self._hashed_chunks, name))
            for name, entry in self.index.files.items()
        }
        contents[INDEX] = Content.of(self._raw)
        if self.is_signed:
            contents[SIGNATURE] = Content.of(self.signature)
        return contents

    @cached_property
    def signature(self) -> bytes:
        """The bytes of the signature, read once; empty where there is none. `check_signature` checks them.

        Raises:
            IntegrityError: it is larger than signatures are, or cannot be read.
        """
        if not self.is_signed:
            return b""
        if self._container.sizes[SIGNATURE] > _LARGEST_SIGNATURE_BYTES:
            raise IntegrityError(f"{SIGNATURE} of {self.path} is too large to be a signature")
        return read_file(self._container, SIGNATURE)

    def check_file(self, name: str, progress: Callable[[int], object] | None = None) -> None:
        """Hash a file and compare it with the index; `progress` is called with the bytes done since the last call.

        Raises:
            IntegrityError: it was changed; the message names it.
        """
        file, offset = self._container.locate(name)
        self._compare(name, file.sha256(offset, self._container.sizes[name], progress))

    def check_all(self, progress: Callable[[int], object] | None = None) -> None:
        """Hash everything: each file, and each tensor against its own digest.

        Raises:
            IntegrityError: something was changed; the message names it.
        """
        from concurrent.futures import ThreadPoolExecutor

        # Hashing lets other threads run; the same bytes count for the file and for their tensor.
        checks: list[Callable[[], None]] = [partial(self.check_file, name, progress) for name in self.index.files]
        checks += [self.tensor(name).check for name in self.index.tensors]
        with ThreadPoolExecutor(2) as pool:
            for _ in pool.map(holding(operator.call), checks):  # holds no future, whose error would hold it
                pass

    def tensor(self, name: str) -> PackageTensor:
        """Return a stored tensor; its bytes are verified when they are first used."""
        if name not in self._tensors:
            entry = self.index.tensors[name]
            file, begin = self._container.locate(entry.file)
            self._tensors[name] = PackageTensor(
                entry.dtype,
                entry.shape,
                f"tensor {name!r} in {entry.file}",
                file,
                begin + entry.offset,
                entry.sha256,
                private=self._private,
                vouch=self._vouch,
            )
        return self._tensors[name]

    def graph(self) -> Graph:
        """Return a new graph; its weights are tensors of the package, not read yet.

        Raises:
            PackageError: the graph file is no graph.
        """
        from rlx_ort.ir.serde import from_json

        tensors = {name: self.tensor(name) for name in self.index.tensors}
        try:
            return from_json(self.read(self.index.graph).decode("utf-8"), tensors)
        except (ConversionError, UnicodeDecodeError) as err:
            raise PackageError(f"{self.index.graph} of {self.path} is not a graph: {err}") from err

    def arrays(self, references: Mapping[str, str]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that a golden case refers to, verified."""
        return {name: self.tensor(stored).numpy() for name, stored in references.items()}

    @property
    def cases(self) -> tuple[Case, ...]:
        """The golden cases."""
        return self.index.cases

    @property
    def copy(self) -> PackageCopy:
        """The copy that the package is opened from, in the state that its files have now."""
        from rlx_ort.deploy.copies import PackageCopy

        return PackageCopy(self._container, self.sha256)

    def close(self) -> None:
        """Close the files; tensors that were used stay usable."""
        self._container.close()

    def __enter__(self) -> Package:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _hashed_chunks(self, name: str) -> Iterator[bytes]:
        file, offset = self._container.locate(name)
        end, digest = offset + self._container.sizes[name], hashlib.sha256()
        for start in range(offset, end, _CHUNK_BYTES):
            chunk = file.read(start, min(_CHUNK_BYTES, end - start))
            digest.update(chunk)
            yield chunk
        self._compare(name, digest.hexdigest())

    def _compare(self, name: str, digest: str) -> None:
        entry = self.index.files[name]
        if digest != entry.sha256:
            raise IntegrityError(
                f"{name} of {self.path} has changed since it was packed (SHA-256 {digest}, "
                f"expected {entry.sha256}); download the package again"
            )


def _vouch(container: Container, digest: str) -> None:
    """Check the bytes of a package whose index has this digest, unless this copy of it was read whole before.

    Raises:
        IntegrityError: they were changed.
    """
    from rlx_ort.deploy.copies import PackageCopy

    PackageCopy(container, digest).check()


def _check_versions(requires: Mapping[str, str], path: Path) -> None:
    """Compare the installed versions, by their metadata; a missing ONNX Runtime is an error at opening a session."""
    if not requires:
        return
    import rlx_ort
    from rlx_ort.providers.engine.runtime import runtime_packages

    for what, least in requires.items():
        if what not in REQUIRABLE:
            raise PackageError(f"{path} requires {what!r}, which this version of rlx_ort does not support; update it")
        installed = [rlx_ort.__version__] if what == "rlx_ort" else list(runtime_packages().values())
        if installed and all(_numbers(here) < _numbers(least) for here in installed):
            raise PackageError(f"{path} requires {what} {least} or newer, here is {installed[0]}; update it")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d{1,9}", text.partition("+")[0])[:4])


class PackageTensor(TensorData):
    """A tensor in a package, whose bytes are verified before they are returned.

    The first access to `buffer` hashes the bytes, in time proportional to their number. Construction reads nothing. The
    bytes are in `file` from `offset` on and must have the digest `sha256`; `name` is the tensor's name in messages.
    With `private`, they are copied into memory of this process and the copy is hashed, which no write to the file can
    reach any more.

    `sha256` alone is a promise. Whoever uses other bytes of that digest in place of reading these, as the compile cache
    does, calls `vouch` first, unless the tensor `is_verified`; all tensors of an open package have the same `vouch`.
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
        vouch: Callable[[], None],
        private: bool = False,
    ) -> None:
        source = None if private else FileRange(str(file.path.absolute()), offset, file.stamp, pinned=True)
        values: dict[str, Any] = {"dtype": dtype, "shape": shape, "source": source, "sha256": sha256, "vouch": vouch}
        values |= {"_name": name, "_file": file, "_offset": offset, "_private": private}
        values |= {"_verified": None, "_state": None, "_lock": threading.Lock()}
        for key, value in values.items():
            object.__setattr__(self, key, value)

    sha256: str
    vouch: Callable[[], None]
    _name: str
    _file: OpenFile
    _offset: int
    _private: bool
    _verified: npt.NDArray[np.uint8] | None
    _state: tuple[Any, ...] | None
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
        """The bytes, hashed before they are handed out for the first time, and again after the file was changed.

        Raises:
            IntegrityError: they contradict the index, or the file was changed.
        """
        with self._lock:
            data = self._verified
            state = None if self._private else self._file.state()
            if data is None:
                data = self._load()
            elif state not in (None, self._state):  # the map shows later writes to the file
                self.check()
            object.__setattr__(self, "_verified", data)
            object.__setattr__(self, "_state", state)
            return data

    def check(self) -> None:
        """Hash the bytes in the file again, whether they were verified before or not.

        Raises:
            IntegrityError: they contradict the index.
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
                f"{self._file.name}: {self._name} has changed since it was packed (SHA-256 {digest}, "
                f"expected {self.sha256}); download the package again"
            )


def sign_package(package: Package, private_key: Path, password: str | None = None) -> None:
    """Verify everything in a package, sign it, and put the signature into it; a signature that is there is replaced.

    The folder form gets one more file. The one-file form is written again beside its place and moved there; the package
    is closed for this, because Windows cannot replace an open file. If the path is a link, its target is signed.

    Raises:
        IntegrityError: the contents of the package do not match its index; nothing is signed.
        PackageError: the key cannot be used, or the package cannot be written.
    """
    from rlx_ort.deploy.write import Content, add_file, write_package

    signing = _library().signing
    package.check_all()
    with temporary_folder() as folder:
        made = folder / SIGNATURE
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=private_key, password=password)
            config.set_hashing_config(_listed(package)).sign(package.path.absolute(), made)
        except Exception as err:  # the library raises the errors of its own libraries
            raise PackageError(f"{package.path} cannot be signed with {private_key}: {err}") from err
        signature = made.read_bytes()
    place = package.path.resolve()
    if package.is_folder:
        add_file(place, SIGNATURE, signature)
        return
    contents = {**package.contents(), SIGNATURE: Content.of(signature)}
    write_package(place, contents, folder=False, overwrite=True, before_move=package.close)


def check_signature(package: Package, public_key: Path) -> None:
    """Refuse a package that the owner of a key did not sign as it is. Reads the index and the signature only.

    Raises:
        IntegrityError: there is no signature, it is of another key, or it is of other files.
        PackageError: the key cannot be read, or the extra is not installed.
    """
    if not package.is_signed:
        raise IntegrityError(f"{package.path} is not signed, and a signature by {public_key} is required")
    verifying = _library().verifying
    try:
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
    except Exception as err:  # the library raises the errors of its own libraries
        raise PackageError(f"{public_key} is not a public key that can verify packages: {err}") from err
    raw = package.signature
    with temporary_folder() as folder:
        path = folder / SIGNATURE  # the library reads signatures from files only
        path.write_bytes(raw)
        try:
            if not json.loads(raw)["verificationMaterial"]["publicKey"]["hint"]:
                # The library accepts it with a warning on stdout.
                raise ValueError("it does not name the key that made it; sign the package again")
            config.set_hashing_config(_listed(package)).verify(package.path.absolute(), path)
        except Exception as err:  # the library raises the errors of its own libraries
            detail = str(err) or type(err).__name__
            raise IntegrityError(
                f"{SIGNATURE} of {package.path} is not a signature by {public_key} of this content: {detail}"
            ) from err


def _listed(package: Package) -> Any:
    """Return a hashing configuration of the library that answers with the digests of the index."""
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest  # its public modules use it and do not export it

    kind = manifest.SerializationType.from_args(
        {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE]}
    )
    digests = {name: entry.sha256 for name, entry in package.index.files.items()}
    digests[INDEX] = package.sha256
    items = [kind.new_item(name, Digest("sha256", bytes.fromhex(digest))) for name, digest in digests.items()]
    listed = manifest.Manifest(package.path.name, items, kind)

    class Listed(hashing.Config):
        """Returns the list; the library's own class reads the files of a folder."""

        def __init__(self) -> None:
            pass  # the base would set up how to read files

        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
            """Leave it: the list has no ignored paths."""

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:
            """Return the list."""
            return listed

    return Listed()


def _library() -> Any:
    try:
        import model_signing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as err:
        raise MissingExtraError(
            f"signatures need model-signing, which cannot be imported: {err}\n  {install_command('sign')}"
        ) from err
    return model_signing
