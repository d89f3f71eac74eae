"""Opening of checkpoints, which are GGUF files or Hugging Face directories with safetensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
from gemma_py.models.family import Family, dense_name, dense_shapes
from gemma_py.models.fields import Fields
from gemma_py.tokenizer import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from gemma_py.tokenizer.sources import appended_token
from gemma_py.weights.modules import Modules, read_modules
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
    # The number of tensors in each part for images or sound, such as "vision_tower". These tensors are not read.
    left_out: Mapping[str, int] = field(default_factory=dict)
    modules: Modules = field(default_factory=Modules)  # empty for GGUF
    # Whether packed weights may be cached on disk. If not, each start packs the weights into memory.
    cacheable: bool = True

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self.source.tensors

    def weights(self, quant: str | None = None) -> dict[str, Matrix | StoredMatrix | np.ndarray]:
        """Read all weights, unpacked, for the specification (reference/). A `GatheredTable` stays in the file."""
        return read_weights(self.stored_weights(quant))

    def stored_weights(self, quant: str | None = None) -> dict[str, Stored]:
        """Check names and shapes, and return the weights. The values of matrices are not read yet."""
        return stored_weights(self.source, quant)

    @cached_property
    def text_end(self) -> int | None:
        """The id of the token, usually eos, that the tokenizer appends to a text to embed, or None if it appends none.

        A tokenizer.json decides alone, as in current versions of transformers: add_eos_token in tokenizer_config.json has no
        effect beside it.
        """
        if self.format != "GGUF":
            file = self.path / "tokenizer.json"
            return appended_token(file) if present(file) else None
        fields = Fields(str(self.path), self.metadata)
        if not fields.flag("tokenizer.ggml.add_eos_token", False):
            return None
        ids = fields.ids("tokenizer.ggml.eos_token_id")
        if not ids:
            raise ConfigError(
                f"{self.path}: tokenizer.ggml.add_eos_token is set, but tokenizer.ggml.eos_token_id is missing"
            )
        return ids[0]

    def tokenizer(self) -> Tokenizer | None:
        if self.format == "GGUF":
            return tokenizer_from_gguf(self.path, dict(self.metadata))
        file = self.path / "tokenizer.json"
        return tokenizer_from_json(file, _bos_token(self.path)) if present(file) else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face directory. The config and the tensors' headers are read, but not the weights."""
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise ModelNotFoundError(f"{path}: no such file or directory")
    if not path.is_file():
        raise FormatError(f"{path}: should be a file or a directory, but is something else")
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        raise FormatError(f"{path}: give the directory that contains this file, instead of the file")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    file = read_gguf(path)
    embedding = file.tensors.get(_GGUF_EMBEDDING)
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{path}: tensor {_GGUF_EMBEDDING!r} should be a matrix, but is missing or has another shape")
    tied = _GGUF_HEAD not in file.tensors
    family, config = config_from_gguf(file.metadata, str(path), embedding.shape[0], tied, file.tensors)
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"{path}: tokenizer.chat_template should be a string, found {type(template).__name__}")
    tensors, left_out = _text_model(file.tensors)
    source = gguf_source(tensors, family.tensors(config), tied, str(path), family.unused(config))
    return Checkpoint(path, "GGUF", family, config, source, template, file.metadata, left_out)


def _open_directory(path: Path) -> Checkpoint:
    if not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        hint = f"; to open the GGUF file in this directory, give {ggufs[0]}" if ggufs else ""
        raise ModelNotFoundError(f"{path}: no config.json in this directory{hint}")
    document = read_json(path / "config.json")
    generation = path / "generation_config.json"
    generation_config = read_json(generation) if present(generation) else None
    modules = read_modules(path)
    dense = dense_shapes(modules.dense)
    family, config = config_from_hf(document, str(path / "config.json"), generation_config, dense)
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.exists():
        tensors = read_safetensors(single)
    elif index.exists():
        tensors = read_index(index)
    else:
        raise ModelNotFoundError(
            f"{path}: neither model.safetensors nor model.safetensors.index.json in this directory"
        )
    tensors, left_out = _text_model(tensors)
    tensors |= {dense_name(number): tensor for number, tensor in enumerate(modules.dense)}
    tied, unused = config.tie_word_embeddings, family.unused(config)
    source = hugging_face_source(tensors, family.tensors(config), tied, str(path), unused)
    return Checkpoint(path, "safetensors", family, config, source, _template(path), {}, left_out, modules=modules)


def _text_model(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], Counter[str]]:
    """Return the tensors of the text model, and the number of tensors in each other part of a multimodal checkpoint."""
    parts = {name: other_part(name) for name in tensors}
    text = {name: tensor for name, tensor in tensors.items() if parts[name] is None}
    return text, Counter(part for part in parts.values() if part is not None)


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    document = read_json(file) if present(file) else {}
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: should be a JSON object, found {type(document).__name__}")
    return document


def _bos_token(path: Path) -> str:
    """Return the bos token's text. tokenizer_config.json has the text, or an object with the text in `content`."""
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
    if isinstance(template, list):  # a list of named templates; the one for chat is called "default"
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if template is not None and not isinstance(template, str):
        raise ConfigError(
            f"{path / 'tokenizer_config.json'}: chat_template should be a string, found {type(template).__name__}"
        )
    return template
