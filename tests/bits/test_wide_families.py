"""Gemma 3n, Gemma 4 and embedding models with quantised weights, from GGUF files and quantised on loading."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints as tiny
from equivalence import Expected, bits, opened, prompt, together
from gguf_files import write_model
from tiny_models import WIDE

import gemma_py
from gemma_py.formats.blocks import TYPES
from gemma_py.runtime.fault_injection import FaultPlan

Q8_0 = TYPES["Q8_0"]
LONGEST = 45  # more than a tile of attention and several windows
GENERATING = [name for name, variant in WIDE.items() if not tiny.is_embedding(variant)]


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize(
    ("quant", "kv"),
    [
        ("F32", "bfloat16"),
        *((quant, kv) for quant in ("Q8_0", "Q4_0") for kv in ("float32", "bfloat16")),
        ("Q4_0", "q8_0"),
    ],
)
def test_every_way_of_a_pass_matches_the_reference(tmp_path: Path, name: str, quant: str, kv: str) -> None:
    """Passes differ in threads, chunks (single tokens, and around the ring's size), sequences in a pass, and schedules."""
    path = write_model(tmp_path / "m.gguf", WIDE[name], seed=3, quant=None if quant == "F32" else quant)
    with opened(path, 1, kv=kv) as engine:
        W = min(layer.sliding_window or LONGEST for layer in engine.config.layers)
        wants = [Expected(engine, prompt(engine.config, length, seed=length)) for length in (LONGEST, 20, 1)]
        for threads in (1, 2, 3, 8):
            engine.set_threads(threads)
            pieces = [[LONGEST], [W, 1, 2 * W + 1]]
            if threads in (1, 3):
                pieces += [[1], [W - 1], [W + 1], [2 * W + 1]]
            for sizes in pieces:
                assert wants[0].same(engine, sizes), f"{threads} threads, pieces of {sizes}"
            assert wants[0].same(engine, [33], all_logits=False), f"{threads} threads, one row of logits"
            assert together(engine, wants, threads), f"{threads} threads, shared passes"
        engine.set_threads(4)
        engine.instruments.fault_plan = FaultPlan(seed=1)
        assert wants[0].same(engine, [LONGEST]) and together(engine, wants[1:], 1), "a perturbed schedule"


def values_of(name: str, rounded: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """The model's values. Those of matrices that `rounded` chooses are rounded to values that Q8_0 can hold."""
    values = tiny.tensors(WIDE[name], 3)
    for tensor, table in values.items():
        if table.ndim > 1 and table.shape[-1] % Q8_0.block == 0 and rounded(tensor):
            assert Q8_0.pack is not None
            values[tensor] = Q8_0.dequantise(Q8_0.pack(table.reshape(-1, Q8_0.block))).reshape(table.shape)
    return values


def results(path: Path, quant: str | None = None) -> np.ndarray:
    with gemma_py.load(path, threads=2, quant=quant) as engine:
        ids = prompt(engine.config, 40)
        return engine.embed([ids]) if engine.config.embedding else engine.session().prefill(ids, all_logits=True)


def written(variant: tiny.Variant, directory: Path, values: dict[str, np.ndarray]) -> tuple[Path, Path]:
    """Write the values as a float checkpoint, and as a GGUF file that the gguf package quantises. Return both paths."""
    tiny.write(variant, directory / "hf", seed=3)
    tiny.save_safetensors(directory / "hf" / "model.safetensors", values, "F32")
    return directory / "hf", write_model(directory / "m.gguf", variant, seed=3, values=values, quant="Q8_0")


@pytest.mark.parametrize("name", WIDE)
def test_quantising_on_loading_has_the_bits_of_a_gguf_with_these_codes(tmp_path: Path, name: str) -> None:
    """The table of per-layer inputs is not quantised on loading, because it stays in the checkpoint's file."""
    values = values_of(name, lambda tensor: "embed_tokens_per_layer" in tensor)
    floats, codes = written(WIDE[name], tmp_path, values)
    made = bits(results(floats, "q8_0"))
    np.testing.assert_array_equal(made, bits(results(codes)))
    assert (made != bits(results(floats))).any()


@pytest.mark.parametrize("name", WIDE)
def test_quantised_weights_are_their_own_values(tmp_path: Path, name: str) -> None:
    """The weights are given as codes and as float32. Only the 16-bit activations make the results differ.

    An activation has an error of up to 2^-16, which norms increase to up to 1.5e-3. If one row of one layer's q_proj is
    wrong by 1%, the logits differ by more than the limit.
    """
    variant = replace(WIDE[name], dense=())  # `values_of` makes no values for dense layers
    floats, codes = written(variant, tmp_path, values_of(name, lambda tensor: "router" not in tensor))
    made, wanted = results(codes), results(floats)
    assert 0 < np.abs(made - wanted).max() / wanted.std() < 3e-3
