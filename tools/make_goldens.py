"""Write tests/data: logits of tiny random checkpoints by transformers in float32. Needs the extra `oracle`.

    python tools/make_goldens.py [--seed 1] [--check SEED ...]

Only ids and logits are stored, because the tests create the checkpoints from the seed. With --check nothing is written:
gemma_py and transformers are compared for checkpoints of the given seeds, and the largest error is printed for each, in
units of
the logits' standard deviation; exit code 1 above 1e-3.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny
import torch
import transformers

import gemma_py

DATA = Path(__file__).parent.parent / "tests" / "data"
TOKENS = 45  # more than every sliding window and every attention tile
BAR = 1e-3


def token_ids(seed: int, vocab_size: int) -> list[int]:
    return [2, *(int(abs(x) * 1e6) % vocab_size for x in tiny.gaussians(seed + 77, TOKENS - 1))]


def their_logits(directory: Path, ids: list[int]) -> np.ndarray:
    # "eager", because transformers' sdpa attention ignores logit soft-capping.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].numpy()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", type=int, nargs="*")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    worst = 0.0
    golden = {}
    for seed in args.check or [args.seed]:
        for name, variant in tiny.VARIANTS.items():
            with tempfile.TemporaryDirectory() as scratch:
                tiny.write(variant, Path(scratch), seed)
                engine = gemma_py.load(scratch)
                ids = token_ids(seed, engine.config.vocab_size)
                theirs = their_logits(Path(scratch), ids)
                ours = engine.session().prefill(ids, all_logits=True)
            error = float(np.abs(ours - theirs).max() / theirs.std())
            worst = max(worst, error)
            print(
                f"seed {seed} {name:24} largest error {error:.2e} of the logits' standard deviation {theirs.std():.3f}"
            )
            golden[name] = (ids, theirs)
    if args.check is None:
        DATA.mkdir(parents=True, exist_ok=True)
        logits = {name: theirs.astype(np.float32) for name, (_, theirs) in golden.items()}
        np.savez_compressed(DATA / "tiny_logits.npz", **logits)  # type: ignore[arg-type]
        ids_of = {name: ids for name, (ids, _) in golden.items()}
        (DATA / "tiny_ids.json").write_text(json.dumps({"seed": args.seed, "ids": ids_of}) + "\n")
    print(json.dumps({"largest_error": worst, "bar": BAR}))
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
