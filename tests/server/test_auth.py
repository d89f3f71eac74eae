import errno
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from repository import TINY
from serving import Running, serving

import gemma_py
from gemma_py.errors import InputError
from gemma_py.server.auth import OPEN, Auth, Keys, is_loopback

Run = Callable[..., tuple[int, str, str]]
KEY, OTHER, LETTERS = "k" * 32, "o" * 32, "clé secrète de là-bas, là"
ROUTES = (
    ("GET", "/"), ("GET", "/audit"), ("GET", "/health"), ("GET", "/metrics"), ("GET", "/openapi.json"), ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"), ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/v1/responses"),
    ("POST", "/tokenize"), ("POST", "/detokenize"), ("POST", "/v1/audit"), ("GET", "/nothing"),
)  # fmt: skip


@pytest.fixture(scope="module")
def locked(tiny_engine: gemma_py.Engine) -> Iterator[Running]:
    with serving(tiny_engine, keys=[OTHER, LETTERS, KEY], origins=["https://friend.example"]) as running:
        yield running


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_the_key(locked: Running, method: str, path: str) -> None:
    body: object = {} if method == "POST" else None
    for given in (
        {},
        {"Authorization": f"Bearer {KEY[:-1]}x"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
    ):
        status, document, headers = locked.request(method, path, body, given)
        if path in OPEN:
            assert status == 200
        else:
            assert (status, document["error"]["code"], headers["WWW-Authenticate"]) == (
                401,
                "invalid_api_key",
                "Bearer",
            )
    status, _, _ = locked.request(method, path, body, {"Authorization": f"Bearer {KEY}"})
    assert status != 401


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "10.0.0.1"}, {"Host": ""}, {"Host": "[::1"},
        {"Host": "localhost@evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"}, {"Origin": "http://[::1"},
    ],
)  # fmt: skip
def test_every_route_refuses_forged_headers(server: Running, method: str, path: str, headers: dict[str, str]) -> None:
    status, document, _ = server.request(method, path, {} if method == "POST" else None, headers)
    assert status == 403
    assert document["error"]["code"] == ("forbidden_host" if "Host" in headers else "forbidden_origin")


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: localhost\r\n"])
def test_a_request_needs_exactly_one_host(server: Running, hosts: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(f"GET /health HTTP/1.1\r\n{hosts}\r\n".encode())
        assert b" 400 " in connection.recv(4096)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 403 " in connection.recv(4096)


def test_its_own_host_names_and_pages_are_allowed(server: Running) -> None:
    for host in (f"localhost:{server.port}", "LOCALHOST", f"127.0.0.1:{server.port}", "[::1]"):
        assert server.request("GET", "/v1/models", headers={"Host": host, "Origin": f"http://{host}"})[0] == 200


def test_a_public_server_allows_its_addresses_and_names_but_no_other_host(tiny_engine: gemma_py.Engine) -> None:
    with serving(tiny_engine, host="0.0.0.0", names=["Gemma.example"]) as running:
        for host, status in (("10.1.2.3:80", 200), ("[fe80::1]", 200), ("gemma.example", 200), ("evil.example", 403)):
            assert running.request("GET", "/v1/models", headers={"Host": host})[0] == status


def test_pages_of_other_sites_must_be_allowed(locked: Running, server: Running) -> None:
    friend, stranger = {"Origin": "https://friend.example"}, {"Origin": "https://stranger.example"}
    wanted = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    status, _, headers = locked.request("OPTIONS", "/v1/completions", headers={**friend, **wanted})
    assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://friend.example")
    status, _, headers = locked.request("OPTIONS", "/v1/completions", headers={**stranger, **wanted})
    assert status == 400 and headers["Access-Control-Allow-Origin"] is None
    key = {"Authorization": f"Bearer {KEY}"}
    _, _, headers = locked.request("GET", "/v1/models", headers={**friend, **key})
    assert headers["Access-Control-Allow-Origin"] == "https://friend.example"
    assert locked.request("GET", "/v1/models", headers={**stranger, **key})[0] == 403
    _, _, headers = server.request("GET", "/v1/models")
    assert headers["Access-Control-Allow-Origin"] is None


def test_a_key_file_holds_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"\n  {KEY}  \n\n{OTHER}\n")
    keys = Keys.read(file)
    assert keys.hold(KEY.encode()) and keys.hold(OTHER.encode()) and not keys.hold(b"") and not keys.hold(b"k" * 31)
    for content in ("", "\n\n", "short\n"):
        file.write_text(content)
        with pytest.raises(InputError, match="one key on each line"):
            Keys.read(file)
    with pytest.raises(InputError, match="cannot be read"):
        Keys.read(tmp_path / "none")


def test_a_key_may_have_any_letters(locked: Running) -> None:
    """HTTP headers are bytes, so the key is compared as bytes."""
    given = {"Authorization": "Bearer " + LETTERS.encode().decode("latin-1")}
    assert locked.request("GET", "/v1/models", headers=given)[0] == 200


def test_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return a == b

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert Keys([KEY, OTHER]).hold(KEY.encode())
    # Every key is compared, even after one matched.
    assert len(compared) == 2 and {len(digest) for digest in compared} == {32}


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "")))


def test_host_names_ignore_case() -> None:
    async def app(*_: object) -> None: ...

    auth = Auth(app, "MyBox.Local", ["Gemma.Example"], [], Keys())
    assert all(auth._is_ours(host) for host in ("mybox.local:8080", "MYBOX.LOCAL", "gemma.example"))
    assert not auth._is_ours("other.local")


def test_a_port_in_use_is_one_error(server: Running, run: Run) -> None:
    code, _, err = run("serve", TINY, "--port", server.port)
    assert (code, err) == (
        1,
        f"gemma_py: cannot listen on 127.0.0.1, port {server.port}: {os.strerror(errno.EADDRINUSE)}; --port 0 takes a free port\n",
    )


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o604, True)])
def test_a_key_file_that_others_can_read_gives_a_warning(
    server: Running, run: Run, tmp_path: Path, mode: int, warned: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef")
    keys.chmod(mode)
    _, _, err = run("serve", TINY, "--port", server.port, "--api-key-file", keys)
    assert (
        f"gemma_py: {keys}: other users of this machine can read this file; protect it with chmod 600" in err
    ) == warned
