"""Hosts of a Ray cluster. No other file imports Ray.

Ray starts processes on hosts, and carries messages. Whether a process is alive is decided here, because Ray reports a lost host
only after a minute, and a stopped process never.

    this process  --put(message)-->  the actor's inbox   -->  the job
                  <--get(seconds)--  the actor's outbox  <--  the job

One call of `get` is always under way. It returns when the job sends a message, or without one as a heartbeat.
"""

import atexit
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemma_py.cluster.channel import HEARTBEAT, Channel, Ended, Messages, RemoteJob
from gemma_py.cluster.hosts import Facts
from gemma_py.errors import InputError

_TOKEN, _PATH, _MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"
_TOKEN_FILE = Path(os.environ.get(_PATH) or Path.home() / ".ray" / "auth_token")
if _TOKEN in os.environ or _TOKEN_FILE.exists():
    # `ray start` uses a token if there is one, but a program does not. Ray reads this variable when it is imported.
    os.environ.setdefault(_MODE, "token")

import ray  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

_CONNECT = 8.0  # seconds in which a cluster should answer
# Seconds in which a host should say its facts. At first, all hosts are awaited. Later, when a process is to be replaced soon, one
# answer is awaited, and _OTHERS seconds for those of the other hosts.
_FIRST_ANSWER, _ANSWER, _OTHERS = 30.0, 8.0, 0.5
_END = 5.0  # seconds to wait for calls to Ray when this process ends
_HEARTBEAT = 1.0  # the longest time between heartbeats
_ORPHAN = 30.0  # seconds without `get` after which an actor ends, because the process that started it is gone
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).cluster_id"


_threads: list[threading.Thread] = []
_ending = threading.Event()  # set when this process is about to end


def _in_background(work: Any, *arguments: Any) -> None:
    """Call a function that uses Ray in a thread, which a process awaits before Ray is shut down."""
    _threads[:] = [thread for thread in _threads if thread.is_alive()]
    _threads.append(threading.Thread(target=work, args=arguments, name="gemma_py-ray", daemon=True))
    _threads[-1].start()


def _await_threads() -> None:
    _ending.set()
    until = time.monotonic() + _END
    for thread in _threads:
        thread.join(max(0.0, until - time.monotonic()))


def connect(address: str, allow_open: bool = False) -> "RayHosts":
    """Connect to a Ray cluster of which this machine is a host. address: HOST:PORT of its head

    allow_open: whether the cluster may lack token authentication
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"the address of a Ray cluster should be HOST:PORT, found {address!r:.80}")
    try:
        socket.create_connection((host, int(port)), _CONNECT).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {getattr(error, 'strerror', None) or error}") from None
    _check(address, allow_open)
    if not ray.is_initialized():
        # No option keeps Ray from printing the ends of processes to standard output, where this package prints answers.
        ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None
        handler = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(address, namespace="gemma_py", log_to_driver=False, logging_level=logging.CRITICAL)
        except Exception as error:  # Ray raises many kinds, with texts of several lines
            reason = " ".join(str(error).split())[:400]
            raise InputError(f"cannot join the Ray cluster at {address}: {reason}") from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # ray.init sets a handler of its own
        atexit.register(_await_threads)  # the function that is registered last is called first, before Ray's own
    return RayHosts()


def _check(address: str, allow_open: bool) -> None:
    """Raise InputError if no cluster answers at the address, if it refuses the token, or if it asks for none.

    Ray itself would try again for minutes. So other processes ask, which can be ended.
    """
    with _probe(address, dict(os.environ)) as mine, _probe(address, os.environ | {_MODE: "disabled"}) as without:
        until = time.monotonic() + _CONNECT
        refused = _outcome(mine, until)
        opened = _outcome(without, until)
    if refused == "token":
        raise InputError(
            f"the Ray cluster at {address} refuses the token; set {_TOKEN}, or copy ~/.ray/auth_token from another host"
        )
    if refused:
        raise InputError(f"no Ray cluster answers at {address}")
    if not opened and not allow_open:
        raise InputError(
            f"the Ray cluster at {address} asks for no token, so anyone who reaches it can run programs on its hosts; "
            f"start it with {_MODE}=token, or give --open"
        )


@contextlib.contextmanager
def _probe(address: str, environment: dict[str, str]) -> Any:
    command = [sys.executable, "-c", _PROBE, address]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _outcome(process: "subprocess.Popen[str]", until: float) -> str:
    """Return an empty string if the cluster answers, "token" if it refuses the token, and otherwise "silent"."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    assert process.stderr is not None

    def read(stream: Any = process.stderr) -> None:
        with contextlib.suppress(ValueError):  # the stream is closed when the process is no longer wanted
            for line in stream:
                lines.put(line)
            lines.put("")

    threading.Thread(target=read, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        try:
            line = lines.get(timeout=left)
        except queue.Empty:
            break
        if "Unauthenticated" in line or "AuthenticationError" in line:
            return "token"
        if not line:
            return "" if process.wait() == 0 else "silent"
    return "silent"


@dataclass(frozen=True)
class RayHost:
    """id: of Ray's node."""

    id: str
    name: str
    facts: Facts
    here: bool

    @property
    def memory(self) -> int | None:
        return self.facts.memory

    @property
    def threads(self) -> int | None:
        return self.facts.threads

    def start(self, deadline: float) -> Channel:
        return RayChannel(self.id, deadline)


class RayHosts:
    """The hosts of the cluster that `connect` joined."""

    patience = 120.0

    def __init__(self) -> None:
        self._asked = False

    def usable(self) -> Sequence[RayHost]:
        """Return the hosts that answer now: other machines first, and those with more memory first.

        The first call raises InputError if a host does not answer, or has no gemma_py. Later calls leave out such hosts.
        """
        alive, mine = _alive(), ray.get_runtime_context().get_node_id()
        found, names = _facts(alive, None, not self._asked), _names(alive)
        if not self._asked:
            for node in alive:
                if not isinstance(found[node], Facts):
                    raise InputError(f"{names[node]}: {found[node]}")
            self._asked = True
        hosts = [RayHost(id, names[id], told, id == mine) for id, told in found.items() if isinstance(told, Facts)]
        return sorted(hosts, key=lambda host: (host.here, -(host.memory or 0)))

    def ask(self, model: str | None) -> dict[str, Facts | str]:
        """Return each host's facts by its name, or an error text. model: see `facts`"""
        alive = _alive()
        found, names = _facts(alive, model, True), _names(alive)
        return {names[node]: found[node] for node in alive}


def _alive() -> dict[str, dict[str, Any]]:
    """Return Ray's table of the hosts that are alive, or were a minute ago, by their ids."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}


def _names(alive: dict[str, dict[str, Any]]) -> dict[str, str]:
    addresses = [node["NodeManagerAddress"] for node in alive.values()]
    return {
        id: node["NodeManagerAddress"]
        if addresses.count(node["NodeManagerAddress"]) == 1
        else f"{node['NodeManagerAddress']} ({id[:6]})"
        for id, node in alive.items()
    }


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node, soft=False)


def _facts(nodes: Sequence[str] | dict[str, Any], model: str | None, awaits_all: bool) -> dict[str, Facts | str]:
    """Return each host's facts, or an error text if the host does not answer in time or has no usable gemma_py."""
    if not nodes:
        return {}
    seconds = _FIRST_ANSWER if awaits_all else _ANSWER

    def facts_here(model: str | None) -> Any:
        try:
            from gemma_py.cluster.hosts import facts
        except ImportError as error:
            return f"gemma_py is not installed there: {error}"
        return facts(model)

    remote = ray.remote(num_cpus=0, max_retries=0)(facts_here)
    asked = {remote.options(scheduling_strategy=_on(node)).remote(model): node for node in nodes}
    ray.wait(list(asked), num_returns=len(asked) if awaits_all else 1, timeout=seconds)
    answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_OTHERS)
    made: dict[str, Facts | str] = dict.fromkeys(nodes, "no answer")
    for reference in answered:
        try:
            made[asked[reference]] = ray.get(reference)
        except ray.exceptions.RayError as error:
            made[asked[reference]] = _reason(error)
    return made


