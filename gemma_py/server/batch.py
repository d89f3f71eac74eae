"""Many requests from a file, in OpenAI's batch form, through the same scheduler as the server's.

A row of the input is {"custom_id", "method": "POST", "url", "body"}; of the output {"id", "custom_id", "response", "error"}, in
the order in which answers are complete. Each is written whole, at once and in one piece, before the next is begun; so after a
kill there is at most one torn line at the end, which is dropped, and rows that are there are not computed again.
"""

import fcntl
import json
import os
import queue
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from gemma_py.errors import ComputationError, GemmaError, InputError, Overloaded
from gemma_py.generate.events import Event
from gemma_py.generate.scheduler import Ticket
from gemma_py.server.answers import Answer, ChatAnswer, CompletionAnswer
from gemma_py.server.errors import ApiError, checked, from_engine
from gemma_py.server.responses import ResponsesAnswer
from gemma_py.server.schemas import ChatRequest, CompletionRequest, ResponsesRequest
from gemma_py.server.service import Service

_LARGEST_ROW = 64 << 20  # bytes
_PATIENCE = 1.0  # seconds between looks at the engine's health


@dataclass(frozen=True)
class Row:
    """Where a request stands in the file."""

    custom_id: str
    url: str
    start: int
    size: int


@dataclass
class Counts:
    """rows: of the file. before: those that an earlier run has done. failed: of this run's, with an error."""

    rows: int
    before: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_rows(path: Path) -> list[Row]:
    """Checked before anything is computed: whatever has no name could not be found again."""
    rows: list[Row] = []
    lines: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LARGEST_ROW + 1), b""), 1):
                if line.strip():
                    row = _row(line, start, f"{path}, line {number}")
                    if row.custom_id in lines:
                        first = lines[row.custom_id]
                        raise InputError(
                            f"{path}, line {number}: custom_id {row.custom_id!r:.60} stands in line {first} too"
                        )
                    lines[row.custom_id] = number
                    rows.append(row)
                start += len(line)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise InputError(f"{path}: holds no requests")
    return rows


def _row(line: bytes, start: int, where: str) -> Row:
    if len(line) > _LARGEST_ROW:
        raise InputError(f"{where}: longer than {_LARGEST_ROW} bytes")
    row = _object(line, where)
    name, url, method = row.get("custom_id"), row.get("url"), row.get("method", "POST")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: custom_id should be a name of its own, found {name!r:.60}")
    if url not in _KINDS or method != "POST":
        raise InputError(f"{where}: should be a POST to one of {', '.join(_KINDS)}, found {method!r:.20} {url!r:.60}")
    if not isinstance(row.get("body"), dict):
        raise InputError(f"{where}: body should be a request, found {row.get('body')!r:.60}")
    return Row(name, url, start, len(line))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON: {' '.join(str(error).split()):.120}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: should be a JSON object, found {document!r:.60}")
    return document


class Output:
    """The file of answers, which belongs to one process at a time. A context manager.

    done: the custom_ids whose rows are complete; a torn last line is dropped. models: that answered them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.models: set[str] = set()
        try:
            self._file: BinaryIO = path.open("ab+")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error}") from None
        try:
            self.done = self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> set[str]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self._path}: another process is writing it") from None
        done, whole = set(), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            if not line.endswith(b"\n"):
                break
            where = f"{self._path}, line {number}"
            row = _object(line, where)
            name, response = row.get("custom_id"), row.get("response")
            body = response.get("body") if isinstance(response, dict) else None
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                self.models.add(body["model"])
            if not isinstance(name, str):
                raise InputError(f"{where}: no answer of a batch; nothing was changed")
            done.add(name)
            whole += len(line)
        self._file.truncate(whole)
        return done

    def write(self, row: dict[str, Any]) -> None:
        """On the disk when this returns."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error}; what is in it counts at the next run"
            ) from None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class _Work:
    """A row that is being computed."""

    def __init__(self, row: Row, answer: Answer) -> None:
        self.row, self.answer = row, answer
        self.tickets: list[Ticket] = []


def run(service: Service, source: Path, rows: list[Row], output: Output, progress: Callable[[Counts], None]) -> Counts:
    """Compute what is not done yet. GemmaError if the engine fails or the disk is full; what is written stays."""
    strange = output.done - {row.custom_id for row in rows}
    if strange:
        raise InputError(f"the output holds {min(strange)!r:.60}, which {source} does not ask for: another batch's?")
    others = output.models - {service.model}
    if others:
        raise InputError(
            f"the output holds answers of {min(others)!r:.60}, and this is {service.model!r}: take another file"
        )
    counts = Counts(len(rows), before=len(output.done))
    with source.open("rb") as file:
        batch = _Batch(service, file, output, counts, progress)
        try:
            batch.run(row for row in rows if row.custom_id not in output.done)
        finally:
            batch.cancel()
    return counts


