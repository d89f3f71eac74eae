"""The cache of packed weights on disk: one safetensors file per checkpoint, memory-mapped at every start.

    header    metadata: layout, content key (see below), path of the checkpoint, checksums of the sections, sha256 of the
              header; padded to whole pages
    sections  for each arena (see pack.py), a section with the matrices that every pass reads and, if there are experts, a
              section with the experts' matrices; a section begins at a page boundary and is padded with zeros to the next

Every start checks the header and the sections that every pass reads. The sections' checksums are computed from the file.
With these checksums, the header must equal, byte for byte, the header that this program would write for this checkpoint.
Checking reads each weight once and so takes about as long as generating a token. If a file is damaged or writable by
another user, the weights are packed again.

The sections of experts are not read at a start, because most of them are not needed for an answer. Right after writing, they
are read from the disk once, and compared with the checksums in the header. A record on disk then keeps the file's device,
inode, size and time of modification. Without a record for these values, the next start checks the experts again.

What may damage the file, and how the damage is noticed or prevented:

    a write is interrupted, or the file is changed    the checksum, or for experts the missing record
    another user writes to the file                   the permissions of the file and the directory
    the disk damages bytes, without a new file time   the checksum; experts are not protected after they were checked

The content key is the sha256 of the checkpoint's tensors. Computing it takes seconds per gigabyte, so it is kept in a record
on disk. The record is valid while the device, inode, size and times of change of the checkpoint's files are unchanged.
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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gemma_py import machine
from gemma_py.errors import GemmaError, GemmaWarning, InputError
from gemma_py.formats.container import SUFFIX, Spec, dtype_name, make_header, with_digest
from gemma_py.formats.files import drop_pages
from gemma_py.formats.safetensors import read_header
from gemma_py.formats.tensor import StoredTensor
from gemma_py.kernels.checksum import checksum
from gemma_py.kernels.memory import aligned
from gemma_py.paths import PARTIAL, atomic_write, cache_dir, is_abandoned, private_dir
from gemma_py.progress import ReportProgress, no_report
from gemma_py.weights.checkpoint import Checkpoint
from gemma_py.weights.pack import LAYOUT, PAGE, PackedWeights, PackingPlan

FOLDER, RECORDS = "weights", "records"
OLD_SUFFIX = ".packed"  # the suffix of files that older versions wrote, which are no longer read
# The files of a Hugging Face directory, besides the weights, that decide logits or how text is tokenised.
_BESIDE_WEIGHTS = ("config.json", "tokenizer.json", "tokenizer_config.json")
_LONGEST_SOURCE = 1024  # the most characters of the checkpoint's path in the header
# Weights smaller than this are not cached, because packing them takes no longer than checking a cached file.
_SMALLEST = 8 << 20
_LARGE = 1 << 30  # bytes; a file at least this large is announced before it is written
_MARGIN = 1 << 30  # bytes that must stay free on the disk
_BLOCK = 1 << 22
_EXPERTS_BLOCK = 1 << 28  # bytes of experts to check at a time
# Nanoseconds. Two changes of a file within this time may leave one time of change, because some file systems round times to
# two seconds.
_FRESH = 2_000_000_000


class _DamagedError(Exception):
    """A cached file is not exactly what this program would write. The message names the difference."""


def check_memory(checkpoint: Checkpoint, quant: str | None) -> None:
    """Raise InputError if the weights that every pass reads need more memory than is available."""
    free = machine.memory()
    if free is None or 4 * sum(tensor.data.nbytes for tensor in checkpoint.tensors.values()) < free:
        return  # packed weights have less than four times the bytes of the file
    needed = sum(arena.kind.itemsize * arena.dense for arena in PackingPlan(checkpoint.stored_weights(quant)).arenas)
    if needed > free:
        gib = 1 << 30
        raise InputError(
            f"{checkpoint.path}: each pass reads {needed / gib:.2f} GiB of weights, and {free / gib:.2f} GiB of memory are "
            "available; --shards N --address HOST:PORT divides the model among hosts"
        )


def packed_weights(
    checkpoint: Checkpoint, quant: str | None = None, progress: ReportProgress = no_report
) -> PackedWeights:
    """Return the checkpoint's packed weights, memory-mapped from the cache on disk.

    If the cache does not have the weights, they are packed into the cache first. If the cache cannot be written, the
    weights are packed into memory, and a GemmaWarning gives the reason. Names and shapes of tensors are checked at every
    start. Values are checked for NaN and infinity when the weights are packed.
    """
    plan = PackingPlan(checkpoint.stored_weights(quant))
    for tensor in checkpoint.tensors.values():  # release the pages of the file that were loaded to read the gains
        drop_pages(tensor.data)
    if not checkpoint.cacheable or sum(section.bytes for section in _sections(plan)) < _SMALLEST:
        return plan.packed(_in_memory(plan, checkpoint.path, progress))
    try:
        arenas = _cached(plan, checkpoint.path, progress)
    except OSError as error:
        message = f"packed weights are not cached, so every start takes longer: {error}"
        warnings.warn(message, GemmaWarning, stacklevel=2)
        arenas = _in_memory(plan, checkpoint.path, progress)
    return plan.packed(arenas)


def _in_memory(plan: PackingPlan, source: Path, progress: ReportProgress) -> list[np.ndarray]:
    arenas = [aligned(arena.size, arena.kind, np.zeros) for arena in plan.arenas]
    _fill(plan, arenas, source, progress)
    return arenas


def _cached(plan: PackingPlan, source: Path, progress: ReportProgress) -> list[np.ndarray]:
    """Return the arenas of the cached file. If the file is missing or damaged, it is written first."""
    folder = private_dir(cache_dir() / FOLDER)
    key = _content_key(plan, folder / RECORDS, progress)
    path = folder / f"{key.hex()[:40]}-{LAYOUT}{SUFFIX}"
    try:
        return _mapped(path, plan, key, progress)
    except FileNotFoundError:
        pass
    except _DamagedError as error:
        warnings.warn(f"{path}: {error}; the weights are packed again", GemmaWarning, stacklevel=3)
    _write(path, plan, key, source, progress)
    _drop_from_page_cache(path)
    try:
        return _mapped(path, plan, key, progress)
    except _DamagedError as error:
        raise OSError(f"{path}: the file was just written, but {error}") from None


class _Section(NamedTuple):
    """A part of an arena in the file: the matrices that every pass reads, or the matrices of experts.

    first: the byte at which the section begins, counted from the beginning of the first section.
    values: the number of values, without padding.
    """

    name: str
    arena: int
    kind: np.dtype
    first: int
    values: int
    of_experts: bool

    @property
    def bytes(self) -> int:
        """The size in the file, padded to whole pages."""
        return -(-self.kind.itemsize * self.values // PAGE) * PAGE


def _sections(plan: PackingPlan) -> list[_Section]:
    """Return the sections in the order of the file. An arena's two sections are next to each other."""
    made: list[_Section] = []
    for number, arena in enumerate(plan.arenas):
        for name, values in (("arena", arena.dense), ("experts", arena.experts)):
            if values:
                first = made[-1].first + made[-1].bytes if made else 0
                made.append(_Section(f"{name}.{number}", number, arena.kind, first, values, name == "experts"))
    return made


