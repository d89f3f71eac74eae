"""Signed receipts: DSSE envelopes with ed25519 signatures.

    https://github.com/secure-systems-lab/dsse/blob/master/envelope.md

Signing and checking signatures need the package cryptography (extra `sign`). Reading an envelope does not.
"""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_py.errors import FormatError, InputError, install_command
from gemma_py.formats.files import read_bytes
from gemma_py.receipts.receipt import Receipt, canonical

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
PUBLIC = ".pub"  # the ending of a public key's file, after the name of the private key's file
_KEY_LIMIT = 1 << 16
_MOST_SIGNATURES = 16


def signed_bytes(payload: bytes) -> bytes:
    """Return what is signed: DSSE's pre-authentication encoding of the payload and its type."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True)
class Envelope:
    """A payload with signatures, which are not checked yet. signatures: pairs of the key's id and the signature."""

    payload: bytes
    signatures: tuple[tuple[str, bytes], ...]

    def document(self) -> dict[str, Any]:
        signatures = [{"keyid": keyid, "sig": _base64(signature)} for keyid, signature in self.signatures]
        return {"payload": _base64(self.payload), "payloadType": PAYLOAD_TYPE, "signatures": signatures}

    @classmethod
    def read(cls, document: dict[str, Any], where: str) -> "Envelope":
        if set(document) != {"payload", "payloadType", "signatures"} or document["payloadType"] != PAYLOAD_TYPE:
            raise FormatError(
                f"{where}: an envelope should have payload, signatures and the payloadType {PAYLOAD_TYPE!r}"
            )
        given = document["signatures"]
        if not isinstance(given, list) or not 1 <= len(given) <= _MOST_SIGNATURES:
            raise FormatError(f"{where}: an envelope should have 1 to {_MOST_SIGNATURES} signatures")
        signatures = []
        for entry in given:
            if not isinstance(entry, dict) or set(entry) != {"keyid", "sig"} or not isinstance(entry["keyid"], str):
                raise FormatError(f"{where}: a signature should have the fields keyid and sig")
            signatures.append((entry["keyid"], _bytes(entry["sig"], f"{where}: signatures.sig")))
        return cls(_bytes(document["payload"], f"{where}: payload"), tuple(signatures))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any, where: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True) if isinstance(text, str) else None
    except (binascii.Error, ValueError):
        data = None
    if data is None or _base64(data) != text:
        raise FormatError(f"{where} should be base64 text")
    return data


class Signer:
    def __init__(self, key: "Ed25519PrivateKey") -> None:
        self._key = key
        self.keyid = key_id(key.public_key())

    @classmethod
    def load(cls, path: Path) -> "Signer":
        """Read a private key, which other users must not be able to read."""
        private = _key_classes()[0]
        data = read_bytes(path, _KEY_LIMIT)
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        message = f"{path}: no private ed25519 key in PEM form"
        if b"-----BEGIN PUBLIC KEY-----" in data:
            message += ", but a public key, which signs nothing"
        key = _parsed(lambda: load_pem_private_key(data, None), private, message)
        if path.stat().st_mode & 0o077:
            raise InputError(f"{path}: other users may read this private key; run chmod 600 on the file")
        return cls(key)

    def envelope(self, receipt: Receipt) -> Envelope:
        payload = receipt.to_bytes()
        return Envelope(payload, ((self.keyid, self._key.sign(signed_bytes(payload))),))


class Verifier:
    def __init__(self, key: "Ed25519PublicKey") -> None:
        self._key = key
        self.keyid = key_id(key)

    @classmethod
    def load(cls, path: Path) -> "Verifier":
        public = _key_classes()[1]
        data = read_bytes(path, _KEY_LIMIT)
        from cryptography.hazmat.primitives.serialization import load_pem_public_key

        return cls(_parsed(lambda: load_pem_public_key(data), public, f"{path}: no public ed25519 key in PEM form"))

    def problem(self, envelope: Envelope | None) -> str:
        """Return why an envelope is not signed with this key, or an empty string."""
        from cryptography.exceptions import InvalidSignature

        if envelope is None:
            return "the receipt is not signed"
        ours = [signature for keyid, signature in envelope.signatures if keyid == self.keyid]
        if not ours:
            return f"the receipt has no signature by the key {self.keyid}"
        for signature in ours:
            try:
                self._key.verify(signature, signed_bytes(envelope.payload))
            except InvalidSignature:
                return f"the signature by the key {self.keyid} is invalid"
        return ""


def new_key(path: Path) -> str:
    """Write a new private key, which only this user can read, and its public key beside it. Return the key's id."""
    private, _ = _key_classes()
    from cryptography.hazmat.primitives import serialization

    key = private.generate()
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    for file, data, mode in ((path, secret, 0o600), (path.with_name(path.name + PUBLIC), public, 0o644)):
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as opened:
                opened.write(data)
        except FileExistsError:
            raise InputError(f"{file}: the file exists, and a key must not be overwritten") from None
        except OSError as error:
            raise InputError(f"{file}: cannot be written: {error}") from None
    return key_id(key.public_key())


def key_id(key: "Ed25519PublicKey") -> str:
    """Return the id that securesystemslib gives to a public key: the sha256 of a JSON document with the key."""
    document = {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": key.public_bytes_raw().hex()}}
    return hashlib.sha256(canonical(document)).hexdigest()


def _parsed(load: Callable[[], object], kind: Any, message: str) -> Any:
    from cryptography.exceptions import UnsupportedAlgorithm

    try:
        key = load()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, kind):
        raise InputError(message)
    return key


def _key_classes() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise InputError(f"signatures need the package cryptography: {install_command('sign')}") from None
    return ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey
