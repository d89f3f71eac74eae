"""Shards in processes: faults, requests, speculation and receipts, compared with an engine without shards."""

import os
import queue
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints as tiny
import tiny_families
from repository import ROOT, TINY
from serving import Heard, Running, serving, wait_until

import gemma_py
from gemma_py.cluster import links
from gemma_py.cluster.hosts import ThisMachine
from gemma_py.cluster.links import Identity, ShardLink
from gemma_py.cluster.processes import PipeChannel
from gemma_py.cluster.shard import Accept
from gemma_py.cluster.shards import Shards
from gemma_py.errors import ComputationError, InputError, ShardError
from gemma_py.generate.core import Request
from gemma_py.generate.events import Failed, Finished, Generated
from gemma_py.generate.options import Sampling
from gemma_py.generate.scheduler import Scheduler
from gemma_py.runtime.runner import SequenceInput

PROMPT = [2, *range(100, 160)]
REPETITIVE = [2, *[7, 8, 9, 10] * 12]  # guesses from earlier text hold often


def load(shards: int, **options: Any) -> gemma_py.Engine:
    return gemma_py.load(TINY, threads=2, shards=shards, **options)


@pytest.fixture(scope="module")
def whole() -> Iterator[gemma_py.Engine]:
    with load(1) as engine:
        yield engine


@pytest.fixture(scope="module")
def pair() -> Iterator[gemma_py.Engine]:
    """An engine with two shards. Tests end and stop its process, which the engine then replaces."""
    with load(2) as engine:
        yield engine


def shards_of(engine: gemma_py.Engine) -> Shards:
    assert isinstance(engine.runner, Shards)
    return engine.runner


def channel_of(engine: gemma_py.Engine) -> PipeChannel:
    link = shards_of(engine)._links[0]
    assert isinstance(link, ShardLink) and isinstance(link.channel, PipeChannel)
    return link.channel


def first_process(engine: gemma_py.Engine) -> "subprocess.Popen[bytes]":
    return channel_of(engine).process


def ids_of(engine: gemma_py.Engine, prompt: list[int], count: int = 40, **options: Any) -> list[int]:
    return [token.id for token in engine.generate(prompt, count, **options)]


@pytest.mark.parametrize("kv", ["float32", "bfloat16"])
@pytest.mark.parametrize("shards", [2, 7])
def test_logits_and_rows_have_the_unsharded_bits(shards: int, kv: str) -> None:
    def results(engine: gemma_py.Engine) -> list[Any]:
        session = engine.session(keep=40)
        made: list[Any] = [session.prefill(PROMPT, 7, all_logits=True).tobytes()]
        session.rewind(30)
        made += [session.decode(5).tobytes(), session.kv_digest(), session.can_rewind_to(3)]
        second = engine.session()
        second.restore(session.ids, session.raw_kv_rows(session.position))
        return [*made, second.decode(6).tobytes(), second.kv_digest(), second.kv_rows(2)[0].tobytes()]

    with load(1, kv=kv) as engine:
        wanted = results(engine)
    with load(shards, kv=kv) as engine:
        assert len(shards_of(engine).spans) == shards
        assert results(engine) == wanted
        engine.set_threads(3)
        assert results(engine) == wanted


