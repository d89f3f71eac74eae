"""Packed weights kept in the user's cache: one file a checkpoint, written once and memory-mapped at every later start.

    header (one page)   magic, format, layout, content key, sizes and checksums of the arenas, source, sha256 of all that
    arenas              floats, bf16, codes; each begins at a page and is padded with zeros to the next

The file says nothing that is believed: its header must equal, byte for byte, what this program would write for the
checkpoint at hand, but for the checksums, and each arena must have its checksum. All of it is checked at every start, at the
memory's speed: that costs about as much as a token, as every token reads all weights, and brings in the pages that the first
token needs. A file that is damaged, of another size, or that somebody else could have written is packed anew.

A checkpoint is known by its content: sha256 of the tensors. Since that takes seconds a gigabyte, a record remembers it for
files of the same device, inode, size and times of change.
"""

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import stat
import struct
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gemma_py.formats.files import drop_pages
from gemma_py.formats.tensor import StoredTensor
from gemma_py.kernels.checksum import checksum
from gemma_py.kernels.memory import aligned
from gemma_py.paths import PARTIAL, abandoned, atomic_write, cache_dir, private_dir
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import LAYOUT, PackedWeights, Plan

FOLDER, SUFFIX, RECORDS = "weights", ".packed", "records"
_MAGIC, _FORMAT = b"GEMMAPK\n", 1
_PAGE = 4096
_FIXED = struct.Struct("<8sII32s3Q")  # magic, format, layout, content key, sizes of the arenas
_SUMS = struct.Struct("<3Q")
_LONGEST_SOURCE = 1024  # bytes of the source's path, for people who list the cache
_SMALLEST = 8 << 20  # bytes of weights worth a file: fewer are packed about as fast as they are checked
_MARGIN = 1 << 30  # bytes that a disk must have left beside the file
_BLOCK = 1 << 22
_FRESH = 2_000_000_000  # nanoseconds in which a file system's clock may stand still
_SHOWN_AFTER, _SHOWN_EVERY = 2.0, 3.0  # seconds


class _Damaged(Exception):
    """A kept file that is not what this program would have written, and why."""


def packed_weights(checkpoint: Checkpoint, quant: str | None = None) -> PackedWeights:
    """The checkpoint's weights for the kernels: mapped from the cache, packed into it where they are not there yet.

    Names and shapes are checked at every start, values when they are packed. Where nothing can be kept, the weights are
    packed into memory, and a line on stderr says why, once a process.
    """
    plan = Plan(checkpoint.stored_weights(quant))
    for tensor in checkpoint.tensors.values():  # norms are copied; the system maps a megabyte around each
        drop_pages(tensor.data)
    if not checkpoint.keep or sum(_spans(plan)[-1]) < _SMALLEST:
        return plan.packed(_in_memory(plan, checkpoint.path))
    try:
        arenas = _kept(plan, checkpoint.path)
    except OSError as error:
        _say_once(f"packed weights are not kept, so every start takes longer: {error}")
        arenas = _in_memory(plan, checkpoint.path)
    return plan.packed(arenas)


def _in_memory(plan: Plan, source: Path) -> list[np.ndarray]:
    arenas = [aligned(count, kind, np.zeros) for kind, count in plan.arenas]
    _fill(plan, arenas, source)
    return arenas


def _kept(plan: Plan, source: Path) -> list[np.ndarray]:
    """The arenas in the cache's file, written first where it is not there or not sound."""
    folder = private_dir(cache_dir() / FOLDER)
    key = _content_key(plan, folder / RECORDS)
    path = folder / f"{key.hex()[:40]}-{LAYOUT}{SUFFIX}"
    try:
        return _mapped(path, plan, key)
    except FileNotFoundError:
        pass
    except _Damaged as error:
        print(f"gemma_py: {path}: {error}; the weights are packed anew", file=sys.stderr, flush=True)
    _write(path, plan, key, source)
    _let_go(path)
    try:
        return _mapped(path, plan, key)
    except _Damaged as error:
        raise OSError(f"{path}: {error}, just after it was written") from None


def _fixed(plan: Plan, key: bytes) -> bytes:
    return _FIXED.pack(_MAGIC, _FORMAT, LAYOUT, key, *(kind.itemsize * count for kind, count in plan.arenas))


