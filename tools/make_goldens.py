"""Write tests/data: logits and embeddings of tiny random checkpoints, computed by transformers in float32.

    python tools/make_goldens.py [--seed 1]
    python tools/make_goldens.py --check SEED ... [--only TEXT]

Needs the extra `oracle`. Only ids and results are stored, because the tests create the checkpoints from the seed.

--check writes nothing, and compares gemma_py with transformers for each seed, on every fixed variant and on one variant
of each kind with random shapes. gemma_py also loads the checkpoint that transformers saves, and must compute equal bits
from it. --only TEXT: compare only variants whose name contains TEXT.

The error of logits is their largest difference, divided by their standard deviation. The error of embeddings is their
largest cosine distance. The limits are 1e-4 and 1e-5, and the exit code is 1 if a limit is exceeded. For a badly
conditioned checkpoint, even transformers' float32 and float64 results differ much. If they differ by more than a third
of the limit, the limit for this checkpoint is three times their difference.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tiny_checkpoints as tiny
import tiny_families
import torch
import transformers
from sentence_transformers.sentence_transformer.modules import Dense, Pooling

import gemma_py
from gemma_py.errors import UnsupportedError

DATA = Path(__file__).parent.parent / "tests" / "data"
TOKENS = 45  # more than every sliding window of a fixed variant, and more than a tile of attention
LENGTHS = (1, 7, TOKENS)
LOGITS_LIMIT, COSINE_LIMIT = 1e-4, 1e-5
VARIANTS = tiny.VARIANTS | tiny_families.VARIANTS


def token_ids(seed: int, vocab_size: int, count: int = TOKENS) -> list[int]:
    return [2, *(int(abs(x) * 1e6) % vocab_size for x in tiny.gaussians(seed + 77, count - 1))]


def texts_of(variant: tiny.Variant, seed: int) -> list[list[int]]:
    lengths = LENGTHS if tiny.is_embedding(variant) else (TOKENS,)
    vocab_size = tiny.text_config(variant)["vocab_size"]
    return [token_ids(seed + 100 * number, vocab_size, count) for number, count in enumerate(lengths)]


def their_model(directory: Path, variant: tiny.Variant, dtype: torch.dtype) -> transformers.PreTrainedModel:
    # transformers' sdpa attention ignores logit soft-capping, and grouped experts need aligned widths.
    options = {"dtype": dtype, "attn_implementation": "eager", "experts_implementation": "eager"}
    text, kind = tiny.text_config(variant), variant.config["model_type"]
    if kind == "gemma3n":  # multimodal Gemma 3n would need the package timm
        config = transformers.Gemma3nTextConfig(**{key: value for key, value in text.items() if key != "model_type"})
        options |= {"config": config, "key_mapping": {r"^model\.language_model\.": "model."}}
    loader = transformers.AutoModel if tiny.is_embedding(variant) else transformers.AutoModelForCausalLM
    loader = transformers.Gemma3nForCausalLM if kind == "gemma3n" else loader
    model, info = loader.from_pretrained(directory, output_loading_info=True, **options)
    missing = [
        name for name in info["missing_keys"] if not any(part in name for part in ("vision", "audio", "multi_modal"))
    ]
    surplus = [name for name in info["unexpected_keys"] if kind != "gemma3n" or "language_model" in name]
    if missing or surplus or info["mismatched_keys"]:
        raise SystemExit(f"{directory}: missing {missing}, surplus {surplus}, misshapen {info['mismatched_keys']}")
    return model


def their_result(
    model: transformers.PreTrainedModel, directory: Path, variant: tiny.Variant, texts: list[list[int]]
) -> np.ndarray:
    with torch.no_grad():
        if not tiny.is_embedding(variant):
            return model(torch.tensor(texts)).logits[0].numpy()
        modules: list[torch.nn.Module] = []
        if variant.dense:
            listed = json.loads((directory / "modules.json").read_text())
            kinds = {"Pooling": Pooling, "Dense": Dense}
            loaders = [(kinds.get(entry["type"].rpartition(".")[2]), directory / entry["path"]) for entry in listed]
            modules = [kind.load(str(path)).to(model.dtype) for kind, path in loaders if kind is not None]
        return np.stack([_their_embedding(model, modules, ids) for ids in texts])


def _their_embedding(model: transformers.PreTrainedModel, modules: list[torch.nn.Module], ids: list[int]) -> np.ndarray:
    hidden = model(torch.tensor([ids])).last_hidden_state
    features = {"token_embeddings": hidden, "attention_mask": torch.ones(1, len(ids))}
    for module in modules:
        features = module(features)
    pooled = features["sentence_embedding"] if modules else hidden.mean(1)
    return torch.nn.functional.normalize(pooled)[0].numpy()


def our_result(directory: Path, variant: tiny.Variant, texts: list[list[int]]) -> np.ndarray:
    with gemma_py.load(directory) as engine:
        if tiny.is_embedding(variant):
            return np.asarray(engine.embed(texts))
        return engine.session().prefill(texts[0], all_logits=True)


def error_of(ours: np.ndarray, theirs: np.ndarray, variant: tiny.Variant) -> float:
    if tiny.is_embedding(variant):
        return tiny.largest_cosine_distance(ours, theirs)
    return float(np.abs(ours - theirs).max() / theirs.std())


def check(name: str, variant: tiny.Variant, seed: int, scratch: Path) -> float:
    """Compare one checkpoint. Returns the error as a multiple of its limit."""
    written, saved = scratch / "written", scratch / "saved"
    tiny.write(variant, written, seed)
    texts, limit = texts_of(variant, seed), COSINE_LIMIT if tiny.is_embedding(variant) else LOGITS_LIMIT
    model = their_model(written, variant, torch.float32)
    theirs = their_result(model, written, variant, texts)
    exact = their_result(their_model(written, variant, torch.float64), written, variant, texts)
    ours, own = our_result(written, variant, texts), error_of(theirs, exact, variant)
    error, exact_error = error_of(ours, theirs, variant), error_of(ours, exact, variant)
    print(
        f"seed {seed} {name:34} error {error:.1e}, to float64 {exact_error:.1e}, theirs to float64 {own:.1e}",
        flush=True,
    )
    model.save_pretrained(saved)
    if variant.dense:
        return error / max(limit, 3 * own)
    if not np.array_equal(our_result(saved, variant, texts), ours):
        raise SystemExit(f"seed {seed} {name}: the checkpoint that transformers saved gives different bits")
    return error / max(limit, 3 * own)


def checked_variants(seed: int) -> Iterator[tuple[str, tiny.Variant]]:
    yield from VARIANTS.items()
    for kind in tiny_families.KINDS:
        yield f"{kind} with random shapes", tiny_families.drawn(kind, seed)


def write(seed: int) -> None:
    all_ids: dict[str, list[int] | list[list[int]]] = {}
    results: dict[str, np.ndarray] = {}
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            tiny.write(variant, Path(scratch), seed)
            texts = texts_of(variant, seed)
            all_ids[name] = texts if tiny.is_embedding(variant) else texts[0]
            model = their_model(Path(scratch), variant, torch.float32)
            results[name] = their_result(model, Path(scratch), variant, texts).astype(np.float32)
    DATA.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(DATA / "tiny_logits.npz", **results)  # type: ignore[arg-type]
    (DATA / "tiny_ids.json").write_text(json.dumps({"seed": seed, "ids": all_ids}) + "\n")


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", type=int, nargs="+", metavar="SEED")
    parser.add_argument("--only", default="", metavar="TEXT")
    args = parser.parse_args()
    quiet()
    if args.check is None:
        write(args.seed)
        return 0
    worst = 0.0
    for seed in args.check:
        for name, variant in checked_variants(seed):
            if args.only in name:
                with tempfile.TemporaryDirectory() as scratch:
                    try:
                        worst = max(worst, check(name, variant, seed, Path(scratch)))
                    except UnsupportedError as error:
                        print(f"seed {seed} {name:34} FAILED: {error}", flush=True)
                        worst = float("inf")
    print(json.dumps({"largest_error_in_limits": worst}))
    return 0 if worst <= 1 else 1


if __name__ == "__main__":
    sys.exit(main())
