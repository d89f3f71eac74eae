"""gemma_py and other runtimes behind one interface, each in a process that compare_peers.py controls over pipes.

    python tools/peers.py prepare MODEL.gguf DIRECTORY [NAME ...]    # writes dequantised weights for torch and these runtimes
    python tools/peers.py serve NAME MODEL.gguf DIRECTORY THREADS [SETTINGS]

serve answers each line of JSON, [method, argument, ...], with a line of JSON. The methods are those of `Runtime`.
"""

import json
import os
import pydoc
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

TOPICS = ("str", "json", "argparse", "asyncio.Task", "random", "subprocess", "pathlib.Path", "collections")
_SCORED_AT_ONCE = 32


def texts() -> list[str]:
    return [pydoc.plain(pydoc.render_doc(topic)) for topic in TOPICS]


def dequantised(path: Path, **options: Any) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, **options
    )


def prepare(path: Path, directory: Path, names: Sequence[str]) -> None:
    """Write the dequantised model to DIRECTORY/float32 for transformers, and if they are among the names, to DIRECTORY/int8
    for CTranslate2 and to DIRECTORY/openvino for OpenVINO.
    """
    import tokenizers
    import transformers

    model = dequantised(path)
    model.hf_quantizer = None  # otherwise transformers refuses to save the dequantised weights
    vars(model.config).pop("quantization_config", None)  # only newer versions of transformers keep it
    model.save_pretrained(directory / "float32")
    # The converter needs a vocabulary. The texts of its tokens do not matter, because only ids are compared.
    vocabulary = {str(number): number for number in range(model.config.vocab_size)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="3"))
    special = {"bos_token": "2", "eos_token": "1", "unk_token": "3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(directory / "float32")
    if "CTranslate2" in names:
        from ctranslate2.converters import TransformersConverter

        TransformersConverter(str(directory / "float32")).convert(str(directory / "int8"), quantization="int8")
    if "OpenVINO" in names:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        options = {"export": True, "quantization_config": OVWeightQuantizationConfig(bits=8)}
        OVModelForCausalLM.from_pretrained(directory / "float32", **options).save_pretrained(directory / "openvino")


class Runtime:
    """A runtime to measure. Calls do not depend on each other.

    prefill: seconds to the last token's logits.
    decode: seconds of `count` greedy tokens after the ids.
    nll: the NLL of each token after the first.
    """

    def prefill(self, ids: list[int]) -> float:
        raise NotImplementedError

    def decode(self, ids: list[int], count: int) -> float:
        raise NotImplementedError

    def nll(self, ids: list[int]) -> list[float]:
        raise NotImplementedError

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Ours(Runtime):
    def __init__(self, path: Path, directory: Path, threads: int) -> None:
        import gemma_py

        self.engine = gemma_py.load(path, threads=threads)

    def encode(self, text: str) -> list[int]:
        return self.engine.encode(text)

    def prefill(self, ids: list[int]) -> float:
        start = time.perf_counter()
        self.engine.session().prefill(ids)
        return time.perf_counter() - start

    def decode(self, ids: list[int], count: int) -> float:
        session = self.engine.session()
        logits = session.prefill(ids)
        start = time.perf_counter()
        for _ in range(count):
            logits = session.decode(int(np.argmax(logits)))
        return time.perf_counter() - start

    def nll(self, ids: list[int]) -> list[float]:
        return list(self.engine.score(ids))


class Llama(Runtime):
    def __init__(self, path: Path, directory: Path, threads: int, **settings: Any) -> None:
        import llama_cpp

        self.api = llama_cpp
        # llama.cpp's own programs also limit the cache of sliding layers to the window. A full cache is not faster.
        options = {"n_gpu_layers": 0, "swa_full": False, "verbose": False, "n_batch": settings["n_ubatch"], **settings}
        self.load = partial(llama_cpp.Llama, str(path), n_threads=threads, n_threads_batch=threads, **options)
        self.model = self.load(n_ctx=4096)

    def _make_room(self, tokens: int) -> None:
        if tokens > self.model.n_ctx():
            self.model.close()
            self.model = self.load(n_ctx=tokens)

    def _logits(self, row: int) -> np.ndarray:
        pointer = self.api.llama_get_logits_ith(self.model.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self.model.n_vocab(),))

    def prefill(self, ids: list[int]) -> float:
        self._make_room(len(ids))
        self.model.reset()
        start = time.perf_counter()
        self.model.eval(ids)  # discards cached tokens; computes only the last token's logits
        self._logits(-1).argmax()  # reading the logits waits for the computation
        return time.perf_counter() - start

    def decode(self, ids: list[int], count: int) -> float:
        self._make_room(len(ids) + count)
        self.prefill(ids)
        start = time.perf_counter()
        for _ in range(count):
            self.model.eval([int(self._logits(-1).argmax())])
        self._logits(-1)
        return time.perf_counter() - start

    def nll(self, ids: list[int]) -> list[float]:
        made: list[float] = []
        api, memory = self.api, self.api.llama_get_memory(self.model.ctx)
        api.llama_memory_clear(memory, True)
        batch = api.llama_batch_init(_SCORED_AT_ONCE, 0, 1)
        for first in range(0, len(ids) - 1, _SCORED_AT_ONCE):
            following = ids[first + 1 : first + 1 + _SCORED_AT_ONCE]
            batch.n_tokens = len(following)
            for row in range(len(following)):
                batch.token[row], batch.pos[row], batch.logits[row] = ids[first + row], first + row, True
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, 0
            if api.llama_decode(self.model.ctx, batch) != 0:
                raise RuntimeError("llama_decode failed")
            for row, token in enumerate(following):
                logits = self._logits(row).astype(np.float64)
                made.append(float(logits.max() + np.log(np.exp(logits - logits.max()).sum()) - logits[token]))
        api.llama_batch_free(batch)
        api.llama_memory_clear(memory, True)
        return made