def _spans(plan: Plan) -> list[tuple[int, int]]:
    """(first byte, padded size) of each arena in the file; the last ends where the file does."""
    spans, at = [], _PAGE
    for kind, count in plan.arenas:
        size = -(-kind.itemsize * count // _PAGE) * _PAGE
        spans.append((at, size))
        at += size
    return spans


def _arenas(data: np.ndarray, plan: Plan) -> list[np.ndarray]:
    """Views of a file's bytes."""
    return [
        data[at : at + kind.itemsize * count].view(kind)
        for (at, _), (kind, count) in zip(_spans(plan), plan.arenas, strict=True)
    ]


def _sums(data: np.ndarray, plan: Plan) -> bytes:
    return _SUMS.pack(*(int(checksum(data[at : at + size].view("<u8"))) for at, size in _spans(plan)))


def _mapped(path: Path, plan: Plan, key: bytes) -> list[np.ndarray]:
    """The arenas of a sound file, read-only. FileNotFoundError if there is none, _Damaged if it is not sound."""
    if path.is_symlink():
        raise _Damaged("a link")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _Damaged("not a file that only this user may write")
        size = sum(_spans(plan)[-1])
        if status.st_size != size:
            raise _Damaged(f"{size} bytes expected, found {status.st_size}")
        mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages for files
                mapped.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(mapped, np.uint8)
        header = data[:_PAGE].tobytes()
        if header[: _FIXED.size] != _fixed(plan, key) or not _sound(header):
            raise _Damaged("damaged")
        if header[_FIXED.size : _FIXED.size + _SUMS.size] != _sums(data, plan):
            raise _Damaged("damaged")
        with contextlib.suppress(OSError):
            os.utime(handle)  # when it was last used, for whoever cleans up
    finally:
        os.close(handle)
    return _arenas(data, plan)


def _let_go(path: Path) -> None:
    """A file that was written page by page also lies in memory in small pages, which make decoding a fifth slower: it is
    read anew, in large ones where the system has such."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sound(header: bytes) -> bool:
    return len(header) == _PAGE and hashlib.sha256(header[:-32]).digest() == header[-32:]


def source_of(path: Path) -> str | None:
    """What the file was packed from, as its header says; None where it is no sound header."""
    with path.open("rb") as file:
        header = file.read(_PAGE)
    if header[: len(_MAGIC)] != _MAGIC or not _sound(header):
        return None
    return header[_FIXED.size + _SUMS.size : -32].rstrip(b"\0").decode("utf-8", "replace")


def _write(path: Path, plan: Plan, key: bytes, source: Path) -> None:
    """The file under its name, whole. OSError where it cannot be had; a process that packs it too does no harm."""
    for left in path.parent.glob(f"*{SUFFIX}.*{PARTIAL}"):  # by a process that was killed
        if abandoned(left):
            left.unlink(missing_ok=True)
    size = sum(_spans(plan)[-1])
    free = shutil.disk_usage(path.parent).free
    if free < size + _MARGIN:
        raise OSError(
            f"{path.parent}: {size >> 20} MiB and a margin of {_MARGIN >> 20} are needed, {free >> 20} are free"
        )
    with atomic_write(path) as file:
        # All blocks at once: a mapped file that meets a full disk later ends the process (SIGBUS). Where there is no such
        # call (macOS), the margin has to do.
        reserve = getattr(os, "posix_fallocate", lambda handle, _, size: os.truncate(handle, size))
        reserve(file.fileno(), 0, size)
        data = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        _fill(plan, _arenas(data, plan), source)
        header = _fixed(plan, key) + _sums(data, plan) + os.fsencode(source.absolute())[:_LONGEST_SOURCE]
        header = header.ljust(_PAGE - 32, b"\0")
        data[:_PAGE] = np.frombuffer(header + hashlib.sha256(header).digest(), np.uint8)


def _fill(plan: Plan, arenas: Sequence[np.ndarray], source: Path) -> None:
    """Pack, and let the pages go that are done with: neither the checkpoint nor a file being written stays in memory."""
    progress = _Progress(f"packing the weights of {source.name}", sum(m.tensor.data.nbytes for m in plan.matrices))
    for matrix in plan.fill(arenas):
        drop_pages(matrix.tensor.data)
        for arena in arenas:
            drop_pages(arena)
        progress.add(matrix.tensor.data.nbytes)


def _content_key(plan: Plan, records: Path) -> bytes:
    """sha256 of all that the arenas are made of, remembered for files that have not changed since."""
    tensors = [matrix.tensor for matrix in plan.matrices]
    shapes = [(tensor.name, tensor.type.name, tensor.shape, str(tensor.path)) for tensor in tensors]
    paths = sorted({tensor.path for tensor in tensors})
    before = [_identity(path) for path in paths]
    record = records / hashlib.sha256(repr((shapes, before)).encode("utf-8", "surrogateescape")).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        text = record.read_bytes()[:65]
        if re.fullmatch(rb"[0-9a-f]{64}\n", text):
            return bytes.fromhex(text.decode())
    key = _digest(tensors)
    # Files that changed just now may change again without their times telling.
    latest = max(max(identity[3:]) for identity in before)
    if [_identity(path) for path in paths] == before and time.time_ns() - latest > _FRESH:
        # Without a record the next start hashes again; a packed file that is there is used all the same.
        with contextlib.suppress(OSError), atomic_write(record) as file:
            file.write(key.hex().encode() + b"\n")
    return key


def _digest(tensors: Sequence[StoredTensor]) -> bytes:
    progress = _Progress(f"reading {tensors[0].path.name}", sum(tensor.data.nbytes for tensor in tensors))
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.type.name, tensor.shape)).encode())
        for first in range(0, tensor.data.nbytes, _BLOCK):
            part = tensor.data[first : first + _BLOCK]
            digest.update(part.data)
            progress.add(part.nbytes)
        drop_pages(tensor.data)
    return digest.digest()


def drop_records() -> None:
    """Forget contents of which no packed file is left."""
    folder = cache_dir() / FOLDER
    known = {path.name[:40] for path in folder.glob(f"*{SUFFIX}")}
    for record in (folder / RECORDS).glob("*"):
        if (
            re.fullmatch("[0-9a-f]{64}", record.name)
            and record.read_bytes()[:40].decode("ascii", "replace") not in known
        ):
            record.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int, int, int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        print(f"gemma_py: {message}", file=sys.stderr, flush=True)


class _Progress:
    """A line on stderr every few seconds, if the work lasts longer than people wait without asking."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done = what, total, 0
        self._next = time.monotonic() + _SHOWN_AFTER

    def add(self, count: int) -> None:
        self.done += count
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SHOWN_EVERY
            print(f"{self.what}: {self.done >> 20} of {self.total >> 20} MiB", file=sys.stderr, flush=True)