class _Batch:
    def __init__(
        self, service: Service, file: BinaryIO, output: Output, counts: Counts, progress: Callable[[Counts], None]
    ) -> None:
        self._service, self._file, self._output = service, file, output
        self._counts, self._progress = counts, progress
        self._events: queue.SimpleQueue[tuple[_Work, int, Event]] = queue.SimpleQueue()
        self._running: set[_Work] = set()

    def run(self, rows: Iterator[Row]) -> None:
        self._progress(self._counts)
        for row in rows:
            while len(self._running) > self._service.scheduler.parallel:  # one more, so that no place is ever empty
                self._take()
            self._begin(row)
        while self._running:
            self._take()

    def cancel(self) -> None:
        for work in self._running:
            for ticket in work.tickets:
                ticket.cancel()

    def _begin(self, row: Row) -> None:
        self._file.seek(row.start)
        body = _object(self._file.read(row.size), row.custom_id)["body"]
        try:
            work = _Work(row, self._answer(row, body))
        except ApiError as error:
            self._write_error(row, error)
            return
        self._running.add(work)
        try:
            self._submit(work)
        except GemmaError as error:
            self._fail(work, from_engine(error, work.answer.job.param))

    def _answer(self, row: Row, body: dict[str, Any]) -> Answer:
        schema, prepare, kind = _KINDS[row.url]
        asked = checked(schema, body)
        if asked.stream:
            raise ApiError(400, "A batch has no streams.", "stream", "unsupported_parameter")
        self._service.check_model(asked.model)
        return kind(self._service, prepare(self._service, asked), asked)

    def _submit(self, work: _Work) -> None:
        """When the scheduler has no room, what runs comes first; what there will never be room for is an error."""
        for index, request in enumerate(work.answer.job.requests):
            while len(work.tickets) == index:
                try:
                    work.tickets.append(self._service.scheduler.submit(request, partial(self._tell, work, index)))
                except Overloaded:
                    if index == 0 and len(self._running) == 1:
                        raise
                    self._take()
                    if work not in self._running:  # one of its choices has failed meanwhile
                        return

    def _tell(self, work: _Work, index: int, event: Event) -> None:
        """Called from the scheduler's thread."""
        self._events.put((work, index, event))

    def _take(self) -> None:
        """An event, or nothing for a while."""
        try:
            work, index, event = self._events.get(timeout=_PATIENCE)
        except queue.Empty:
            self._insist()
            return
        if work not in self._running:  # one of its choices has failed
            return
        try:
            for _ in work.answer.take(index, event):
                pass
        except ApiError as error:
            self._fail(work, error)
            return
        if work.answer.done:
            self._end(work)
            usage = work.answer.usage()
            self._counts.prompt_tokens += usage["prompt_tokens"]
            self._counts.completion_tokens += usage["completion_tokens"]
            self._write(work.row, 200, work.answer.document(), None)

    def _end(self, work: _Work) -> None:
        self._running.discard(work)
        for ticket in work.tickets:
            ticket.cancel()

    def _fail(self, work: _Work, error: ApiError) -> None:
        self._insist()
        self._end(work)
        self._write_error(work.row, error)

    def _insist(self) -> None:
        """An engine that has failed says nothing about a row."""
        health = self._service.scheduler.health()
        if not health.ok:
            raise ComputationError(f"the engine has failed: {health.why}; the finished rows count at the next run")

    def _write_error(self, row: Row, error: ApiError) -> None:
        document = error.document()
        self._counts.failed += 1
        self._write(
            row, error.status, document, {name: document["error"][name] for name in ("code", "message", "param")}
        )

    def _write(self, row: Row, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> None:
        name = uuid.uuid4().hex
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        self._output.write(
            {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response, "error": error}
        )
        self._counts.done += 1
        self._progress(self._counts)


_KINDS: dict[str, tuple[Any, Callable[..., Any], Callable[..., Answer]]] = {
    "/v1/chat/completions": (ChatRequest, Service.chat, ChatAnswer),
    "/v1/completions": (CompletionRequest, Service.completion, CompletionAnswer),
    "/v1/responses": (ResponsesRequest, Service.responses, ResponsesAnswer),
}
