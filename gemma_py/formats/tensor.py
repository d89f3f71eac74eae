"""Tensors in memory-mapped files."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gemma_py.errors import FormatError
from gemma_py.formats.blocks import BlockType


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    shape: in numpy's order, so [N, K] has N rows of K values
    data: uint8, read-only, memory-mapped
    """

    name: str
    type: BlockType
    shape: tuple[int, ...]
    data: np.ndarray
    path: Path

    @property
    def where(self) -> str:
        return f"{self.path}: tensor {self.name!r:.80}"

    def blocks(self, first: int = 0, last: int | None = None) -> np.ndarray:
        per_row = self.shape[-1] // self.type.block
        table = self.data.reshape(-1, self.type.bytes)
        return table[first * per_row : None if last is None else last * per_row]

    def to_float32(self) -> np.ndarray:
        return self.type.dequantise(self.blocks()).reshape(self.shape)


@dataclass(frozen=True)
class QuantisedTensor(StoredTensor):
    """A float matrix in a file. `blocks` reads rows of the matrix and quantises the rows to `type`."""

    source: StoredTensor

    def blocks(self, first: int = 0, last: int | None = None) -> np.ndarray:
        assert self.type.pack is not None
        values = self.source.type.dequantise(self.source.blocks(first, last)).reshape(-1, self.type.block)
        if not np.isfinite(values).all():
            raise FormatError(f"{self.where}: holds NaN or infinite values")
        packed = self.type.pack(values)
        scales = packed[:, :2].copy().view(np.float16)
        if not np.isfinite(scales).all():
            raise FormatError(f"{self.where}: holds values too large for {self.type.name}, whose scales are float16")
        return packed
