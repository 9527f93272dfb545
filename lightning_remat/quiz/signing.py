"""Signatures under certificates, for organisers who vouch for them: Ed25519 (RFC 8032).

An ID can be made by anyone. Whoever gives an exam and saw that it was taken honestly can sign the ID with a key of
their own and publish the public half; the signature then shows that they did, and nobody else can make it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_remat.errors import RematError
from lightning_remat.quiz.certificate import to_bytes

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PREFIX = b"lightning-remat certificate 1\n"
_INSTALL = (
    "Signatures need the package cryptography, which is not installed: pip install 'lightning-remat[certificates]'."
)
_KEY_BYTES, _SIGNATURE_BYTES = 32, 64


class SigningError(RematError, ValueError):
    """A key or signature that is none, a file of a key that cannot be read or made, or no ``cryptography``."""


def new_key(path: Path) -> str:
    """Make a private key, write it to a new file that only its owner can read (PEM), and return the public one.

    Raises:
        SigningError: If the file is there already or cannot be written, or ``cryptography`` is missing.
    """
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise SigningError(_INSTALL) from error
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        # Made with these rights, so that nobody can read it in between; never over another key.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(pem)
    except FileExistsError as error:
        raise SigningError(f"{path} is there already: a key is never overwritten. Name another file.") from error
    except OSError as error:
        raise SigningError(f"{path} cannot be written: {error.strerror or error}.") from error
    return _public(key)


def public_key(path: Path) -> str:
    """The public half of a private key's file, as text: base64url of its 32 bytes, without padding.

    Raises:
        SigningError: If there is no such key, or ``cryptography`` is missing.
    """
    return _public(_load(path))


def sign(path: Path, text: str) -> str:
    """Sign an ID with the private key of a file.

    Returns:
        base64url of the 64 bytes of the signature, without padding.

    Raises:
        CertificateError: If the ID is mistyped. Whether it is of a known exam is not looked at.
        SigningError: If there is no such key, or ``cryptography`` is missing.
    """
    message = _PREFIX + to_bytes(text)
    return _encode(_load(path).sign(message))


def check(key: str, text: str, signature: str) -> bool:
    """Whether a signature under an ID was made with the private half of this public key.

    Raises:
        CertificateError: If the ID is mistyped.
        SigningError: If the key or the signature is none at all, or ``cryptography`` is missing.
    """
    message = _PREFIX + to_bytes(text)
    key_bytes = _decode(key, _KEY_BYTES, "a public key")
    signature_bytes = _decode(signature, _SIGNATURE_BYTES, "a signature")
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise SigningError(_INSTALL) from error
    try:
        Ed25519PublicKey.from_public_bytes(key_bytes).verify(signature_bytes, message)
    except InvalidSignature:
        return False
    return True


def _load(path: Path) -> Ed25519PrivateKey:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise SigningError(_INSTALL) from error
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SigningError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, TypeError) as error:  # TypeError: it is encrypted
        raise SigningError(f"{path} has no private key in PEM without a password: quiz keygen makes one.") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SigningError(f"{path} has a key of another kind than Ed25519: quiz keygen makes one.")
    return key


def _public(key: Ed25519PrivateKey) -> str:
    return _encode(key.public_key().public_bytes_raw())


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


def _decode(text: str, length: int, what: str) -> bytes:
    plain = re.sub(r"\s", "", text)
    try:
        raw = base64.b64decode(plain + "=" * (-len(plain) % 4), altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        raw = b""
    if len(raw) != length or _encode(raw) != plain:
        raise SigningError(
            f"this is not {what}: {length} bytes as base64url without padding, {len(_encode(bytes(length)))} characters"
        )
    return raw
