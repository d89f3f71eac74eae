"""Throughput over threads and chunk sizes, with the bits of every run compared as it goes."""

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_py.checks import plot, verify
from gemma_py.checks.verify import Difference, Result, Say, Way
from gemma_py.errors import MismatchError
from gemma_py.generate.engine import Engine
from gemma_py.runtime.cache import check_context


@dataclass
class Point:
    """Tokens a second of each round."""

    way: Way
    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


class Sweep:
    """The whole product of threads and chunks, round by round. `points` are those that have been measured."""

    def __init__(self, engine: Engine, threads: Sequence[int], chunks: Sequence[int], tokens: int, new: int) -> None:
        check_context(engine.context, tokens, new=new)
        self.engine, self.threads, self.chunks, self.tokens, self.new = (
            engine,
            tuple(threads),
            tuple(chunks),
            tokens,
            new,
        )
        self._ids = verify.prompt(tokens + new, engine.config.vocab_size)
        self._all = [Point(Way(count, chunk)) for count in threads for chunk in chunks]
        self._first: tuple[Way, Result] | None = None
        self.difference: Difference | None = None

    @property
    def points(self) -> list[Point]:
        return [point for point in self._all if point.decode]

    def run(self, rounds: int, open_engine: verify.Open, say: Say) -> None:
        """Until all is done or two runs differ; `open_engine` is for finding out where."""
        costs = [verify.cost(self.tokens, point.way.chunk) + verify.cost(self.new, 1) for point in self._all]
        done = 0
        for number in range(rounds):
            before = 0
            for point, cost in zip(self._all, costs, strict=True):
                if point.way.threads != before:
                    before = point.way.threads
                    self.engine.set_threads(before)
                    self._warm_up()
                say(f"{point.way}, round {number + 1} of {rounds}", done / (rounds * sum(costs)))
                result = self._measure(point)
                done += cost
                self._first = self._first or (point.way, result)
                way, expected = self._first
                if result != expected:
                    say(f"where {point.way} part from {way}", 1.0)
                    both = (expected, result)
                    self.difference = verify.locate(open_engine, self._ids, way, point.way, both)
                    return

    def _warm_up(self) -> None:
        """The first pass of a team waits for memory that the others find there."""
        count = min(self.tokens, max(self.chunks))
        self.engine.session().prefill(self._ids[:count], count)

    def _measure(self, point: Point) -> Result:
        session = self.engine.session()
        start = time.perf_counter()
        logits = [session.prefill(self._ids[: self.tokens], point.way.chunk)]
        middle = time.perf_counter()
        for token in self._ids[self.tokens :]:
            logits.append(session.decode(token))
        end = time.perf_counter()
        point.prefill.append(self.tokens / (middle - start))
        point.decode.append(self.new / (end - middle))
        rows = tuple(hashlib.sha256(row.tobytes()).digest() for row in logits)
        return Result(rows, tuple(session.kv_digest()))

    # What the figures say.

    def prefill(self, threads: int, chunk: int) -> float | None:
        """Tokens a second, the median; None where nothing has been measured."""
        rates = next((point.prefill for point in self.points if point.way == Way(threads, chunk)), None)
        return statistics.median(rates) if rates else None

    def decode(self, threads: int) -> float | None:
        """The same; of all chunks together, since decoding does not know of them."""
        rates = [rate for point in self.points if point.way.threads == threads for rate in point.decode]
        return statistics.median(rates) if rates else None

    def efficiency(self, threads: int, chunk: int | None) -> float | None:
        """What a thread gives, against a thread of the smallest team; chunk None: in decoding."""
        fewest = min(self.threads)
        one, many = (self.decode(count) if chunk is None else self.prefill(count, chunk) for count in (fewest, threads))
        return None if one is None or many is None else many / one / (threads / fewest)

    def best_prefill(self) -> Way:
        return max(self.points, key=lambda point: statistics.median(point.prefill)).way

    def best_decode(self) -> int:
        return max((point.way.threads for point in self.points), key=lambda count: self.decode(count) or 0.0)

    def insist(self) -> None:
        """An error if two runs differed."""
        if self.difference is not None:
            raise MismatchError(str(self.difference))

    def as_json(self) -> dict[str, Any]:
        points = [
            {"threads": point.way.threads, "chunk": point.way.chunk,
             "prefill_tokens_per_second": statistics.median(point.prefill), "prefill_rounds": point.prefill,
             "prefill_efficiency": self.efficiency(point.way.threads, point.way.chunk),
             "decode_tokens_per_second": statistics.median(point.decode), "decode_rounds": point.decode,
             "decode_efficiency": self.efficiency(point.way.threads, None)}
            for point in self.points
        ]  # fmt: skip
        best = None
        if points:
            way = self.best_prefill()
            best = {"prefill": {"threads": way.threads, "chunk": way.chunk}, "decode": {"threads": self.best_decode()}}
        return {
            "tokens": self.tokens, "new_tokens": self.new, "points": points, "best": best,
            "equal": self.difference is None, "difference": verify.as_table(self.difference),
        }  # fmt: skip

    def draw(self, path: Path, title: str) -> None:
        """Prefill over chunks, decoding over threads, and the efficiency of both over threads."""
        figure, (chunks, threads, shares) = plot.panels(3, title)
        for count in self.threads:
            self._line(
                chunks, verify.threads_text(count), self.chunks, [self.prefill(count, chunk) for chunk in self.chunks]
            )
        self._line(threads, "decode", self.threads, [self.decode(count) for count in self.threads])
        for chunk in self.chunks:
            made = [self.efficiency(count, chunk) for count in self.threads]
            self._line(shares, f"prefill in chunks of {chunk}", self.threads, made)
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
        plot.finish(shares, "efficiency", "threads", "of what as many single threads would give", sorted(self.threads))
        plot.save(figure, path)

    def _line(self, ax: Any, label: str, x: Sequence[int], y: Sequence[float | None]) -> None:
        """Through what has been measured."""
        known = sorted((at, value) for at, value in zip(x, y, strict=True) if value is not None)
        plot.draw(ax, label, [at for at, _ in known], [value for _, value in known])
