"""`sweep` measures the speed of each number of threads and chunk size, and checks that all runs give equal bits.

A pass may also compute guesses of the next tokens, or a token of each of several sequences. `sweep` measures how much longer
than a pass of one token such a pass takes.
"""

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.checks import plot, verify
from gemma_py.checks.verify import Difference, ReportFraction, RunResult, RunSetting
from gemma_py.errors import InputError, MismatchError
from gemma_py.formats.floats import bytes_for_digest
from gemma_py.generate.engine import Engine
from gemma_py.generate.session import Session
from gemma_py.runtime.cache import check_context

PASSES = (2, 4, 8, 16)  # the numbers of tokens in the measured passes of several tokens


@dataclass
class SweepPoint:
    """The speeds that were measured with one number of threads and one chunk size, one per round.

    prefill, decode: tokens per second. passes: for each number of tokens in a pass, the seconds of the pass.
    """

    setting: RunSetting
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    passes: dict[int, list[float]] = field(default_factory=dict)


class Sweep:
    """Measures every combination of threads and chunk size. `points` has the results so far."""

    def __init__(self, engine: Engine, threads: Sequence[int], chunks: Sequence[int], tokens: int, new: int) -> None:
        if engine.config.embedding is not None:
            raise InputError(
                "an embedding model has no chunks and decodes nothing, so there is nothing to sweep; use bench"
            )
        check_context(engine.context, tokens, new=new)
        self.engine, self.threads, self.chunks = engine, tuple(threads), tuple(chunks)
        self.tokens, self.new = tokens, new
        self._ids = verify.prompt(tokens + new, engine.config.vocab_size)
        self._all = [SweepPoint(RunSetting(count, chunk)) for count in threads for chunk in chunks]
        self._first: tuple[RunSetting, RunResult] | None = None
        self.difference: Difference | None = None

    @property
    def points(self) -> list[SweepPoint]:
        return [point for point in self._all if point.decode]

    def run(self, rounds: int, open_engine: verify.OpenEngine, progress: ReportFraction) -> None:
        """Measure all rounds. If two runs give different bits, stop, and find the first difference.

        open_engine: opens an engine for finding the difference
        """
        costs = [verify.cost(self.tokens, point.setting.chunk) + verify.cost(self.new, 1) for point in self._all]
        done = 0
        for number in range(rounds):
            before = 0
            for point, cost in zip(self._all, costs, strict=True):
                if point.setting.threads != before:
                    before = point.setting.threads
                    self.engine.set_threads(before)
                    self._warm_up()
                progress(f"{point.setting}, round {number + 1} of {rounds}", done / (rounds * sum(costs)))
                result = self._measure(point)
                if self.difference is not None:
                    return
                done += cost
                self._first = self._first or (point.setting, result)
                setting, expected = self._first
                if result != expected:
                    progress(f"where {point.setting} and {setting} differ", 1.0)
                    both = (expected, result)
                    self.difference = verify.locate(open_engine, self._ids, setting, point.setting, both)
                    return

    def _warm_up(self) -> None:
        """Run one untimed pass, because the first pass of a worker team allocates memory."""
        count = min(self.tokens, max(self.chunks))
        self.engine.session().prefill(self._ids[:count], count)

    def _measure(self, point: SweepPoint) -> RunResult:
        session = self.engine.session(keep=self.new)
        start = time.perf_counter()
        logits = [session.prefill(self._ids[: self.tokens], point.setting.chunk)]
        middle = time.perf_counter()
        for token in self._ids[self.tokens :]:
            logits.append(session.decode(token))
        end = time.perf_counter()
        point.prefill.append(self.tokens / (middle - start))
        point.decode.append(self.new / (end - middle))
        result = RunResult(tuple(_digest(row) for row in logits), tuple(session.kv_digest()))
        for count in (count for count in PASSES if count <= self.new):
            self._measure_pass(session, point, count, result)
        return result

    def _measure_pass(self, session: Session, point: SweepPoint, count: int, decoded: RunResult) -> None:
        """Measure a pass that computes the first `count` decoded tokens again, and compare the logits."""
        session.rewind(self.tokens)
        token, *guesses = self._ids[self.tokens : self.tokens + count]
        start = time.perf_counter()
        logits = session.verify(token, guesses)
        point.passes.setdefault(count, []).append(time.perf_counter() - start)
        for number, row in enumerate(logits, start=1):  # the first of the decoded rows is the prompt's
            if _digest(row) != decoded.rows[number] and self.difference is None:
                between = f"decoding and a pass of {count} tokens on {verify.threads_text(point.setting.threads)}"
                self.difference = Difference(between, None, "logits", number, number)

    # --- results

    def prefill(self, threads: int, chunk: int) -> float | None:
        rates = next((point.prefill for point in self.points if point.setting == RunSetting(threads, chunk)), None)
        return statistics.median(rates) if rates else None

    def decode(self, threads: int) -> float | None:
        """Return the median decode rate over the runs with all chunk sizes, because decoding has no chunks."""
        rates = [rate for point in self.points if point.setting.threads == threads for rate in point.decode]
        return statistics.median(rates) if rates else None

    def pass_seconds(self, threads: int, count: int) -> float | None:
        """Return the median seconds of a pass of `count` tokens."""
        if count == 1:
            rate = self.decode(threads)
            return None if rate is None else 1 / rate
        points = (point for point in self.points if point.setting.threads == threads)
        seconds = [value for point in points for value in point.passes.get(count, ())]
        return statistics.median(seconds) if seconds else None

    def efficiency(self, threads: int, chunk: int | None) -> float | None:
        """Return the rate per thread, as a fraction of the rate per thread with the fewest threads.

        chunk: the chunk size of a prefill; None for decoding
        """
        fewest = min(self.threads)
        one, many = (self.decode(count) if chunk is None else self.prefill(count, chunk) for count in (fewest, threads))
        return None if one is None or many is None else many / one / (threads / fewest)

    def best_prefill(self) -> RunSetting:
        return max(self.points, key=lambda point: statistics.median(point.prefill)).setting

    def best_decode(self) -> int:
        return max((point.setting.threads for point in self.points), key=lambda count: self.decode(count) or 0.0)

    def raise_on_mismatch(self) -> None:
        if self.difference is not None:
            raise MismatchError(str(self.difference))

    def as_json(self) -> dict[str, Any]:
        points = [
            {"threads": point.setting.threads, "chunk": point.setting.chunk,
             "prefill_tokens_per_second": statistics.median(point.prefill), "prefill_rounds": point.prefill,
             "prefill_efficiency": self.efficiency(point.setting.threads, point.setting.chunk),
             "decode_tokens_per_second": statistics.median(point.decode), "decode_rounds": point.decode,
             "decode_efficiency": self.efficiency(point.setting.threads, None),
             "pass_seconds": {str(count): statistics.median(values) for count, values in point.passes.items()}}
            for point in self.points
        ]  # fmt: skip
        best = None
        if points:
            setting = self.best_prefill()
            best = {
                "prefill": {"threads": setting.threads, "chunk": setting.chunk},
                "decode": {"threads": self.best_decode()},
            }
        return {
            "tokens": self.tokens, "new_tokens": self.new, "points": points, "best": best,
            "equal": self.difference is None, "difference": verify.as_table(self.difference),
        }  # fmt: skip

    def draw(self, path: Path, title: str) -> None:
        figure, (chunks, threads, shares) = plot.panels(3, title)
        for count in self.threads:
            self._line(
                chunks, verify.threads_text(count), self.chunks, [self.prefill(count, chunk) for chunk in self.chunks]
            )
        self._line(threads, "decode", self.threads, [self.decode(count) for count in self.threads])
        for chunk in self.chunks:
            shares_of_chunk = [self.efficiency(count, chunk) for count in self.threads]
            self._line(shares, f"prefill in chunks of {chunk}", self.threads, shares_of_chunk)
        self._line(shares, "decode", self.threads, [self.efficiency(count, None) for count in self.threads])
        plot.finish(
            chunks,
            f"prefill of {self.tokens:,} tokens",
            "tokens a chunk",
            "tokens a second",
            sorted(self.chunks),
            log=True,
        )
        plot.finish(threads, "decode", "threads", "tokens a second", sorted(self.threads))
        plot.finish(shares, "efficiency", "threads", "share of linear scaling", sorted(self.threads))
        plot.save(figure, path)

    def _line(self, ax: Any, label: str, x: Sequence[int], y: Sequence[float | None]) -> None:
        """y: None stands for a missing measurement."""
        measured = sorted((at, value) for at, value in zip(x, y, strict=True) if value is not None)
        plot.draw(ax, label, [at for at, _ in measured], [value for _, value in measured])


def _digest(row: np.ndarray) -> bytes:
    return hashlib.sha256(bytes_for_digest(row)).digest()
