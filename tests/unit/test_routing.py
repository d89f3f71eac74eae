"""Which replica gets a request, with simulated replicas."""

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from gemma_py.replicas.routing import KnownBlocks, block_keys, choose
from gemma_py.runtime.prefix_cache import BLOCK_TOKENS

PARALLEL = 4


class Simulated:
    """A replica: its requests as (blocks of the prompt, blocks of prompt and answer), and what its prefix cache holds."""

    def __init__(self, capacity: int) -> None:
        self.known, self._cache = KnownBlocks(capacity), KnownBlocks(capacity)
        self.waiting: deque[tuple[list[bytes], list[bytes]]] = deque()
        self.cached = self.requests = 0

    @property
    def load(self) -> int:
        return len(self.waiting)

    def submit(self, prompt: list[bytes], whole: list[bytes]) -> None:
        self.known.add(prompt)
        self.waiting.append((prompt, whole))
        self.requests += 1

    def end(self) -> None:
        prompt, whole = self.waiting.popleft()
        self.cached += next((n for n, key in enumerate(prompt) if key not in self._cache._blocks), len(prompt))
        self._cache.add(whole)
        self.known.add(whole)


Choose = Callable[[Sequence[Simulated], Sequence[bytes], int], Simulated]


def conversations(count: int, turns: int, system: int, seed: int) -> list[list[tuple[list[int], list[int]]]]:
    """For each conversation its turns, as (prompt, prompt and answer). system: the tokens of the common system prompt"""
    rng, made = random.Random(seed), []
    common = [rng.randrange(1000) for _ in range(system)]
    for _ in range(count):
        ids, rounds = list(common), []
        for _ in range(turns):
            prompt = [*ids, *(rng.randrange(1000) for _ in range(rng.randint(20, 120)))]
            ids = [*prompt, *(rng.randrange(1000) for _ in range(rng.randint(20, 200)))]
            rounds.append((prompt, ids))
        made.append(rounds)
    return made


def simulate(replicas: int, capacity: int, system: int, at_once: int, choose: Choose = choose) -> list[Simulated]:
    """50 conversations of 5 turns, of which `at_once` have a request under way at any time."""
    rng, made = random.Random(1), [Simulated(capacity) for _ in range(replicas)]
    left = [deque(turns) for turns in conversations(50, 5, system, 2)]
    running: list[Simulated] = []
    while any(left):
        talking = rng.choice([turns for turns in left if turns])
        prompt, whole = talking.popleft()
        keys = block_keys(prompt[:-1])
        replica = choose(made, keys, PARALLEL)
        replica.submit(keys, block_keys(whole[:-1]))
        running.append(replica)
        if len(running) >= at_once:
            running.pop(0).end()
    for replica in running:
        replica.end()
    return made


CAPACITY = 600  # blocks of each of four replicas; all conversations together have some 3,000


@pytest.mark.parametrize("system", [0, 100, 300])
@pytest.mark.parametrize("at_once", [1, 4, 16])
def test_four_replicas_find_the_prefixes_of_one_with_four_times_the_memory(system: int, at_once: int) -> None:
    (one,), four = simulate(1, 4 * CAPACITY, system, at_once), simulate(4, CAPACITY, system, at_once)
    assert sum(replica.cached for replica in four) >= 0.9 * one.cached > 0
    assert max(replica.requests for replica in four) <= 2 * 250 / 4


def test_control_a_router_that_ignores_prefixes() -> None:
    def least_busy(replicas: Sequence[Simulated], keys: Sequence[bytes], parallel: int) -> Simulated:
        return choose(replicas, (), parallel)

    (one,), four = simulate(1, 4 * CAPACITY, 100, 4), simulate(4, CAPACITY, 100, 4, least_busy)
    assert sum(replica.cached for replica in four) < 0.9 * one.cached


def test_control_a_router_that_follows_a_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a prefix that many prompts share attracts them all to one replica."""

    def match(self: KnownBlocks, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self._blocks), len(keys))

    monkeypatch.setattr(KnownBlocks, "match", match)
    four = simulate(4, CAPACITY, 300, 1)
    assert max(replica.requests for replica in four) > 2 * 250 / 4


def keys_of(*blocks: int) -> list[bytes]:
    return block_keys([token for block in blocks for token in [block] * BLOCK_TOKENS])


def test_a_key_depends_on_all_tokens_before() -> None:
    assert keys_of(1, 2)[0] == keys_of(1, 3)[0] != keys_of(2, 2)[0]
    assert keys_of(1, 2)[1] != keys_of(3, 2)[1]
    assert block_keys([5] * (BLOCK_TOKENS - 1)) == [] and len(block_keys([5] * (2 * BLOCK_TOKENS + 3))) == 2


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    known = KnownBlocks(4)
    known.add(keys_of(1, 2, 3))
    known.add(keys_of(7, 8))
    assert known.match(keys_of(1, 2, 3)) == 2 and known.match(keys_of(7, 8)) == 2
    known.add(keys_of(1, 2))
    known.add(keys_of(9))
    assert known.match(keys_of(1, 2)) == 2 and known.match(keys_of(7, 8)) == 1
    known.add(keys_of(1, 2, 3, 4, 5, 6))
    assert len(known) == 4 and known.match(keys_of(1, 2, 3, 4, 5, 6)) == 4


def test_the_common_beginning_of_many_prompts_does_not_count() -> None:
    known = KnownBlocks(100)
    known.add(keys_of(1, 2, 3))
    assert known.match(keys_of(1, 2, 4)) == 2
    known.add(keys_of(1, 2, 4))
    assert known.match(keys_of(1, 2, 5)) == 0
    assert known.match(keys_of(1, 2, 4, 5)) == 3
    assert known.match(keys_of(1, 2)) == 2


def test_a_busy_replica_is_avoided() -> None:
    replicas = [Simulated(100), Simulated(100)]
    conversation = keys_of(1, 2, 3)
    for count in range(PARALLEL):
        assert choose(replicas, conversation, PARALLEL) is replicas[0], count
        replicas[0].submit(conversation, conversation)
    assert choose(replicas, conversation, PARALLEL) is replicas[1]
    replicas[0].end()
    assert choose(replicas, conversation, PARALLEL) is replicas[0]
