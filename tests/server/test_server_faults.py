"""Clients that disconnect, stall, or send invalid or too many requests; signals; a failing engine. See also
tools/load.py.
"""

import contextlib
import json
import random
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import TINY
from serving import Process, Running, idle, serving, wait_until

import gemma_py
from gemma_py.server import http, streaming
from gemma_py.server.process import MAX_HEADERS
from gemma_py.server.protocol import LimitedProtocol

SHORT = {"prompt": "a", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def impatient(tiny_engine: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(LimitedProtocol, "header_seconds", 0.3)
    monkeypatch.setattr(LimitedProtocol, "write_seconds", 0.3)
    monkeypatch.setattr(http, "BODY_SECONDS", 0.3)
    with serving(tiny_engine) as running:
        yield running


def is_closed(connection: socket.socket) -> bool:
    """Wait until the other side closes the connection."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_clients_that_leave_free_their_places(server: Running) -> None:
    _, want = server.post("/v1/completions", **SHORT)
    rng = random.Random(1)
    for number in range(60):
        asked = {
            "messages": [{"role": "user", "content": "x" * rng.choice((1, 3000))}],
            "max_tokens": 3000,
            "stream": number % 3 > 0,
        }
        body = json.dumps(asked).encode()
        with server.send(
            "POST", "/v1/chat/completions", body[: rng.choice((len(body), len(body), 20))], len(body)
        ) as connection:
            time.sleep(rng.random() * 0.03)
            if number % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    wait_until(lambda: idle(server))
    _, got = server.post("/v1/completions", **SHORT)
    assert got["choices"] == want["choices"]


def test_a_client_that_leaves_stops_the_computation(server: Running) -> None:
    before = server.scheduler.stats().computed_tokens
    with server.open_stream(4000):
        assert not idle(server)
    wait_until(lambda: idle(server))
    assert server.scheduler.stats().computed_tokens - before < 2000


def test_disconnects_do_not_change_other_responses(server: Running) -> None:
    asked = {"prompt": "The list", "max_tokens": 60, "seed": 7, "temperature": 1}
    _, alone = server.post("/v1/completions", **asked)
    leaving = [server.open_stream(3000, f"{number}") for number in range(3)]
    body = json.dumps(asked).encode()
    with server.send("POST", "/v1/completions", body) as connection:
        for stream in leaving:
            stream.close()
        answer = b""
        while b'"usage"' not in answer:
            answer += connection.recv(1 << 16)
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"] == alone["choices"]


def test_slow_headers_lose_the_connection(impatient: Running) -> None:
    with (
        socket.create_connection(("127.0.0.1", impatient.port), timeout=30) as silent,
        impatient.send("GET", "/health", b"") as second,
    ):
        second.recv(4096)
        # Later requests on a connection have the same time limit as the first.
        second.sendall(b"GET /health HTTP/1.1\r\n")
        for number in range(3):
            time.sleep(0.05)
            second.sendall(f"X-{number}: y\r\n".encode())
        assert is_closed(silent) and is_closed(second)


def test_a_slow_body_gets_an_error(impatient: Running) -> None:
    with impatient.send("POST", "/v1/completions", b'{"prompt"', 100) as connection:
        assert b" 408 " in connection.recv(4096)
    assert idle(impatient)


def test_a_reader_that_stalls_loses_the_connection(impatient: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "encode_events", lambda documents, typed: b"data: " + b"x" * (1 << 20) + b"\n\n")
    with impatient.open_stream(3000):
        wait_until(lambda: idle(impatient))


def test_a_slow_answer_sends_keep_alive_comments(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.001)
    asked = {"messages": [{"role": "user", "content": "word " * 1500}], "stream": True, "max_tokens": 1}
    _, text, _ = server.request("POST", "/v1/chat/completions", asked)
    assert ": still here\n\n" in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit(server: Running, chunked: bool) -> None:
    size = http.MAX_BODY + 1
    if chunked:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(f"{size:x}\r\n".encode() + b" " * size + b"\r\n")
    else:
        connection = server.send("POST", "/v1/completions", b"", size)
    with connection:
        answer = connection.recv(4096)
        while b"}}" not in answer:
            answer += connection.recv(4096)
    assert b" 413 " in answer and b"request_too_large" in answer
    wait_until(lambda: idle(server))


def test_headers_beyond_the_limit(server: Running) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (MAX_HEADERS + 1))
        assert b" 400 " in connection.recv(4096)


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"\0" * 5000, b"GET / HTTP/1\r\n\r\n"]
)
def test_invalid_http_is_refused(server: Running, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(nonsense)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(4096)
    assert answer == b"" or b" 400 " in answer
    assert server.request("GET", "/health")[0] == 200


def test_an_invalid_body_after_the_response_ends_the_connection(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """A client that repeats this does not fill the log."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"POST /none HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n")
        assert b" 404 " in connection.recv(4096)
        connection.sendall(b"no length\r\n")
        assert is_closed(connection)
    assert not caplog.records


def test_an_exception_in_a_handler_reveals_no_details(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.service, "check_model", lambda wanted: 1 / 0)
    status, document = server.post("/tokenize", content="x")
    assert status == 500 and "ZeroDivision" not in json.dumps(document)


# --- the process ------------------------------------------------------------------------------------------------------


def rest(stream: socket.socket) -> bytes:
    with stream:
        text = b""
        while part := stream.recv(1 << 16):
            text += part
        return text


@pytest.mark.parametrize("drain", ["60", "0"])
def test_sigterm_lets_streams_end_until_the_deadline(drain: str) -> None:
    with Process("--drain", drain) as process:
        streams = [process.open_stream(600 if drain == "60" else 4000) for _ in range(3)]
        process.child.send_signal(signal.SIGTERM)
        for text in map(rest, streams):
            assert b"data: [DONE]" in text
            assert (b'"error":{' in text) == (drain == "0")
            assert (b'"finish_reason":"length"' in text) == (drain == "60")
        assert process.end() == (0, "")
        assert process.said.startswith(f"shutting down: waiting up to {drain} s for running requests: 3;")
        assert process.said.endswith(f"ended; requests cut off: {0 if drain == '60' else 3}\n")
        with pytest.raises(ConnectionRefusedError):
            process.send("GET", "/health", b"")


def test_a_slow_client_gets_its_answer_while_the_server_ends() -> None:
    # The answer has 4 MB, more than the buffers of the sockets hold while nobody reads.
    asked = {"prompt": "abcdefgh" * 400, "echo": True, "logprobs": 5, "n": 4, "max_tokens": 1, "stream": True}
    with Process("--drain", "0") as process:
        stream = process.send("POST", "/v1/completions", json.dumps(asked).encode())
        assert b"200 OK" in stream.recv(100)
        wait_until(lambda: {"running": 0, "waiting": 0}.items() <= process.request("GET", "/health")[1].items())
        process.child.send_signal(signal.SIGTERM)
        time.sleep(3)
        text = rest(stream)
        assert text.count(b'"finish_reason":"length"') == 4 and b'"error":{' not in text
        assert process.end() == (0, "")


def test_programs_read_one_line_of_json() -> None:
    with Process("--json") as process:
        told = json.loads(process.ready)
        assert told == {"url": f"http://127.0.0.1:{process.port}", "model": "tiny-gemma3", "pid": process.child.pid}
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == (0, "") and process.said == ""


def test_a_second_signal_ends_it_at_once() -> None:
    with Process("--drain", "600") as process, process.open_stream(4000):
        process.child.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        process.child.send_signal(signal.SIGTERM)
        assert process.end()[0] == 128 + signal.SIGTERM


def test_ctrl_c_ends_the_server_with_exit_code_130() -> None:
    with Process() as process:
        process.child.send_signal(signal.SIGINT)
        assert process.end() == (130, "")


def continues_after_silent_clients(process: Process, count: int) -> None:
    """Let more clients connect than the server accepts. The server must go on, log one warning, and exit with 0."""
    held = [socket.create_connection(("127.0.0.1", process.port)) for _ in range(count)]
    time.sleep(0.2)
    for connection in held:
        connection.close()
    wait_until(lambda: process.request("GET", "/health")[0] == 200)
    assert process.post("/v1/completions", **SHORT)[0] == 200
    process.child.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == 0 and "new connections have to wait" in errors and errors.count("\n") == 1


def test_a_server_without_file_descriptors_continues_when_some_are_free() -> None:
    with Process() as process:
        files = len(list(Path(f"/proc/{process.child.pid}/fd").iterdir()))
        resource.prlimit(process.child.pid, resource.RLIMIT_NOFILE, (files + 3, files + 3))
        continues_after_silent_clients(process, 30)


def test_a_server_with_few_file_descriptors_serves_some_clients() -> None:
    few = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)); "
    with Process(program=["-c", few + "from gemma_py.cli.main import main; sys.exit(main(sys.argv[1:]))"]) as process:
        body = json.dumps(SHORT).encode()
        answers = list(map(rest, [process.send("POST", "/v1/completions", body, closing=True) for _ in range(200)]))
        served = [text for text in answers if b" 200 OK" in text and b'"usage"' in text]
        refused = [text for text in answers if b" 429 " in text and b"rate_limit_exceeded" in text]
        assert len(served) > 20 and len(served) + len(refused) == 200
        with contextlib.ExitStack() as streams:
            with pytest.raises(AssertionError, match=" 429 "):
                for _ in range(64):
                    streams.enter_context(process.open_stream(3000))
            assert process.request("GET", "/health")[0] == 200
        continues_after_silent_clients(process, 200)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "0.0.0.0"], "other machines can connect to 0.0.0.0"),
        (["--host", "203.0.113.1", "--open"], "cannot listen on 203.0.113.1"),
        (["--api-key-file", "nowhere"], "nowhere: cannot be read"),
        (["--port", "-1"], "whole number"),
        (["--port", "65536"], "should be a port number of at most 65535, found '65536'"),
        (["--host", ""], "should be a host name or an IP address, without a port"),
        (["--host", "[::1"], "should be a host name or an IP address, without a port"),
        (["--host", "[::]"], "other machines can connect to ::"),
        (["--allowed-host", "http://x"], "should be a host name or an IP address, without a port, found 'http://x'"),
        (["--allowed-host", "x:80"], "should be a host name or an IP address, without a port"),
        (["--cors", "*"], "should be an origin such as https://example.org, found '*'"),
        (["--cors", "example.org"], "should be an origin"),
        (["--cors", "https://Example.org"], "should be an origin"),
        (["--cors", "https://example.org/"], "should be an origin"),
        (["--cors", "https://[x"], "should be an origin"),
    ],
)
def test_wrong_options_of_serve_are_one_line(server: Running, run: object, arguments: list[str], said: str) -> None:
    taken = ("--port", server.port)  # if the arguments were accepted, the port in use would end the command
    code, out, err = run("serve", TINY, *taken, *arguments)  # type: ignore[operator]
    assert code in (1, 2) and out == "" and said in err and err.count("\n") == 1


