"""Trace files: digests of the output of every phase of a forward pass, to compare machines or versions.

A trace does not depend on the number of threads or the chunk size.
"""

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.checks.verify import Difference, compute, prompt
from gemma_py.errors import FormatError, InputError
from gemma_py.formats.files import read_json
from gemma_py.generate.engine import Engine
from gemma_py.paths import atomic_write
from gemma_py.runtime.trace import UNTRACED

_BLOCK = 16  # the number of consecutive positions that share one digest
_TRACED_AT_ONCE = 64
_FORM = "gemma_py trace 2"
_FORM_1 = "gemma_py trace 1"  # an older format, which can still be read


def identity(engine: Engine) -> dict[str, str]:
    """Return digests that identify a model without reading all weights, and the options that change the bits.

    One digest covers the config. The others cover each tensor's name, type, shape and 16 short pieces of the data.
    """
    checkpoint, options = engine.checkpoint, {}
    if engine.quant is not None:
        options["quant"] = engine.quant
    if engine.kv_type != "float32":
        options["kv"] = engine.kv_type
    weights = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        weights.update(repr((name, tensor.type.name, tensor.shape, tensor.data.nbytes)).encode())
        data = tensor.data.reshape(-1)
        for part in range(16):
            at = (len(data) - 1) * part // 15
            weights.update(data[at : at + 256].tobytes())
    config = hashlib.sha256(json.dumps(asdict(checkpoint.config), sort_keys=True).encode()).hexdigest()
    return {"config": config, "weights": weights.hexdigest(), **options}


def fold(hashes: np.ndarray) -> list[list[str]]:
    """Return a string for each layer and each phase: 16 hex digits of a sha256 for every block of _BLOCK positions.

    hashes: int64 [layers + 1, phases, tokens]. The string is empty where a layer does not have the phase.
    """
    little = hashes.astype("<i8")

    def joined(row: np.ndarray) -> str:
        if (row == UNTRACED).all():
            return ""
        starts = range(0, len(row), _BLOCK)
        return "".join(hashlib.sha256(row[at : at + _BLOCK].tobytes()).hexdigest()[:16] for at in starts)

    return [[joined(row) for row in layer] for layer in little]


def trace_document(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    traced = compute(engine, ids, _TRACED_AT_ONCE, trace=True)
    return {
        "format": _FORM,
        "model": identity(engine),
        "machine": f"{platform.machine()}, {platform.system()}, {engine.threads} threads",
        "tokens": list(ids),
        "block": _BLOCK,
        "phases": list(traced.phases),
        "hashes": fold(traced.hashes),
        "logits": traced.result.logits,
        "kv": list(traced.result.kv),
    }


def write_trace(path: Path, document: dict[str, Any]) -> None:
    with atomic_write(path) as file:
        file.write(json.dumps(document).encode() + b"\n")


def read_trace(path: Path) -> dict[str, Any]:
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") not in (_FORM, _FORM_1):
        raise FormatError(f"{path}: not a trace file of this version, whose format is {_FORM!r}")
    tokens, blocks, phases = document.get("tokens"), 0, document.get("phases")
    sound = _is_list_of(tokens, int) and document.get("block") == _BLOCK and _is_list_of(phases, str)
    if sound and tokens:
        blocks = -(-len(tokens) // _BLOCK)
    hashes = document.get("hashes")
    sound = sound and blocks > 0 and _is_list_of(hashes, list) and _is_list_of(document.get("kv"), str)
    sound = sound and isinstance(document.get("model"), dict) and isinstance(document.get("logits"), str)
    if not sound or not all(_is_layer(layer, len(phases or ()), blocks) for layer in hashes or ()):
        raise FormatError(f"{path}: damaged trace: some fields are missing or invalid")
    return document


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(entry) is kind for entry in value)


def _is_layer(layer: list[Any], phases: int, blocks: int) -> bool:
    return _is_list_of(layer, str) and len(layer) == phases and all(len(row) in (0, 16 * blocks) for row in layer)


def check_comparable(trace: dict[str, Any], path: Path, engine: Engine, tokens: int | None) -> None:
    """Raise InputError unless the trace was made with the engine's model and the fixed prompt.

    Commands call this before a long run. tokens: the wanted number of tokens, or None for as many as the trace has.
    """
    ours, theirs = identity(engine), dict(trace["model"])
    if trace["format"] == _FORM_1:  # format 1 computed config digests differently, so compare only the weights
        ours.pop("config"), theirs.pop("config", None)
    if ours != theirs:
        raise InputError(f"{path}: this trace was made with another model, --quant or --kv than {engine.path}")
    length = len(trace["tokens"])
    if tokens not in (None, length):
        raise InputError(
            f"{path}: the trace has {length} tokens, but --tokens is {tokens}; leave --tokens out to use {length}"
        )
    if trace["tokens"] != prompt(length, engine.config.vocab_size):
        raise InputError(f"{path}: the trace was made with other token ids than the fixed prompt of this version")
    if len(trace["hashes"]) != engine.program.layers or len(trace["kv"]) != len(engine.config.kv_owners):
        raise FormatError(f"{path}: damaged trace: the trace and the model differ in the number of layers")


def compare(trace: dict[str, Any], made: dict[str, Any], between: str) -> Difference | None:
    """Return the first difference of two traces of one prompt. If a trace lacks a phase, the phase counts as empty."""
    names = [*made["phases"], *(name for name in trace["phases"] if name not in made["phases"])]
    for layer, (ours, theirs) in enumerate(zip(made["hashes"], trace["hashes"], strict=True)):
        of_ours, of_theirs = (
            dict(zip(made["phases"], ours, strict=True)),
            dict(zip(trace["phases"], theirs, strict=True)),
        )
        for name in names:
            a, b = of_ours.get(name, ""), of_theirs.get(name, "")
            if a != b:
                return Difference(between, layer, name, *_positions(a, b, len(made["tokens"])))
    for layer, (a, b) in enumerate(zip(made["kv"], trace["kv"], strict=True)):
        if a != b:
            return Difference(between, layer, "rows kept in the cache")
    return None if made["logits"] == trace["logits"] else Difference(between, None, "logits")


def _positions(a: str, b: str, tokens: int) -> tuple[int, int]:
    """Return the first and the last position of the first block that differs.

    If one trace lacks the phase, return the range of all positions.
    """
    blocks: Iterable[int] = range(0, min(len(a), len(b)), 16)
    at = next((at for at in blocks if a[at : at + 16] != b[at : at + 16]), None)
    if at is None:
        return 0, tokens - 1
    first = at // 16 * _BLOCK
    return first, min(first + _BLOCK, tokens) - 1
