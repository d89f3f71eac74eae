"""Measure speculation: tokens a pass, accepted guesses, and the speed of `auto` as a multiple of the speed of `off`.

    python tools/speculation.py [MODEL] [--tokens 128] [--rounds 3] [--threads N] [--temperatures 0,0.8] [--kinds edit,json]

Every round generates each continuation with `off` and with `auto`, in an order that alternates, and compares ids, texts and
finish reasons. The last answers of a kind are compared with the bits of their log probabilities too, which are not computed
in the measured answers. A difference ends the tool with an error. The kinds are recorded prompts: change a function's signature
(`edit`), rename two variables, which changes every second line (`rename`), summarise with quotes, extract JSON, chat, write
code. Two kinds more repeat the chat with guesses that are always right (`oracle`) and always wrong (`wrong`). The last line
is a JSON document.
"""

import argparse
import contextlib
import json
import statistics
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from drafters import drafting

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.cli.common import markdown, positive
from gemma_py.generate.core import Request
from gemma_py.generate.options import Sampling
from gemma_py.generate.session import Decoder

FUNCTION = '''def total_price(items, discount, tax_rate):
    """Return the price of all items, with discount and tax."""
    total = 0.0
    for item in items:
        if item.quantity < 0:
            raise ValueError("the quantity must not be negative")
        total += item.price * item.quantity
    if discount is not None:
        total -= total * discount
    total += total * tax_rate
    return round(total, 2)
'''
ARTICLE = """The harbour bridge was opened in 1932, after eight years of work. "Nobody believed that it would stand," said the
engineer Ada Stone, who led the works from the first day. The arch was built from both sides at once, and the two halves met in
August 1930. The city paid for the bridge with tolls until 1988. "It is not a road, it is our front door," the mayor Tom Reed
said when the last toll was paid. Today 160,000 cars cross the bridge every day, and eight trains every hour."""
PEOPLE = """Alice Brown, born 1984, lives in Leeds and works as a baker. Robert Hill, born 1990, lives in York and works as a
nurse. Clara Moss, born 1978, lives in Bath and works as a pilot. David Lane, born 2001, lives in Hull and works as a cook."""
PROMPTS = {
    "edit": f"The function:\n\n{FUNCTION}\nThe same function, in which the tax rate is 0.2 unless it is given:\n\n"
    + "def total_price(items, discount, tax_rate=0.2):",
    "rename": f"The function:\n\n{FUNCTION}\nThe same function, in which items is called articles:\n\n"
    + FUNCTION[:60].replace("items", "articles"),
    "quotes": f"{ARTICLE}\n\nSummary, with the quotes of both people:\n\n",
    "json": f"{PEOPLE}\n\nThe same facts in JSON:\n\n"
    '[\n  {"name": "Alice Brown", "born": 1984, "city": "Leeds", "job": "baker"},\n  {"name": "Robert Hill", "born":',
    "chat": "User: What should I see in a small town on a river in one day?\nAssistant:",
    "code": 'import csv\n\n\ndef read_table(path):\n    """Return the rows of a CSV file as dictionaries."""\n',
}
Answer = list[tuple[int, str, bytes, str | None]]  # id, text, the bytes of the log probability, finish reason


def answer(engine: gemma_py.Engine, request: Request) -> tuple[Answer, float, int, int, int]:
    """Return the tokens after a prompt, the seconds after the first token, and the passes, guesses and accepted guesses."""
    generation, session = engine.generation(request), engine.session()
    logits = session.prefill(generation.prompt)
    made, begin = [], 0.0
    for token in generation.tokens(logits, Decoder(session, generation).decode, session.kv_digest):
        begin = begin or time.perf_counter()
        made.append((token.id, token.text, struct.pack("<d", token.logprob), token.finish_reason))
    speculation = generation.speculation
    seconds = time.perf_counter() - begin
    return made, seconds, speculation.passes, speculation.guessed, speculation.accepted


@contextlib.contextmanager
def guessing(kind: str, request: Request, known: Answer, vocabulary: int) -> Iterator[None]:
    if kind in ("oracle", "wrong"):
        with drafting(kind, {tuple(request.ids): [token for token, *_ in known]}, vocabulary):
            yield
    else:
        yield


def measured(engine: gemma_py.Engine, kind: str, temperature: float, tokens: int, rounds: int) -> dict[str, Any]:
    ids = engine.encode(PROMPTS.get(kind, PROMPTS["chat"]))
    ratios, passes, guessed, accepted, compared = [], 0, 0, 0, 0
    for number in range(rounds):
        sampling = Sampling(temperature=temperature, top_k=64, top_p=0.95, seed=number)
        requests = {mode: Request(ids, tokens, sampling, logprobs=False, speculate=mode) for mode in ("off", "auto")}
        off, *_ = answer(engine, requests["off"])  # not timed
        seconds, counts = {}, [0, 0, 0]
        for mode in ("off", "auto") if number % 2 else ("auto", "off"):
            with guessing(kind, requests[mode], off, engine.config.vocab_size):
                made, seconds[mode], *of_mode = answer(engine, requests[mode])
            if made != off:
                raise SystemExit(f"{kind}, temperature {temperature}, seed {number}: speculation changed the answer")
            counts = of_mode if mode == "auto" else counts
        ratios.append(seconds["off"] / seconds["auto"])
        passes, guessed, accepted = passes + counts[0], guessed + counts[1], accepted + counts[2]
        compared += len(off)
    scored = [answer(engine, replace(request, logprobs=True))[0] for request in requests.values()]
    if scored[0] != scored[1]:
        raise SystemExit(f"{kind}, temperature {temperature}, seed {number}: speculation changed a log probability")
    return {
        "kind": kind, "temperature": temperature, "tokens": compared, "tokens_a_pass": (compared - rounds) / passes,
        "guessed": guessed, "accepted": accepted, "speed": statistics.median(ratios), "least": min(ratios),
    }  # fmt: skip


def shown(rows: Sequence[dict[str, Any]]) -> str:
    header = ("kind", "temperature", "tokens", "tokens a pass", "accepted", "speed", "least")
    cells = [
        (row["kind"], f"{row['temperature']:g}", f"{row['tokens']:,}", f"{row['tokens_a_pass']:.2f}",
         f"{row['accepted'] / row['guessed']:.0%} of {row['guessed']:,}" if row["guessed"] else "no guesses",
         f"{row['speed']:.2f}x", f"{row['least']:.2f}x")
        for row in rows
    ]  # fmt: skip
    return markdown(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=positive, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="answers of each kind (default: %(default)s)")
    parser.add_argument("--threads", type=positive)
    parser.add_argument("--temperatures", default="0,0.8", help="separated by commas (default: %(default)s)")
    parser.add_argument("--kinds", default=",".join([*PROMPTS, "oracle", "wrong"]), help="(default: %(default)s)")
    args = parser.parse_args()
    with gemma_py.load(args.model, threads=args.threads) as engine:
        rows = [
            measured(engine, kind, float(temperature), args.tokens, args.rounds)
            for temperature in args.temperatures.split(",")
            for kind in args.kinds.split(",")
        ]
    print(shown(rows))
    print(json.dumps({"model": str(args.model), "rows": rows}))


if __name__ == "__main__":
    main()