# An engine that fails when CONDITION becomes true.
FAULTY = """
import functools, pathlib, sys, time
import gemma_py
from gemma_py.generate import base_scheduler, scheduler
from gemma_py.cli.main import main
from gemma_py.runtime.fault_injection import FaultPlan
gemma_py.load, step, fault = functools.partial(gemma_py.load, deadline=1.0), scheduler.Scheduler._step, sys.argv.pop()
if fault == "hang":
    base_scheduler.SLOWEST_STEP = 1.0
def faulty(self):
    if CONDITION and fault == "hang":
        time.sleep(3600)
    if CONDITION:
        self.engine.instruments.fault_plan = FaultPlan(fault=fault, worker=1)
    step(self)
scheduler.Scheduler._step = faulty
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("fault", "said"),
    [("raise", "worker 1 of 2"), ("stall", "worker 1 of 2"), ("hang", "no step has ended for"), ("", "")],
)
def test_if_the_engine_fails_all_clients_get_an_error_and_the_process_ends(
    fault: str, said: str, tmp_path: Path
) -> None:
    """Two requests run and two wait when the engine fails. In a control run without a failure, all four get their
    answers.
    """
    arguments = ("--threads", "2", "--parallel", "2", fault)
    now = tmp_path / "now"  # the engine fails when this file exists
    program = FAULTY.replace("CONDITION", f"pathlib.Path({str(now)!r}).exists()")
    with Process(*arguments, program=["-c", program]) as process, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(process.open_stream(3000 if fault else 60)) for _ in range(4)]
        if fault:
            now.touch()
            wait_until(lambda: process.request("GET", "/health")[0] == 503)
            status, document = process.post("/v1/completions", **SHORT)
            assert (status, document["error"]["code"]) == (503, "engine_failed")
            assert said in document["error"]["message"]
        else:
            assert process.request("GET", "/health")[0] == 200
            process.child.send_signal(signal.SIGTERM)
        for text in map(rest, streams):
            assert b"data: [DONE]" in text and (b'"error":{' in text and said.encode() in text) == bool(fault)
            assert (b'"finish_reason":"length"' in text) == (not fault)
        code, errors = process.end()
    assert code == bool(fault) and (f"the engine has failed: {said}" in errors) == bool(fault)


ONCE = """
import functools, sys, time
import gemma_py
from gemma_py.cli.main import main
from gemma_py.runtime.runner import Runner
from gemma_py.runtime.fault_injection import FaultPlan
from gemma_py.server import process
gemma_py.load, process._UNHEALTHY_TICKS, honest = functools.partial(gemma_py.load, deadline=1.0), 2, Runner.run_together
passes = 0
def stalls(self, parts):
    global passes
    passes += 1
    self.instruments.fault_plan = FaultPlan(fault="stall", worker=1) if passes == 4 else None
    if passes == 5:
        time.sleep(1)
    return honest(self, parts)
