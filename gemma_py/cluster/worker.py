"""A process that runs a job. `PipeChannel` starts this module as a program, and writes messages to its standard input."""

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from gemma_py.cluster.channel import HEARTBEAT, Messages, Send

_SECONDS = 1.0  # the longest time between heartbeats


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # File descriptor 1 is redirected to stderr, because printed text would otherwise mix with the messages.
    pipe = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    lock, messages = threading.Lock(), Messages()

    def send(message: Any) -> None:
        with lock:
            pipe.send(message)

    # The heartbeats begin first, because importing the job's module takes a second or more.
    threading.Thread(target=_send_heartbeats, args=(send, min(_SECONDS, float(sys.argv[1]) / 5)), daemon=True).start()
    threading.Thread(target=_listen, args=(Connection(os.dup(0), writable=False), messages), daemon=True).start()
    messages.get().run(messages, send)


def _listen(connection: Connection, messages: Messages) -> None:
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _send_heartbeats(send: Send, seconds: float) -> None:
    try:
        while True:
            send(HEARTBEAT)
            time.sleep(seconds)
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