def test_guesses_that_hold_do_not_change_an_answer(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = ids_of(whole, REPETITIVE, 60, speculate="off")
    orders: list[Any] = []
    runner = shards_of(pair)
    order = runner.order

    def noted(made: Any) -> None:
        orders.append(made)
        order(made)

    monkeypatch.setattr(runner, "order", noted)
    assert ids_of(pair, REPETITIVE, 60, prediction=wanted) == wanted
    assert any(isinstance(made, Accept) for made in orders)


def test_a_receipt_of_shards_is_the_unsharded_receipt(whole: gemma_py.Engine, pair: gemma_py.Engine) -> None:
    receipts = [
        list(engine.generate(PROMPT, 20, temperature=1.0, seed=3, receipt=True))[-1].receipt for engine in (whole, pair)
    ]
    assert receipts[0] is not None and receipts[1] is not None
    assert receipts[0].document() == receipts[1].document()


def test_a_draft_model_guesses_for_shards(whole: gemma_py.Engine) -> None:
    wanted = ids_of(whole, PROMPT)
    with load(2, draft=TINY) as engine:
        assert ids_of(engine, PROMPT) == wanted


def test_models_that_cannot_be_divided_are_refused(
    checkpoints: dict[str, Path], embedding_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="an embedding model cannot be divided into shards"):
        gemma_py.load(embedding_folder, shards=2)
    with pytest.raises(InputError, match="shards should be at least 1, found 0"):
        load(0)
    with pytest.raises(InputError, match="the model has 7 layers, so at most 7 shards, found 8"):
        load(8)
    tiny.write(tiny_families.ASSISTANTS["gemma4-e2b"], tmp_path, 2)
    with pytest.raises(InputError, match="an assistant reads the model's KV rows, which other processes have"):
        gemma_py.load(checkpoints["gemma4-e2b"], draft=tmp_path, shards=2)


def test_commands_with_shards_print_the_unsharded_output(run: Callable[..., tuple[int, str, str]]) -> None:
    command = ("generate", TINY, "--prompt", "a b c", "--max-tokens", 12, "--threads", 2)
    assert run(*command, "--shards", 3)[:2] == run(*command)[:2]
    code, _, error = run("verify", TINY, "--shards", "1,50", "--tokens", 8)
    assert code == 1 and error == "gemma_py: the model has 7 layers, so at most 7 shards, found 50\n"  # before any run
    code, out, _ = run("verify", TINY, "--shards", "1,2,4", "--threads", 2, "--chunks", "1,7", "--tokens", 40)
    assert code == 0
    assert out.splitlines()[0].split()[:2] == ["shards", "threads"]
    assert "6 runs of 40 tokens: all logits and all keys and values have the same bits" in out


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_goes_on_after_a_shard_ends_or_stalls(whole: gemma_py.Engine, kind: signal.Signals) -> None:
    wanted = ids_of(whole, PROMPT, seed=5)
    with load(2, deadline=1.0) as engine:
        before, made = first_process(engine), []
        for token in engine.generate(PROMPT, 40, seed=5):
            made.append(token.id)
            if len(made) == 10:
                os.kill(before.pid, kind)
        assert made == wanted
        assert before.returncode == -signal.SIGKILL
        assert first_process(engine).pid != before.pid


class _Interrupted:
    """An inbox in which Ctrl-C comes while a reply is awaited."""

    def get(self, timeout: float) -> Any:
        raise KeyboardInterrupt


def same_after_ctrl_c(whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Interrupt a pass of a session. Return whether the next pass has the logits and KV rows of an engine without shards."""
    sessions = [engine.session() for engine in (whole, pair)]
    for session in sessions:
        session.prefill(PROMPT)
    channel, before = channel_of(pair), first_process(pair)
    with monkeypatch.context() as patch:
        patch.setattr(channel, "_inbox", _Interrupted())
        with pytest.raises(KeyboardInterrupt):
            sessions[1].decode(9)
    assert sessions[1].position == len(PROMPT)
    logits = [session.decode(5).tobytes() for session in sessions]
    assert first_process(pair) is before
    return logits[0] == logits[1] and sessions[0].kv_digest() == sessions[1].kv_digest()


def test_a_session_goes_on_after_ctrl_c(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same_after_ctrl_c(whole, pair, monkeypatch)


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_an_answer_continues_after_shards_end_or_stall_while_they_start(
    whole: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch, kind: signal.Signals
) -> None:
    monkeypatch.setattr(PipeChannel, "start", 2.0)
    started: list[int] = []
    honest = ShardLink.join

    def join(self: ShardLink) -> None:
        assert isinstance(self.channel, PipeChannel)
        started.append(self.channel.process.pid)
        if len(started) == 2:
            os.kill(self.channel.process.pid, kind)
        honest(self)

    monkeypatch.setattr(ShardLink, "join", join)
    with load(2) as engine:
        os.kill(started[0], signal.SIGKILL)
        assert ids_of(engine, PROMPT) == ids_of(whole, PROMPT)
    assert len(started) == 3


def test_a_dead_shard_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_py.cluster.shards._LEAST_ATTEMPTS", 1)
    monkeypatch.setattr(ThisMachine, "patience", 0.0)
    with load(2) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        os.kill(first_process(engine).pid, signal.SIGKILL)
        with pytest.raises(ShardError, match=r"^shard 1 of 2, layers 0 to \d, was ended by SIGKILL$"):
            session.decode(5)
        session.decode(5)  # the next pass has a new process
        assert session.position == len(PROMPT) + 1


def test_a_stalled_shard_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemma_py.cluster.shards._LEAST_ATTEMPTS", 1)
    monkeypatch.setattr(ThisMachine, "patience", 0.0)
    with load(2, deadline=0.5) as engine:
        session = engine.session()
        session.prefill(PROMPT)
        os.kill(first_process(engine).pid, signal.SIGSTOP)
        with pytest.raises(ShardError, match=r"^shard 1 of 2, layers 0 to \d, gave no sign of life for 0.5 s$"):
            session.decode(5)


def events_of(engine: gemma_py.Engine, fault: Callable[[int], None]) -> list[list[Any]]:
    """Run six requests with a common prefix at once. Return the events of each. fault: called after each token, with their number."""
    scheduler, made = Scheduler(engine, parallel=4), queue.SimpleQueue[Any]()

    def listen(number: int, event: Any) -> None:
        made.put((number, event))

    try:
        for number in range(6):
            request = Request([*PROMPT, number, number + 1], 24, Sampling(temperature=1.0, seed=number))
            scheduler.submit(request, partial(listen, number))
        events: list[list[Any]] = [[] for _ in range(6)]
        tokens = 0
        while not all(of and isinstance(of[-1], Finished | Failed) for of in events):
            number, event = made.get(timeout=120)
            if isinstance(event, Generated):
                tokens += 1
                fault(tokens)
                events[number].append(event.token)
            elif isinstance(event, Finished | Failed):
                events[number].append(event)
        assert scheduler.stats().prefix_hits
        return [[token.id for token in of[:-1]] + [of[-1].reason] for of in events]
    finally:
        scheduler.close()


def test_all_requests_end_with_their_tokens_after_kills(whole: gemma_py.Engine, pair: gemma_py.Engine) -> None:
    wanted = events_of(whole, lambda tokens: None)

    def kill(tokens: int) -> None:
        if tokens in (8, 40, 80):
            os.kill(first_process(pair).pid, signal.SIGKILL)

    assert events_of(pair, kill) == wanted


def test_streams_over_http_do_not_notice_a_killed_shard(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = [Request([*PROMPT, number], 40, Sampling(temperature=1.0, seed=number)) for number in range(4)]

    def answers(engine: gemma_py.Engine, fault: Callable[[Running], None]) -> list[tuple[str, list[float]]]:
        with serving(engine) as server, ThreadPoolExecutor(len(requests)) as pool:
            heard = [pool.submit(Heard, server, request) for request in requests]
            wait_until(lambda: server.scheduler.stats().passes > 5)
            fault(server)
            return [(each.result().text, each.result().logprobs) for each in heard]

    health = []
    wanted = answers(whole, lambda server: None)

    def kill(server: Running) -> None:
        starter = shards_of(pair)._starter

        def start_later(number: int) -> Any:
            health.append(server.scheduler.health())
            return start(number)

        start = starter.start
        monkeypatch.setattr(starter, "start", start_later)
        os.kill(first_process(pair).pid, signal.SIGKILL)

    assert answers(pair, kill) == wanted
    assert not health[0].ok and not health[0].permanent
    assert health[0].why.endswith("was ended by SIGKILL")


def test_a_process_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        f"import gemma_py, time\nengine = gemma_py.load({str(TINY)!r}, shards=2)\n"
        "print(engine.runner._links[0].channel.process.pid, flush=True)\ntime.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        shard = int(parent.stdout.readline())
        assert Path(f"/proc/{shard}").exists() or not Path("/proc").exists()
        parent.kill()
    for _ in range(600):
        try:
            os.kill(shard, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{shard}/stat").exists() and ") Z " in Path(f"/proc/{shard}/stat").read_text():
            return  # ended; whoever adopted the process has not noticed yet
        time.sleep(0.05)
    pytest.fail("the shard's process is still running")


@pytest.mark.parametrize("field", ["model", "package"])
def test_a_shard_of_another_model_does_not_join(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    identity_of = links.identity_of
    monkeypatch.setattr(
        "gemma_py.cluster.divide.identity_of", lambda of: Identity(**(identity_of(of)._asdict() | {field: "other"}))
    )
    with pytest.raises(InputError, match=f"a shard has another {field} than the process that started it"):
        load(2)


def test_an_engine_with_shards_is_refused_after_a_fork(pair: gemma_py.Engine) -> None:
    session = pair.session()
    session.prefill(PROMPT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # this process has threads
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: session.decode(5), lambda: session.rewind(3), session.kv_digest):
            try:
                use()
            except ComputationError:
                refused += 1
        shards_of(pair)._links[0].close()  # ends no process, because the process belongs to the parent
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert first_process(pair).poll() is None


# --- controls: a wrong replay is noticed ------------------------------------------------------------------------------


def test_a_replay_that_is_one_token_short_is_noticed(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [engine.session() for engine in (whole, pair)]
    for session in sessions:
        session.prefill(PROMPT)
    runner = shards_of(pair)
    run_parts = runner._run_parts

    def short(parts: Any, ahead: int, traces: Any) -> Any:
        replay = len(parts[0].tokens) > 1
        return run_parts([part._replace(tokens=part.tokens[:-1]) for part in parts] if replay else parts, ahead, traces)

    monkeypatch.setattr(runner, "_run_parts", short)
    runner._begin_again()
    assert sessions[0].decode(5).tobytes() != sessions[1].decode(5).tobytes()


def test_chunks_of_a_replay_that_change_places_are_noticed(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_of(pair), "chunk", 16)
    sessions = [engine.session() for engine in (whole, pair)]
    for session in sessions:
        session.prefill(PROMPT)
    runner = shards_of(pair)
    run_parts = runner._run_parts

    def swapped(parts: Any, ahead: int, traces: Any) -> Any:
        number = PROMPT.index(parts[0].tokens[0]) if len(parts[0].tokens) == 16 else 0
        tokens = {16: PROMPT[32:48], 32: PROMPT[16:32]}.get(number, parts[0].tokens)
        return run_parts([parts[0]._replace(tokens=tokens)], ahead, traces)

    for mutant in (False, True):
        if mutant:
            monkeypatch.setattr(runner, "_run_parts", swapped)
        runner._begin_again()
        assert (sessions[0].decode(5).tobytes() == sessions[1].decode(5).tobytes()) != mutant


def test_a_late_reply_that_is_taken_for_the_next_reply_is_noticed(
    whole: gemma_py.Engine, pair: gemma_py.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: all calls have one number, so each call gets the reply to the call before it."""
    with monkeypatch.context() as patch:
        patch.setattr(ShardLink, "_call", property(lambda self: 7, lambda self, value: None), raising=False)
        with pytest.raises(ValueError, match="could not broadcast"):
            same_after_ctrl_c(whole, pair, patch)
    assert ids_of(pair, PROMPT) == ids_of(whole, PROMPT)


def test_a_prefix_that_outlives_its_epoch_is_noticed(whole: gemma_py.Engine, pair: gemma_py.Engine) -> None:
    """If only one shard's prefix cache is cleared, the shards find different prefixes, which is an error."""
    prefixes = pair.new_prefix_cache(1 << 20)
    cache = pair.new_cache(16)
    pair.run_together([SequenceInput(cache, PROMPT)])
    prefixes.insert(cache, 0)
    assert prefixes.restore(pair.new_cache(16), PROMPT) == 48
    shard = shards_of(pair).local
    shard.prefixes = shard._prefix_cache(4)
    with pytest.raises(ComputationError, match="the shards have different prefixes, of 48, 0 tokens"):
        prefixes.restore(pair.new_cache(16), PROMPT)
    assert prefixes.restore(pair.new_cache(16), PROMPT) == 0  # all shards began again


def test_an_engine_without_shards_imports_nothing_of_them() -> None:
    code = (
        f"import sys, gemma_py\nlist(gemma_py.load({str(TINY)!r}).generate([1, 2], 2))\n"
        "print([name for name in sys.modules if name.startswith('gemma_py.cluster')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
