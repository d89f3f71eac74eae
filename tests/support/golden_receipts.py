"""Receipts of the tiny model. Every machine must make the bytes that are stored in tests/data."""

from pathlib import Path
from typing import Any

from repository import DATA

import gemma_py
from gemma_py.receipts.receipt import RULES

PROMPT, TOKENS = "The list of", 12
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"logit_bias": {1: -100.0, 6: -100.0}},
    "sampled": {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11, "repetition_penalty": 1.2,
        "presence_penalty": 0.25, "frequency_penalty": 0.5, "logit_bias": {1: -100.0, 6: -100.0}, "stop": ["no such text"],
    },
}  # fmt: skip


def path(name: str) -> Path:
    return DATA / f"receipt_{name}.json"


def made(engine: gemma_py.Engine, name: str) -> bytes:
    *_, last = engine.generate(PROMPT, TOKENS, receipt=True, **OPTIONS[name])
    assert last.receipt is not None
    return last.receipt.to_bytes()


def check(engine: gemma_py.Engine, name: str) -> None:
    assert made(engine, name) == path(name).read_bytes(), (
        f"the receipt {name!r} has other bytes than {path(name).name}, so audits of older receipts would report a "
        f"difference: increase RULES (now {RULES}) in gemma_py/receipts/receipt.py, and run tools/make_receipts.py"
    )
