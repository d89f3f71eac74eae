"""A tiny model with a vocabulary and a template like Gemma 4's, and answers that a test chooses."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from gemma4_vocabulary import ENDS, Gemma4Vocabulary
from repository import DATA, TINY

import gemma_py
from gemma_py.generate.sampling import Sampler
from gemma_py.tokenizer import Tokenizer

TEMPLATE = (DATA / "gemma4.jinja").read_text()


def write_checkpoint(folder: Path, ends: Sequence[int] = ENDS) -> Path:
    shutil.copytree(TINY, folder)
    (folder / "tokenizer.json").write_text(json.dumps(Gemma4Vocabulary().document()))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        document = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(document | {"eos_token_id": list(ends)}))
    return folder


def answer_ids(tokenizer: Tokenizer, *parts: str) -> list[int]:
    """Parts that are names of control tokens become these tokens. Other parts are encoded as text."""
    made: list[int] = []
    for part in parts:
        number = tokenizer.token_id(part)
        made += (
            [number] if number in tokenizer.control_ids and number is not None else tokenizer.encode(part, bos=False)
        )
    return made


@contextlib.contextmanager
def scripted(ids: Sequence[int]) -> Iterator[None]:
    def choose(self: Any, logits: Any, generated: Sequence[int]) -> int:
        return ids[len(generated)]

    with mock.patch.object(Sampler, "choose", choose):
        yield


def load(folder: Path) -> gemma_py.Engine:
    return gemma_py.load(folder, threads=1)
