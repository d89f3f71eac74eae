"""Answers many requests from a file, in OpenAI's batch form, through the same scheduler as the server.

A row of the input is {"custom_id", "method": "POST", "url", "body"}; a row of the output is {"id", "custom_id", "response",
"error"}. Rows are written in the order in which they are complete, each on the disk before the next one. After a kill the
output holds at most one torn line, at its end; the next run drops it, and does not compute the whole rows again.
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
from gemma_py.server.openai.builders import ResponseBuilder
from gemma_py.server.openai.endpoints import ENDPOINTS
from gemma_py.server.openai.errors import ApiError, api_error, checked
from gemma_py.server.openai.service import Service

_MAX_ROW = 64 << 20  # bytes
_HEALTH_SECONDS = 1.0  # between two looks at the engine's health, while no event arrives


@dataclass(frozen=True)
class InputRow:
    """Where one request stands in the file: its first byte and its length."""

    custom_id: str
    url: str
    start: int
    size: int


@dataclass
class Counts:
    """rows: all in the file. before: those that an earlier run completed. done: those of this run, of which `failed` have an error."""

    rows: int
    before: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


def read_rows(path: Path) -> list[InputRow]:
    """The rows of a file, all checked before anything is computed. Raises InputError about the first one that is malformed."""
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
        raise InputError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise InputError(f"{path}: contains no requests")
    return rows


def _row(line: bytes, start: int, where: str) -> InputRow:
    if len(line) > _MAX_ROW:
        raise InputError(f"{where}: longer than {_MAX_ROW} bytes")
    row = _object(line, where)
    name, url, method = row.get("custom_id"), row.get("url"), row.get("method", "POST")
    if not isinstance(name, str) or not name:
        raise InputError(f"{where}: custom_id should be a text that is not empty, found {name!r:.60}")
    if url not in ENDPOINTS or method != "POST":
        raise InputError(
            f"{where}: should be a POST to one of {', '.join(ENDPOINTS)}, found {method!r:.20} {url!r:.60}"
        )
    if not isinstance(row.get("body"), dict):
        raise InputError(f"{where}: body should be a JSON object, found {row.get('body')!r:.60}")
    return InputRow(name, url, start, len(line))


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not valid JSON: {' '.join(str(error).split()):.120}") from None
    if not isinstance(document, dict):
        raise InputError(f"{where}: should be a JSON object, found {document!r:.60}")
    return document


class Output:
    """The output file, which one process at a time may write. A context manager.

    done: the custom_ids of the rows that are complete. models: the models that these rows were computed with.
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
                raise InputError(f"{where}: not a row of a batch's output; the file was left as it is")
            done.add(name)
            whole += len(line)
        self._file.truncate(whole)
        return done

    def write(self, row: dict[str, Any]) -> None:
        """Appends a row, which is on the disk when this returns."""
        try:
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise InputError(
                f"{self._path}: cannot be written: {error}; the next run continues after the rows that are in it"
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
    service: Service, source: Path, rows: list[InputRow], output: Output, progress: Callable[[Counts], None]
) -> Counts:
    """Computes the rows that are not in the output yet. Raises GemmaError if the engine fails or the disk is full."""
    unknown = output.done - {row.custom_id for row in rows}
    if unknown:
        raise InputError(
            f"the output holds {min(unknown)!r:.60}, which {source} does not contain: it belongs to another batch"
        )
    others = output.models - {service.model}
    if others:
        raise InputError(
            f"the output was computed with {min(others)!r:.60}, not with {service.model!r}: choose another file"
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
        self._events: queue.SimpleQueue[tuple[_RunningRow, int, Event]] = queue.SimpleQueue()
        self._running: set[_RunningRow] = set()

    def run(self, rows: Iterator[InputRow]) -> None:
        self._progress(self._counts)
        for row in rows:
            while (
                len(self._running) > self._service.scheduler.parallel
            ):  # one more than run at once, so that one is always ready
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
        asked = checked(endpoint.schema, body)
        if asked.stream:
            raise ApiError(400, "A batch cannot stream.", "stream", "unsupported_parameter")
        self._service.check_model(asked.model)
        return endpoint.builder(self._service, asked)

    def _submit(self, running: _RunningRow) -> None:
        """Waits for running rows where the scheduler has no room. A row that does not fit even alone is an error."""
        for index, request in enumerate(running.builder.job.requests):
            while len(running.tickets) == index:
                try:
                    running.tickets.append(self._service.scheduler.submit(request, partial(self._put, running, index)))
                except Overloaded:
                    if index == 0 and len(self._running) == 1:
                        raise
                    self._take()
                    if running not in self._running:  # another of its choices has failed meanwhile
                        return

    def _put(self, running: _RunningRow, index: int, event: Event) -> None:
        """The scheduler calls this from its own thread."""
        self._events.put((running, index, event))

    def _take(self) -> None:
        """Handles the next event; if none arrives for a while, checks that the engine still works."""
        try:
            running, index, event = self._events.get(timeout=_HEALTH_SECONDS)
        except queue.Empty:
            self._check_healthy()
            return
        if running not in self._running:  # another of its choices has failed
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
            self._counts.completion_tokens += usage["completion_tokens"]
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
        """Raises if the engine has failed: then no row is at fault, and none is written as failed."""
        health = self._service.scheduler.health()
        if not health.ok:
            raise ComputationError(
                f"the engine has failed: {health.why}; the next run continues after the rows that are complete"
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
