import base64
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import receipt_tampering as tampering
from repository import TINY

import gemma_py
from gemma_py.errors import FormatError, InputError
from gemma_py.receipts.envelope import PAYLOAD_TYPE, Envelope, Signer, Verifier, new_key, signed_bytes
from gemma_py.receipts.receipt import Receipt, canonical
from gemma_py.receipts.sources import read_file

pytest.importorskip("cryptography")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "signer.pem"
    new_key(path)
    return path


@pytest.fixture(scope="module")
def public(key: Path) -> Path:
    return key.with_name("signer.pem.pub")


@pytest.fixture(scope="module")
def receipt(tiny_engine: gemma_py.Engine) -> Receipt:
    return tampering.made(tiny_engine, "The list", 5)


def test_what_is_signed_is_the_encoding_of_dsse() -> None:
    """The example in DSSE's protocol.md has another payload type."""
    assert signed_bytes(b"hello world") == b"DSSEv1 28 application/vnd.in-toto+json 11 hello world"


def test_a_key_is_private_and_never_printed(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    code, out, err = run("keygen", path, "--json")
    said = json.loads(out)
    assert code == 0 and not err and said["private"] == str(path) and len(said["keyid"]) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = "".join(path.read_text().splitlines()[1:-1])
    assert len(secret) == 64 and secret not in out
    assert said["keyid"] == Signer.load(path).keyid == Verifier.load(Path(said["public"])).keyid
    before = path.read_bytes()
    code, out, err = run("keygen", path)
    assert code == 1 and "must not be overwritten" in err and path.read_bytes() == before
    path.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        Signer.load(path)


def test_files_that_are_no_keys_are_refused(tmp_path: Path, key: Path, public: Path) -> None:
    garbage = tampering.write(tmp_path / "garbage", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    garbage.chmod(0o600)
    for load, path in ((Signer.load, garbage), (Verifier.load, garbage), (Verifier.load, key), (Signer.load, public)):
        with pytest.raises(InputError) as caught:
            load(path)
        assert "ed25519" in str(caught.value) and "chmod" not in str(caught.value)
        assert ("but a public key" in str(caught.value)) == (path == public)


def test_a_signature_covers_every_byte(receipt: Receipt, key: Path, public: Path, tmp_path: Path) -> None:
    envelope, verifier = Signer.load(key).envelope(receipt), Verifier.load(public)
    assert verifier.problem(envelope) == "" and envelope.payload == receipt.to_bytes()
    assert Envelope.read(json.loads(canonical(envelope.document())), "it") == envelope
    ((keyid, signature),) = envelope.signatures
    for payload, signatures in (
        (envelope.payload.replace(b'"trim":false', b'"trim":true'), envelope.signatures),
        (envelope.payload + b"\n", envelope.signatures),
        (envelope.payload, ((keyid, tampering.with_bit(signature)),)),
        (envelope.payload, ((keyid, signature), (keyid, tampering.with_bit(signature)))),
    ):
        assert "is invalid" in verifier.problem(Envelope(payload, signatures))
    assert "no signature by the key" in verifier.problem(Envelope(envelope.payload, (("0" * 64, signature),)))
    assert verifier.problem(None) == "the receipt is not signed"
    other = tmp_path / "other.pem"
    new_key(other)
    assert "no signature by the key" in verifier.problem(Signer.load(other).envelope(receipt))


@pytest.mark.parametrize("changes", [
    {"payloadType": "text/plain"}, {"payload": "A"}, {"payload": 1}, {"payload": "AAAA\n"}, {"signatures": []},
    {"signatures": [{}] * 17}, {"signatures": [{"keyid": 1, "sig": "AAAA"}]}, {"signatures": [{"keyid": "a", "sig": "*"}]},
    {"signatures": {}}, {"more": 1}, {"payload": base64.b64encode(b"{}").decode()},
])  # fmt: skip
def test_envelopes_that_violate_the_format_are_refused(
    receipt: Receipt, key: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    document = Signer.load(key).envelope(receipt).document() | changes
    (found,) = read_file(tampering.write(tmp_path / "envelope.json", json.dumps(document).encode()))
    assert found.receipt is None and found.error.startswith(str(tmp_path)) and "\n" not in found.error


def test_the_payload_has_to_be_canonical(receipt: Receipt, key: Path, tmp_path: Path) -> None:
    payload = json.dumps(receipt.document()).encode()
    signature = Signer.load(key)._key.sign(signed_bytes(payload))
    envelope = Envelope(payload, ((Signer.load(key).keyid, signature),))
    (found,) = read_file(tampering.write(tmp_path / "envelope.json", canonical(envelope.document())))
    assert found.receipt is None and "canonical" in found.error


def test_commands_sign_and_check(run: Run, tmp_path: Path, key: Path, public: Path) -> None:
    signed, plain = tmp_path / "signed.json", tmp_path / "plain.json"
    ask = ("generate", TINY, "--prompt", "The", "--max-tokens", 4, "--receipt")
    assert run(*ask, signed, "--sign", key)[0] == 0 and run(*ask, plain)[0] == 0
    assert json.loads(signed.read_bytes())["payloadType"] == PAYLOAD_TYPE
    for files, options, code, words in (
        ([signed], ["--public-key", public], 0, "signature valid"),
        ([signed], [], 0, "signature not checked"),
        ([plain], [], 0, "not signed"),
        ([plain], ["--public-key", public], 1, "signature: the receipt is not signed"),
    ):
        found, out, _ = run("audit", *files, TINY, *options)
        assert found == code and words in out
    document = json.loads(signed.read_bytes())
    payload = base64.b64decode(document["payload"]).replace(b'"trim":false', b'"trim":true')
    document["payload"] = base64.b64encode(payload).decode()
    forged = tampering.write(tmp_path / "forged.json", json.dumps(document).encode())
    code, out, _ = run("audit", forged, TINY, "--public-key", public)
    assert code == 1 and "differs: signature: the signature by the key" in out
    assert "differs: structure" in run("audit", forged, TINY)[1]
    code, out, err = run("audit", signed, TINY, "--public-key", signed)
    assert code == 2 and not out and err.count("\n") == 1
    broken = tampering.write(tmp_path / "broken.json", b'{"_type":1}')
    code, out, err = run("audit", broken, TINY, "--public-key", public)
    assert code == 1 and out.count("\n") == 1 and not err and "differs: signature: no signed receipt" in out


def test_a_key_without_a_receipt_is_refused(run: Run, key: Path) -> None:
    code, out, err = run("generate", TINY, "--prompt", "The", "--max-tokens", 4, "--sign", key)
    assert (code, out) == (1, "") and err.count("\n") == 1 and "--sign needs --receipt" in err


def test_securesystemslib_verifies_the_envelope(receipt: Receipt, key: Path, public: Path) -> None:
    dsse = pytest.importorskip("securesystemslib.dsse")
    signers = pytest.importorskip("securesystemslib.signer")
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    theirs = signers.SSlibKey.from_crypto(load_pem_public_key(public.read_bytes()))
    document = Signer.load(key).envelope(receipt).document()
    assert theirs.keyid == Verifier.load(public).keyid
    envelope = dsse.Envelope.from_dict(json.loads(canonical(document)))
    assert envelope.pae() == signed_bytes(receipt.to_bytes())
    assert list(envelope.verify([theirs], 1)) == [theirs.keyid]
    forged = dsse.Envelope.from_dict(document | {"payload": base64.b64encode(receipt.to_bytes() + b" ").decode()})
    with pytest.raises(Exception, match=r"threshold|signature"):
        forged.verify([theirs], 1)


def test_in_toto_parses_the_statement(receipt: Receipt) -> None:
    statements = pytest.importorskip("in_toto_attestation.v1.statement")
    protobuf = pytest.importorskip("google.protobuf.json_format")
    message = pytest.importorskip("in_toto_attestation.v1.statement_pb2").Statement()
    protobuf.Parse(receipt.to_bytes(), message)
    statement = statements.Statement.copy_from_pb(message)
    statement.validate()
    assert statement.pb.predicate_type == "urn:gemma-py:receipt:v1"
    assert statement.pb.subject[0].digest["sha256"] == receipt.outputs["answer"]
    assert statement.pb.predicate["root"] == receipt.root()
    del message.subject[:]
    with pytest.raises(ValueError):
        statements.Statement.copy_from_pb(message).validate()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.asymmetric", None)
    monkeypatch.delitem(sys.modules, "cryptography.hazmat.primitives.asymmetric.ed25519", raising=False)
    for call in (lambda: new_key(tmp_path / "k"), lambda: Signer.load(key)):
        with pytest.raises(InputError, match=r"pip install 'gemma_py\[sign\]'"):
            call()
    with pytest.raises(FormatError):
        Envelope.read({}, "it")
