"""Answer a file of requests in OpenAI's batch format, with the scheduler that the server uses.

A row of the input is {"custom_id", "method": "POST", "url", "body"}; a row of the output is {"id", "custom_id", "response",
"error"}. Each output row is written as soon as its response is complete, and is flushed to disk before the next row is written.
If the process is killed, only the last line of the output can be incomplete. The next run removes an incomplete line, and
then computes only the requests that have no row yet.
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
from gemma_py.generate.base_scheduler import Ticket
from gemma_py.generate.events import Event
from gemma_py.server.openai.builders import ResponseBuilder
from gemma_py.server.openai.endpoints import ENDPOINTS
from gemma_py.server.openai.errors import ApiError, api_error, checked
from gemma_py.server.openai.service import Service

_MAX_ROW = 64 << 20
_ROW_START = b'{"id": "batch_req_'  # of every row that is written
_HEALTH_SECONDS = 1.0  # after this time without an event, the engine's health is checked


@dataclass(frozen=True)
class InputRow:
    """A request in the input file. The request's line begins at byte `start` of the file and has `size` bytes."""

    custom_id: str
    url: str
    start: int
    size: int


@dataclass
class Counts:
    """The progress of a batch.

    rows: requests in the input
    before: rows written by earlier runs
    done: rows written by this run
    failed: rows written by this run that have an error instead of a response
    """

    rows: int
    before: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_rows(path: Path) -> list[InputRow]:
    rows: list[InputRow] = []
    lines: dict[str, int] = {}
    start = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_MAX_ROW + 1), b""), 1):
                if line.strip():
                    row = _row(line, start, f"{path}, line {number}")
                    if row.custom_id in lines:
                        first = lines[row.custom_id]
                        raise InputError(
                            f"{path}, line {number}: custom_id {row.custom_id!r:.60} is already used in line {first}"
                        )
                    lines[row.custom_id] = number
                    rows.append(row)
                start += len(line)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not rows:
        raise InputError(f"{path}: contains no requests")
    return rows


def _row(line: bytes, start: int, where: str) -> InputRow:
    if len(line) > _MAX_ROW:
        raise InputError(f"{where}: the line is longer than the limit of {_MAX_ROW} bytes")
    row = _object(line, where)
    name, url, method = row.get("custom_id"), row.get("url"), row.get("method", "POST")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: custom_id should be a non-empty string, found {name!r:.60}")
    if url not in ENDPOINTS or method != "POST":
        raise InputError(
            f"{where}: method and url should be POST and one of {', '.join(ENDPOINTS)}, found {method!r:.20} {url!r:.60}"
        )
    if not isinstance(row.get("body"), dict):
        raise InputError(f"{where}: body should be a JSON object, found {row.get('body')!r:.60}")
    return InputRow(name, url, start, len(line))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: the line is not valid JSON: {error.msg}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: the line is not valid JSON: {' '.join(str(error).split()):.120}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: the line should be a JSON object, found {document!r:.60}")
    return document