Runner.run_together = stalls
sys.exit(main(sys.argv[1:]))
"""


def test_all_streams_finish_although_a_worker_stalls_once() -> None:
    with Process("--threads", "2", program=["-c", ONCE]) as process, contextlib.ExitStack() as stack:
        for text in map(rest, [stack.enter_context(process.open_stream(60)) for _ in range(3)]):
            # "error" may also be a token of the answer.
            assert b'"finish_reason":"length"' in text and b'"error":{' not in text
        assert "gemma_py_failed_passes_total 1.0" in process.request("GET", "/metrics")[1]
        process.child.send_signal(signal.SIGTERM)
        assert process.end() == (0, "")


@pytest.mark.parametrize(
    ("fault", "drain", "said"), [("raise", "60", "worker 1 of 2"), ("hang", "0", "no step has ended for")]
)
def test_an_engine_that_stops_working_while_the_server_ends(fault: str, drain: str, said: str) -> None:
    program = FAULTY.replace("CONDITION", "not self._open")
    with Process("--threads", "2", "--drain", drain, fault, program=["-c", program]) as process:
        stream = process.open_stream(2000)
        process.child.send_signal(signal.SIGTERM)
        text = rest(stream)
        assert b'"error":{' in text and b"data: [DONE]" in text
        code, errors = process.end()
    assert code == 1 and f"the engine has failed: {said}" in errors


def test_an_engine_that_fails_ends_the_process_after_telling_all(tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(
        "import pathlib, sys\n"
        "from gemma_py.generate import scheduler\n"
        "from gemma_py.cli.main import main\n"
        "step = scheduler.Scheduler._step\n"
        "def fails(self):\n"
        "    step(self)\n"
        "    if pathlib.Path(__file__).with_name('now').exists():\n"
        "        raise RuntimeError('a fault for the test')\n"
        "scheduler.Scheduler._step = fails\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    with Process(program=[str(failing)]) as process:
        streams = [process.open_stream(4000) for _ in range(3)]
        (tmp_path / "now").touch()
        for text in map(rest, streams):
            assert b"a fault for the test" in text and b"data: [DONE]" in text
        code, errors = process.end()
    assert code == 1 and "the engine has failed" in errors