def _header(plan: PackingPlan, key: bytes, source: str, checksums: Sequence[int]) -> bytes:
    """Return the file's header, padded to whole pages. The header's length does not depend on the checksums."""
    metadata = {
        "format": "gemma_py packed weights", "layout": str(LAYOUT), "key": key.hex(), "source": source,
        "checksums": " ".join(f"{checksum:016x}" for checksum in checksums),
    }  # fmt: skip
    specs = {
        section.name: Spec(dtype_name(section.kind), (section.bytes // section.kind.itemsize,))
        for section in _sections(plan)
    }
    header = make_header(specs, metadata, PAGE)
    return with_digest(header, hashlib.sha256(header).hexdigest())


def _blank_header(plan: PackingPlan, key: bytes, source: str) -> bytes:
    return _header(plan, key, source, [0] * len(_sections(plan)))


def _file_size(plan: PackingPlan, header: bytes) -> int:
    return len(header) + sum(section.bytes for section in _sections(plan))


def _arenas(data: np.ndarray, plan: PackingPlan) -> list[np.ndarray]:
    """Return the arenas in a file's data, without copying."""
    sections, made = _sections(plan), []
    start = len(data) - sum(section.bytes for section in sections)
    for number, arena in enumerate(plan.arenas):
        first = start + min(section.first for section in sections if section.arena == number)
        made.append(data[first : first + arena.kind.itemsize * arena.size].view(arena.kind))
    return made


def _checksum(data: np.ndarray, plan: PackingPlan, section: _Section) -> int:
    first = len(data) - sum(other.bytes for other in _sections(plan)) + section.first
    part = data[first : first + section.bytes]
    if not section.of_experts:
        return int(checksum(part.view("<u8")))
    # A section of experts may be larger than the memory, so its pages are released block by block.
    sums = np.zeros(-(-len(part) // _EXPERTS_BLOCK) * 8, np.uint64)
    for number, at in enumerate(range(0, len(part), _EXPERTS_BLOCK)):
        block = part[at : at + _EXPERTS_BLOCK]
        sums[8 * number] = checksum(block.view("<u8"))
        drop_pages(block)
    return int(checksum(sums))


def _found_checksums(data: np.ndarray, plan: PackingPlan, recorded: str) -> list[int]:
    """Return the checksums of a file's sections: from `recorded` for experts' sections, computed for the others.

    recorded: the checksums in the file's header, separated by spaces
    """
    words, sections = recorded.split(" "), _sections(plan)
    if len(words) != len(sections) or not all(re.fullmatch("[0-9a-f]{16}", word) for word in words):
        raise _DamagedError("the header is damaged")
    return [
        int(word, 16) if section.of_experts else _checksum(data, plan, section)
        for section, word in zip(sections, words, strict=True)
    ]


def _mapped(path: Path, plan: PackingPlan, key: bytes, progress: ReportProgress) -> list[np.ndarray]:
    """Check a cached file, and return read-only views of its arenas.

    Raises FileNotFoundError if there is no file, and _DamagedError if the file is not exactly what `_write` would write.
    """
    if path.is_symlink():
        raise _DamagedError("the path is a symbolic link")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise _DamagedError("the path is not a regular file that only this user may write")
        if status.st_size < PAGE:
            raise _DamagedError("the size of the file is wrong")
        mapped = mmap.mmap(handle, status.st_size, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # some systems have no huge pages for files
                mapped.madvise(mmap.MADV_HUGEPAGE)
        data = np.frombuffer(mapped, np.uint8)
        # Load the first page through the mapping. If `read_header` loaded it, Linux would read ahead in small pages, so that
        # the first 40 MB would never be in huge pages.
        data[0].tobytes()
        try:
            header = read_header(path, status.st_size)
        except GemmaError:
            raise _DamagedError("the header is damaged") from None
        source = header.metadata.get("source", "")
        blank = _blank_header(plan, key, source)
        if header.size != len(blank) or status.st_size != _file_size(plan, blank):
            raise _DamagedError("the size of the file is wrong")
        sums = _found_checksums(data, plan, header.metadata.get("checksums", ""))
        if data[: header.size].tobytes() != _header(plan, key, source, sums):
            raise _DamagedError("the content of the file is damaged")
        _check_experts(path, _identity(handle)[:4], data, plan, sums, progress)
        with contextlib.suppress(OSError):  # `gemma_py cache` shows this time as the time of last use
            os.utime(handle, ns=(time.time_ns(), status.st_mtime_ns))
    finally:
        os.close(handle)
    return _arenas(data, plan)


def _check_experts(
    path: Path,
    identity: tuple[int, ...],
    data: np.ndarray,
    plan: PackingPlan,
    sums: Sequence[int],
    progress: ReportProgress,
) -> None:
    """Raise _DamagedError if a section of experts has a wrong checksum. If a record on disk says that the sections were
    checked before, the sections are not read.

    identity: device, inode, size and time of modification of the mapped file, which is not the file at `path` if another
    process has replaced that file. data: the bytes of the mapped file. sums: the checksums in the header, in the order of
    the sections.
    """
    sections = [(section, found) for section, found in zip(_sections(plan), sums, strict=True) if section.of_experts]
    if not sections:
        return
    checked = repr((path.name, identity))
    record = path.parent / RECORDS / hashlib.sha256(checked.encode()).hexdigest()
    wanted = f"{path.name[:40]} {checked}\n".encode("utf-8", "surrogateescape")
    with contextlib.suppress(OSError):
        if record.read_bytes() == wanted:
            return
    what, done, total = f"checking {path.name}", 0, sum(section.bytes for section, _ in sections)
    for section, found in sections:
        progress(what, done, total, "bytes")
        if _checksum(data, plan, section) != found:
            raise _DamagedError("the content of the file is damaged")
        done += section.bytes
    progress(what, done, total, "bytes")
    # If the record cannot be written, the next start checks the experts again.
    with contextlib.suppress(OSError), atomic_write(record) as file:
        file.write(wanted)


def _drop_from_page_cache(path: Path) -> None:
    """Remove a new file from the page cache, so that the next read loads it again, in huge pages if the system supports
    them.

    After writing, the file is in the page cache in small pages, with which decoding would be a fifth slower.
    """
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def source_of(path: Path) -> str | None:
    """Return the path of the checkpoint that a cached file was made from. An invalid header gives None."""
    try:
        return read_header(path, path.stat().st_size).metadata.get("source")
    except GemmaError:
        return None


def _write(path: Path, plan: PackingPlan, key: bytes, source: Path, progress: ReportProgress) -> None:
    """Write the cached file atomically. Several processes may write one file at once. Raises OSError on failure."""
    for left in path.parent.glob(f"*{SUFFIX}.*{PARTIAL}"):  # partial files of killed processes
        if is_abandoned(left):
            left.unlink(missing_ok=True)
    name = os.fsencode(source.absolute()).decode("utf-8", "replace")[:_LONGEST_SOURCE]
    size = _file_size(plan, _blank_header(plan, key, name))
    free = shutil.disk_usage(path.parent).free
    if free < size + _MARGIN:
        raise OSError(
            f"{path.parent}: {(size + _MARGIN) >> 20} MiB of free disk space are needed, {free >> 20} MiB are free"
        )
    if size >= _LARGE:
        progress(f"writing packed weights to {path.parent}", 0, size, "bytes")
    with atomic_write(path) as file:
        # Allocate the file's disk space first. Otherwise, if the disk became full while the mapped file is written, SIGBUS
        # would end the process. macOS lacks posix_fallocate; there, only _MARGIN protects against a full disk.
        reserve = getattr(os, "posix_fallocate", lambda handle, _, size: os.truncate(handle, size))
        reserve(file.fileno(), 0, size)
        data = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
        _fill(plan, _arenas(data, plan), source, progress)
        header = _header(plan, key, name, [_checksum(data, plan, section) for section in _sections(plan)])
        data[: len(header)] = np.frombuffer(header, np.uint8)


def _fill(plan: PackingPlan, arenas: Sequence[np.ndarray], source: Path, progress: ReportProgress) -> None:
    """Pack the matrices. Finished pages are dropped from memory, because the whole file may be larger than the memory."""
    what, done = f"packing the weights of {source.name}", 0
    total = sum(matrix.data.nbytes for matrix in plan.matrices)
    progress(what, done, total, "bytes")
    for matrix in plan.fill(arenas):
        drop_pages(matrix.data)
        for arena in arenas:
            drop_pages(arena)
        done += matrix.data.nbytes
        progress(what, done, total, "bytes")


def _content_key(plan: PackingPlan, records: Path, progress: ReportProgress) -> bytes:
    """Return the sha256 of the plan's matrices, from a record on disk if the checkpoint's files are unchanged."""
    tensors = list({matrix.tensor.name: matrix.tensor for matrix in plan.matrices}.values())
    shapes = [(tensor.name, tensor.type.name, tensor.shape, str(tensor.path)) for tensor in tensors]
    paths = sorted({tensor.path for tensor in tensors})
    return _recorded(repr(shapes), paths, records, lambda: _digest(tensors, progress))


def file_digests(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the sha256 of each file that decides what the model computes and how text is tokenised, in ascending order."""
    paths = {tensor.path for tensor in checkpoint.tensors.values()}
    beside = (checkpoint.path / name for name in _BESIDE_WEIGHTS) if checkpoint.path.is_dir() else (checkpoint.path,)
    paths |= {path for path in beside if path.exists()}
    records = None
    with contextlib.suppress(OSError):  # without a cache directory, each process computes the digests again
        records = private_dir(cache_dir() / FOLDER) / RECORDS
    digests = {_recorded("file", [path], records, partial(_file_digest, path)).hex() for path in paths}
    return tuple(sorted(digests))


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _recorded(what: str, paths: Sequence[Path], records: Path | None, compute: Callable[[], bytes]) -> bytes:
    """Return a sha256 of files, from a record on disk if the files are unchanged since the record was written.

    what: a name for the content whose sha256 `compute` returns; a record that was written under another name is not used
    records: the directory of the records, or None to compute in any case
    """
    before = [_identity(path) for path in paths]
    if records is None:
        return compute()
    record = records / hashlib.sha256(f"({what}, {before!r})".encode("utf-8", "surrogateescape")).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        text = record.read_bytes()[:65]
        if re.fullmatch(rb"[0-9a-f]{64}\n", text):
            return bytes.fromhex(text.decode())
    key = compute()
    # File systems round times of change, so a file that changes twice within a short time may keep its time. Therefore no
    # record is written for files that have just changed.
    latest = max(max(identity[3:]) for identity in before)
    if [_identity(path) for path in paths] == before and time.time_ns() - latest > _FRESH:
        # If the record cannot be written, the next start computes the sha256 again.
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
    """Remove the records of checkpoints whose cached file no longer exists."""
    folder = cache_dir() / FOLDER
    packed = {path.name[:40] for path in folder.glob(f"*{SUFFIX}")}
    for record in (folder / RECORDS).glob("*"):
        if (
            re.fullmatch("[0-9a-f]{64}", record.name)
            and record.read_bytes()[:40].decode("ascii", "replace") not in packed
        ):
            record.unlink(missing_ok=True)


def _identity(file: Path | int) -> tuple[int, int, int, int, int]:
    status = os.stat(file)  # noqa: PTH116, because Path.stat knows no open files
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
