"""Read files: memory-mapped, or as text, bytes or strict JSON up to a size limit."""

import json
import mmap
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gemma_py.errors import FormatError, ModelNotFoundError

JSON_LIMIT = 16 << 20  # bytes; a parsed document can take thirty times as much memory
TEXT_LIMIT = 16 << 20
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def map_file(path: Path) -> np.ndarray:
    """Return the whole file as a read-only, memory-mapped array: uint8 [size].

    Hazard: if another process truncates the mapped file, the next access kills this process with SIGBUS. Replacing the file
    with rename() is safe.
    """
    _check_regular(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size == 0:
                raise FormatError(f"{path}: the file is empty")
            return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error


class FileState(NamedTuple):
    """The identity, size and modification time of a file. If the content changes, one of these values changes.

    file: (device, inode)
    """

    file: tuple[int, int]
    size: int
    modified: int  # nanoseconds


def file_state(path: Path) -> FileState | None:
    """Return the state of the file at a path, or None if no file has this path.

    None need not be an error, because a mapped file stays readable after its path is deleted.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return FileState((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


def drop_pages(array: np.ndarray) -> None:
    """Release the memory of a mapped array. A later access reads the file again."""
    _advise(array, mmap.MADV_DONTNEED)


def advise_random(array: np.ndarray) -> None:
    """Turn off read-ahead for a mapped array that is read at random places."""
    _advise(array, mmap.MADV_RANDOM)


def _advise(array: np.ndarray, advice: int) -> None:
    base: object = array
    while isinstance(base, np.ndarray | memoryview):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap) and array.nbytes:
        first = array.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        base.madvise(advice, start, first + array.nbytes - start)


def _check_regular(path: Path) -> None:
    """Raise an error unless the path is a regular file.

    Opening a pipe would wait for a writer, and reading a device may never end.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise ModelNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    if not stat.S_ISREG(mode):
        raise FormatError(f"{path}: not a regular file")


def present(path: Path) -> bool:
    if path.is_symlink() and not path.exists():
        raise FormatError(f"{path}: a dangling link; its target does not exist")
    return path.exists()


def parse_json(data: bytes | str, where: str) -> Any:
    """Parse strict JSON. Raise FormatError for duplicate keys, NaN, half surrogate pairs and too deep nesting.

    where: the file name for error messages
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    raise FormatError(f"{where}: the key {key!r:.80} appears twice")
                seen.add(key)
        return table

    def constant(name: str) -> None:
        raise FormatError(f"{where}: {name} is not a JSON value")

    try:
        # Decode the bytes here, because json.loads would also accept UTF-16 and encoded surrogates.
        text = data if isinstance(data, str) else data.decode("utf-8")
        document = json.loads(text, object_pairs_hook=unique, parse_constant=constant)
        if _ESCAPED_SURROGATE.search(text):
            json.dumps(document, ensure_ascii=False).encode("utf-8")
        return document
    except UnicodeEncodeError:
        raise FormatError(f"{where}: a string has half a surrogate pair, which is not a character") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise FormatError(f"{where}: the JSON document is nested too deeply") from None
    except ValueError as error:
        raise FormatError(f"{where}: not valid JSON: {error}") from None


def read_json(path: Path, limit: int = JSON_LIMIT) -> Any:
    return parse_json(read_bytes(path, limit), str(path))


def read_text(path: Path, limit: int = TEXT_LIMIT) -> str:
    try:
        return read_bytes(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: not UTF-8: {error.reason} at byte {error.start}") from None


def read_bytes(path: Path, limit: int) -> bytes:
    _check_regular(path)
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except OSError as error:
        raise FormatError(f"{path}: cannot be read: {error}") from error
    if len(data) > limit:
        raise FormatError(f"{path}: the file is larger than the {limit} bytes allowed")
    return data
