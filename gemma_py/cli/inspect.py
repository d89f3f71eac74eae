"""Describe a checkpoint: its shape, layers, tensor types, sizes, tokenizer and template.

The weights are not loaded.

With --json: an object with the path, the format, fields of the configuration under their names in config.json, "layers",
"kv_cache_bytes" for each type of the KV cache, "types", "tokenizer" and "chat_template"; --tensors adds "tensors".
"""

import argparse
from collections import Counter
from typing import Any

from gemma_py.catalog import resolve
from gemma_py.cli.common import add_model, parts, print_json, size
from gemma_py.cli.progress import LoadProgress
from gemma_py.generate.embedding import prompts_of
from gemma_py.runtime.cache import bytes_needed
from gemma_py.runtime.kv_types import KV_TYPES
from gemma_py.runtime.runner import CHUNK
from gemma_py.weights.checkpoint import Checkpoint, open_checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    parser.add_argument("--tensors", action="store_true", help="list every tensor")


def report(checkpoint: Checkpoint, with_tensors: bool) -> dict[str, Any]:
    config, tensors = checkpoint.config, checkpoint.tensors.values()
    types: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for tensor in tensors:
        types[tensor.type.name] += tensor.data.nbytes
        counts[tensor.type.name] += 1
    tokenizer = checkpoint.tokenizer()
    made: dict[str, Any] = {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "model_type": config.model_type,
        "parameters": sum(tensor_size(tensor.shape) for tensor in tensors),
        "bytes": sum(types.values()),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "context": config.max_position_embeddings,
        "tied_head": config.tie_word_embeddings,
        "attn_logit_softcapping": config.attn_logit_softcapping,
        "final_logit_softcapping": config.final_logit_softcapping,
        "query_pre_attn_scalar": config.query_pre_attn_scalar,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input,
        "eos_token_ids": list(config.eos_token_ids),
        "layers": [
            {
                "window": layer.sliding_window,
                "bidirectional": layer.bidirectional,
                "heads": layer.num_attention_heads,
                "kv_heads": layer.num_key_value_heads,
                "head_dim": layer.head_dim,
                "intermediate_size": layer.intermediate_size,
                "rope_theta": layer.rope.theta,
                "rope_factor": layer.rope.factor,
                "rope_share": layer.rope.share,
                "kv_source": layer.kv_source,
                "value_is_key": layer.value_is_key,
                "norms": norms_of(checkpoint, number),
            }
            for number, layer in enumerate(config.layers)
        ],
        "kv_cache_bytes": {kv: bytes_needed(config, kv, config.max_position_embeddings, CHUNK) for kv in KV_TYPES},
        "embedding": embedding_of(checkpoint),
        "left_out": dict(checkpoint.left_out),
        "types": {name: {"tensors": counts[name], "bytes": types[name]} for name in types},
        "tokenizer": None
        if tokenizer is None
        else {"size": tokenizer.size, "control_tokens": len(tokenizer.control_ids), "bos": tokenizer.bos_id},
        "chat_template": checkpoint.chat_template,
    }
    if with_tensors:
        made["tensors"] = [
            {"name": tensor.name, "type": tensor.type.name, "shape": list(tensor.shape), "bytes": tensor.data.nbytes}
            for tensor in tensors
        ]
    return made


def embedding_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    head, modules = checkpoint.config.embedding, checkpoint.modules
    if head is None:
        return None
    return {
        "dimensions": head.dense[-1][0] if head.dense else head.projection or checkpoint.config.hidden_size,
        "pooling": "mean",
        "projection": head.projection,
        "dense": [list(shape) for shape in head.dense],
        "prompts": dict(prompts_of(checkpoint)),
        "default_prompt": modules.default,
        "text_end": checkpoint.text_end,
    }


def norms_of(checkpoint: Checkpoint, layer: int) -> list[str]:
    prefix, specs = f"layers.{layer}.", checkpoint.family.tensors(checkpoint.config)
    return [
        name.removeprefix(prefix) for name, spec in specs.items() if name.startswith(prefix) and len(spec.shape) == 1
    ]


