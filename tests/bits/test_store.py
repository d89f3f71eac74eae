import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tiny_checkpoints as tiny
from gguf_files import write_model
from repository import child_environment

import gemma_py
from gemma_py import paths
from gemma_py.cli.progress import LoadProgress, shown_warnings
from gemma_py.errors import FormatError, GemmaWarning
from gemma_py.formats.safetensors import read_header
from gemma_py.kernels.checksum import checksum
from gemma_py.kernels.decorator import CACHE
from gemma_py.weights import store
from gemma_py.weights import tensors as weights
from gemma_py.weights.checkpoint import open_checkpoint
from gemma_py.weights.pack import PackedArrays
from gemma_py.weights.tensors import StoredMatrix

VARIANT = tiny.VARIANTS["gemma3"]
# The kinds of these matrices use all arenas: codes with and without minimums, f32 and bfloat16.
KINDS = {"gate_proj": "Q8_0", "up_proj": "Q4_1", "q_proj": "BF16"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf", VARIANT, seed=2, kinds=KINDS)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache directory in which weights of any size and age are stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_SMALLEST", 0)
    monkeypatch.setattr(store, "_FRESH", -1)
    yield tmp_path / "cache" / "gemma_py" / "weights"


def packed(path: Path) -> PackedArrays:
    return store.packed_weights(open_checkpoint(path)).arrays


def bits(m: PackedArrays) -> list[bytes]:
    return [array.tobytes() for array in m]


def only(folder: Path) -> Path:
    (found,) = [path for path in folder.iterdir() if path.is_file()]
    return found


def forbid_unpacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoredMatrix, "rows", lambda *_: pytest.fail("a matrix was read"))


