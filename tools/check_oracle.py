"""Compare gemma_py with transformers on the demo model: negative log-likelihoods (NLL) of texts, and greedy
continuations.

    python tools/check_oracle.py [--model gemma-3-270m] [--lengths 10,100,700,2300] [--tokens 40] [--write FILE]

Needs the extra `oracle` (torch, transformers). transformers dequantises the GGUF itself and computes in float32. Texts
are Python's own documentation strings, so nothing is downloaded. --write stores ids and transformers' NLL as a golden
file that the test suite uses. The last line is one JSON object; the exit code is 1 if a limit is exceeded.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from peers import dequantised, texts

import gemma_py
from gemma_py.catalog import resolve

MEAN_BAR, LARGEST_BAR = 4e-4, 1e-2  # limits for the mean and the largest error of a token's NLL
MARGIN = 0.02  # greedy tokens must be equal if the two largest logits differ by more than this


def prompts(engine: gemma_py.Engine, lengths: list[int]) -> list[list[int]]:
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(text) for text in texts()]
    return [ids[number % len(ids)][:length] for number, length in enumerate(lengths)]


def nll(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    rows = torch.from_numpy(logits[:-1]).double()
    return -torch.log_softmax(rows, -1)[range(len(ids) - 1), ids[1:]].numpy()


def greedy(model: transformers.PreTrainedModel, ids: list[int], count: int) -> tuple[list[int], list[float]]:
    made, margins = [], []
    with torch.no_grad():
        out = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
        for _ in range(count):
            best = out.logits[0, -1].topk(2)
            made.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            out = model(torch.tensor([[made[-1]]]), past_key_values=out.past_key_values, use_cache=True)
    return made, margins


def our_greedy(engine: gemma_py.Engine, ids: list[int], count: int) -> list[int]:
    session = engine.session()
    logits = session.prefill(ids)
    made = []
    for _ in range(count):
        made.append(int(np.argmax(logits)))
        logits = session.decode(made[-1])
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--lengths", default="10,40,100,250,700,2300")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--write", type=Path)
    args = parser.parse_args()
    path = resolve(args.model)
    engine = gemma_py.load(path)
    model = dequantised(path, attn_implementation="eager")
    differences, golden, agree, close, compared = [], [], 0, 0, 0
    for ids in prompts(engine, [int(part) for part in args.lengths.split(",")]):
        start = time.perf_counter()
        with torch.no_grad():
            theirs = nll(model(torch.tensor([ids])).logits[0].numpy(), ids)
        ours = nll(engine.session().prefill(ids, all_logits=True), ids)
        golden.append({"ids": ids, "nll": [round(float(x), 7) for x in theirs]})
        differences.append(np.abs(ours - theirs))
        made, margins = greedy(model, ids, args.tokens)
        mine = our_greedy(engine, ids, args.tokens)
        same = 0
        for a, b, margin in zip(made, mine, margins, strict=True):
            compared += 1
            if a != b:
                # If the two largest logits were almost equal, the texts may differ from here on.
                close += margin <= MARGIN
                if margin > MARGIN:
                    print(f"  token {same}: {a} expected, {b} found, margin {margin:.4f}")
                    compared = -1
                break
            same += 1
        agree += same
        d = differences[-1]
        print(
            f"{len(ids):5} tokens: NLL differs by {d.mean():.6f} on average, {d.max():.5f} at most; "
            f"greedy equal for {same} of {args.tokens}; {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    every = np.concatenate(differences)
    good = bool(every.mean() <= MEAN_BAR and every.max() <= LARGEST_BAR and compared >= 0)
    if args.write:
        args.write.write_text(json.dumps(golden) + "\n")
    report = {"tokens": len(every), "mean": float(every.mean()), "largest": float(every.max())}
    print(json.dumps({**report, "greedy_equal": agree, "near_ties": close, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
