"""Pairs of EC keys for the tests of signatures."""

from __future__ import annotations

from pathlib import Path

import pytest

__all__ = ["write_keys"]


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a new pair of P-256 keys; return the private and the public file. Skips the test without model-signing."""
    pytest.importorskip("model_signing")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    private.write_bytes(key.private_bytes(pem, pkcs8, plain))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return private, public