class RayChannel:
    """Starts an actor on a host, and exchanges messages with it."""

    start = 15.0

    def __init__(self, node: str, deadline: float) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._open, self._node = True, node
        heartbeat = min(_HEARTBEAT, deadline / 5)
        self._actor = _Actor.options(scheduling_strategy=_on(node)).remote(max(_ORPHAN, 6 * deadline))
        self._process = self._actor.process.remote()
        _in_background(self._listen, heartbeat)

    def send(self, message: Any) -> None:
        self._actor.put.remote(message)

    def receive(self, seconds: float) -> Any:
        message = self._inbox.get(timeout=seconds)
        if isinstance(message, Ended):
            self.close()
            raise message
        return message

    def _listen(self, heartbeat: float) -> None:
        reference = self._actor.get.remote(heartbeat)
        while self._open and not _ending.is_set():
            try:
                messages = ray.get(reference, timeout=_HEARTBEAT)
            except ray.exceptions.GetTimeoutError:
                continue
            except ray.exceptions.RayError as error:
                self._inbox.put(Ended(f"has ended: {_reason(error)}"))
                return
            for message in messages or [HEARTBEAT]:
                self._inbox.put(message)
            reference = self._actor.get.remote(heartbeat)

    def close(self) -> None:
        if self._open:
            self._open = False
            # In a thread, because the calls wait for hosts that may be out of reach.
            _in_background(_end, self._actor, self._process, self._node)


def _end(actor: Any, process: Any, node: str) -> None:
    """End an actor. Ray asks the process to end, but a stopped process does not answer, so a task kills it too.

    process: the reference to the process's id
    """

    def kill(process: int) -> None:
        with contextlib.suppress(OSError):  # the process has ended
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::"):
                os.kill(process, signal.SIGKILL)

    ray.kill(actor)
    with contextlib.suppress(ray.exceptions.RayError):  # the actor or its host has ended
        if ray.wait([process], timeout=_FIRST_ANSWER)[0]:
            number = ray.get(process)
            ray.get(ray.remote(num_cpus=0, max_retries=0)(kill).options(scheduling_strategy=_on(node)).remote(number))


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class _Member:
    """A process that runs a job, the first message that it gets. orphan: see _ORPHAN"""

    def __init__(self, orphan: float) -> None:
        self._messages, self._sent = Messages(), Messages()
        self._asked, self._orphan = time.monotonic(), orphan
        threading.Thread(target=self._run, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def process(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="put", num_returns=0)
    def put(self, message: Any) -> None:
        self._messages.put(message)

    @ray.method(concurrency_group="get")
    def get(self, seconds: float) -> list[Any]:
        """Wait for messages of the job. Return an empty list if there are none in time."""
        messages = []
        try:
            messages.append(self._sent.get(timeout=seconds))
            while True:
                messages.append(self._sent.get_nowait())
        except queue.Empty:
            pass
        self._asked = time.monotonic()
        return messages

    def _run(self) -> None:
        job: RemoteJob = self._messages.get()
        try:
            job.run(self._messages, self._sent.put)
        finally:
            self._sent.put(Ended("has ended"))

    def _watch(self) -> None:
        while time.monotonic() - self._asked < self._orphan:
            time.sleep(_HEARTBEAT)
        os._exit(1)


_Actor: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, concurrency_groups={"put": 1, "get": 1})(
    _Member
)
