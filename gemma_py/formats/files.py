"""Files as read-only memory, and JSON that cannot surprise."""

import json
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from gemma_py.errors import FormatError, ModelNotFoundError

JSON_LIMIT = 256 << 20  # bytes; Gemma's own tokenizer.json has 33 MB


def map_file(path: Path) -> np.ndarray:
    """The whole file as read-only uint8 [size], mapped, not read.

    Hazard: a file truncated by somebody else while it is mapped ends the process with SIGBUS at the next read;
    no runtime that maps its weights can prevent that. Replacing the file (rename) is safe.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FormatError(f"{path}: the file is empty")
            return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error


def parse_json(data: bytes | str, where: str) -> Any:
    """JSON without duplicate keys, NaN, or nesting that exhausts the stack."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise FormatError(f"{where}: the key {key!r:.80} stands twice")
                seen.add(key)
        return table

    def constant(name: str) -> None:
        raise FormatError(f"{where}: {name} is not JSON")

    try:
        return json.loads(data, object_pairs_hook=unique, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise FormatError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def read_json(path: Path) -> Any:
    """The JSON document in a file of bounded size."""
    return parse_json(read_bytes(path, JSON_LIMIT), str(path))


def read_text(path: Path, limit: int = 16 << 20) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_bytes(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    if len(data) > limit:
        raise FormatError(f"{path}: larger than the {limit} bytes allowed here")
    return data
