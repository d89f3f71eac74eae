"""Measure the time to the first token of an answer in a long conversation.

    python tools/first_token.py [MODEL] [--tokens 500,10000,30000] [--turns 5] [--template FORM] [--threads N]

For each length of the history, the table has the median and the largest time of several turns with 20 new tokens.
Another column has the time before the model starts, in which the prompt is rendered, tokenised and compared with the KV
cache.
"""

import argparse
import statistics
import time

import gemma_py
from gemma_py.catalog import DEFAULT_MODEL
from gemma_py.cli.common import counts, markdown, positive

QUESTION = " and what of the next town, is there a river, a mill, or an old bridge?"  # 20 tokens of Gemma's tokenizer
ANSWER = " There is a river beside the mill, and an old bridge of stone leads over it."


def grown(engine: gemma_py.Engine, tokens: int, template: str | None) -> gemma_py.Conversation:
    conversation = gemma_py.Conversation(engine, template=template, max_tokens=8)
    turn = 0
    for number in range(tokens):
        conversation.messages += [
            {"role": "user", "content": f"{number:03}:{QUESTION}"},
            {"role": "assistant", "content": f"{number:03}.{ANSWER}"},
        ]
        turn = turn or conversation.tokens_used
        if (number + 2) * turn > tokens:
            break
    list(conversation.send(QUESTION))
    return conversation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=counts, default=(500, 10_000, 30_000))
    parser.add_argument("--turns", type=positive, default=5)
    parser.add_argument("--template", help="gemma, transcript or a jinja file (default: the checkpoint's own)")
    parser.add_argument("--threads", type=positive)
    args = parser.parse_args()
    rows = []
    with gemma_py.load(args.model, threads=args.threads) as engine:
        for tokens in args.tokens:
            conversation = grown(engine, tokens, args.template)
            waits, before_model, new = [], [], []
            for number in range(args.turns):
                start = time.perf_counter()
                answer = conversation.send(f"{number}{QUESTION}")
                ready = time.perf_counter()
                next(answer)
                waits.append(1000 * (time.perf_counter() - start))
                before_model.append(1000 * (ready - start))
                list(answer)
                stats = conversation.stats
                assert stats is not None
                new.append(stats.prompt_tokens - stats.cached_tokens)
            present, turns = len(conversation.ids), len(conversation.messages) // 2
            figures = (statistics.median(waits), max(waits), statistics.median(before_model), max(before_model))
            rows.append([f"{present:,}", f"{turns:,}", f"{max(new)}", *(f"{figure:.1f}" for figure in figures)])
    header = ["tokens", "turns", "new tokens", "ms", "largest", "before the model, ms", "largest"]
    print(markdown(header, rows, left=0))


if __name__ == "__main__":
    main()
