"""The cache of packed weights: one safetensors file a checkpoint, written once and memory-mapped at every later start.

    header    metadata: layout, content key, source, checksums of the arenas, sha256 of the header; padded to whole pages
    arenas    one tensor each, which begins at a page boundary and is padded with zeros to the next one

The file is not trusted: its header must equal, byte for byte, what this program would write for this checkpoint and for the
actual checksums of the arenas. The whole file is checked at every start, at the speed of memory. That takes about as long as one
token, which reads all weights too, and loads the pages that the first token needs. A file that is damaged, of another size, or
writable by another user is packed again.

A checkpoint is identified by the sha256 of its tensors. Since that takes seconds a gigabyte, a record stores the digest for a
file with the same device, inode, size and times of change.
"""

import contextlib
import hashlib
import mmap
import os
import re
import shutil
import stat
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gemma_py.errors import GemmaError, GemmaWarning
from gemma_py.formats.container import SUFFIX, Spec, dtype_name, make_header, with_digest
from gemma_py.formats.files import drop_pages
from gemma_py.formats.safetensors import read_header
from gemma_py.formats.tensor import StoredTensor
from gemma_py.kernels.checksum import checksum
from gemma_py.kernels.memory import aligned
from gemma_py.paths import PARTIAL, atomic_write, cache_dir, is_abandoned, private_dir
from gemma_py.progress import ReportProgress, no_report
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import LAYOUT, PackedWeights, PackingPlan

FOLDER, RECORDS = "weights", "records"
OLD_SUFFIX = ".packed"  # files of a former format, which is not read any more
_PAGE = 4096
_LONGEST_SOURCE = 1024  # characters of the source's path, which `gemma_py cache` shows
_SMALLEST = (
    8 << 20
)  # bytes of weights below which no file is written: they are packed about as fast as a file is checked
_MARGIN = 1 << 30  # bytes that must stay free on the disk
_BLOCK = 1 << 22
_FRESH = 2_000_000_000  # nanoseconds; the resolution of a file system's clock may be as coarse as this


class _DamagedError(Exception):
    """A cached file differs from what this program would have written; the message says how."""


def packed_weights(
    checkpoint: Checkpoint, quant: str | None = None, progress: ReportProgress = no_report
) -> PackedWeights:
    """The checkpoint's weights for the kernels: mapped from the cache, or packed into it first if they are not there yet.

    Names and shapes are checked at every start, values when they are packed. If the cache cannot be written, the weights are
    packed into memory, and a GemmaWarning says why.
    """
    plan = PackingPlan(checkpoint.stored_weights(quant))
    for tensor in checkpoint.tensors.values():  # norms have been copied, and the system has read a megabyte around each
        drop_pages(tensor.data)
    if not checkpoint.cacheable or sum(_sizes(plan)) < _SMALLEST:
        return plan.packed(_in_memory(plan, checkpoint.path, progress))
    try:
        arenas = _cached(plan, checkpoint.path, progress)
    except OSError as error:
        message = f"packed weights are not cached, so every start takes longer: {error}"
        warnings.warn(message, GemmaWarning, stacklevel=2)
        arenas = _in_memory(plan, checkpoint.path, progress)
    return plan.packed(arenas)


def _in_memory(plan: PackingPlan, source: Path, progress: ReportProgress) -> list[np.ndarray]:
    arenas = [aligned(count, kind, np.zeros) for kind, count in plan.arenas]
    _fill(plan, arenas, source, progress)
    return arenas


def _cached(plan: PackingPlan, source: Path, progress: ReportProgress) -> list[np.ndarray]:
    """The arenas of the cached file, which is written first if it is missing or damaged."""
    folder = private_dir(cache_dir() / FOLDER)
    key = _content_key(plan, folder / RECORDS, progress)
    path = folder / f"{key.hex()[:40]}-{LAYOUT}{SUFFIX}"
    try:
        return _mapped(path, plan, key)
    except FileNotFoundError:
        pass
    except _DamagedError as error:
        warnings.warn(f"{path}: {error}; the weights are packed again", GemmaWarning, stacklevel=3)
    _write(path, plan, key, source, progress)
    _drop_from_page_cache(path)
    try:
        return _mapped(path, plan, key)
    except _DamagedError as error:
        raise OSError(f"{path}: {error}, just after it was written") from None


