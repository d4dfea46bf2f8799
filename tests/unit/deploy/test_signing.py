"""Signatures: what is signed cannot change, and only its key will do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from sample_packages.keys import write_keys
from sample_packages.packages import files_of, flip, make, rebuilt, repacked

from rlx_ort import IntegrityError, PackageError, open_package, start_package, warm_package
from rlx_ort.deploy.package import Package, sign_package
from rlx_ort.deploy.write import write_package
from rlx_ort.environment import override

pytest.importorskip("model_signing.signing", exc_type=ImportError)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Return two pairs of keys."""
    folder = tmp_path_factory.mktemp("keys")
    return {name: write_keys(folder, name) for name in ("ours", "theirs")}


@pytest.fixture(params=[False, True], ids=["file", "folder"])
def signed(request: pytest.FixtureRequest, tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> Path:
    """Return a signed package in each form."""
    path = make(tmp_path / "signed.ortpackage", folder=request.param)
    with Package(path) as package:
        sign_package(package, keys["ours"][0])
    return path


def test_the_right_key_takes_it(signed: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """A package that was signed opens with the public key, and still opens without one."""
    with Package(signed, key=keys["ours"][1]) as package:
        package.check_all()
    with Package(signed) as package:
        assert package.is_signed


def test_the_signature_stays_valid_in_the_other_form(
    signed: Path, tmp_path: Path, keys: dict[str, tuple[Path, Path]]
) -> None:
    """A signed file that is written as a folder under another name, or the other way round, is still signed."""
    other = tmp_path / "other.ortpackage"
    with Package(signed, key=keys["ours"][1]) as package:
        write_package(other, package.contents(), folder=not package.is_folder)
    Package(other, key=keys["ours"][1]).close()


def test_signing_again_replaces_the_signature(signed: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """The new key is taken, the old one no more, and nothing else is in the folder of the package."""
    with Package(signed) as package:
        sign_package(package, keys["theirs"][0])
    Package(signed, key=keys["theirs"][1]).close()
    with pytest.raises(IntegrityError, match=r"signature\.json"):
        Package(signed, key=keys["ours"][1])
    assert [path.name for path in signed.parent.iterdir()] == [signed.name]


def test_while_it_is_signed_a_package_is_whole_and_not_open(
    signed: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, tuple[Path, Path]]
) -> None:
    """A process that dies before the last move leaves what was there; Windows moves nothing over an open file."""
    move, seen = os.replace, []

    def watching(source: Path, target: Path) -> None:
        Package(signed, key=keys["ours"][1]).close()
        descriptors = Path("/proc/self/fd")
        held = [os.path.realpath(path) for path in descriptors.iterdir()] if descriptors.is_dir() else []
        seen.append(str(target.resolve()) in held)
        move(source, target)

    monkeypatch.setattr(os, "replace", watching)
    with Package(signed) as package:
        sign_package(package, keys["theirs"][0])
    assert seen == [False]


@pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")
def test_signing_through_a_link_signs_what_it_leads_to(
    signed: Path, tmp_path: Path, keys: dict[str, tuple[Path, Path]]
) -> None:
    """The link stays a link, and the package behind it has the new signature."""
    link = tmp_path / "newest.ortpackage"
    link.symlink_to(signed)
    with Package(link) as package:
        sign_package(package, keys["theirs"][0])
    assert link.is_symlink()
    Package(signed, key=keys["theirs"][1]).close()


def test_an_unsigned_package_is_refused_when_a_signature_is_required(
    tmp_path: Path, keys: dict[str, tuple[Path, Path]]
) -> None:
    """Taking the signature away does not help; the variable asks for one as the argument does."""
    path = make(tmp_path / "plain.ortpackage")
    with pytest.raises(IntegrityError, match="not signed"):
        open_package(path, require_signature=keys["ours"][1])
    with override({"RLX_PACKAGE_KEY": str(keys["ours"][1])}), pytest.raises(IntegrityError, match="not signed"):
        open_package(path)


def test_an_empty_key_is_an_error_and_never_no_key(tmp_path: Path) -> None:
    """A script that expands an unset variable must not open an unsigned package."""
    path = make(tmp_path / "plain.ortpackage")
    for taker in (open_package, start_package, warm_package):
        with pytest.raises(PackageError, match="require_signature is empty"):
            taker(path, require_signature="")
        with override({"RLX_PACKAGE_KEY": ""}), pytest.raises(PackageError, match="RLX_PACKAGE_KEY is empty"):
            taker(path)


def test_a_consistent_forgery_is_found(signed: Path, tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """New content with an index that fits it does not fit the signature."""
    files = files_of(signed)
    index = json.loads(files["rlx.json"])
    index["license"] = "none of your business"
    path = repacked(tmp_path / "forged.ortpackage", rebuilt(files, index))
    Package(path).close()
    with pytest.raises(IntegrityError, match=r"rlx\.json"):
        Package(path, key=keys["ours"][1])


def test_the_signature_of_another_package_does_not_fit(
    signed: Path, tmp_path: Path, keys: dict[str, tuple[Path, Path]]
) -> None:
    """A right signature of an older package is no signature of this one."""
    files = files_of(make(tmp_path / "newer.ortpackage", seed=1))
    files["signature.json"] = files_of(signed)["signature.json"]
    with pytest.raises(IntegrityError, match=r"signature\.json"):
        Package(repacked(tmp_path / "mixed.ortpackage", files), key=keys["ours"][1])


def test_a_changed_bit_in_the_signature_is_found(tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """Every byte of the signature file counts that says anything."""
    path = make(tmp_path / "signed.ortpackage", folder=True)
    with Package(path) as package:
        sign_package(package, keys["ours"][0])
    signature = path / "signature.json"
    text = signature.read_bytes()
    for place in (text.index(b'"payload"') + 40, text.index(b'"sig"') + 20):
        flip(signature, place, 1)
        with pytest.raises(IntegrityError, match=r"signature\.json"):
            Package(path, key=keys["ours"][1])
        flip(signature, place, 1)


def test_the_librarys_own_verifier_agrees(tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """`model_signing` takes our signature of the folder form, and refuses it after a change of any file."""
    from model_signing import verifying

    path = make(tmp_path / "signed.ortpackage", folder=True)
    with Package(path) as package:
        sign_package(package, keys["ours"][0])
    config = verifying.Config().use_elliptic_key_verifier(public_key=keys["ours"][1])
    config.verify(path, path / "signature.json")
    flip(path / "LICENSE.txt", 3)
    with pytest.raises(ValueError, match=r"LICENSE\.txt"):
        config.verify(path, path / "signature.json")


def test_a_signature_of_the_librarys_own_signer_is_taken(tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """What `model_signing` makes of a folder is a signature for us, once it lies in the folder."""
    from model_signing import signing

    path = make(tmp_path / "folder.ortpackage", folder=True)
    signing.Config().use_elliptic_key_signer(private_key=keys["ours"][0]).sign(path, tmp_path / "made.json")
    (tmp_path / "made.json").replace(path / "signature.json")
    Package(path, key=keys["ours"][1]).close()
    with pytest.raises(IntegrityError, match=r"signature\.json"):
        Package(path, key=keys["theirs"][1])


def test_a_broken_package_is_not_signed(tmp_path: Path, keys: dict[str, tuple[Path, Path]]) -> None:
    """Signing reads everything first."""
    path = make(tmp_path / "broken.ortpackage", folder=True)
    with Package(path) as package:
        flip(path / package.index.tensors["tensor0"].file, 11)
        with pytest.raises(IntegrityError):
            sign_package(package, keys["ours"][0])
    assert not (path / "signature.json").exists()


def test_a_file_that_is_no_key_is_a_package_error(signed: Path, tmp_path: Path) -> None:
    """An unreadable key and a wrong signature are different errors."""
    (tmp_path / "text.pub").write_text("no key", encoding="utf-8")
    with pytest.raises(PackageError, match=r"text\.pub") as caught:
        Package(signed, key=tmp_path / "text.pub")
    assert not isinstance(caught.value, IntegrityError)
    with Package(signed) as package, pytest.raises(PackageError, match=r"text\.pub"):
        sign_package(package, tmp_path / "text.pub")
