"""The modules of sentence-transformers that follow an embedding model's transformer, and the prompts for tasks.

modules.json lists the modules, each with a type and a folder: Transformer, Pooling, up to 8 times Dense, and perhaps
Normalize.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemma_py.errors import ConfigError, FormatError, ModelNotFoundError, UnsupportedError
from gemma_py.formats.files import present, read_json
from gemma_py.formats.safetensors import read_safetensors
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.fields import Fields

_MOST_DENSE = 8
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
_WEIGHT = "linear.weight"
_LEGACY_POOLING = "pooling_mode_"


@dataclass(frozen=True)
class Modules:
    """The dense layers and prompts in the files of sentence-transformers.

    dense: the weight [outputs, inputs] of each dense layer
    prompts: for each task, the text that precedes the user's text
    default: the name of the prompt to use without a task, or None
    """

    dense: tuple[StoredTensor, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


def read_modules(directory: Path) -> Modules:
    """Read modules.json and config_sentence_transformers.json. Either file may be missing."""
    file, dense = directory / "modules.json", []
    folders = _folders(file) if present(file) else []
    for kind, folder in folders:
        if kind == "Pooling":
            _check_pooling(directory / folder / "config.json")
        elif kind == "Dense":
            dense.append(_dense(directory / folder))
    prompts, default = _prompts(directory / "config_sentence_transformers.json")
    return Modules(tuple(dense), prompts, default)


def _folders(file: Path) -> list[tuple[str, str]]:
    listed = read_json(file)
    if not isinstance(listed, list) or not all(isinstance(module, dict) for module in listed):
        raise FormatError(f"{file}: should be a list of modules, found {listed!r:.80}")
    modules = [Fields(f"{file}: module {number}", module) for number, module in enumerate(listed)]
    kinds = [module.text("type").rpartition(".")[2] for module in modules]
    unknown = next((kind for kind in kinds if kind not in _KINDS), None)
    if unknown is not None:
        raise UnsupportedError(f"{file}: the module {unknown!r:.40} is not supported, only {', '.join(_KINDS)}")
    expected = ["Transformer", "Pooling", *["Dense"] * min(kinds.count("Dense"), _MOST_DENSE)]
    if kinds not in (expected, [*expected, "Normalize"]):
        raise UnsupportedError(
            f"{file}: the modules should be Transformer, Pooling, at most {_MOST_DENSE} times Dense, and Normalize, "
            f"in this order, found {', '.join(kinds):.120}"
        )
    return [(kind, _folder(module, kind)) for kind, module in zip(kinds, modules, strict=True)]


def _folder(module: Fields, kind: str) -> str:
    """Return a module's folder. Raise FormatError if the folder leads out of the checkpoint's directory."""
    folder = module.text("path", "")
    plain = folder == Path(folder).name and folder not in ("", ".", "..") and len(folder) <= 255 and "\0" not in folder
    if kind == "Transformer":
        if folder not in ("", "."):
            module.fail("path", "empty, because the transformer should stand in the directory of modules.json")
    elif not plain:
        module.fail("path", "the name of a folder beside modules.json")
    return str(folder)


def _table(file: Path) -> Fields:
    if not file.exists():
        raise ModelNotFoundError(f"{file}: no such file, although modules.json lists this module")
    document = read_json(file)
    if not isinstance(document, dict):
        raise ConfigError(f"{file}: should be a JSON object, found {document!r:.80}")
    return Fields(str(file), document)


def _check_pooling(file: Path) -> None:
    """Raise an error unless pooling is the mean of all hidden states, including those of the prompt."""
    config = _table(file)
    if not config.flag("include_prompt", True):
        raise UnsupportedError(f"{file}: include_prompt should be true, found false")
    mode = config.values.get("pooling_mode")
    if mode is None:  # before version 5.3, sentence-transformers wrote one flag for each mode
        flags = [name for name in config.values if name.startswith(_LEGACY_POOLING) and config.flag(name, False)]
        mode = [name.removeprefix(_LEGACY_POOLING) for name in flags] or "mean"
        mode = "mean" if mode == ["mean_tokens"] else mode
    if mode not in ("mean", ["mean"]):
        raise UnsupportedError(f"{file}: the pooling mode should be 'mean', found {mode!r:.60}")


def _dense(folder: Path) -> StoredTensor:
    """Return the weight of a dense layer. If the layer has a bias, an activation function or a residual connection, raise
    an error.
    """
    config = _table(folder / "config.json")
    if config.flag("bias", True) or config.flag("use_residual", False):
        raise UnsupportedError(f"{config.where}: bias and use_residual should be false, but one of these is true")
    activation = config.text("activation_function", "torch.nn.modules.activation.Tanh")
    if activation.rpartition(".")[2] != "Identity":
        raise UnsupportedError(f"{config.where}: activation_function should be Identity, found {activation!r:.60}")
    for name in ("module_input_name", "module_output_name"):
        if config.text(name, "sentence_embedding") != "sentence_embedding":
            raise UnsupportedError(f"{config.where}: {name} should be 'sentence_embedding'")
    shape = (config.integer("out_features"), config.integer("in_features"))
    file = folder / "model.safetensors"
    tensors = read_safetensors(file)
    if list(tensors) != [_WEIGHT]:
        raise ConfigError(f"{file}: should hold the tensor {_WEIGHT} and no other, found {', '.join(tensors):.80}")
    if tensors[_WEIGHT].shape != shape:
        found = list(tensors[_WEIGHT].shape)
        raise ConfigError(f"{file}: the shape of {_WEIGHT} should be {list(shape)} as in config.json, found {found}")
    return tensors[_WEIGHT]


def _prompts(file: Path) -> tuple[Mapping[str, str], str | None]:
    if not present(file):
        return {}, None
    config = _table(file)
    prompts: Any = config.values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        config.fail("prompts", "an object of strings")
    default = config.text("default_prompt_name", None)
    if default is not None and default not in prompts:
        config.fail("default_prompt_name", "the name of one of the prompts")
    return prompts, default