def embedding_head(embedding: dict[str, Any]) -> str:
    dense = "".join(f", a dense layer from {K} to {N}" for N, K in embedding["dense"])
    if embedding["projection"] is not None:
        dense = f", a projection to {embedding['projection']}{dense}"
    end = "no token" if embedding["text_end"] is None else f"token {embedding['text_end']}"
    return f"the mean of the tokens{dense}: {embedding['dimensions']} dimensions; {end} is appended to a text"


def tensor_size(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def run(args: argparse.Namespace) -> None:
    made = report(open_checkpoint(resolve(args.model, LoadProgress())), args.tensors)
    if args.json:
        print_json(made)
        return
    layers = made["layers"]
    windows, embedding = Counter(layer["window"] for layer in layers), made["embedding"]
    kinds = [f"{n} full" if window is None else f"{n} with a window of {window}" for window, n in windows.items()]
    if embedding is not None:
        kinds = [
            f"{n} full" if window is None else f"{n} with {window - 1} tokens in each direction"
            for window, n in windows.items()
        ]
    ropes = {
        f"{y['rope_theta']:g}" + (f" / {y['rope_factor']:g}" if y["rope_factor"] != 1 else "")
        + (f" for {y['rope_share']:.0%} of a head" if y["rope_share"] != 1 else "")
        + (" (full)" if y["window"] is None else " (window)")
        for y in layers
    }  # fmt: skip
    heads = {
        f"{y['heads']} query and {y['kv_heads']} key/value heads of {y['head_dim']}"
        + (", keys as values" if y["value_is_key"] else "")
        for y in layers
    }  # fmt: skip
    feed_forward = sorted({layer["intermediate_size"] for layer in layers})
    sharing = sum(layer["kv_source"] != number for number, layer in enumerate(layers))
    if sharing:
        kinds.append(f"{sharing} read the KV rows of an earlier layer")
    per_layer = made["hidden_size_per_layer_input"]
    caps = [
        f"{name} {made[f'{name}_logit_softcapping']:g}"
        for name in ("attn", "final")
        if made[f"{name}_logit_softcapping"]
    ]
    tokenizer = made["tokenizer"]
    template = made["chat_template"]
    rows = [
        ("path", made["path"]),
        ("format", made["format"] + ", " + ", ".join(
            f"{kind['tensors']} {name} ({size(kind['bytes'])})" for name, kind in made["types"].items())),
        ("model", f"{made['model_type']}, {made['parameters'] / 1e6:,.1f} M parameters, {size(made['bytes'])}"),
        ("shape", f"hidden {made['hidden_size']}, feed-forward {' and '.join(map(str, feed_forward))}, "
                  + (f"per-layer input {per_layer}, " if per_layer else "")
                  + f"vocabulary {made['vocab_size']}, context {made['context']}"),
        ("layers", f"{len(layers)}: " + ", ".join(kinds)),
        ("attention", f"{'; '.join(sorted(heads))}, query scalar {made['query_pre_attn_scalar']:g}"),
        ("rope", ", ".join(sorted(ropes))),
        ("soft caps", ", ".join(caps) or "none"),
        ("head", embedding_head(embedding) if embedding else
            "tied to the embedding" if made["tied_head"] else "its own matrix"),
        ("tokenizer", "none: token ids only" if tokenizer is None else
            f"{tokenizer['size']} pieces, {tokenizer['control_tokens']} control tokens, bos {tokenizer['bos']}, "
            f"end {', '.join(map(str, made['eos_token_ids']))}"),
        ("tasks", ", ".join(embedding["prompts"])) if embedding else
            ("template", "none" if template is None else f"{len(template)} characters"),
        ("KV cache", "of a full context: " + ", ".join(
            f"{size(count)} as {kv}" for kv, count in made["kv_cache_bytes"].items())),
        ("left out", parts(made["left_out"]) or "nothing"),
    ]  # fmt: skip
    for name, text in rows:
        print(f"{name:10} {text}")
    for tensor in made.get("tensors", []):
        print(f"{tensor['type']:7} {tensor['bytes']:>12} {tensor['shape']!s:18} {tensor['name']!r}")
