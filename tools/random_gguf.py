"""Write a GGUF file with random weights in the shape of a Gemma 3 or 4 of the catalogue, to compare speeds without a
download.

    python tools/random_gguf.py NAME OUT.gguf [--layers N] [--type Q4_0] [--embedding Q8_0] [--vocabulary MODEL.gguf]
        [--assistant FOLDER]

--type is the type of matrices whose rows are whole blocks. --embedding is the type of the embedding, which is also
the output matrix. The per-layer table of Gemma 4 is Q4_0, as in published files. --layers writes only the first N
layers, for a model that does not fit on the disk or into memory. The vocabulary is copied from another file with
262,144 tokens, by default the demo model's. --assistant also writes a random assistant for a Gemma 4, in bfloat16 and
about as large as Google's assistants. `tools/compare_peers.py OUT.gguf --peers llama.cpp` then compares the speeds.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from gemma_py.catalog import DEFAULT_MODEL, catalogue, resolve
from gemma_py.checks.shapes import config_document
from gemma_py.formats.blocks import TYPES
from gemma_py.formats.gguf import read_gguf
from gemma_py.models.families import config_from_hf

sys.path.append(str(Path(__file__).parent.parent / "tests" / "support"))

import tiny_checkpoints
from gguf_fields import add_fields, architecture, rope_divisors
from tiny_checkpoints import Variant
from tiny_families import assistant

# Values of all models of a family, which the catalogue does not list.
_SLIDING = {"rope_type": "default", "rope_theta": 1e4}
_COMMON: dict[str, dict[str, Any]] = {
    "gemma3": {
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": _SLIDING,
        },
    },
    "gemma4": {
        "rms_norm_eps": 1e-6, "num_kv_shared_layers": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": _SLIDING,
        },
    },
}  # fmt: skip
TOKENS = 262_144  # the size of the demo model's vocabulary
_BLOCKS_AT_ONCE = 1 << 21


def document(name: str, layers: int | None) -> dict[str, Any]:
    """A config as Hugging Face writes it. layers: how many layers to keep, or None for all."""
    family = next(entry.shape["family"] for entry in catalogue() if entry.name == name)
    made = _COMMON[family] | config_document(name) | {"model_type": f"{family}_text"}
    made["vocab_size"] = made["vocab_size_per_layer_input"] = TOKENS
    # In Gemma 3, every sixth layer has full attention.
    every = ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(made["num_hidden_layers"])]
    types = made.get("layer_types", every)[:layers]
    if "full_attention" not in types:
        first = made.get("layer_types", every).index("full_attention") + 1
        raise SystemExit(f"--layers should be at least {first}, because llama.cpp needs a layer with full attention")
    return made | {"num_hidden_layers": len(types), "layer_types": types}


def blocks(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random codes, with float16 scales that keep activations near 1."""
    stored = TYPES[kind]
    made: np.ndarray = rng.integers(0, 256, (count // stored.block, stored.bytes), np.uint8)
    made[:, :2] = np.frombuffer(np.float16(0.1 / math.sqrt(2048)).tobytes(), np.uint8)
    return made


def add_vocabulary(writer: gguf.GGUFWriter, path: Path) -> None:
    fields = {key: value for key, value in read_gguf(path).metadata.items() if key.startswith("tokenizer.ggml.")}
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"])
    writer.add_token_list(list(fields["tokenizer.ggml.tokens"]))
    writer.add_token_scores([float(score) for score in fields["tokenizer.ggml.scores"]])
    writer.add_token_types([int(kind) for kind in fields["tokenizer.ggml.token_type"]])
    writer.add_bos_token_id(int(fields["tokenizer.ggml.bos_token_id"]))
    writer.add_eos_token_id(int(fields["tokenizer.ggml.eos_token_id"]))


def write(name: str, path: Path, kinds: dict[str, str], layers: int | None, vocabulary: Path) -> None:
    """kinds: the types of the tensors by name; the key "" has the type of the other matrices"""
    made = document(name, layers)
    family, config = config_from_hf(made, name)
    writer = gguf.GGUFWriter(str(path), architecture(made))
    add_fields(writer, made, ())
    add_vocabulary(writer, vocabulary)
    stored: list[tuple[str, tuple[int, ...]]] = []
    for tensor in family.tensors(config).values():
        if tensor.gguf == "output.weight":
            continue
        kind = kinds.get(tensor.gguf, kinds[""])
        quantised = len(tensor.shape) > 1 and tensor.shape[-1] % TYPES[kind].block == 0
        if quantised:
            block_type = gguf.GGMLQuantizationType[kind]
            size = math.prod(tensor.shape) // TYPES[block_type.name].block * TYPES[block_type.name].bytes
            writer.add_tensor_info(
                tensor.gguf, _bytes_shape(tensor.shape, block_type.name), np.dtype(np.uint8), size, block_type
            )
        else:
            writer.add_tensor_info(tensor.gguf, tensor.shape, np.dtype(np.float32), 4 * math.prod(tensor.shape))
        stored.append((block_type.name if quantised else "F32", tensor.shape))
    divisors = rope_divisors(made) if made["model_type"] == "gemma4_text" else np.empty(0, np.float32)
    if len(divisors):
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, np.dtype(np.float32), divisors.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    rng = np.random.default_rng(1)
    with path.open("r+b") as file:
        file.seek(0, 2)
        for block_type, shape in stored:
            file.write(b"\0" * (-file.tell() % writer.data_alignment))
            if block_type == "F32":
                file.write(np.ones(shape, np.float32).tobytes())
                continue
            left, block = math.prod(shape), TYPES[block_type].block
            while left:
                now = min(left, _BLOCKS_AT_ONCE * block)
                file.write(blocks(block_type, now, rng).tobytes())
                left -= now
        file.write(b"\0" * (-file.tell() % writer.data_alignment))
        file.write(divisors.tobytes())
        file.write(b"\0" * (-file.tell() % writer.data_alignment))


def write_assistant(name: str, layers: int | None, folder: Path) -> None:
    made = document(name, layers)
    size = 256 if made.get("hidden_size_per_layer_input") else 1024  # the assistants of E2B and E4B are smaller
    context = made["max_position_embeddings"]
    sizes = {"hidden_size": size, "intermediate_size": 8 * size, "max_position_embeddings": context}
    tiny_checkpoints.write(assistant(Variant(made, dtype="BF16"), sliding_layers=3, **sizes), folder, 1)


def _bytes_shape(shape: tuple[int, ...], block_type: str) -> tuple[int, ...]:
    """The gguf package computes the shape in values from this shape in bytes."""
    return (*shape[:-1], shape[-1] // TYPES[block_type].block * TYPES[block_type].bytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[e.name for e in catalogue() if e.shape["family"] in _COMMON])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, help="write the first N layers only")
    types = [name for name, kind in TYPES.items() if kind.quantised]
    parser.add_argument("--type", default="Q4_0", choices=types)
    parser.add_argument("--embedding", default="Q8_0", choices=types)
    parser.add_argument("--vocabulary", type=Path, help="a GGUF file with 262,144 tokens (default: the demo model)")
    parser.add_argument("--assistant", type=Path, metavar="FOLDER", help="also write an assistant for this Gemma 4")
    args = parser.parse_args()
    if args.assistant and document(args.name, args.layers)["model_type"] != "gemma4_text":
        parser.error("--assistant needs a Gemma 4, because other models have no assistants")
    if args.assistant:
        write_assistant(args.name, args.layers, args.assistant)
    kinds = {"": args.type, "token_embd.weight": args.embedding, "per_layer_token_embd.weight": "Q4_0"}
    write(args.name, args.out, kinds, args.layers, args.vocabulary or resolve(DEFAULT_MODEL))
    return 0


if __name__ == "__main__":
    sys.exit(main())
