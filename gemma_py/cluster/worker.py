"""The process of a shard. `PipeLink` starts this module as a program, and sends orders to its standard input.

If the starting process ends, its end of the pipe is closed, and this process ends too, even in the middle of a pass.
"""

import os
import queue
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from gemma_py.cluster.links import BEAT, Join, identity_of
from gemma_py.cluster.shard import Shard, SpanRunner
from gemma_py.cluster.spans import make_spans
from gemma_py.errors import InputError
from gemma_py.runtime.program import link
from gemma_py.runtime.runner import SharedTeam
from gemma_py.weights.checkpoint import open_checkpoint
from gemma_py.weights.store import packed_weights

_SECONDS = 1.0  # the longest time between beats


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Whatever this process prints must not get between the replies.
    replies = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    lock, messages = threading.Lock(), queue.SimpleQueue[Any]()

    def reply(message: Any) -> None:
        with lock:
            replies.send(message)

    threading.Thread(target=_listen, args=(Connection(os.dup(0), writable=False), messages), daemon=True).start()
    shard: Shard | None = None
    while True:
        number, *message = messages.get()
        try:
            if shard is None:
                (join,) = message
                threading.Thread(target=_beat, args=(reply, min(_SECONDS, join.deadline / 5)), daemon=True).start()
                shard, results = _join(join), None
            else:
                results = shard.apply(*message)
        except Exception as error:
            reply((number, type(error).__name__, str(error)))
        else:
            reply((number, results))


def _join(join: Join) -> Shard:
    checkpoint = replace(open_checkpoint(join.path), cacheable=join.cacheable)
    found = identity_of(checkpoint)
    for name, mine, theirs in zip(found._fields, found, join.identity, strict=True):
        if mine != theirs:
            raise InputError(f"{join.path}: a shard has another {name} than the process that started it")
    program = link(checkpoint.family.program(checkpoint.config), packed_weights(checkpoint, join.quant))
    span = make_spans(checkpoint.config, program, join.cuts)[join.number]
    return Shard(SpanRunner(span, SharedTeam(join.threads, join.deadline), join.kv))


def _listen(connection: Connection, messages: "queue.SimpleQueue[Any]") -> None:
    try:
        while True:
            messages.put(connection.recv())
    except (EOFError, OSError):
        os._exit(0)


def _beat(reply: Any, seconds: float) -> None:
    while True:
        time.sleep(seconds)
        reply(BEAT)


if __name__ == "__main__":
    main()
