"""A forward pass as data: the list of operations that a family's file writes down and that runtime/forward.py interprets.

A program names buffers, tensors and layers. Buffers are rows of float32, one row a token of the pass; an operation
that writes a buffer determines how wide its rows are from then on. Operations are grouped into phases: a phase is what workers do
between two barriers, and errors, traces and profiles say its name. Where an operation cannot share the phase of the one
before, a new phase of the same name begins. Inputs of matrices of codes are quantised automatically; a program does not
mention it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gemma_py.models.config import Config, Rope

# Kinds of operations. Those before MATMUL work on rows, and several of them may share a phase: a worker takes some rows
# through all of them. The others have phases of their own.
(EMBED, ROPE_TABLE, NORM, ADD, SCALE, MULTIPLY, GELU_GATE, QUANTISE, TAKE, TAKE_COLUMNS, ROPE, STORE, MATMUL, SCORES,
 ATTEND) = range(15)  # fmt: skip
KIND_NAMES = ("embed", "rope table", "norm", "add", "scale", "multiply", "gelu gate", "quantise", "take", "take columns",
              "rope", "store", "matmul", "scores", "attend")  # fmt: skip
ALL, WANTED = range(2)  # which rows an operation computes: those of every token, or those whose logits are wanted
LOGITS = "logits"  # the buffer that a pass returns


@dataclass(frozen=True)
class Tensor:
    """A tensor of a family: a matrix [N, K] or a norm's gain [width], with its names in the two formats.

    hugging_face: the name after the checkpoint's prefix. plus_one: Hugging Face stores the gain without its 1.
    gathered: the matrix is never packed; a pass reads the rows of its tokens from the checkpoint's file.
    """

    shape: tuple[int, ...]
    hugging_face: str
    gguf: str
    plus_one: bool = False
    gathered: bool = False


@dataclass
class Op:
    """One operation. Which fields are used depends on the kind; see the methods of `Program`."""

    kind: int
    phase: "Phase"
    source: str = ""
    second: str = ""
    target: str = ""
    tensor: str = ""
    heads: int = 1  # rows of `width` that a token's row consists of
    width: int = 0
    kv_heads: int = 0
    kv: int = -1  # place in config.kv_layers
    window: int = 0  # 0: none
    rope: int = -1
    first: int = 0  # for TAKE_COLUMNS: the first column, and the width of the source's rows
    stride: int = 0
    numbers: tuple[float, float] = (0.0, 0.0)
    codes: "Op | None" = None  # for a matmul: the operation that turns its input into codes


@dataclass(eq=False)
class Phase:
    """What workers do between two barriers. layer: the layer number in errors and traces."""

    name: str
    layer: int
    rows: int


@dataclass
class Program:
    """The operations of a pass. A family's `write` calls one method for each operation, in the order of the computation."""

    config: Config
    tensors: Mapping[str, Tensor]
    ops: list[Op] = field(default_factory=list)
    ropes: list[tuple[Rope, int]] = field(default_factory=list)  # (rope, head width)
    gathers: list[tuple[str, str]] = field(
        default_factory=list
    )  # (tensor, the buffer that gets its rows before the pass)
    widths: dict[str, int] = field(default_factory=dict)  # the widest row that each buffer ever holds
    _widths_now: dict[str, int] = field(default_factory=dict)  # the width of each buffer's rows at this point
    _rows_now: dict[str, int] = field(default_factory=dict)  # ALL or WANTED: which rows each buffer holds at this point
    # The operation that made a buffer's codes, while they are up to date.
    _coded: dict[str, Op] = field(default_factory=dict)
    _phase: Phase = field(default_factory=lambda: Phase("embedding", 0, ALL))

    def phase(self, name: str, layer: int, rows: int = ALL) -> None:
        """Begin a phase: the operations up to the next call belong to it."""
        self._phase = Phase(name, layer, rows)

    def embed(self, tensor: str, target: str, factor: float | None = None) -> None:
        """target = the token's row of the matrix times the factor, which is sqrt(D) where none is given. A token that the
        matrix has no row for gets row 0. Of a gathered tensor, the rows are put into target before the pass begins."""
        D = self._shape(tensor, 2)[1]
        gathered = self.tensors[tensor].gathered
        if gathered and (target in self.widths or self._phase.rows != ALL):
            raise ValueError(
                f"rows of {tensor} are gathered for all tokens, into a buffer that nothing was written to: {target}"
            )
        self._write(target, D)
        numbers = (math.sqrt(D) if factor is None else factor, 0.0)
        if gathered:
            self.gathers.append((tensor, target))
            self._add(MULTIPLY, target=target, width=D, numbers=numbers)
        else:
            self._add(EMBED, target=target, tensor=tensor, width=D, numbers=numbers)

    def rope_tables(self) -> None:
        """Cosines and sines of every position of the pass, for each rope and head width that the layers have."""
        self.ropes = list(dict.fromkeys((layer.rope, layer.head_dim) for layer in self.config.layers))
        for number, (_, width) in enumerate(self.ropes):
            cosines, sines = self._angles(number, self._phase.rows)
            self._write(cosines, width // 2)
            self._write(sines, width // 2)
            self._add(ROPE_TABLE, target=cosines, second=sines, width=width // 2, rope=number)

    def norm(self, source: str, target: str, gain: str, heads: int = 1) -> None:
        """target = RMS norm of source times gain; each head of a row is normalised by itself. gain: "" means a gain of ones."""
        width = self._widths_now[source] // heads
        if gain and self._shape(gain, 1) != (width,):
            raise ValueError(f"{gain} is not as wide as the rows of {source}, {width}")
        self._write(target, heads * width)
        self._add(NORM, source=source, target=target, tensor=gain, heads=heads, width=width)

    def add(self, target: str, source: str, gain: str = "") -> None:
        """target += source. With a gain: target += RMS norm of source times gain, and source is overwritten."""
        self._check_rows(target)
        width = self._same_width(target, source)
        self._write(target, width)
        self._add(ADD, source=source, target=target, tensor=gain, width=width)

    def scale(self, target: str, tensor: str) -> None:
        """target *= the only value of the tensor."""
        self._shape(tensor, 1)
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(SCALE, target=target, tensor=tensor, width=width)

    def multiply(self, target: str, factor: float) -> None:
        """target *= the factor, rounded to float32."""
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(MULTIPLY, target=target, width=width, numbers=(factor, 0.0))

    def columns(self, source: str, target: str, first: int, width: int) -> None:
        """target = the columns first .. first + width - 1 of source."""
        stride = self._widths_now[source]
        if not 0 <= first < first + width <= stride or source == target:
            raise ValueError(f"{source} has {stride} columns, and {target} cannot get {width} of them from {first} on")
        self._write(target, width)
        self._add(TAKE_COLUMNS, source=source, target=target, width=width, first=first, stride=stride)

    def gelu_gate(self, gate: str, up: str) -> None:
        """gate = gelu(gate) * up"""
        self._check_rows(gate)
        width = self._same_width(gate, up)
        self._write(gate, width)
        self._add(GELU_GATE, source=up, target=gate, width=width)

    def take(self, source: str, target: str) -> None:
        """target = the rows of source whose logits are wanted; in a phase of WANTED rows."""
        if self._phase.rows != WANTED or self._rows_now[source] != ALL:
            raise ValueError(
                f"{source} cannot be taken: take wanted rows of a buffer of all rows, in a phase of wanted rows"
            )
        width = self._widths_now[source]
        self._write(target, width)
        self._add(TAKE, source=source, target=target, width=width)

    def rope(self, target: str, layer: int, heads: int) -> None:
        """Apply rotary position embedding to each head of target, in place."""
        y = self.config.layers[layer]
        self._check_rows(target)
        self._check_width(target, heads * y.head_dim)
        number = self.ropes.index((y.rope, y.head_dim))
        cosines, sines = self._angles(number, self._phase.rows)
        self._write(target, heads * y.head_dim)
        self._add(ROPE, target=target, source=cosines, second=sines, heads=heads, width=y.head_dim)

    def store(self, keys: str, values: str, layer: int) -> None:
        """Keys and values become the layer's KV rows, and are published in position order."""
        y, kv = self.config.layers[layer], self.config.kv_numbers[layer]
        if y.kv_source != layer:
            raise ValueError(f"layer {layer} shares the KV rows of layer {y.kv_source} and must not write them")
        if self._phase.rows != ALL:
            raise ValueError("KV rows are stored for all tokens of a pass, not for wanted rows alone")
        for rows in (keys, values):
            self._check_width(rows, y.num_key_value_heads * y.head_dim)
        self._add(STORE, source=keys, second=values, kv_heads=y.num_key_value_heads, width=y.head_dim, kv=kv)

    def matmul(self, source: str, target: str, tensor: str, cap: float | None = None) -> None:
        """target = source times the matrix, soft-capped where there is a cap."""
        N, K = self._shape(tensor, 2)
        self._check_width(source, K)
        op = self._add(MATMUL, source=source, target=target, tensor=tensor, width=N, numbers=(cap or 0.0, 0.0))
        if source not in self._coded:
            self._quantise(source, before=op.phase)
        op.codes = self._coded[source]
        self._write(target, N)

    def attend(self, source: str, target: str, layer: int, scale: float, cap: float | None = None) -> None:
        """target = attention of the queries in source to the layer's KV rows. Two phases, "scores" and "attention": the
        first one is for positions that several workers share, and is skipped where there are none."""
        y = self.config.layers[layer]
        H, E = y.num_attention_heads, y.head_dim
        rows = self._phase.rows
        self._check_width(source, H * E)
        self._write(target, H * E)
        for kind, name in ((SCORES, "scores"), (ATTEND, "attention")):
            self.phase(name, layer, rows)
            op = self._add(kind, source=source, target=target, heads=H, width=E, kv_heads=y.num_key_value_heads)
            op.kv, op.window, op.numbers = self.config.kv_numbers[layer], y.sliding_window or 0, (scale, cap or 0.0)

    def _add(self, kind: int, **fields: object) -> Op:
        op = Op(kind, self._phase, **fields)  # type: ignore[arg-type]
        if kind != TAKE:
            self._check_rows(op.source)
            self._check_rows(op.second)
        if not self._shares_phase(op):
            op.phase = self._phase = replace(self._phase)
        self.ops.append(op)
        return op

    def _quantise(self, source: str, before: Phase) -> None:
        """Insert a QUANTISE of source: into the phase before if that one works on rows, else as a phase of its own."""
        at = next(number for number, op in enumerate(self.ops) if op.phase is before)
        phase = self.ops[at - 1].phase
        if self.ops[at - 1].kind >= STORE or phase.rows != before.rows:
            phase = Phase(f"{before.name} input", before.layer, before.rows)
        op = Op(QUANTISE, phase, source=source, width=self._widths_now[source])
        self.ops.insert(at, op)
        self._coded[source] = op

    def _shares_phase(self, op: Op) -> bool:
        """Whether the operation can be in the current phase: it needs no barrier between it and the others there."""
        others = [other for other in self.ops if other.phase is op.phase]
        if op.kind < MATMUL:
            return all(other.kind < STORE for other in others)  # rows are published when their phase ends
        return all(other.kind == op.kind == MATMUL and _independent(op, other) for other in others)

    def _write(self, target: str, width: int) -> None:
        """The rows of target are this wide from here on. Codes that were made of them are out of date."""
        self._widths_now[target] = width
        self.widths[target] = max(self.widths.get(target, 0), width)
        self._rows_now[target] = self._phase.rows
        self._coded.pop(target, None)

    def _shape(self, tensor: str, dimensions: int) -> tuple[int, ...]:
        shape = self.tensors[tensor].shape
        if len(shape) != dimensions:
            raise ValueError(f"{tensor} should have {dimensions} dimensions, found {list(shape)}")
        return shape

    def _check_rows(self, buffer: str) -> None:
        """A buffer that an operation of this phase reads or changes holds the rows that the phase computes."""
        if self._rows_now.get(buffer, self._phase.rows) != self._phase.rows:
            raise ValueError(
                f"{buffer} holds other rows than phase {self._phase.name!r} computes; take the wanted ones first"
            )

    def _check_width(self, buffer: str, width: int) -> None:
        if self._widths_now[buffer] != width:
            raise ValueError(f"rows of {buffer} should have {width} numbers, found {self._widths_now[buffer]}")

    def _same_width(self, target: str, source: str) -> int:
        if self._widths_now[target] != self._widths_now[source]:
            raise ValueError(
                f"rows of {target} have {self._widths_now[target]} numbers, those of {source} {self._widths_now[source]}"
            )
        return self._widths_now[target]

    def _angles(self, rope: int, rows: int) -> tuple[str, str]:
        """The buffers of a rope's cosines and sines."""
        of = "" if rows == ALL else " of wanted rows"
        return f"cosines {rope}{of}", f"sines {rope}{of}"


def _independent(a: Op, b: Op) -> bool:
    """Whether two products may be computed at the same time: neither writes what the other one reads or writes."""
    return a.target not in (b.source, b.target) and b.target != a.source
