"""The interface that every model family implements."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gemma_py.errors import ConfigError
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.config import Config
from gemma_py.models.fields import Fields
from gemma_py.models.program import Program, Tensor


@dataclass(frozen=True)
class ModelDescription:
    """The metadata of a checkpoint, from Hugging Face's JSON files or from a GGUF file.

    name: the value for Config.model_type.
    fields: the fields of the text model, for example those of text_config in config.json.
    outer: the whole config.json, or all GGUF metadata.
    tokens: the fields of generation_config.json; empty for GGUF.
    tensors: the tensors by name; set for GGUF only.
    dense: the shapes [outputs, inputs] of the dense layers that follow the pooling of an embedding model.
    vocab_size: the number of rows of the embedding matrix; set for GGUF only.
    tied: whether the embedding matrix is also the output matrix; set for GGUF only.
    """

    name: str
    fields: Fields
    outer: Fields
    tokens: Fields
    vocab_size: int = 0
    tied: bool = True
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    dense: tuple[tuple[int, int], ...] = ()

    def token_ids(self, name: str, default: int) -> tuple[int, ...]:
        """The special token ids from Hugging Face's files. generation_config.json takes precedence over config.json."""
        return self.tokens.ids(name) or self.fields.ids(name) or self.outer.ids(name) or (default,)

    def common_from_hf(self) -> dict[str, Any]:
        """Return the fields of `Config` that every family reads in one way from Hugging Face's files."""
        fields, tied = self.fields, "tie_word_embeddings"
        return {
            "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
            "tie_word_embeddings": self.outer.flag(tied, fields.flag(tied, True)),
            "bos_token_id": self.token_ids("bos_token_id", 2)[0],
            "eos_token_ids": self.token_ids("eos_token_id", 1),
        }

    def common_from_gguf(self) -> dict[str, Any]:
        """Return the fields of `Config` that every family reads in one way from GGUF metadata."""
        fields, bos = self.fields, self.outer.ids("tokenizer.ggml.bos_token_id")
        ends = {*self.outer.ids("tokenizer.ggml.eos_token_id"), *self.outer.ids("tokenizer.ggml.eot_token_id")}
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": fields.integer("embedding_length"),
            "max_position_embeddings": fields.integer("context_length"),
            "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
            "tie_word_embeddings": self.tied,
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": tuple(sorted(ends)),
        }


def _nothing(config: Config) -> frozenset[str]:
    return frozenset()


def dense_shapes(tensors: Iterable[StoredTensor]) -> tuple[tuple[int, int], ...]:
    """Return the shapes [outputs, inputs] of dense layers. A weight that is not a matrix raises ConfigError."""
    made = []
    for tensor in tensors:
        if len(tensor.shape) != 2:
            raise ConfigError(f"{tensor.where}: a dense layer should be a matrix, found the shape {list(tensor.shape)}")
        made.append((tensor.shape[0], tensor.shape[1]))
    return tuple(made)


def dense_name(number: int) -> str:
    """Return the value of `Tensor.hugging_face` for dense layer `number` of an embedding model."""
    return f"dense.{number}.linear.weight"


@dataclass(frozen=True)
class Family:
    """A model family.

    model_types: maps the model_type of a config.json to Config.model_type.
    architectures: the values of general.architecture in GGUF files. Each of them is also a value of Config.model_type.
    """

    model_types: Mapping[str, str]
    architectures: tuple[str, ...]
    config_from_hf: Callable[[ModelDescription], Config]
    config_from_gguf: Callable[[ModelDescription], Config]
    tensors: Callable[[Config], dict[str, Tensor]]
    write: Callable[[Program], None]  # appends the operations of a forward pass to the program
    # Returns the names, in Hugging Face and in GGUF, of tensors that a checkpoint may contain although the model does not
    # use them.
    unused: Callable[[Config], frozenset[str]] = _nothing

    def program(self, config: Config) -> Program:
        program = Program(config, self.tensors(config))
        self.write(program)
        return program
