"""A conversation on disk: a line of JSON, the rows of keys and values, and a checksum of both.

    gemma_py conversation 2\\n        JSON on one line\\n        rows of layer 0: keys, values; of layer 1 ...        sha256

The rows are those that a token after the position `since` may read, [G, positions, E], as they are stored. The file gets
its name when it is complete, so whoever is killed while writing leaves the old one. It belongs to one model, known by
`Engine.fingerprint`.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from gemma_py.errors import FormatError, InputError
from gemma_py.formats.files import parse_json
from gemma_py.generate.engine import Engine, Session
from gemma_py.models.digest import first_readable
from gemma_py.paths import atomic_write
from gemma_py.runtime.cache import KV_TYPES

_MAGIC = b"gemma_py conversation 2\n"
_LARGEST_LINE = 1 << 30
_BLOCK = 1 << 22


def write(path: Path, description: dict[str, Any], session: Session, since: int) -> None:
    """Whole or not at all. since: how far back a session that is restored can be rewound."""
    engine = session.engine
    state = {"model": engine.fingerprint(), "kv": engine.kv_type, "ids": session.ids, "since": since}
    line = {**description, **state}
    digest = hashlib.sha256()
    try:
        with atomic_write(path) as file:

            def put(data: bytes) -> None:
                digest.update(data)
                file.write(data)

            put(_MAGIC)
            put(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            for rows in session.stored(since):
                for array in rows:
                    put(np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes())
            file.write(digest.digest())
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error}") from error


class Reader:
    """An open file, whose checksum and model are the right ones. A context manager."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self._path, self._engine = path, engine
        try:
            self._file: BinaryIO = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error}") from error
        try:
            self.description: dict[str, Any] = self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> dict[str, Any]:
        size = self._path.stat().st_size
        if not self._path.is_file() or self._file.read(len(_MAGIC)) != _MAGIC:
            raise FormatError(f"{self._path}: no saved conversation")
        self._check(size)
        self._file.seek(len(_MAGIC))
        description = parse_json(self._file.readline(_LARGEST_LINE), str(self._path))
        engine = self._engine
        if description["model"] != engine.fingerprint():
            raise InputError(f"{self._path}: saved from another model than {engine.name}, or from other weights of it")
        if description["kv"] != engine.kv_type:
            raise InputError(
                f"{self._path}: saved with kv={description['kv']!r}, and this engine has kv={engine.kv_type!r}"
            )
        return description

    def _check(self, size: int) -> None:
        """The checksum, which is the last 32 bytes."""
        digest, left = hashlib.sha256(_MAGIC), size - len(_MAGIC) - 32
        while left > 0 and (block := self._file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        if left != 0 or self._file.read() != digest.digest():
            raise FormatError(f"{self._path}: damaged: its checksum is not that of its content")

    def restore(self, session: Session) -> None:
        """The tokens and rows, into a session that is empty."""
        ids = self.description["ids"]
        if ids:
            session.restore(ids, self._rows(len(ids), self.description["since"]))

    def _rows(self, position: int, since: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        dtype = np.dtype(KV_TYPES[self._engine.kv_type])
        for layer in self._engine.config.kv_layers:
            shape = (layer.num_key_value_heads, position - first_readable(layer, since), layer.head_dim)
            size = math.prod(shape) * dtype.itemsize
            keys, values = (
                np.frombuffer(self._file.read(size), dtype.newbyteorder("<")).reshape(shape) for _ in range(2)
            )
            yield keys, values

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
