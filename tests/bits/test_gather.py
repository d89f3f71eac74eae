import os
from pathlib import Path

import numpy as np
import pytest

from gemma_py.errors import FormatError
from gemma_py.formats.blocks import TYPES, BlockType
from gemma_py.formats.files import map_file
from gemma_py.formats.tensor import StoredTensor
from gemma_py.models.program import Tensor
from gemma_py.reference import operations
from gemma_py.weights.pack import PackingPlan
from gemma_py.weights.tensors import GatheredTable, gguf_source, stored_weights

N, K = 37, 512
IDS = np.array([3, 36, 0, 3, 37, 1 << 20, 17])  # one row twice, and two ids beyond the table


def random_bytes(kind: BlockType) -> np.ndarray:
    data = np.random.default_rng(1).integers(0, 256, (N * K // kind.block, kind.bytes), np.uint8)
    return data & np.uint8(0xBF)  # exponents are never all ones, so scales and floats are finite


def table_in_file(path: Path, kind: BlockType) -> GatheredTable:
    path.write_bytes(b"head" + random_bytes(kind).tobytes() + b"tail")
    data = map_file(path)[4:-4]
    return GatheredTable.of(StoredTensor("table", kind, (N, K), data, path))


def gathered(table: GatheredTable) -> np.ndarray:
    rows = np.full((len(IDS), K), np.nan, np.float32)
    table.gather(IDS, rows)
    return rows


@pytest.mark.parametrize("kind", TYPES.values(), ids=TYPES)
def test_gathered_rows_match_the_specification(tmp_path: Path, kind: BlockType) -> None:
    table = table_in_file(tmp_path / "file", kind)
    wanted = np.stack([operations.embed(table.matrix, int(token), 1.0) for token in IDS])
    whole = np.stack([operations.matrix_row(table.matrix.whole(), n) for n in (3, 36, 0, 3, 0, 0, 17)])
    made = gathered(table)
    assert (made.view(np.uint32) == wanted.view(np.uint32)).all()
    assert (made.view(np.uint32) == whole.view(np.uint32)).all()
    table.gather(IDS + 1, made)
    assert (made.view(np.uint32) != wanted.view(np.uint32)).any()


def test_a_table_that_changes_in_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    table = table_in_file(path, TYPES["F32"])
    before = gathered(table)
    with path.open("r+b") as file:
        file.seek(4 + 3 * 4 * K)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(1, 1))
    with pytest.raises(FormatError, match="tensor 'table': the file was changed while it was in use"):
        gathered(table)
    assert (before[:, 0] != 0).any()


def test_a_file_that_is_replaced_or_deleted_stays_in_use_as_it_was(tmp_path: Path) -> None:
    path, other = tmp_path / "file", tmp_path / "other"
    table = table_in_file(path, TYPES["Q4_K"])
    before = gathered(table)
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)
    assert (gathered(table) == before).all()
    path.unlink()
    assert (gathered(table) == before).all()


@pytest.mark.parametrize("row", [3, 4])
def test_rows_that_are_not_finite_are_refused_when_they_are_gathered(row: int) -> None:
    values = np.ones((N, K), np.float32)
    values[row, 7] = np.inf
    data = values.view(np.uint8).reshape(-1)
    table = GatheredTable.of(StoredTensor("table", TYPES["F32"], (N, K), data, Path("nowhere")))
    if row == 4:
        assert (gathered(table) == 1).all()
        return
    with pytest.raises(FormatError, match="holds NaN or infinite values"):
        gathered(table)


def test_a_gathered_table_is_not_packed() -> None:
    def plan(gathered: bool) -> PackingPlan:
        tensor = StoredTensor("t", TYPES["F32"], (N, K), np.zeros(4 * N * K, np.uint8), Path("nowhere"))
        specs = {"embed_tokens": Tensor((N, K), "t", "t", gathered=gathered)}
        return PackingPlan(stored_weights(gguf_source({"t": tensor}, specs, True, "here"), None))

    assert plan(False).bytes > 4 * N * K and not plan(False).packed(arenas_of(plan(False))).tables
    assert plan(True).bytes < 100 and list(plan(True).packed(arenas_of(plan(True))).tables) == ["embed_tokens"]


def arenas_of(plan: PackingPlan) -> list[np.ndarray]:
    return [np.zeros(arena.size, arena.kind) for arena in plan.arenas]