class Output:
    """The output file, as a context manager. A lock on the open file keeps other processes from writing to the file.

    done: the custom_ids of the rows that the file had when it was opened
    models: the names of the models that computed the rows in `done`
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.models: set[str] = set()
        try:
            self._file: BinaryIO = path.open("ab+")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror or error}") from None
        try:
            self.done = self._recover()
        except BaseException:
            self._file.close()
            raise

    def _recover(self) -> set[str]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{self._path}: another process is writing to this file") from None
        done, whole = set(), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            where = f"{self._path}, line {number}"
            no_output = InputError(f"{where}: the line is not a row of a batch's output; the file was not changed")
            if not line.endswith(b"\n"):
                begun = line.rstrip(b"\0")  # a file system may leave zeros at the end when the power fails
                if begun[: len(_ROW_START)] != _ROW_START[: len(begun)]:
                    raise no_output
                break
            row = _object(line, where)
            name, response = row.get("custom_id"), row.get("response")
            body = response.get("body") if isinstance(response, dict) else None
            if isinstance(body, dict) and isinstance(body.get("model"), str):
                self.models.add(body["model"])
            if not isinstance(name, str) or "response" not in row:  # a request has a custom_id too
                raise no_output
            done.add(name)
            whole += len(line)
        self._file.truncate(whole)
        return done

    def write(self, row: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error}; run the same command again to compute the remaining rows"
            ) from None

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


class _RunningRow:
    def __init__(self, row: InputRow, builder: ResponseBuilder) -> None:
        self.row, self.builder = row, builder
        self.tickets: list[Ticket] = []


def run(
    service: Service,
    source: Path,
    rows: list[InputRow],
    output: Output,
    progress: Callable[[Counts], None],
    receipts: bool = False,
) -> Counts:
    """Compute the rows that are missing in the output. Raise GemmaError if the engine fails or the disk is full.

    receipts: add a receipt to every response, even if the request does not ask for a receipt
    """
    unknown = output.done - {row.custom_id for row in rows}
    if unknown:
        raise InputError(
            f"the output has the custom_id {min(unknown)!r:.60}, which {source} does not contain: choose another output file"
        )
    others = output.models - {service.model}
    if others:
        raise InputError(
            f"the output has rows of the model {min(others)!r:.60}, not of {service.model!r}: choose another output file"
        )
    counts = Counts(len(rows), before=len(output.done))
    with source.open("rb") as file:
        batch = _Batch(service, file, output, counts, progress, receipts)
        try:
            batch.run(row for row in rows if row.custom_id not in output.done)
        finally:
            batch.cancel()
    return counts


class _Batch:
    def __init__(
        self,
        service: Service,
        file: BinaryIO,
        output: Output,
        counts: Counts,
        progress: Callable[[Counts], None],
        receipts: bool,
    ) -> None:
        self._service, self._file, self._output, self._receipts = service, file, output, receipts
        self._counts, self._progress = counts, progress
        self._events: queue.SimpleQueue[tuple[_RunningRow, int, Event]] = queue.SimpleQueue()
        self._running: set[_RunningRow] = set()

    def run(self, rows: Iterator[InputRow]) -> None:
        self._progress(self._counts)
        for row in rows:
            # Keep one row waiting in the scheduler, so that the scheduler can start this row as soon as a running row ends.
            while len(self._running) > self._service.scheduler.parallel:
                self._take()
            self._begin(row)
        while self._running:
            self._take()

    def cancel(self) -> None:
        for running in self._running:
            for ticket in running.tickets:
                ticket.cancel()

    def _begin(self, row: InputRow) -> None:
        self._file.seek(row.start)
        body = _object(self._file.read(row.size), row.custom_id)["body"]
        try:
            running = _RunningRow(row, self._builder(row, body))
        except GemmaError as error:
            self._write_error(row, error)
            return
        self._running.add(running)
        try:
            self._submit(running)
        except GemmaError as error:
            self._fail(running, error)

    def _builder(self, row: InputRow, body: dict[str, Any]) -> ResponseBuilder:
        endpoint = ENDPOINTS[row.url]
        asked = checked(endpoint.schema, body | {"receipt": True} if self._receipts else body)
        if asked.stream:
            raise ApiError(400, "A request in a batch cannot have 'stream': true.", "stream", "unsupported_parameter")
        return endpoint.response(self._service, asked)

    def _submit(self, running: _RunningRow) -> None:
        for index, request in enumerate(running.builder.job.requests):
            while len(running.tickets) == index:
                try:
                    running.tickets.append(self._service.scheduler.submit(request, partial(self._put, running, index)))
                except Overloaded:
                    if index == 0 and len(self._running) == 1:
                        raise
                    self._take()
                    if running not in self._running:  # another choice of this row failed during `_take`
                        return

    def _put(self, running: _RunningRow, index: int, event: Event) -> None:
        """Queue an event. The scheduler calls this in one of its threads."""
        self._events.put((running, index, event))

    def _take(self) -> None:
        """Handle the next event. If no event arrives within _HEALTH_SECONDS, check the engine's health."""
        try:
            running, index, event = self._events.get(timeout=_HEALTH_SECONDS)
        except queue.Empty:
            self._check_healthy()
            return
        if running not in self._running:  # another choice of this row has failed
            return
        try:
            for _ in running.builder.take(index, event):
                pass
        except GemmaError as error:
            self._fail(running, error)
            return
        if running.builder.done:
            self._end(running)
            usage = running.builder.usage()
            self._counts.prompt_tokens += usage["prompt_tokens"]
            self._counts.completion_tokens += usage["total_tokens"] - usage["prompt_tokens"]
            self._write(running.row, 200, running.builder.document(), None)

    def _end(self, running: _RunningRow) -> None:
        self._running.discard(running)
        for ticket in running.tickets:
            ticket.cancel()

    def _fail(self, running: _RunningRow, error: GemmaError) -> None:
        self._check_healthy()
        self._end(running)
        self._write_error(running.row, error)

    def _check_healthy(self) -> None:
        """Raise ComputationError if the engine has failed. A failure of the engine must not be written as a row's error.

        While a lost shard or replica is being replaced, the engine is not ok, but has not failed.
        """
        health = self._service.scheduler.health()
        if health.permanent:
            raise ComputationError(
                f"the engine has failed: {health.why}; run the same command again to compute the remaining rows"
            )

    def _write_error(self, row: InputRow, error: GemmaError) -> None:
        refusal = api_error(error, ENDPOINTS[row.url].prompt_field)
        document = refusal.document()
        self._counts.failed += 1
        self._write(
            row, refusal.status, document, {name: document["error"][name] for name in ("code", "message", "param")}
        )

    def _write(self, row: InputRow, status: int, body: dict[str, Any], error: dict[str, Any] | None) -> None:
        name = uuid.uuid4().hex
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        self._output.write(
            {"id": f"batch_req_{name}", "custom_id": row.custom_id, "response": response, "error": error}
        )
        self._counts.done += 1
        self._progress(self._counts)
