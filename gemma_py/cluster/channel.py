"""Channels. A channel carries messages to another process and back, and tells whether the process is alive.

The first message is a job. The process runs the job, which takes the other messages and sends its own. A thread of the process
sends several heartbeats in each deadline, so a process without heartbeats is stalled, however long its job computes.
"""

import queue
from collections.abc import Callable
from typing import Any, Protocol

HEARTBEAT = None  # a message that only shows that a process is alive

Messages = queue.SimpleQueue[Any]  # the messages that a process receives
Send = Callable[[Any], None]  # sends a message of a process


class RemoteJob(Protocol):
    """What a process does. A job is sent to its process by pickle."""

    def run(self, messages: Messages, send: Send) -> None: ...


class Ended(Exception):
    """The process at the other end of a channel has ended. The text says how, such as "was ended by SIGKILL"."""


class Channel(Protocol):
    """The end of a channel in the process that started the other process.

    start: seconds until the first heartbeat, at most, because the process has to start before it.
    """

    start: float

    def send(self, message: Any) -> None:
        """Send a message. Do not wait until the process has received it."""

    def receive(self, seconds: float) -> Any:
        """Return the next message or heartbeat. Raise queue.Empty if none comes in time, and Ended if the process has ended."""

    def close(self) -> None:
        """End the process. A channel may be closed twice."""


class Silence:
    """Tells when a process has given no sign of life for too long.

    Silence is counted in short waits. If this process is suspended, only one wait expires, which is no stall.
    """

    WAITS = 20  # the number of waits in a deadline

    def __init__(self, channel: Channel, deadline: float) -> None:
        self.deadline = deadline
        self._channel, self._silent, self._heard = channel, 0, False

    @property
    def limit(self) -> float:
        return self.deadline if self._heard else max(self.deadline, self._channel.start)

    def receive(self) -> Any:
        """Return the next message or heartbeat. Raise Ended if the process has ended or was silent for the whole deadline."""
        self._silent = 0
        while True:
            try:
                message = self._channel.receive(self.limit / self.WAITS)
            except queue.Empty:
                self._silent += 1
                if self._silent > self.WAITS:
                    raise Ended(f"gave no sign of life for {self.limit:g} s") from None
                continue
            self._heard = True
            return message
