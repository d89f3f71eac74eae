"""The interface that every model family implements."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    dense: the shapes [N, K] of the dense layers that follow the pooling of an embedding model.
    vocab_size: the number of rows of the embedding matrix; set for GGUF only.
    tied: whether the embedding matrix is also the output matrix; set for GGUF only.
    """

    name: str
    fields: Fields
    outer: Fields
    tokens: Fields
    dense: tuple[tuple[int, int], ...] = ()
    vocab_size: int = 0
    tied: bool = True


def dense_name(number: int) -> str:
    """Return the name that `Tensor.hugging_face` has for dense layer `number` of an embedding model."""
    return f"dense.{number}.linear.weight"


@dataclass(frozen=True)
class Family:
    """A model family.

    model_types: maps the model_type of a config.json to Config.model_type.
    architectures: the values of general.architecture in GGUF files. They equal Config.model_type.
    """

    model_types: Mapping[str, str]
    architectures: tuple[str, ...]
    config_from_hf: Callable[[ModelDescription], Config]
    config_from_gguf: Callable[[ModelDescription], Config]
    tensors: Callable[[Config], dict[str, Tensor]]
    write: Callable[[Program], None]  # appends the operations of a forward pass to the program

    def program(self, config: Config) -> Program:
        program = Program(config, self.tensors(config))
        self.write(program)
        return program
