"""Reading of receipts from files: alone, in a signed envelope, or in the responses of a server or a batch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gemma_py.errors import FormatError
from gemma_py.formats.files import parse_json, read_bytes
from gemma_py.receipts.envelope import Envelope
from gemma_py.receipts.receipt import Receipt, parse, read
from gemma_py.receipts.shown import ShownField, StreamedAnswers, shown_fields

LIMIT = 64 << 20  # the most bytes of a file
_MOST_SHOWN = 200


class FoundReceipt(NamedTuple):
    """A receipt in a file, or the reason why it cannot be read.

    envelope: None for a receipt that is not signed. shown: the fields of the response that show the receipt's answer.
    missing: True if the file holds no receipt, False if the file holds a receipt that cannot be read.
    """

    name: str
    receipt: Receipt | None
    envelope: Envelope | None = None
    error: str = ""
    shown: Sequence[ShownField] = ()
    missing: bool = False

    @property
    def problem(self) -> str:
        return f"{'holds no receipt' if self.missing else 'structure'}: {self.error.removeprefix(f'{self.name}: ')}"


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
            yield FoundReceipt(where, None, error=str(error)[:_MOST_SHOWN], missing=True)
            return
        documents = []
        for number, line in lines:
            name = f"{where}, line {number}"
            try:
                documents.append((name, parse_json(line, name)))
            except FormatError as wrong:
                yield FoundReceipt(name, None, error=str(wrong)[:_MOST_SHOWN], missing=True)
    streams: dict[str, StreamedAnswers] = {}
    found = [receipt for name, document in documents for receipt in _receipts(document, name, streams)]
    for key, stream in streams.items():
        if stream.ended and stream.fields():
            message = f"{where}: the response {key!r:.80} has chunks after the receipts, which end a stream"
            found.append(FoundReceipt(where, None, error=message))
    if not found and documents:
        message = f"{where}: the file is neither a receipt nor a response with receipts"
        yield FoundReceipt(where, None, error=message, missing=True)
    yield from found


def _receipts(document: Any, where: str, streams: dict[str, StreamedAnswers]) -> Iterator[FoundReceipt]:
    """Yield the receipts within a document.

    streams: by response id, the answers in the chunks of earlier lines. The last chunk of a stream has the receipts.
    """
    if not isinstance(document, dict):
        return
    if "_type" in document or "payloadType" in document:
        yield _read(document, where)
    response = document.get("response")
    levels = {"": document, "response.": response}
    levels["response.body."] = response.get("body") if isinstance(response, dict) else None
    responses = {prefix: level for prefix, level in levels.items() if isinstance(level, dict)}
    shown: dict[int, list[ShownField]] = {}
    for prefix, level in responses.items():
        _extend(shown, shown_fields(level, prefix))
    key = document.get("id")
    if isinstance(key, str) and isinstance(document.get("choices"), list):
        stream = streams.setdefault(key, StreamedAnswers())
        stream.add(document)
        if "receipts" in document:
            _extend(shown, stream.fields())
            streams[key] = StreamedAnswers(ended=True)
    for level in responses.values():
        receipts = level.get("receipts")
        if not isinstance(receipts, list):
            continue
        for number, inner in enumerate(receipts):
            name = where if len(receipts) == 1 else f"{where}, receipt {number}"
            yield _read(inner, name)._replace(shown=tuple(shown.get(number, ())))
        more = [number for number in shown if number >= len(receipts)]
        if more:
            yield FoundReceipt(where, None, error=f"{where}: choices[{min(more)}] has no receipt")


def _extend(shown: dict[int, list[ShownField]], more: dict[int, list[ShownField]]) -> None:
    for number, fields in more.items():
        shown.setdefault(number, []).extend(fields)


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
