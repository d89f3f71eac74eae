"""The interface of a model family: four functions, which the family's file under models/ defines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gemma_py.models.config import Config
from gemma_py.models.fields import Fields
from gemma_py.models.program import Program, Tensor


@dataclass(frozen=True)
class ModelDescription:
    """The description of a model in its checkpoint: Hugging Face's config.json or GGUF's metadata.

    name: Config.model_type. outer: the whole document; fields: the part that describes the text model. tokens: Hugging Face's
    generation_config.json. vocab_size, tied: for GGUF, the rows of the embedding, and whether it is the head too.
    """

    name: str
    fields: Fields
    outer: Fields
    tokens: Fields
    vocab_size: int = 0
    tied: bool = True


@dataclass(frozen=True)
class Family:
    """model_types: Hugging Face's model_type to Config.model_type. architectures: GGUF's names, which equal Config.model_type."""

    model_types: Mapping[str, str]
    architectures: tuple[str, ...]
    config_from_hf: Callable[[ModelDescription], Config]
    config_from_gguf: Callable[[ModelDescription], Config]
    tensors: Callable[[Config], dict[str, Tensor]]
    write: Callable[[Program], None]  # writes the forward pass, operation by operation

    def program(self, config: Config) -> Program:
        program = Program(config, self.tensors(config))
        self.write(program)
        return program
