"""Opening a checkpoint, a GGUF file or a Hugging Face directory: its config, tensors, tokenizer and chat template."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import ConfigError, FormatError, ModelNotFoundError
from gemma_py.formats.files import present, read_json, read_text
from gemma_py.formats.gguf import read_gguf
from gemma_py.formats.safetensors import read_index, read_safetensors
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.config import Config
from gemma_py.models.families import config_from_gguf, config_from_hf
from gemma_py.models.family import Family
from gemma_py.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from gemma_py.weights.tensors import (
    Matrix,
    Source,
    Stored,
    StoredMatrix,
    gguf_source,
    hugging_face_source,
    other_part,
    read_weights,
    stored_weights,
)

_GGUF_EMBEDDING, _GGUF_HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: str  # "GGUF" or "safetensors"
    family: Family
    config: Config
    source: Source
    chat_template: str | None
    metadata: Mapping[str, Any]  # GGUF's metadata; empty for safetensors
    left_out: Mapping[str, int] = field(default_factory=dict)  # parts for images and sound: how many tensors each has
    cacheable: bool = True  # whether its packed weights may be cached for later starts

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.source.tensors

    def weights(self, quant: str | None = None) -> dict[str, Matrix | StoredMatrix | np.ndarray]:
        """All weights in memory, for the specification; gathered tables stay in their file."""
        return read_weights(self.stored_weights(quant))

    def stored_weights(self, quant: str | None = None) -> dict[str, Stored]:
        """The weights with names and shapes checked; the matrices' values stay in the file."""
        return stored_weights(self.source, quant)

    def tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if it has none, and then the engine works on ids only."""
        if self.format == "GGUF":
            return tokenizer_from_gguf(self.path, dict(self.metadata))
        file = self.path / "tokenizer.json"
        return tokenizer_from_json(file, _bos_token(self.path)) if present(file) else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Read headers and descriptions; weights stay on disk until they are needed."""
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if not path.is_file():
        raise FormatError(f"{path}: neither a file nor a directory")
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        raise FormatError(f"{path}: give the directory with config.json and the weights")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    embedding = file.tensors.get(_GGUF_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{path}: tensor {_GGUF_EMBEDDING!r} is missing or not a matrix")
    tied = _GGUF_HEAD not in file.tensors
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    family, config = config_from_gguf(file.metadata, str(path), embedding.shape[0], tied, shapes)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: tokenizer.chat_template should be a string")
    tensors, left_out = _text_model(file.tensors)
    source = gguf_source(tensors, family.tensors(config), tied, str(path))
    return Checkpoint(path, "GGUF", family, config, source, template, file.metadata, left_out)


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; it contains {ggufs[0].name}: give that file" if ggufs else ""
        raise ModelNotFoundError(f"{path}: no config.json in this directory{hint}")
    document = read_json(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if present(generation) else None
    family, config = config_from_hf(document, str(path / "config.json"), generation_config)
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        tensors = read_safetensors(single)
    elif index.exists():
        tensors = read_index(index)
    else:
        raise ModelNotFoundError(f"{path}: neither model.safetensors nor model.safetensors.index.json")
    tensors, left_out = _text_model(tensors)
    source = hugging_face_source(tensors, family.tensors(config), config.tie_word_embeddings, str(path))
    return Checkpoint(path, "safetensors", family, config, source, _template(path), {}, left_out)


def _text_model(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """The tensors of the text model, and how many there are of each other part of a multimodal checkpoint."""
    parts = {name: other_part(name) for name in tensors}
    text = {name: tensor for name, tensor in tensors.items() if parts[name] is None}
    return text, Counter(part for part in parts.values() if part is not None)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    document = read_json(file) if present(file) else {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: should be a JSON object")
    return document


def _bos_token(path: Path) -> str:
    """The text of the bos token, which is a string or, from older tools, an object."""
    token = _tokenizer_config(path).get("bos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return "<bos>"
    if not isinstance(token, str):
        raise ConfigError(f"{path / 'tokenizer_config.json'}: bos_token should be a string, found {token!r:.60}")
    return token


def _template(path: Path) -> str | None:
    file = path / "chat_template.jinja"
    if present(file):
        return read_text(file)
    template = _tokenizer_config(path).get("chat_template")
    if isinstance(template, list):  # several named templates; "default" is the one for chat
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path / 'tokenizer_config.json'}: chat_template should be a string")
    return template
