"""Compare how many short texts gemma_py, sentence-transformers and llama.cpp embed per second, with equal random
weights.

    python tools/compare_embeddings.py [--shape tiny|300m] [--texts N] [--type F32|Q8_0] [--threads N] [--rounds N] [--python EXE]

The shape 300m is EmbeddingGemma's, with the small vocabulary of the tiny tokenizer: the size of the vocabulary does not
matter, because an embedding model only looks up rows of the table. gemma_py and sentence-transformers get texts.
llama.cpp gets token ids, so its time does not include tokenisation. sentence-transformers has no quantised weights and
is left out with Q8_0. Each runtime has a process of its own, and one process works at a time. The largest cosine
distance to gemma_py's embeddings shows whether a runtime computes this model. --python is the interpreter that has the
packages of the other runtimes.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tools")]
_MOST_TOKENS, _MOST_TEXTS = 512, 64  # limits of a pass of llama.cpp, equal to those of gemma_py
_BATCH = 32  # texts in a batch, as by default in sentence-transformers


def short_texts(count: int) -> list[str]:
    from peers import texts

    words, rng = " ".join(texts()).split(), np.random.default_rng(1)
    starts, lengths = rng.integers(0, len(words) - 25, count), rng.integers(3, 26, count)
    return [" ".join(words[at : at + length]) for at, length in zip(starts, lengths, strict=True)]


def write_models(shape: str, kind: str, folder: Path) -> None:
    """Write the weights to FOLDER/hf for sentence-transformers and to FOLDER/model.gguf for the other runtimes."""
    import tiny_checkpoints as tiny
    import tiny_families
    from gguf_files import write_model

    sizes: dict[str, Any] = {"max_position_embeddings": 512, "vocab_size": 1536}
    dense = (40, 32)
    if shape == "300m":
        sizes |= {"max_position_embeddings": 2048, "hidden_size": 768, "intermediate_size": 1152, "num_hidden_layers": 24,
                  "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256, "query_pre_attn_scalar": 256,
                  "sliding_window": 512}  # fmt: skip
        dense = (3072, 768)
    variant = tiny.Variant(tiny_families.embedding_gemma(**sizes), prefix="", dense=dense)
    tiny.write(variant, folder / "hf", 1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "models" / "tiny-gemma3" / name, folder / "hf" / name)
    write_model(folder / "model.gguf", variant, 1, quant=None if kind == "F32" else kind)
    (folder / "vocab_size").write_text(str(sizes["vocab_size"]))


class Ours:
    def __init__(self, folder: Path, threads: int) -> None:
        import gemma_py

        path = folder / ("hf" if json.loads((folder / "kind.json").read_text()) == "F32" else "model.gguf")
        self.engine = gemma_py.load(path, threads=threads)
        self.tokenizer = gemma_py.load(folder / "hf", threads=1).text_tokenizer()

    def embed(self, texts: list[str]) -> np.ndarray:
        if self.engine.tokenizer is not None:
            return self.engine.embed(texts)
        # The file has no vocabulary.
        return self.engine.embed([self.tokenizer.encode(text) for text in texts])


class SentenceTransformers:
    def __init__(self, folder: Path, threads: int) -> None:
        import sentence_transformers
        import torch

        torch.set_num_threads(threads)
        self.model = sentence_transformers.SentenceTransformer(str(folder / "hf"), device="cpu")

    def embed(self, texts: list[str]) -> np.ndarray:
        return np.asarray(self.model.encode(texts, batch_size=_BATCH, show_progress_bar=False))


class Llama:
    def __init__(self, folder: Path, threads: int) -> None:
        import llama_cpp

        import gemma_py

        self.api, self.tokenizer = llama_cpp, gemma_py.load(folder / "hf", threads=1).text_tokenizer()
        overrides = (llama_cpp.llama_model_kv_override * 3)()
        overrides[0].key, overrides[0].tag = b"tokenizer.ggml.model", llama_cpp.LLAMA_KV_OVERRIDE_TYPE_STR
        overrides[0].value.val_str = b"no_vocab"
        overrides[1].key, overrides[1].tag = b"gemma-embedding.vocab_size", llama_cpp.LLAMA_KV_OVERRIDE_TYPE_INT
        overrides[1].value.val_i64 = int((folder / "vocab_size").read_text())
        options = llama_cpp.llama_model_default_params()
        options.kv_overrides = overrides
        self.model = llama_cpp.llama_model_load_from_file(str(folder / "model.gguf").encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = _MOST_TEXTS * _MOST_TOKENS
        settings.n_batch = settings.n_ubatch = _MOST_TOKENS
        settings.n_seq_max, settings.embeddings = _MOST_TEXTS, True
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, settings)
        self.batch = llama_cpp.llama_batch_init(_MOST_TOKENS, 0, 1)
        self.width = llama_cpp.llama_model_n_embd_out(self.model)

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        made, first = np.empty((len(texts), self.width), np.float32), 0
        while first < len(order):
            last, tokens = first, 0
            while last < len(order) and last - first < _MOST_TEXTS and tokens + len(texts[order[last]]) <= _MOST_TOKENS:
                tokens += len(texts[order[last]])
                last += 1
            self._pass([texts[number] for number in order[first:last]], made, order[first:last])
            first = last
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    def _pass(self, texts: list[list[int]], made: np.ndarray, numbers: list[int]) -> None:
        batch, row = self.batch, 0
        for number, text in enumerate(texts):
            for position, token in enumerate(text):
                batch.token[row], batch.pos[row], batch.n_seq_id[row] = token, position, 1
                batch.seq_id[row][0], batch.logits[row] = number, 1
                row += 1
        batch.n_tokens = row
        if self.api.llama_encode(self.context, batch):
            raise SystemExit("llama_encode of llama.cpp failed")
        for at, number in enumerate(numbers):
            values = self.api.llama_get_embeddings_seq(self.context, at)
            made[number] = np.ctypeslib.as_array(ctypes.cast(values, ctypes.POINTER(ctypes.c_float)), (self.width,))


RUNTIMES: dict[str, Any] = {"gemma_py": Ours, "sentence-transformers": SentenceTransformers, "llama.cpp": Llama}


def serve(name: str, folder: Path, threads: int) -> None:
    """For each line of standard input, embed the texts of FOLDER/texts.json and print the seconds."""
    texts = json.loads((folder / "texts.json").read_text())
    runtime = RUNTIMES[name](folder, threads)
    if isinstance(runtime, Llama):
        texts = [runtime.tokenizer.encode(text) for text in texts]
    np.save(folder / f"{name}.npy", runtime.embed(texts))
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        runtime.embed(texts)
        print(time.perf_counter() - start, flush=True)


class Worker:
    def __init__(self, name: str, python: str, folder: Path, threads: int) -> None:
        command = [sys.executable if name == "gemma_py" else python, __file__, "--serve", name, str(folder)]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        if self._line() != "ready\n":
            raise SystemExit(f"{name} did not start")

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def measure(self) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.communicate()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", "300m"), default="tiny")
    parser.add_argument("--type", choices=("F32", "Q8_0"), default="F32", dest="kind")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--serve", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], Path(args.serve[1]), args.threads)
        return 0
    names = [name for name in RUNTIMES if args.kind == "F32" or name != "sentence-transformers"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_models(args.shape, args.kind, folder)
        (folder / "kind.json").write_text(json.dumps(args.kind))
        (folder / "texts.json").write_text(json.dumps(short_texts(args.texts)))
        workers = {name: Worker(name, args.python, folder, args.threads) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(args.rounds):
            for name, worker in workers.items():
                seconds[name].append(worker.measure())
        for worker in workers.values():
            worker.close()
        made = {name: np.load(folder / f"{name}.npy").astype(np.float64) for name in names}
    ours = seconds["gemma_py"]
    for name in names:
        rate, distance = args.texts / statistics.median(seconds[name]), 1 - (made[name] * made["gemma_py"]).sum(1)
        ratio = statistics.median(theirs / mine for theirs, mine in zip(seconds[name], ours, strict=True))
        print(f"{name:22} {rate:10.1f} texts/s   gemma_py is {ratio:.2f}x as fast   distance {distance.max():.1e}")
    print(
        json.dumps(
            {"shape": args.shape, "type": args.kind, "texts": args.texts, "threads": args.threads, "seconds": seconds}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
