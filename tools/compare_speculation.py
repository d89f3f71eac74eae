"""Compare prompt lookup of gemma_py, llama-cpp-python and transformers: tokens per second, and whether the tokens
change.

    python tools/compare_speculation.py [MODEL] [--tokens 96] [--rounds 3] [--threads 2] [--peers llama.cpp,transformers]

Needs an idle machine, a GGUF file (by default the demo model), and one Python with gemma_py and the peers. The prompts
are those of `bench --speculate`, decoded greedily. Each runtime continues each prompt alternately without prompt lookup
and with it (10 tokens, the peers' default). The time begins with the first token. transformers computes in float32 with
dequantised weights. The last line is a JSON document.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from peers import dequantised

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL, resolve
from gemma_py.checks.speculation import PROMPTS, answer
from gemma_py.cli.common import markdown, positive
from gemma_py.generate.core import Request

_LOOKUP_TOKENS = 10
_PAUSE = 0.3
# (prompt, number of new tokens, whether to use prompt lookup) -> (tokens, seconds after the first token)
Run = Callable[[list[int], int, bool], tuple[list[int], float]]


def ours(path: Path, threads: int) -> Run:
    engine = gemma_py.load(path, threads=threads)

    def run(ids: list[int], tokens: int, lookup: bool) -> tuple[list[int], float]:
        made = answer(engine, Request(ids, tokens, logprobs=False, speculate="auto" if lookup else "off"))
        return [token for token, *_ in made.tokens], made.seconds

    return run


def llama(path: Path, threads: int) -> Run:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    options: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    draft = LlamaPromptLookupDecoding(num_pred_tokens=_LOOKUP_TOKENS)
    models = [Llama(str(path), **options), Llama(str(path), draft_model=draft, **options)]

    def run(ids: list[int], tokens: int, lookup: bool) -> tuple[list[int], float]:
        made, begin = list[int](), 0.0
        for token in models[lookup].generate(ids, temp=0.0):
            begin = begin or time.perf_counter()
            made.append(int(token))
            if len(made) == tokens:
                break
        return made, time.perf_counter() - begin

    return run


class _Clock:
    """A streamer of transformers that notes the time of the first new token."""

    def __init__(self) -> None:
        self.puts, self.begin = 0, 0.0

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:  # the first call has the prompt
            self.begin = time.perf_counter()

    def end(self) -> None: ...


def transformers(path: Path, threads: int) -> Run:
    import torch

    torch.set_num_threads(threads)
    model = dequantised(path)
    # No token has this number. Some versions of transformers cannot look up prompts without a number here.
    model.generation_config.eos_token_id = model.config.vocab_size

    def run(ids: list[int], tokens: int, lookup: bool) -> tuple[list[int], float]:
        clock, more = _Clock(), {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if lookup else {}
        with torch.no_grad():
            made = model.generate(
                torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, streamer=clock, use_cache=True, **more
            )
        return made[0, len(ids) :].tolist(), time.perf_counter() - clock.begin

    return run


RUNTIMES = {"gemma_py": ours, "llama.cpp": llama, "transformers": transformers}


def compared(name: str, kind: str, plain: Sequence[Any], looked_up: Sequence[Any]) -> dict[str, Any]:
    """Figures of a runtime for a prompt. plain, looked_up: (tokens, seconds) of each round."""
    a, b = plain[0][0], looked_up[0][0]
    differ = next((at for at, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), None)
    off, auto = (statistics.median((len(ids) - 1) / seconds for ids, seconds in runs) for runs in (plain, looked_up))
    return {
        "runtime": name, "text": kind, "plain_tokens_per_second": off, "lookup_tokens_per_second": auto,
        "speed": statistics.median(x[1] / y[1] for x, y in zip(plain, looked_up, strict=True)), "first_change": differ,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=positive, default=96, help="new tokens for each prompt (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="runs of each prompt (default: %(default)s)")
    parser.add_argument("--threads", type=positive, default=2, help="threads of each runtime (default: %(default)s)")
    parser.add_argument(
        "--peers", default="llama.cpp,transformers", help="runtimes to compare with (default: %(default)s)"
    )
    args = parser.parse_args()
    path = Path(resolve(args.model))
    runs = {name: RUNTIMES[name](path, args.threads) for name in ("gemma_py", *args.peers.split(","))}
    with gemma_py.load(path, threads=1) as engine:
        prompts = {kind: list(engine.encode(text)) for kind, text in PROMPTS.items()}
    rows = []
    for kind, ids in prompts.items():
        results: dict[tuple[str, bool], list[Any]] = {(name, lookup): [] for name in runs for lookup in (False, True)}
        for number in range(args.rounds):
            for name, run in runs.items():
                for lookup in (False, True) if number % 2 else (True, False):
                    results[name, lookup].append(run(ids, args.tokens + 1, lookup))
                time.sleep(_PAUSE)
        rows += [compared(name, kind, results[name, False], results[name, True]) for name in runs]
    table = [
        [row["text"], row["runtime"], f"{row['plain_tokens_per_second']:.1f}", f"{row['lookup_tokens_per_second']:.1f}",
         f"{row['speed']:.2f}x", "none" if row["first_change"] is None else f"from token {row['first_change']}"]
        for row in rows
    ]  # fmt: skip
    print(markdown(("text", "runtime", "plain t/s", "lookup t/s", "speed", "change of the tokens"), table))
    print(json.dumps({"model": path.name, "rows": rows}))


if __name__ == "__main__":
    main()