class Torch(Runtime):
    def __init__(self, path: Path, directory: Path, threads: int) -> None:
        import torch
        import transformers

        self.torch = torch
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory / "float32", dtype=torch.float32)

    def _start(self, ids: list[int]) -> Any:
        return self.model(self.torch.tensor([ids]), use_cache=True, logits_to_keep=1)

    def prefill(self, ids: list[int]) -> float:
        with self.torch.inference_mode():
            start = time.perf_counter()
            int(self._start(ids).logits[0, -1].argmax())
            return time.perf_counter() - start

    def decode(self, ids: list[int], count: int) -> float:
        with self.torch.inference_mode():
            out = self._start(ids)
            start = time.perf_counter()
            for _ in range(count):
                token = out.logits[0, -1].argmax().view(1, 1)
                out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
            return time.perf_counter() - start

    def nll(self, ids: list[int]) -> list[float]:
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([ids])).logits[0, :-1]
            rows = [self.torch.log_softmax(row.double(), -1)[token] for row, token in zip(logits, ids[1:], strict=True)]
        return [-float(row) for row in rows]


class CTranslate(Runtime):
    def __init__(self, path: Path, directory: Path, threads: int) -> None:
        import ctranslate2

        self.model = ctranslate2.Generator(
            str(directory / "int8"), inter_threads=1, intra_threads=threads, compute_type="int8"
        )

    def _generate(self, ids: list[int], count: int) -> list[float]:
        """The time of the start and of each token. The whole prompt is one pass, with logits for the last token only."""
        times = [time.perf_counter()]

        def came(step: Any) -> bool:
            times.append(time.perf_counter())
            return False

        self.model.generate_batch(
            [[str(token) for token in ids]], max_length=count, min_length=count, include_prompt_in_result=False,
            callback=came,
        )  # fmt: skip
        if len(times) != count + 1:
            raise RuntimeError(f"expected {count} tokens, found {len(times) - 1}")
        return times

    def prefill(self, ids: list[int]) -> float:
        start, end = self._generate(ids, 1)
        return end - start

    def decode(self, ids: list[int], count: int) -> float:
        times = self._generate(ids, count + 1)
        return times[-1] - times[1]

    def nll(self, ids: list[int]) -> list[float]:
        (result,) = self.model.score_batch([[str(token) for token in ids]], max_input_length=0)
        return [-float(value) for value in result.log_probs]


