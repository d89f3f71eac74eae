"""Reading of receipts from files: alone, in a signed envelope, or in the responses of a server or a batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gemma_py.errors import FormatError
from gemma_py.formats.files import parse_json, read_bytes
from gemma_py.receipts.envelope import Envelope
from gemma_py.receipts.receipt import Receipt, parse, read

LIMIT = 64 << 20  # bytes of a file
_MOST_SHOWN = 200


class FoundReceipt(NamedTuple):
    """A receipt in a file, or the reason why it cannot be read. envelope: None for a receipt that is not signed."""

    name: str
    receipt: Receipt | None
    envelope: Envelope | None = None
    error: str = ""


def read_file(path: Path) -> list[FoundReceipt]:
    """Return the receipts in a file: a receipt, an envelope, a response with receipts, or the output of a batch."""
    return list(receipts_in(read_bytes(path, LIMIT), str(path)))


def receipts_in(data: bytes, where: str) -> Iterator[FoundReceipt]:
    """Yield the receipts in a JSON document, or in lines of JSON documents."""
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    try:
        documents = [(where, parse_json(data, where))]
    except FormatError as error:
        if len(lines) < 2 or not all(line.startswith(b"{") for _, line in lines):
            yield FoundReceipt(where, None, error=str(error)[:_MOST_SHOWN])
            return
        documents = []
        for number, line in lines:
            name = f"{where}, line {number}"
            try:
                documents.append((name, parse_json(line, name)))
            except FormatError as wrong:
                yield FoundReceipt(name, None, error=str(wrong)[:_MOST_SHOWN])
    found = [(name, document) for where, outer in documents for name, document in _documents(outer, where)]
    if not found and documents:
        yield FoundReceipt(where, None, error=f"{where}: neither a receipt nor a response with receipts")
    for name, document in found:
        yield _read(document, name)


def _documents(document: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the JSON documents of the receipts within a document, each with its name."""
    if isinstance(document, dict) and ("_type" in document or "payloadType" in document):
        yield where, document
    response = document.get("response") if isinstance(document, dict) else None
    for outer in (document, response, response.get("body") if isinstance(response, dict) else None):
        receipts = outer.get("receipts") if isinstance(outer, dict) else None
        if isinstance(receipts, list):
            for number, inner in enumerate(receipts):
                yield where if len(receipts) == 1 else f"{where}, receipt {number}", inner


def _read(document: Any, name: str) -> FoundReceipt:
    envelope = None
    try:
        if not isinstance(document, dict) or "payloadType" not in document:
            return FoundReceipt(name, read(document, name))
        envelope = Envelope.read(document, name)
        receipt = parse(envelope.payload, name)
        if receipt.to_bytes() != envelope.payload:
            raise FormatError(f"{name}: the payload is not in canonical form")
        return FoundReceipt(name, receipt, envelope)
    except FormatError as error:
        return FoundReceipt(name, None, envelope, str(error))
