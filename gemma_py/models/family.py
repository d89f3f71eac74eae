"""What a family of models is to the rest of the package: four functions, which its file under models/ defines."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gemma_py.models.config import Config
from gemma_py.models.fields import Fields
from gemma_py.models.program import Program, Tensor


@dataclass(frozen=True)
class Described:
    """A description of a model as somebody else wrote it.

    name: the model type or architecture that it gives. outer: the whole document; fields: the text model's part of it.
    tokens: Hugging Face's generation_config. vocab_size, tied: for GGUF, of the embedding, and whether it is the head too.
    """

    name: str
    fields: Fields
    outer: Fields
    tokens: Fields
    vocab_size: int = 0
    tied: bool = True


@dataclass(frozen=True)
class Family:
    """model_types: Hugging Face's names, each with ours (Config.model_type). architectures: GGUF's, which are ours."""

    model_types: Mapping[str, str]
    architectures: tuple[str, ...]
    config_from_hf: Callable[[Described], Config]
    config_from_gguf: Callable[[Described], Config]
    tensors: Callable[[Config], dict[str, Tensor]]
    write: Callable[[Program], None]  # the pass, operation by operation

    def program(self, config: Config) -> Program:
        program = Program(config, self.tensors(config))
        self.write(program)
        return program