class IkLlama(Runtime):
    """ik_llama.cpp's program llama-bench. Each call is a process, which loads the model and runs the test twice; the second
    run counts.
    """

    def __init__(self, path: Path, directory: Path, threads: int, program: str, repack: int) -> None:
        settings = {"-m": path, "-t": threads, "-fa": 1, "-rtr": repack, "-r": 2, "-p": 0, "-n": 0, "-o": "json"}
        self.command = [program, *(str(part) for pair in settings.items() for part in pair)]

    def _seconds(self, *test: str) -> float:
        done = subprocess.run([*self.command, *test], stdout=subprocess.PIPE, check=True)
        (result,) = json.loads(done.stdout)
        return float(result["samples_ns"][-1]) / 1e9

    def prefill(self, ids: list[int]) -> float:
        return self._seconds("-p", str(len(ids)))

    def decode(self, ids: list[int], count: int) -> float:
        return self._seconds("-gp", f"{len(ids)},{count}")

    def nll(self, ids: list[int]) -> list[float]:
        return []  # llama-bench computes random tokens, and prints no logits

    def memory(self) -> int:
        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


class OpenVino(Runtime):
    """OpenVINO with 8-bit weights. Two graphs have the same weights: one computes the last token's logits, one all."""

    def __init__(self, path: Path, directory: Path, threads: int) -> None:
        import openvino
        from openvino import opset13

        core = openvino.Core()
        self.options = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self.compile = lambda graph: core.compile_model(graph, "CPU", self.options).create_infer_request()
        self.graph = core.read_model(directory / "openvino" / "openvino_model.xml")
        last = self.graph.clone()
        head = last.output("logits").get_node().input_value(0).get_node()
        if head.get_type_name() != "MatMul":
            raise RuntimeError(f"expected the matrix product of the logits, found {head.get_type_name()}")
        row = opset13.slice(head.input_value(0), [-1], [np.iinfo(np.int32).max], [1], [1])
        head.input(0).replace_source_output(row.output(0))
        last.validate_nodes_and_infer_types()
        self.request = self.compile(last)

    def _logits(self, request: Any, ids: list[int], past: int) -> np.ndarray:
        end = past + len(ids)
        inputs = {
            "input_ids": np.array([ids]), "attention_mask": np.ones((1, end), np.int64),
            "position_ids": np.arange(past, end)[None], "beam_idx": np.zeros(1, np.int32),
        }  # fmt: skip
        return np.asarray(request.infer(inputs)["logits"][0])

    def prefill(self, ids: list[int]) -> float:
        self.request.reset_state()
        start = time.perf_counter()
        self._logits(self.request, ids, 0)
        return time.perf_counter() - start

    def decode(self, ids: list[int], count: int) -> float:
        self.request.reset_state()
        logits = self._logits(self.request, ids, 0)
        start = time.perf_counter()
        for past in range(len(ids), len(ids) + count):
            logits = self._logits(self.request, [int(logits[-1].argmax())], past)
        return time.perf_counter() - start

    def nll(self, ids: list[int]) -> list[float]:
        logits = self._logits(self.compile(self.graph), ids, 0)[:-1]
        rows = zip(logits.astype(np.float64), ids[1:], strict=True)
        return [float(row.max() + np.log(np.exp(row - row.max()).sum()) - row[token]) for row, token in rows]


RUNTIMES = {
    "gemma_py": Ours,
    "llama.cpp": Llama,
    "ik_llama.cpp": IkLlama,
    "torch": Torch,
    "CTranslate2": CTranslate,
    "OpenVINO": OpenVino,
}


def serve(name: str, path: Path, directory: Path, threads: int, settings: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print to stderr, because stdout carries the answers
    runtime = RUNTIMES[name](path, directory, threads, **settings)
    print(json.dumps("ready"), file=answers)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(json.dumps(getattr(runtime, method)(*arguments)), file=answers)
    answers.close()
    os._exit(0)  # skip destructors, because some runtimes abort in them


if __name__ == "__main__":
    command, *rest = sys.argv[1:]
    if command == "prepare":
        prepare(Path(rest[0]), Path(rest[1]), rest[2:])
    else:
        serve(rest[0], Path(rest[1]), Path(rest[2]), int(rest[3]), json.loads(rest[4]) if len(rest) > 4 else {})
