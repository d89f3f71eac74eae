"""POST /v1/audit: check receipts with the served model, and stream the results as JSON lines.

{"type": "receipt", "receipt", "name", "prompt_tokens", "pieces", "signature"}      the first line of each receipt
{"type": "tokens", "receipt", "count"}                                               `count` more tokens were checked and are equal
{"type": "verdict", "receipt", "verdict", "stage", "token", "position", "message", "prompt_tokens", "tokens"}
{"type": "error", "message"}                                                         the engine has failed
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.concurrency import iterate_in_threadpool

from gemma_py.checks.audit import DIVERGED, Audited, Auditor, Verdict
from gemma_py.errors import GemmaError
from gemma_py.receipts.sources import FoundReceipt, receipts_in
from gemma_py.server.openai.constraint import piece_bytes
from gemma_py.server.openai.described_constraint import constraint_maker
from gemma_py.server.openai.errors import ApiError
from gemma_py.server.openai.service import Service

MOST_RECEIPTS = 64  # limit for one request


class Audits:
    """Audits the receipts of one HTTP request at a time. Running requests continue between the audit's forward passes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._working = asyncio.Lock()
        self._auditor: Auditor | None = None

    async def lines(self, body: bytes) -> AsyncIterator[bytes]:
        async with self._working:
            async for event in iterate_in_threadpool(self._events(body)):
                yield json.dumps(event, ensure_ascii=False).encode("utf-8", "replace") + b"\n"

    def _events(self, body: bytes) -> Iterator[dict[str, Any]]:
        try:
            found = list(receipts_in(body, ""))
            if len(found) > MOST_RECEIPTS:
                raise ApiError(400, f"A request may have at most {MOST_RECEIPTS} receipts, found {len(found)}.")
            for number, entry in enumerate(found):
                yield self._begin(number, entry)
            for number, entry in enumerate(found):
                if entry.receipt is None:
                    yield _told(number, entry, Verdict(DIVERGED, entry.problem, "structure"))
            sound = [(number, entry) for number, entry in enumerate(found) if entry.receipt is not None]
            if self._auditor is None:
                engine = self._service.engine
                self._auditor = Auditor(engine, constraint_maker(engine), alone=False)
            receipts = [entry.receipt for _, entry in sound if entry.receipt is not None]
            for event in self._auditor.audit(receipts, [entry.shown for _, entry in sound]):
                number, entry = sound[event.receipt]
                if isinstance(event, Audited):
                    yield _told(number, entry, event.verdict)
                else:
                    yield {"type": "tokens", "receipt": number, "count": len(event.texts)}
        except GemmaError as error:
            yield {"type": "error", "message": str(error)}

    def _begin(self, number: int, entry: FoundReceipt) -> dict[str, Any]:
        receipt, tokenizer = entry.receipt, self._service.tokenizer
        answer = () if receipt is None else receipt.answer
        return {
            "type": "receipt", "receipt": number, "name": entry.name,
            "prompt_tokens": 0 if receipt is None else len(receipt.prompt),
            "pieces": [piece_bytes(tokenizer, token).decode("utf-8", "replace") for token in answer],
            "signature": "none" if entry.envelope is None else "not checked",
        }  # fmt: skip


def _told(number: int, entry: FoundReceipt, verdict: Verdict) -> dict[str, Any]:
    receipt = entry.receipt
    return {
        "type": "verdict", "receipt": number, "verdict": verdict.kind, "stage": verdict.stage, "token": verdict.token,
        "position": verdict.position, "message": verdict.message,
        "prompt_tokens": 0 if receipt is None else len(receipt.prompt),
        "tokens": 0 if receipt is None else len(receipt.answer),
    }  # fmt: skip
