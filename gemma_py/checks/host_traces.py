"""Traces of the hosts of a cluster: each host computes the same prompt, and digests of every phase are compared."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_py.checks import trace_file
from gemma_py.checks.verify import Difference
from gemma_py.cluster.channel import HEARTBEAT, Ended, Messages, Send, Silence
from gemma_py.cluster.hosts import Host
from gemma_py.errors import ComputationError
from gemma_py.generate.engine import load

_DEADLINE = 5.0  # seconds


@dataclass(frozen=True)
class TraceJob:
    """The job of a host's process, which sends a trace or the text of an error. model: as `resolve` takes it."""

    model: str
    quant: str | None
    kv: str
    ids: Sequence[int]

    def run(self, messages: Messages, send: Send) -> None:
        try:
            with load(self.model, quant=self.quant, kv=self.kv) as engine:
                send(trace_file.trace_document(engine, self.ids))
        except Exception as error:
            send(str(error))


def differences(
    hosts: Sequence[Host], job: TraceJob, trace: dict[str, Any]
) -> Iterator[tuple[Host, Difference | None]]:
    """Compute the trace of `job` on every host. Return for each host the first difference from `trace`, this machine's."""
    channels = [host.start(_DEADLINE) for host in hosts]
    try:
        for channel in channels:
            channel.send(job)
        for host, channel in zip(hosts, channels, strict=True):
            silence, made = Silence(channel, _DEADLINE), HEARTBEAT
            try:
                while made is HEARTBEAT:
                    made = silence.receive()
            except Ended as error:
                raise ComputationError(f"the process on {host.name} {error}") from None
            if isinstance(made, str):
                raise ComputationError(f"{host.name}: {made}")
            if made["model"] != trace["model"]:
                raise ComputationError(f"{host.name} has another model than this machine at {job.model}")
            yield host, trace_file.compare(made, trace, f"{host.name} and this machine")
    finally:
        for channel in channels:
            channel.close()
