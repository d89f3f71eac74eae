"""Compare gemma_py and transformers with llama.cpp on tiny random GGUF files in float32.

    python tools/check_llama.py [--check SEED ...] [--only TEXT]

Needs the extra `oracle` and llama-cpp-python. The models are those variants of tools/tiny_families.py that llama.cpp
can run. The error of logits is their largest difference, divided by their standard deviation. The error of embeddings
is their largest cosine distance.

llama.cpp takes GELU from a table of float16 values, which causes an error of some 3e-3 after seven layers. So the tool
prints two errors: between llama.cpp and gemma_py, and between llama.cpp and transformers with such a table. The exit
code is 1 if the first error is above 1e-2 or the second error is above 1e-3.
"""

import argparse
import ctypes
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import NormalDist

import llama_cpp
import make_goldens
import numpy as np
import tiny_checkpoints as tiny
import tiny_families
import torch
import transformers
from tiny_shapes import FULL, SLIDING, unused_kv

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

from gguf_fields import architecture
from gguf_files import write_model

LIMIT, LIMIT_OF_TABLE = 1e-2, 1e-3


class TableGelu(torch.nn.Module):
    """GELU with llama.cpp's rounding to float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rounded = torch.nn.functional.gelu(x.half().float(), approximate="tanh").half().float()
        return torch.where(x <= -10, 0.0, torch.where(x >= 10, x, rounded))


def _gemma3n() -> tiny.Variant:
    """A Gemma 3n with the sizes that llama.cpp takes for granted.

    These are 20 layers with KV rows, 10 sparse layers, 256 per-layer inputs, 4 streams, rank 64, and logits capped at
    30.
    """
    types = [*([SLIDING] * 4 + [FULL]) * 4, SLIDING, FULL]
    config = tiny._gemma3n(
        types, num_kv_shared_layers=2, hidden_size_per_layer_input=256, laurel_rank=64, vocab_size_per_layer_input=64,
        activation_sparsity_pattern=[0.95] * 10 + [0.0] * 12, final_logit_softcapping=30.0,
    )  # fmt: skip
    return tiny.Variant(config, extra=unused_kv(config, "model."))


def _as_llama_computes(model: transformers.PreTrainedModel) -> None:
    """Change transformers' model to llama.cpp's arithmetic: GELU from a table, and a sample deviation (F - 1) in sparse
    layers.
    """
    for module in model.modules():
        if hasattr(module, "act_fn"):
            module.act_fn = TableGelu()
        if getattr(module, "activation_sparsity", 0) > 0:
            module._gaussian_topk = partial(_sample_topk, module.activation_sparsity)


def _sample_topk(sparsity: float, x: torch.Tensor) -> torch.Tensor:
    deviation = x.std(-1, keepdim=True, unbiased=True)
    return torch.relu(x - x.mean(-1, keepdim=True) - deviation * NormalDist().inv_cdf(sparsity))


def _can_run(variant: tiny.Variant) -> bool:
    """Whether llama.cpp computes this model like transformers.

    llama.cpp caps logits at 30 if the config has no cap, and ends the process for a model without sliding layers. If
    layers share KV rows, llama.cpp assumes that the last two layers with rows of their own are a sliding one and then a
    full one.
    """
    c = tiny.text_config(variant)
    types, shared = c["layer_types"], c.get("num_kv_shared_layers", 0)
    first = len(types) - shared
    if SLIDING not in types or (not tiny.is_embedding(variant) and c["final_logit_softcapping"] is None):
        return False
    return not shared or types[max(0, first - 2) : first] == [SLIDING, FULL]


def variants(seed: int) -> dict[str, tiny.Variant]:
    fixed = {name: variant for name, variant in tiny_families.VARIANTS.items() if "gemma3n" not in name}
    drawn = {f"{kind} with random shapes": tiny_families.drawn(kind, seed) for kind in tiny_families.KINDS}
    of_llama = (fixed | drawn | {"gemma3n of llama.cpp's sizes": _gemma3n()}).items()
    absent = ("vaultgemma", "embeddinggemma2", "gemma3n with")
    return {name: variant for name, variant in of_llama if not name.startswith(absent) and _can_run(variant)}


def _without_vocabulary(variant: tiny.Variant) -> ctypes.Array:
    """Metadata that makes llama.cpp use no tokenizer. An empty entry ends the list."""
    config = tiny.text_config(variant)
    made = (llama_cpp.llama_model_kv_override * 3)()
    made[0].key, made[0].tag = b"tokenizer.ggml.model", llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
    made[0].value.val_str = b"no_vocab"
    made[1].key, made[1].tag = f"{architecture(config)}.vocab_size".encode(), llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
    made[1].value.val_i64 = config["vocab_size"]
    return made


def their_result(path: Path, ids: list[int], variant: tiny.Variant, width: int) -> np.ndarray:
    embedding = tiny.is_embedding(variant)
    model_options = llama_cpp.llama_model_default_params()
    # llama.cpp reads this memory while it loads the model, so a reference is kept.
    overrides = _without_vocabulary(variant)
    model_options.kv_overrides = overrides
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_options)
    if model is None:
        raise SystemExit(f"llama.cpp cannot load {path}")
    options = llama_cpp.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = 512
    options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
    options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
    options.n_threads = options.n_threads_batch = 1
    options.embeddings = embedding
    context = llama_cpp.llama_init_from_model(model, options)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for number, token in enumerate(ids):
        batch.token[number], batch.pos[number], batch.n_seq_id[number] = token, number, 1
        batch.seq_id[number][0], batch.logits[number] = 0, 1
    if llama_cpp.llama_decode(context, batch):
        raise SystemExit(f"llama.cpp cannot compute {path}")
    rows = 1 if embedding else len(ids)
    values = llama_cpp.llama_get_embeddings_seq(context, 0) if embedding else llama_cpp.llama_get_logits(context)
    made = np.ctypeslib.as_array(ctypes.cast(values, ctypes.POINTER(ctypes.c_float)), (rows, width)).copy()
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    return made


def check(name: str, variant: tiny.Variant, seed: int, scratch: Path) -> tuple[float, float]:
    """Return the errors between llama.cpp and gemma_py, and between llama.cpp and transformers with llama.cpp's
    arithmetic.
    """
    tiny.write(variant, scratch / "written", seed)
    ids = make_goldens.texts_of(variant, seed)[-1]
    model = make_goldens.their_model(scratch / "written", variant, torch.float32)
    _as_llama_computes(model)
    transformed = make_goldens.their_result(model, scratch / "written", variant, [ids])
    path = write_model(scratch / "m.gguf", variant, seed)
    theirs = their_result(path, ids, variant, transformed.shape[-1])
    ours = make_goldens.our_result(path, variant, [ids])
    errors = make_goldens.error_of(ours, theirs, variant), make_goldens.error_of(transformed, theirs, variant)
    print(
        f"seed {seed} {name:34} error to gemma_py {errors[0]:.1e}, to transformers with the table {errors[1]:.1e}",
        flush=True,
    )
    return errors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=int, nargs="+", default=[1], metavar="SEED")
    parser.add_argument("--only", default="", metavar="TEXT")
    args = parser.parse_args()
    make_goldens.quiet()
    errors = []
    for seed in args.check:
        for name, variant in variants(seed).items():
            if args.only in name:
                with tempfile.TemporaryDirectory() as scratch:
                    errors.append(check(name, variant, seed, Path(scratch)))
    worst = [max(of_one) for of_one in zip(*errors, strict=True)]
    print(json.dumps({"largest_errors": worst, "limits": [LIMIT, LIMIT_OF_TABLE]}))
    return 0 if worst[0] <= LIMIT and worst[1] <= LIMIT_OF_TABLE else 1


if __name__ == "__main__":
    sys.exit(main())
