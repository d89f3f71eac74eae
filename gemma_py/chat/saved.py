"""The file format of a saved conversation: a safetensors file with the settings, the token ids and the KV cache.

    metadata          format version, fingerprint of the model, type of the KV cache, sha256 of the file
    description       U8, JSON: messages, sampling options, other settings, and `since`
    ids               I32 [T]
    layers.N.keys     F32 or BF16 [G, P, E]
    layers.N.values   F32 or BF16 [G, P, E]

T: tokens of the conversation. N: index of a layer that stores KV rows. G: key/value heads. E: head size. The loaded
conversation can be rewound to position `since`; P is the number of positions that later tokens attend to.

The file is replaced atomically: if the process is killed while writing, the previous file remains. Only a model with an
equal `Engine.fingerprint` can load the file.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import FormatError, InputError
from gemma_py.formats.container import Spec, read_arrays, write_arrays
from gemma_py.formats.files import drop_pages, parse_json
from gemma_py.generate.engine import Engine
from gemma_py.generate.session import Session
from gemma_py.paths import atomic_write
from gemma_py.runtime.cache import first_readable
from gemma_py.runtime.kv_types import KV_TYPES

_FORMAT, _VERSION = "gemma_py conversation", "3"
_OLD_MAGIC = b"gemma_py conversation "
_DTYPES = {"float32": "F32", "bfloat16": "BF16", "q8_0": "I8"}


def write(path: Path, description: dict[str, Any], session: Session, since: int) -> None:
    engine, ids = session.engine, np.array(session.ids, np.int32)
    text = json.dumps({**description, "since": since}, ensure_ascii=False).encode("utf-8")
    specs = {"ids": Spec("I32", ids.shape), "description": Spec("U8", (len(text),))}
    rows = _row_specs(engine, len(ids), since)

    def arrays() -> Iterator[np.ndarray]:
        for keys, values in session.raw_kv_rows(since):
            yield keys
            yield values
        yield ids
        yield np.frombuffer(text, np.uint8)

    metadata = {"format": _FORMAT, "version": _VERSION, "model": engine.fingerprint(), "kv": engine.kv_type}
    try:
        with atomic_write(path) as file:
            write_arrays(file, rows | specs, arrays(), metadata)
    except (OSError, ValueError) as error:  # ValueError: the path contains an invalid character
        raise InputError(f"{path}: cannot be written: {error}") from error


def _row_specs(engine: Engine, position: int, since: int) -> dict[str, Spec]:
    specs, kv = {}, KV_TYPES[engine.kv_type]
    for number, layer in enumerate(engine.config.kv_layers):
        shape = (layer.num_key_value_heads, position - first_readable(layer, since), kv.row_size(layer.head_dim))
        for part in ("keys", "values"):
            specs[f"layers.{number}.{part}"] = Spec(_DTYPES[kv.name], shape)
    return specs


class SavedConversation:
    """A saved conversation in a memory-mapped file. The constructor checks the file."""

    def __init__(self, path: Path, engine: Engine) -> None:
        _check_readable(path)
        self._arrays, metadata = read_arrays(path)
        if (metadata.get("format"), metadata.get("version")) != (_FORMAT, _VERSION):
            raise FormatError(f"{path}: not a saved conversation, or saved by another version of gemma_py")
        if metadata["kv"] != engine.kv_type:  # checked first, because the fingerprint depends on it
            raise InputError(f"{path}: saved with --kv {metadata['kv']}, but this engine has --kv {engine.kv_type}")
        if metadata["model"] != engine.fingerprint():
            raise InputError(f"{path}: saved with a model or weights that differ from {engine.name}")
        self.description: dict[str, Any] = parse_json(self._arrays["description"].tobytes(), str(path))
        self._ids: list[int] = self._arrays["ids"].tolist()
        expected = {
            name: spec.shape for name, spec in _row_specs(engine, len(self._ids), self.description["since"]).items()
        }
        if {name: self._arrays[name].shape for name in self._arrays.keys() - {"description", "ids"}} != expected:
            raise FormatError(f"{path}: damaged file: the shapes of the KV rows do not match {len(self._ids)} tokens")

    def restore(self, session: Session) -> None:
        if self._ids:
            session.restore(self._ids, self._rows())

    def _rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number in range((len(self._arrays) - 2) // 2):
            keys, values = (self._arrays[f"layers.{number}.{part}"] for part in ("keys", "values"))
            yield keys, values
            drop_pages(keys)
            drop_pages(values)


def _check_readable(path: Path) -> None:
    try:
        if not path.is_file():
            raise FileNotFoundError("no such file")
        with path.open("rb") as file:
            magic = file.read(len(_OLD_MAGIC))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    if magic == _OLD_MAGIC:
        raise FormatError(f"{path}: saved by an older version of gemma_py, whose format is no longer supported")
