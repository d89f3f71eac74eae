"""The forward pass of a model as a list of operations, which a model family writes and runtime/forward.py interprets.

Operations read and write named buffers. A buffer holds one row of float32 for each token of the pass. The operation that
last wrote a buffer determines the width of the buffer's rows.

Operations are grouped into phases. Workers wait for each other at a barrier after a phase, but not between the operations
of a phase. Errors, traces and profiles name the phase. Where two operations of a phase need a barrier between them,
`Program` splits the phase into two phases of equal name.

A matrix product with a quantised matrix needs a quantised input. `Program.matmul` inserts the QUANTISE operation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gemma_py.models.config import Config, Rope

# Kinds of operations. The kinds before MATMUL are row operations. Several row operations can share a phase, in which a worker
# takes a few rows through all operations.
(EMBED, ROPE_TABLE, NORM, ADD, SCALE, MULTIPLY, GELU_GATE, QUANTISE, TAKE, MEAN, TAKE_COLUMNS, PUT_COLUMNS, GAIN, TANH, SPARSIFY,
 MATCH, PREDICT, CORRECT, ADD_TO_STREAMS, ROPE, ROUTE, MIX, STORE, MATMUL, EXPERT_MATMUL, SCORES, ATTEND) = range(27)  # fmt: skip
KIND_NAMES = ("embed", "rope table", "norm", "add", "scale", "multiply", "gelu gate", "quantise", "take", "mean", "take columns",
              "put columns", "gain", "tanh", "sparsify", "match", "predict", "correct", "add to streams",
              "rope", "route", "mix", "store", "matmul", "expert matmul", "scores", "attend")  # fmt: skip
# Which rows a phase computes: those of all tokens, or those of the tokens whose logits are wanted.
ALL, WANTED = range(2)
LOGITS = "logits"  # the buffer that receives the logits, or an embedding model's embeddings


@dataclass(frozen=True)
class Tensor:
    """A tensor of a model family: a matrix [N, K], matrices [X, N, K] of X experts, or a vector such as a norm's gain.

    hugging_face: the tensor's name in safetensors, without a prefix such as "model.".
    gguf: the tensor's name in GGUF.
    plus_one: whether safetensors files store gain - 1 instead of gain.
    gathered: whether the matrix stays in the checkpoint's file. Only the rows of a pass's tokens are read, before the pass.
    part: (i, n) for experts' matrices that are part i of n of a larger tensor [X, n * N, K]. In safetensors, the larger
    tensor is `hugging_face`. In GGUF, it is `gguf_fused`, unless the file has each part as a tensor of its own, `gguf`.
    gguf_fused: the larger tensor's name in GGUF, or "".
    stays_float: whether the matrix is never quantised while loading, because llama.cpp does not quantise it either.
    stack: (i, count) if a GGUF file has this matrix as the matrix at index i of a tensor [count, N, K].
    """

    shape: tuple[int, ...]
    hugging_face: str
    gguf: str
    plus_one: bool = False
    gathered: bool = False
    part: tuple[int, int] = (0, 1)
    gguf_fused: str = ""
    stays_float: bool = False
    stack: tuple[int, int] | None = None

    @property
    def gguf_shape(self) -> tuple[int, ...]:
        """The shape of the tensor in a GGUF file."""
        return self.shape if self.stack is None else (self.stack[1], *self.shape)


@dataclass
class Op:
    """One operation. The methods of `Program` set the fields that each kind of operation uses."""

    kind: int
    phase: "Phase"
    source: str = ""
    second: str = ""
    target: str = ""
    tensor: str = ""
    heads: int = 1  # a row of the buffer has heads * width elements
    width: int = 0
    kv_heads: int = 0
    kv: int = -1  # index into config.kv_layers
    window: int = 0  # the sliding window; 0 means full attention
    bidirectional: bool = False  # for SCORES and ATTEND
    rope: int = -1  # index into Program.ropes
    first: int = 0  # for TAKE_COLUMNS and PUT_COLUMNS: where the columns begin in the wider buffer
    stride: int = 0  # for TAKE_COLUMNS, PUT_COLUMNS, ROUTE, MIX and EXPERT_MATMUL: the width of the source's rows
    stream: int = 0  # for CORRECT: the active stream; for ADD_TO_STREAMS: the first stream to add to
    experts: int = 0  # for EXPERT_MATMUL: the number of experts
    numbers: tuple[float, float] = (0.0, 0.0)
    codes: "Op | None" = None  # for MATMUL and EXPERT_MATMUL: the QUANTISE operation that quantises `source`

    @property
    def first_matrix(self) -> str:
        return f"{self.tensor}.0" if self.experts else self.tensor


@dataclass(eq=False)
class Phase:
    """A group of operations that workers run without a barrier between them.

    name, layer: how errors and traces name the phase. rows: ALL or WANTED.
    """

    name: str
    layer: int
    rows: int


@dataclass
class Program:
    """The forward pass of a model. The model family calls one method for each operation, in order."""

    config: Config
    tensors: Mapping[str, Tensor]
    ops: list[Op] = field(default_factory=list)
    ropes: list[tuple[Rope, int]] = field(default_factory=list)  # pairs of a rope and a head width
    # Pairs of a tensor that stays in its file (see `Tensor.gathered`) and the buffer to which rows are copied before a pass.
    gathers: list[tuple[str, str]] = field(default_factory=list)
    widths: dict[str, int] = field(default_factory=dict)  # for each buffer, the largest width of its rows
    # For each buffer, after the operations so far: the width of its rows, and whether they are ALL or WANTED rows.
    _widths_now: dict[str, int] = field(default_factory=dict)
    _rows_now: dict[str, int] = field(default_factory=dict)
    # For each buffer, the QUANTISE operation that quantises the buffer's present content. A write to the buffer removes it.
    _coded: dict[str, Op] = field(default_factory=dict)
    _experts: dict[str, int] = field(default_factory=dict)  # for each buffer that `route` wrote, the number of experts
    _phase: Phase = field(default_factory=lambda: Phase("embedding", 0, ALL))

    def phase(self, name: str, layer: int, rows: int = ALL) -> None:
        """Begin a phase. The operations up to the next call of `phase` belong to it."""
        self._phase = Phase(name, layer, rows)

    def embed(self, tensor: str, target: str, factor: float | None = None) -> None:
        """For each token, compute target = factor * the matrix's row of the token's id. Rows have D numbers, and the
        default factor is sqrt(D). A token id beyond the last row selects row 0.
        """
        D = self._shape(tensor, 2)[1]
        gathered = self.tensors[tensor].gathered
        if gathered and self._phase.rows != ALL:
            raise ValueError(f"the gathered tensor {tensor} needs a phase of ALL rows, found a phase of WANTED rows")
        if gathered and target in self.widths:
            raise ValueError(
                f"the rows of {tensor} are copied to {target} before the pass begins, "
                f"so no earlier operation may write {target}"
            )
        self._write(target, D)
        numbers = (math.sqrt(D) if factor is None else factor, 0.0)
        if gathered:
            self.gathers.append((tensor, target))
            self._add(MULTIPLY, target=target, width=D, numbers=numbers)
        else:
            self._add(EMBED, target=target, tensor=tensor, width=D, numbers=numbers)

    def rope_tables(self) -> None:
        """Compute the cosines and sines that `rope` reads, for every position of the pass and every rope of the layers."""
        self.ropes = list(dict.fromkeys((layer.rope, layer.head_dim) for layer in self.config.layers))
        for number, (_, width) in enumerate(self.ropes):
            cosines, sines = self._angles(number, self._phase.rows)
            self._write(cosines, width // 2)
            self._write(sines, width // 2)
            self._add(ROPE_TABLE, target=cosines, second=sines, width=width // 2, rope=number)

    def norm(self, source: str, target: str, gain: str, heads: int = 1) -> None:
        """Compute target = RMSNorm(source) * gain, separately for each head of a row. gain: "" means a gain of ones."""
        width = self._widths_now[source] // heads
        if gain and self._shape(gain, 1) != (width,):
            raise ValueError(
                f"{gain} should have shape [{width}], the head width of {source}, found {list(self._shape(gain, 1))}"
            )
        self._write(target, heads * width)
        self._add(NORM, source=source, target=target, tensor=gain, heads=heads, width=width)

    def add(self, target: str, source: str, gain: str = "") -> None:
        """Compute target += source. If a gain is given, compute target += RMSNorm(source) * gain and overwrite source."""
        self._check_rows(target)
        width = self._same_width(target, source)
        self._write(target, width)
        self._add(ADD, source=source, target=target, tensor=gain, width=width)

    def scale(self, target: str, tensor: str) -> None:
        """Compute target *= tensor[0], in place. The tensor has one element."""
        self._shape(tensor, 1)
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(SCALE, target=target, tensor=tensor, width=width)

    def multiply(self, target: str, factor: float) -> None:
        """Compute target *= factor, in place. The factor is rounded to float32."""
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(MULTIPLY, target=target, width=width, numbers=(factor, 0.0))

    def columns(self, source: str, target: str, first: int, width: int) -> None:
        """Copy the columns first .. first + width - 1 of source to target."""
        stride = self._widths_now[source]
        if not 0 <= first < first + width <= stride:
            raise ValueError(f"{source} has {stride} columns, found columns {first} to {first + width - 1}")
        if source == target:
            raise ValueError(f"{source} cannot be its own target, because its rows would change their width")
        self._write(target, width)
        self._add(TAKE_COLUMNS, source=source, target=target, width=width, first=first, stride=stride)

    def put(self, source: str, target: str, first: int, width: int) -> None:
        """Copy source to the columns of target from `first` on. Other columns of target keep their content. width: the
        number of columns of target.
        """
        stride = self._widths_now[source]
        if not 0 <= first <= width - stride or source == target:
            raise ValueError(
                f"{source} has {stride} columns, which do not fit in the {width} columns of {target} from column {first} on"
            )
        if first > 0:
            self._check_rows(target)
            self._check_width(target, width)
        self._write(target, width)
        self._add(PUT_COLUMNS, source=source, target=target, width=width, first=first, stride=stride)

    def gain(self, target: str, tensor: str) -> None:
        """Compute target *= tensor, column by column, in place."""
        self._check_rows(target)
        (width,) = self._shape(tensor, 1)
        self._check_width(target, width)
        self._write(target, width)
        self._add(GAIN, target=target, tensor=tensor, width=width)

    def tanh(self, target: str) -> None:
        """Compute target = tanh(target), in place."""
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(TANH, target=target, width=width)

    def sparsify(self, target: str, deviations: float) -> None:
        """Compute target = max(target - cutoff, 0), in place.

        The cutoff of a row is (mean of the row) + deviations * (standard deviation of the row).
        """
        self._check_rows(target)
        width = self._widths_now[target]
        self._write(target, width)
        self._add(SPARSIFY, target=target, width=width, numbers=(deviations, 0.0))

    def match(self, target: str, like: str, least: float) -> None:
        """Scale each row of target, in place, to the root mean square of the same row of `like`.

        A mean square of a target row below `least` is replaced by `least`, so that the factor stays finite.
        """
        self._check_rows(target)
        if target == like:
            raise ValueError(f"{target} cannot be matched with itself, because it changes while it is read")
        width = self._same_width(target, like)
        self._write(target, width)
        self._add(MATCH, source=like, target=target, width=width, numbers=(least, 0.0))

    def predict(self, source: str, target: str, coefficients: str, streams: int) -> None:
        """Compute target[i] = source[i] + sum over p of coefficients[i, p] * source[p]; streams i, p are equal parts of rows."""
        width = self._width_of_streams(source, streams)
        self._check_width(coefficients, streams * streams)
        if target in (source, coefficients):
            raise ValueError(
                f"the predicted streams must not overwrite {target}, because each prediction reads all streams of {source}"
            )
        self._write(target, streams * width)
        self._add(PREDICT, source=source, second=coefficients, target=target, heads=streams, width=width)

    def correct(self, target: str, activated: str, coefficients: str, streams: int, active: int) -> None:
        """Compute target[i] += (1 + coefficients[i]) * (activated - target[active]), in place, for every stream i.

        target[active] is read before any stream changes.
        """
        self._check_rows(target)
        width = self._width_of_streams(target, streams)
        self._check_stream(active, streams)
        self._check_width(activated, width)
        self._check_width(coefficients, streams)
        self._write(target, streams * width)
        self._add(
            CORRECT, source=activated, second=coefficients, target=target, heads=streams, width=width, stream=active
        )

    def add_to_streams(self, target: str, source: str, streams: int, since: int) -> None:
        """Compute target[i] += source, in place, for every stream i >= since."""
        self._check_rows(target)
        width = self._width_of_streams(target, streams)
        self._check_stream(since, streams)
        self._check_width(source, width)
        self._write(target, streams * width)
        self._add(ADD_TO_STREAMS, source=source, target=target, heads=streams, width=width, stream=since)

    def gelu_gate(self, gate: str, up: str) -> None:
        """Compute gate = gelu(gate) * up, in place."""
        self._check_rows(gate)
        width = self._same_width(gate, up)
        self._write(gate, width)
        self._add(GELU_GATE, source=up, target=gate, width=width)

    def take(self, source: str, target: str, kind: int = TAKE) -> None:
        """Copy to target the WANTED rows of source. kind: TAKE, or MEAN (see `mean`)."""
        if self._phase.rows != WANTED or self._rows_now[source] != ALL:
            raise ValueError(f"{KIND_NAMES[kind]} needs a phase of WANTED rows and a source of ALL, found {source}")
        width = self._widths_now[source]
        self._write(target, width)
        self._add(kind, source=source, target=target, width=width)

    def mean(self, source: str, target: str) -> None:
        """Compute target = mean of all rows of a sequence, for each sequence. Each sequence has one WANTED row."""
        self.take(source, target, MEAN)

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
        """Store keys and values as KV rows of the layer. Attention waits until the rows that it reads are stored."""
        y, kv = self.config.layers[layer], self.config.kv_numbers[layer]
        if y.kv_source != layer:
            raise ValueError(f"layer {layer} must not store KV rows, because it reads those of layer {y.kv_source}")
        if self._phase.rows != ALL:
            raise ValueError("KV rows must be stored in a phase of ALL rows, found a phase of WANTED rows")
        for rows in (keys, values):
            self._check_width(rows, y.num_key_value_heads * y.head_dim)
        self._add(STORE, source=keys, second=values, kv_heads=y.num_key_value_heads, width=y.head_dim, kv=kv)

    def matmul(self, source: str, target: str, tensor: str, cap: float | None = None) -> None:
        """Compute target = source @ tensor.T. With a cap, target = cap * tanh(target / cap) follows."""
        N, K = self._shape(tensor, 2)
        self._check_width(source, K)
        op = self._add(MATMUL, source=source, target=target, tensor=tensor, width=N, numbers=(cap or 0.0, 0.0))
        self._read_codes(op)
        self._write(target, N)

    def route(self, logits: str, routes: str, gain: str, count: int, scale: float) -> None:
        """Choose `count` experts for each row, and compute the experts' weights. The logits are overwritten.

        p = softmax(logits * scale) over all experts. The experts with the largest p are chosen; among experts of equal p,
        those with lower numbers. An expert's weight is p / (sum of p over the chosen experts) * gain[expert]. A row of
        `routes` has the numbers of the chosen experts in ascending order, then the weights of these experts.
        """
        self._check_rows(logits)
        experts = self._widths_now[logits]
        if self._shape(gain, 1) != (experts,) or not 1 <= count <= experts:
            raise ValueError(
                f"{gain} of shape {list(self._shape(gain, 1))} cannot choose {count} experts from {experts} logits"
            )
        self._write(logits, experts)
        self._write(routes, 2 * count)
        self._add(
            ROUTE, source=logits, target=routes, tensor=gain, width=2 * count, stride=experts, numbers=(scale, 0.0)
        )
        self._experts[routes] = experts

    def expert_matmul(self, source: str, target: str, tensor: str, routes: str) -> None:
        """Compute target = source @ tensor[expert].T for each expert that `routes` has for a row.

        A row of target has one part for each of these experts, in the order of `routes`. A row of source either has one
        part for each of these experts too, or is a single part that is multiplied with the matrices of all of them.
        """
        experts, N, K = self._shape(tensor, 3)
        if self._experts.get(routes) != experts:
            raise ValueError(
                f"{tensor} has {experts} experts, but {routes} has routes to {self._experts.get(routes, 0)}"
            )
        count, stride = self._widths_now[routes] // 2, self._widths_now[source]
        if stride not in (K, count * K):
            raise ValueError(f"rows of {source} should have {K} or {count} * {K} numbers, found {stride}")
        op = self._add(
            EXPERT_MATMUL, source=source, second=routes, target=target, tensor=tensor, heads=count, width=N, stride=stride,
            experts=experts,
        )  # fmt: skip
        self._read_codes(op)
        self._write(target, count * N)

    def mix(self, source: str, target: str, routes: str) -> None:
        """Compute target = sum over a row's experts of (expert's part of source) * (expert's weight in `routes`)."""
        if routes not in self._experts:
            raise ValueError(f"{routes} has no routes")
        count, stride = self._widths_now[routes] // 2, self._widths_now[source]
        if stride % count or source == target:
            raise ValueError(f"rows of {source} should have {count} equal parts, and {source} should not be the target")
        self._write(target, stride // count)
        self._add(MIX, source=source, second=routes, target=target, width=stride // count, stride=stride)

    def attend(self, source: str, target: str, layer: int, scale: float, cap: float | None = None) -> None:
        """Compute target = attention of the queries in source to the layer's KV rows.

        Appends two phases, "scores" and "attention". The scores phase runs only if several workers share one position.
        Otherwise the attention phase computes the scores as well.
        """
        y = self.config.layers[layer]
        H, E, rows = y.num_attention_heads, y.head_dim, self._phase.rows
        self._check_width(source, H * E)
        self._write(target, H * E)
        for kind, name in ((SCORES, "scores"), (ATTEND, "attention")):
            self.phase(name, layer, rows)
            op = self._add(kind, source=source, target=target, heads=H, width=E, kv_heads=y.num_key_value_heads)
            op.kv, op.window, op.numbers = self.config.kv_numbers[layer], y.sliding_window or 0, (scale, cap or 0.0)
            op.bidirectional = y.bidirectional

    def _add(self, kind: int, **fields: object) -> Op:
        op = Op(kind, self._phase, **fields)  # type: ignore[arg-type]
        if kind not in (TAKE, MEAN):
            self._check_rows(op.source)
            self._check_rows(op.second)
        if not self._shares_phase(op):
            op.phase = self._phase = replace(self._phase)
        self.ops.append(op)
        return op

    def _read_codes(self, op: Op) -> None:
        """Set `op.codes`, the QUANTISE operation of the product's source. If there is no such operation yet, insert one."""
        if op.source not in self._coded:
            self._quantise(op.source, before=op.phase)
        op.codes = self._coded[op.source]

    def _quantise(self, source: str, before: Phase) -> None:
        """Insert an operation QUANTISE for `source` in front of the phase `before`.

        QUANTISE joins the last phase of row operations if that phase computes the same rows, and if source is not written
        afterwards. Otherwise, QUANTISE gets a phase of its own.
        """
        at = number = next(number for number, op in enumerate(self.ops) if op.phase is before)
        phase = Phase(f"{before.name} input", before.layer, before.rows)
        while number > 0:
            op = self.ops[number - 1]
            if op.kind < STORE and op.phase.rows == before.rows:
                at, phase = number, op.phase
                break
            if source in (op.target, op.second) or (op.kind in (ADD, ROUTE) and source == op.source):
                break
            number -= 1
        made = Op(QUANTISE, phase, source=source, width=self._widths_now[source])
        self.ops.insert(at, made)
        self._coded[source] = made

    def _shares_phase(self, op: Op) -> bool:
        """Return whether the operation can join the current phase, because it needs no barrier before it."""
        others = [other for other in self.ops if other.phase is op.phase]
        if op.kind < MATMUL:
            # STORE must be the last operation of a phase, because KV rows are published at the end of the phase.
            return all(other.kind < STORE for other in others)
        if op.kind not in (MATMUL, EXPERT_MATMUL):
            return not others
        # All products of a phase must have the same routes, because a worker sorts rows by expert only once in a phase.
        return all(other.kind == op.kind and other.second == op.second and _independent(op, other) for other in others)

    def _write(self, target: str, width: int) -> None:
        """Record that the current phase writes rows of this width to target. Quantised copies of older rows become invalid."""
        self._widths_now[target] = width
        self.widths[target] = max(self.widths.get(target, 0), width)
        self._rows_now[target] = self._phase.rows
        self._coded.pop(target, None)
        self._experts.pop(target, None)

    def _shape(self, tensor: str, dimensions: int) -> tuple[int, ...]:
        shape = self.tensors[tensor].shape
        if len(shape) != dimensions:
            raise ValueError(f"{tensor} should have {dimensions} dimensions, found shape {list(shape)}")
        return shape

    def _check_rows(self, buffer: str) -> None:
        """Raise ValueError if the buffer has ALL rows and the current phase WANTED rows, or the other way round."""
        if self._rows_now.get(buffer, self._phase.rows) != self._phase.rows:
            raise ValueError(
                f"phase {self._phase.name!r} cannot use {buffer}: one of them has ALL rows, the other WANTED rows"
            )

    def _check_width(self, buffer: str, width: int) -> None:
        if self._widths_now[buffer] != width:
            raise ValueError(f"rows of {buffer} should have {width} numbers, found {self._widths_now[buffer]}")

    def _width_of_streams(self, buffer: str, streams: int) -> int:
        width, rest = divmod(self._widths_now[buffer], streams)
        if rest:
            raise ValueError(
                f"rows of {buffer} have {self._widths_now[buffer]} numbers, which are not {streams} streams"
            )
        return width

    def _check_stream(self, stream: int, streams: int) -> None:
        if not 0 <= stream < streams:
            raise ValueError(f"there are {streams} streams, numbered from 0; found stream {stream}")

    def _same_width(self, target: str, source: str) -> int:
        if self._widths_now[target] != self._widths_now[source]:
            raise ValueError(
                f"rows of {target} and rows of {source} should have equally many numbers, "
                f"found {self._widths_now[target]} and {self._widths_now[source]}"
            )
        return self._widths_now[target]

    def _angles(self, rope: int, rows: int) -> tuple[str, str]:
        of = "" if rows == ALL else " of wanted rows"
        return f"cosines {rope}{of}", f"sines {rope}{of}"


def _independent(a: Op, b: Op) -> bool:
    """Return whether two matrix products can run at once, because neither writes what the other reads or writes."""
    return a.target not in (b.source, b.second, b.target) and b.target not in (a.source, a.second)
