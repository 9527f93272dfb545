"""Signatures under certificates: the shared vectors, keys and their files, and what is refused."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_remat.quiz import signing
from lightning_remat.quiz.certificate import CertificateError
from tests.quiz import vectors

SIGNED = json.loads(vectors.PATH.read_text(encoding="utf-8"))["signed"]
ID, OTHER = SIGNED[0]["id"], SIGNED[3]["id"]


@pytest.mark.parametrize("vector", [pytest.param(row, id=row["what"]) for row in SIGNED])
def test_vectors(vector: dict[str, Any]) -> None:
    try:
        right = signing.check(vector["key"], vector["id"], vector["signature"])
    except signing.SigningError:  # it is none at all
        right = False
    assert right is vector["right"]


def test_a_key_signs_and_its_public_half_checks(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    public = signing.new_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----")
    assert public == signing.public_key(path)
    assert len(public) == 43
    signature = signing.sign(path, ID.lower())
    assert len(signature) == 86
    assert signing.check(public, ID, signature)
    assert signing.check(f" {public}\n", ID, f"{signature[:40]}\n{signature[40:]}")
    assert not signing.check(public, OTHER, signature)
    assert not signing.check(signing.new_key(tmp_path / "other.pem"), ID, signature)


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    signing.new_key(path)
    before = path.read_bytes()
    with pytest.raises(signing.SigningError, match="is there already: a key is never overwritten"):
        signing.new_key(path)
    assert path.read_bytes() == before
    with pytest.raises(signing.SigningError, match="cannot be written"):
        signing.new_key(tmp_path / "missing" / "key.pem")


def test_what_is_no_key(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    path = tmp_path / "key.pem"
    with pytest.raises(signing.SigningError, match="cannot be read"):
        signing.sign(path, ID)
    path.write_text("no key")
    with pytest.raises(signing.SigningError, match="no private key in PEM"):
        signing.sign(path, ID)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked = serialization.BestAvailableEncryption(b"secret")
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(*form, locked))
    with pytest.raises(signing.SigningError, match="without a password"):
        signing.sign(path, ID)
    path.write_bytes(generate_private_key(SECP256R1()).private_bytes(*form, serialization.NoEncryption()))
    with pytest.raises(signing.SigningError, match="another kind than Ed25519"):
        signing.public_key(path)


def test_what_is_no_signature() -> None:
    key, signature = SIGNED[0]["key"], SIGNED[0]["signature"]
    with pytest.raises(signing.SigningError, match=r"not a public key: 32 bytes as base64url .* 43 characters"):
        signing.check(key + "=", ID, signature)
    with pytest.raises(signing.SigningError, match=r"not a signature: 64 bytes as base64url .* 86 characters"):
        signing.check(key, ID, signature.replace("-", "+"))
    with pytest.raises(CertificateError, match="no certificate's ID"):
        signing.check(key, ID[1:], signature)
    with pytest.raises(CertificateError, match="no certificate's ID"):
        signing.sign(Path("nowhere"), ID[1:])


def test_without_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional; what needs it says how to get it."""
    path = tmp_path / "key.pem"
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"] + [
        "cryptography.hazmat.primitives",
        "cryptography.exceptions",
    ]:
        monkeypatch.setitem(sys.modules, name, None)
    for call in (
        lambda: signing.new_key(path),
        lambda: signing.sign(path, ID),
        lambda: signing.check(SIGNED[0]["key"], ID, SIGNED[0]["signature"]),
    ):
        with pytest.raises(signing.SigningError, match=r"pip install 'lightning-remat\[certificates\]'"):
            call()
