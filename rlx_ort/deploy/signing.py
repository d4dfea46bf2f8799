"""Signatures by OpenSSF `model-signing` with plain EC keys; works offline. Needs the extra `sign`.

What is signed is the list of (name, SHA-256) of every file but the signature: those of the index, and that of the index
itself. `model_signing sign` signs the same list for the folder form, so each tool verifies signatures of the other. The
list comes from the index here, and bytes are compared with the index when they are read. A signature is therefore
checked without reading gigabytes.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx_ort.deploy.names import INDEX, SIGNATURE
from rlx_ort.deploy.write import Content, add_file, write_package
from rlx_ort.errors import IntegrityError, PackageError

if TYPE_CHECKING:
    from rlx_ort.deploy.package import Package

__all__ = ["check_signature", "sign_package"]


def sign_package(package: Package, private_key: Path, password: str | None = None) -> None:
    """Verify everything in a package, sign it, and put the signature into it; a signature that is there is replaced.

    The folder form gets one more file. The one-file form is written again beside its place and moved there; the package
    is closed for this, because Windows cannot replace an open file. If the path is a link, its target is signed.

    Raises:
        IntegrityError: the contents of the package do not match its index; nothing is signed.
        PackageError: the key cannot be used, or the package cannot be written.
    """
    signing = _library().signing
    package.check_all()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / SIGNATURE
        try:
            config = signing.Config().use_elliptic_key_signer(private_key=private_key, password=password)
            config.set_hashing_config(_listed(package)).sign(package.path.absolute(), made)
        except Exception as err:  # the library raises what its own libraries raise
            raise PackageError(f"{package.path} cannot be signed with {private_key}: {err}") from err
        signature = made.read_bytes()
    place = package.path.resolve()
    if package.is_folder:
        add_file(place, SIGNATURE, signature)
        return
    contents = {**package.contents(), SIGNATURE: Content.of(signature)}
    write_package(place, contents, folder=False, force=True, before_move=package.close)


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
    except Exception as err:  # the library raises what its own libraries raise
        raise PackageError(f"{public_key} is no public key that verifies packages: {err}") from err
    raw = package.signature
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / SIGNATURE  # the library reads signatures from files only
        path.write_bytes(raw)
        try:
            if not json.loads(raw)["verificationMaterial"]["publicKey"]["hint"]:
                # The library accepts it with a warning on stdout.
                raise ValueError("it does not name the key that made it; sign the package again")
            config.set_hashing_config(_listed(package)).verify(package.path.absolute(), path)
        except Exception as err:  # the library raises what its own libraries raise
            detail = str(err) or type(err).__name__
            raise IntegrityError(
                f"{SIGNATURE} of {package.path} is no signature by {public_key} of what is there: {detail}"
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
    found = manifest.Manifest(package.path.name, items, kind)

    class Listed(hashing.Config):
        """Returns the list; the library's own class reads the files of a folder."""

        def __init__(self) -> None:
            pass  # what the base sets up is how to read files

        def add_ignored_paths(self, *, model_path: Any, paths: Any) -> None:
            """Leave it: the list has no ignored paths."""

        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:
            """Return the list."""
            return found

    return Listed()


def _library() -> Any:
    try:
        import model_signing
        import model_signing.signing
        import model_signing.verifying
    except ImportError as err:
        raise PackageError(
            f"signatures need the package model-signing, which cannot be imported here ({err}); "
            "install it with: pip install 'rlx_ort[sign]'"
        ) from err
    return model_signing
