"""The process of a shard. `PipeLink` starts this module as a program, and sends orders to its standard input.

If the process that started this one ends, the pipe is closed. Then this process ends too, even in the middle of a pass.
"""

import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from gemma_py.cluster import BEAT

_SECONDS = 1.0  # the longest time between beats


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # File descriptor 1 is redirected to stderr, because printed text would otherwise mix with the replies.
    replies = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    lock, messages = threading.Lock(), queue.SimpleQueue[Any]()

    def reply(message: Any) -> None:
        with lock:
            replies.send(message)

    threading.Thread(target=_beat, args=(reply, min(_SECONDS, float(sys.argv[1]) / 5)), daemon=True).start()
    # Imported after the beats have begun, because the import takes a second or more.
    from gemma_py.cluster.local import joined_shard

    threading.Thread(target=_listen, args=(Connection(os.dup(0), writable=False), messages), daemon=True).start()
    shard = None
    while True:
        number, *message = messages.get()
        try:
            if shard is None:
                shard, results = joined_shard(*message), None
            else:
                results = shard.apply(*message)
        except Exception as error:
            reply((number, type(error).__name__, str(error)))
        else:
            reply((number, results))


def _listen(connection: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _beat(reply: Any, seconds: float) -> None:
    try:
        while True:
            reply(BEAT)
            time.sleep(seconds)
    except OSError:
        os._exit(0)


if __name__ == "__main__":
    main()