def test_written_once_and_mapped_next_time(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bits(packed(checkpoint))
    assert only(folder).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    forbid_unpacking(monkeypatch)
    monkeypatch.setattr(store, "_digest", lambda *_: pytest.fail("the checkpoint was hashed again"))
    again = packed(checkpoint)
    assert bits(again) == first
    assert not any(array.flags.writeable for array in again[:-1])


def test_small_weights_are_not_cached(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SMALLEST", 8 << 20)
    packed(checkpoint)
    assert not folder.exists()


def test_the_same_bits_with_a_file_and_without(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, logits = [2, 3, 4, 5], []
    for home in ("nowhere", None, None):
        with monkeypatch.context() as context, contextlib.ExitStack() as stack:
            if home is not None:
                context.setenv("XDG_CACHE_HOME", "/proc/nowhere")
                stack.enter_context(pytest.warns(GemmaWarning, match="not cached"))
            with gemma_py.load(checkpoint, threads=2) as engine:
                logits.append(engine.session().prefill(ids, all_logits=True).tobytes())
                reference = gemma_py.reference.logits(engine, ids).tobytes()
    assert only(folder)
    assert set(logits) == {reference}


def test_another_place_of_the_same_content_shares_the_file(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bits(packed(checkpoint))
    copy = checkpoint.with_name("copy.gguf")
    shutil.copy(checkpoint, copy)
    forbid_unpacking(monkeypatch)
    assert bits(packed(copy)) == first


def flip(at: int) -> Any:
    def damage(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 0x80
        return bytes(changed)

    return damage


DAMAGES = {
    **{f"byte {at} of the header": flip(at) for at in (0, 8, 12, 16, 47, 48, 72, 80, 104, 112, 2000, 4064, 4095)},
    **{f"byte {at} of the arenas": flip(at) for at in (4096, 9000, -4096, -1)},
    "nothing left": lambda data: b"",
    "less than a header": lambda data: data[:100],
    "a byte less": lambda data: data[:-1],
    "a byte more": lambda data: data + b"\0",
    "a page more": lambda data: data + bytes(4096),
    "noise": lambda data: np.random.default_rng(1).bytes(len(data)),
    "half zero, as after a crash": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
}


def test_damage_anywhere_is_repaired_with_one_line(
    checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = bits(packed(checkpoint))
    kept = only(folder)
    good = kept.read_bytes()
    for name, damage in DAMAGES.items():
        kept.write_bytes(damage(good))
        with pytest.warns(GemmaWarning, match="packed again") as said:
            assert bits(packed(checkpoint)) == expected, name
        assert len(said) == 1, name
        assert only(folder).read_bytes() == good, name
        assert bits(packed(checkpoint)) == expected
    assert capsys.readouterr().err == ""


def test_the_file_is_a_safetensors_file_whose_arenas_begin_at_pages(checkpoint: Path, folder: Path) -> None:
    m = packed(checkpoint)
    path = only(folder)
    arenas = safetensors.numpy.load_file(path)
    assert [arenas[f"arena.{number}"][: array.size].tobytes() for number, array in enumerate(m[:3])] == bits(m)[:3]
    header = read_header(path, path.stat().st_size)
    assert all(entry.first % 4096 == 0 == entry.last % 4096 for entry in header.entries.values())
    assert header.metadata["source"] == str(checkpoint)
    assert store.source_of(path) == str(checkpoint)


def test_a_checksum_sees_every_bit_and_every_exchange() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 64, 64, np.uint64)
    seen = {int(checksum(words))}
    for i in range(64):
        for bit in range(64):
            changed = words.copy()
            changed[i] ^= np.uint64(1 << bit)
            seen.add(int(checksum(changed)))
    for i in range(56):
        changed = words.copy()
        changed[i], changed[i + 8] = words[i + 8], words[i]  # words i and i + 8 belong to one lane of the checksum
        seen.add(int(checksum(changed)))
    seen |= {int(checksum(some)) for some in (words[:56], np.zeros(8, np.uint64), np.zeros(16, np.uint64))}
    assert len(seen) == 1 + 64 * 64 + 56 + 3
    signs = words.copy()
    signs[[3, 11]] ^= np.uint64(1 << 63)  # a checksum of products alone would not notice flipped signs
    assert checksum(signs) != checksum(words)


def test_another_layout_is_left_alone(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(packed(checkpoint))
    old = only(folder)
    data = old.read_bytes()
    monkeypatch.setattr(store, "LAYOUT", store.LAYOUT + 1)
    assert bits(packed(checkpoint)) == expected
    (new,) = {path for path in folder.iterdir() if path.is_file()} - {old}
    assert old.read_bytes() == data
    new.write_bytes(data)  # a file with the new name and the old layout
    with pytest.warns(GemmaWarning, match="packed again"):
        assert bits(packed(checkpoint)) == expected
    assert new.read_bytes() != data


LAYOUTS = {2: "d177a0675cadc806", 3: "65094b0097f50ed7"}


def test_a_change_of_layout_has_a_new_number(checkpoint: Path, folder: Path) -> None:
    """A file with an older layout must not be read. After a change of the layout, raise LAYOUT and add the new layout's
    digest here.
    """
    digest = hashlib.sha256(b"".join(bits(packed(checkpoint))[:3])).hexdigest()[:16]
    assert LAYOUTS[store.LAYOUT] == digest


def test_parts_make_the_same_panels(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_SMALLEST", 1 << 40)
    expected = bits(packed(checkpoint))
    counts = []
    rows = StoredMatrix.rows

    def counted(self: StoredMatrix, first: int, last: int) -> Any:
        counts.append(last - first)
        return rows(self, first, last)

    monkeypatch.setattr(StoredMatrix, "rows", counted)
    monkeypatch.setattr(weights, "_CHUNK", 1)
    assert bits(packed(checkpoint)) == expected
    assert max(counts) == 64


PROGRAM = """
import hashlib, sys
from pathlib import Path
from gemma_py.weights import store
from gemma_py.weights.checkpoint import open_checkpoint
store._SMALLEST = 0
made = store.packed_weights(open_checkpoint(Path(sys.argv[1])))
print(hashlib.sha256(b"".join(array.tobytes() for array in made.arrays)).hexdigest())
"""


def test_processes_that_pack_at_once(checkpoint: Path, folder: Path) -> None:
    expected = hashlib.sha256(b"".join(bits(packed(checkpoint)))).hexdigest()
    good = only(folder).read_bytes()
    shutil.rmtree(folder)
    if CACHE is not None:  # link the compiled kernels into the new cache
        (folder.parent / "kernels").symlink_to(CACHE.parent)
    command = [sys.executable, "-c", PROGRAM, str(checkpoint)]
    environment = child_environment()
    pipe = subprocess.PIPE
    children = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(3)]
    for child in children:
        out, err = child.communicate(timeout=300)
        assert (out.strip(), err) == (expected, "")
    assert only(folder).read_bytes() == good


def test_a_home_that_cannot_be_written_is_said_once(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with shown_warnings():
        assert bits(packed(checkpoint)) == bits(packed(checkpoint))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gemma_py: packed weights are not cached, so every start takes longer: ")


@pytest.mark.parametrize("full", ["at the start", "on the way"])
def test_a_full_disk_switches_the_cache_off(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    expected = bits(packed(checkpoint))
    only(folder).unlink()
    if full == "at the start":
        usage = shutil.disk_usage(folder)._replace(free=store._MARGIN)
        monkeypatch.setattr(store.shutil, "disk_usage", lambda _: usage)
        monkeypatch.setattr(store, "atomic_write", lambda _: pytest.fail("written although only the margin is free"))
    else:

        def refuse(*_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(store.os, "posix_fallocate", refuse)
    with pytest.warns(GemmaWarning, match="not cached"):
        assert bits(packed(checkpoint)) == expected
    assert [path for path in folder.iterdir() if path.is_file()] == []


def test_a_file_that_others_may_have_written_is_replaced(checkpoint: Path, folder: Path) -> None:
    expected = bits(packed(checkpoint))
    kept = only(folder)

    def loosen() -> None:
        kept.chmod(0o622)

    def give_away() -> None:
        os.chown(kept, 12345, 12345)

    def link() -> None:
        kept.rename(folder.parent / "elsewhere")
        kept.symlink_to(folder.parent / "elsewhere")

    for spoil in (loosen, link, *([give_away] if os.getuid() == 0 else [])):
        spoil()
        with pytest.warns(GemmaWarning, match="packed again"):
            assert bits(packed(checkpoint)) == expected, spoil
        assert not kept.is_symlink()
        assert kept.stat().st_mode & 0o777 == 0o600
        assert kept.stat().st_uid == os.getuid()


def test_a_directory_that_others_may_write_is_not_used(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(packed(checkpoint))
    folder.chmod(0o777)
    monkeypatch.setattr(store, "_mapped", lambda *_: pytest.fail("mapped a file of a directory that others may write"))
    with pytest.warns(GemmaWarning, match="other users may write"):
        assert bits(packed(checkpoint)) == expected


def changed_in_place(path: Path) -> None:
    before = path.stat()
    tensor = open_checkpoint(path).tensors["blk.1.ffn_down.weight"]
    data = bytearray(path.read_bytes())
    at = data.find(tensor.data.tobytes())
    data[at : at + 4] = np.float32(0.25).tobytes()
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_changed_weights_are_noticed(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = bits(packed(checkpoint))
    time.sleep(0.05)  # longer than a tick of a file system's clock
    changed_in_place(checkpoint)
    after = bits(packed(checkpoint))
    assert after != before
    monkeypatch.setattr(store, "_SMALLEST", 1 << 40)
    assert after == bits(packed(checkpoint))


def test_a_file_that_changed_just_now_is_not_remembered(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_FRESH", 60 * 10**9)
    packed(checkpoint)
    assert not (folder / store.RECORDS).exists()


def test_a_record_that_cannot_be_written_changes_nothing(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For example, the disk may become full after the weights were written."""
    expected = bits(packed(checkpoint))
    shutil.rmtree(folder / store.RECORDS)
    (folder / store.RECORDS).touch()
    forbid_unpacking(monkeypatch)
    assert bits(packed(checkpoint)) == expected
    assert capsys.readouterr().err == ""


def test_a_damaged_record_is_not_used(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed(checkpoint)
    (record,) = (folder / store.RECORDS).iterdir()
    good = record.read_bytes()
    for damage in (b"", good[:20], b"\xff" + good[1:], good.upper()[:-1]):
        record.write_bytes(damage)
        packed(checkpoint)
        assert record.read_bytes() == good
    assert only(folder)


def test_bad_weights_leave_nothing_behind(tmp_path: Path, folder: Path) -> None:
    tiny.write(VARIANT, tmp_path / "bad", seed=2)
    values = tiny.tensors(VARIANT, 2)
    values["model.layers.6.mlp.down_proj.weight"].reshape(-1)[-1] = np.nan
    tiny.save_safetensors(tmp_path / "bad" / "model.safetensors", values, "F32")
    with pytest.raises(FormatError, match=r"layers.6.mlp.down_proj.weight': holds NaN"):
        packed(tmp_path / "bad")
    assert [path for path in folder.iterdir() if path.is_file()] == []


def test_partial_files_of_killed_processes_are_removed(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed(checkpoint)
    kept = only(folder)
    monkeypatch.setattr(paths, "_YOUNG", -1.0)
    left = kept.with_name(kept.name + ".abc.partial")
    left.touch()
    with paths.atomic_write(kept) as file:
        kept.unlink()
        packed(checkpoint)
        assert not left.exists()
        assert Path(f"/proc/self/fd/{file.fileno()}").resolve().exists() or not Path("/proc").exists()
        file.write(kept.read_bytes())
    assert only(folder) == kept


def test_progress_is_shown_where_it_takes_long(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store.packed_weights(open_checkpoint(checkpoint), progress=LoadProgress())
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("gemma_py.cli.progress._FIRST_LINE_AFTER", 0.0)
    shutil.rmtree(folder)
    store.packed_weights(open_checkpoint(checkpoint), progress=LoadProgress())
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["reading m.gguf", "packing the weights of m.gguf"]