def _sizes(plan: PackingPlan) -> list[int]:
    """The bytes of each arena in the file, padded to whole pages."""
    return [-(-kind.itemsize * count // _PAGE) * _PAGE for kind, count in plan.arenas]


def _header(plan: PackingPlan, key: bytes, source: str, checksums: Sequence[int]) -> bytes:
    """The file's header, padded to whole pages. Its length does not depend on the checksums."""
    metadata = {
        "format": "gemma_py packed weights", "layout": str(LAYOUT), "key": key.hex(), "source": source,
        "checksums": " ".join(f"{checksum:016x}" for checksum in checksums),
    }  # fmt: skip
    specs = {
        f"arena.{number}": Spec(dtype_name(kind), (size // kind.itemsize,))
        for number, ((kind, _), size) in enumerate(zip(plan.arenas, _sizes(plan), strict=True))
    }
    header = make_header(specs, metadata, _PAGE)
    return with_digest(header, hashlib.sha256(header).hexdigest())


def _padded_arenas(data: np.ndarray, plan: PackingPlan) -> list[np.ndarray]:
    """The arenas at the end of a file, each with its padding, as uint8 views."""
    sizes = _sizes(plan)
    ends = np.cumsum(sizes) + len(data) - sum(sizes)
    return [data[end - size : end] for end, size in zip(ends.tolist(), sizes, strict=True)]


def _arenas(data: np.ndarray, plan: PackingPlan) -> list[np.ndarray]:
    padded = zip(_padded_arenas(data, plan), plan.arenas, strict=True)
    return [arena[: kind.itemsize * count].view(kind) for arena, (kind, count) in padded]


def _checksums(data: np.ndarray, plan: PackingPlan) -> list[int]:
    return [int(checksum(arena.view("<u8"))) for arena in _padded_arenas(data, plan)]


def _mapped(path: Path, plan: PackingPlan, key: bytes) -> list[np.ndarray]:
    """The arenas of an intact file, read-only. FileNotFoundError if there is no file, _DamagedError if it is not intact."""
    if path.is_symlink():
        raise _DamagedError("is a link")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _DamagedError("is not a file that only this user may write")
        try:
            header = read_header(path, status.st_size)
        except GemmaError:
            raise _DamagedError("damaged") from None
        source = header.metadata.get("source", "")
        blank = _header(plan, key, source, [0] * len(plan.arenas))
        if header.size != len(blank) or status.st_size != len(blank) + sum(_sizes(plan)):
            raise _DamagedError("damaged")
        mapped = mmap.mmap(handle, status.st_size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # the system has no large pages for files
                mapped.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(mapped, np.uint8)
        if data[: header.size].tobytes() != _header(plan, key, source, _checksums(data, plan)):
            raise _DamagedError("damaged")
        with contextlib.suppress(OSError):
            os.utime(handle)  # set the time of last use, which `gemma_py cache` shows
    finally:
        os.close(handle)
    return _arenas(data, plan)


def _drop_from_page_cache(path: Path) -> None:
    """A file that was just written is in the page cache as small pages, which make decoding a fifth slower. The next read loads
    it as large pages, where the system supports them."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def source_of(path: Path) -> str | None:
    """The checkpoint that a file was packed from, according to its header; None if the header is not valid."""
    try:
        return read_header(path, path.stat().st_size).metadata.get("source")
    except GemmaError:
        return None


def _write(path: Path, plan: PackingPlan, key: bytes, source: Path, progress: ReportProgress) -> None:
    """Write the file atomically; OSError if that fails. Another process may write the same file at the same time."""
    for left in path.parent.glob(f"*{SUFFIX}.*{PARTIAL}"):  # partial files of processes that were killed
        if is_abandoned(left):
            left.unlink(missing_ok=True)
    name = os.fsencode(source.absolute()).decode("utf-8", "replace")[:_LONGEST_SOURCE]
    blank = _header(plan, key, name, [0] * len(plan.arenas))
    size = len(blank) + sum(_sizes(plan))
    free = shutil.disk_usage(path.parent).free
    if free < size + _MARGIN:
        raise OSError(
            f"{path.parent}: {size >> 20} MiB and a margin of {_MARGIN >> 20} are needed, {free >> 20} MiB are free"
        )
    with atomic_write(path) as file:
        # Allocate all blocks first: if the disk became full while the mapped file is written, the process would end (SIGBUS).
        # Where there is no such call (macOS), there is only the margin.
        reserve = getattr(os, "posix_fallocate", lambda handle, _, size: os.truncate(handle, size))
        reserve(file.fileno(), 0, size)
        data = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        _fill(plan, _arenas(data, plan), source, progress)
        header = _header(plan, key, name, _checksums(data, plan))
        data[: len(header)] = np.frombuffer(header, np.uint8)


def _fill(plan: PackingPlan, arenas: Sequence[np.ndarray], source: Path, progress: ReportProgress) -> None:
    """Pack the matrices, and drop finished pages, so that neither the checkpoint nor the new file stays in memory."""
    what, done = f"packing the weights of {source.name}", 0
    total = sum(matrix.tensor.data.nbytes for matrix in plan.matrices)
    progress(what, done, total, "bytes")
    for matrix in plan.fill(arenas):
        drop_pages(matrix.tensor.data)
        for arena in arenas:
            drop_pages(arena)
        done += matrix.tensor.data.nbytes
        progress(what, done, total, "bytes")


def _content_key(plan: PackingPlan, records: Path, progress: ReportProgress) -> bytes:
    """sha256 of the tensors that the arenas are made from, or the recorded digest if the files have not changed since."""
    tensors = [matrix.tensor for matrix in plan.matrices]
    shapes = [(tensor.name, tensor.type.name, tensor.shape, str(tensor.path)) for tensor in tensors]
    paths = sorted({tensor.path for tensor in tensors})
    before = [_identity(path) for path in paths]
    record = records / hashlib.sha256(repr((shapes, before)).encode("utf-8", "surrogateescape")).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        text = record.read_bytes()[:65]
        if re.fullmatch(rb"[0-9a-f]{64}\n", text):
            return bytes.fromhex(text.decode())
    key = _digest(tensors, progress)
    # No record for files that have just changed: they may change again without new times.
    latest = max(max(identity[3:]) for identity in before)
    if [_identity(path) for path in paths] == before and time.time_ns() - latest > _FRESH:
        # Without a record, the next start computes the digest again and then uses the packed file.
        with contextlib.suppress(OSError), atomic_write(record) as file:
            file.write(key.hex().encode() + b"\n")
    return key


def _digest(tensors: Sequence[StoredTensor], progress: ReportProgress) -> bytes:
    what, done, total = f"reading {tensors[0].path.name}", 0, sum(tensor.data.nbytes for tensor in tensors)
    progress(what, done, total, "bytes")
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr((tensor.type.name, tensor.shape)).encode())
        for first in range(0, tensor.data.nbytes, _BLOCK):
            part = tensor.data[first : first + _BLOCK]
            digest.update(part.data)
            done += part.nbytes
            progress(what, done, total, "bytes")
        drop_pages(tensor.data)
    return digest.digest()


def drop_records() -> None:
    """Remove the records of checkpoints that have no packed file any more."""
    folder = cache_dir() / FOLDER
    packed = {path.name[:40] for path in folder.glob(f"*{SUFFIX}")}
    for record in (folder / RECORDS).glob("*"):
        if (
            re.fullmatch("[0-9a-f]{64}", record.name)
            and record.read_bytes()[:40].decode("ascii", "replace") not in packed
        ):
            record.unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int, int, int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
