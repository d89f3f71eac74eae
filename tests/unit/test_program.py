from collections.abc import Callable

import pytest

from gemma_py.models.config import Config, Layer, Rope, checked
from gemma_py.models.program import LOGITS, MATMUL, WANTED, Program, Tensor

OWNER = Layer(None, Rope(1e4), 2, 1, 32, 64, 0)
TABLE = Tensor((40, 96), "table", "table", gathered=True)
CONFIG = checked(Config("made up", 40, 64, 200, 1e-6, 16.0, None, None, True, None, (), (OWNER, OWNER)), "here")
SHAPES = {"embed": (40, 64), "square": (64, 64), "keys": (32, 64), "wide": (96, 64), "gain": (64,), "scalar": (1,),
          "four": (4, 64), "sixteen": (16, 64)}  # fmt: skip


def program() -> Program:
    """x: an embedding; n: its norm; q, k, v, four, sixteen: matrix products of x."""
    p = Program(CONFIG, {name: Tensor(shape, name, name) for name, shape in SHAPES.items()} | {"table": TABLE})
    p.embed("embed", "x")
    p.rope_tables()
    p.norm("x", "n", "gain")
    for target, tensor in (("q", "square"), ("k", "keys"), ("v", "keys"), ("four", "four"), ("sixteen", "sixteen")):
        p.matmul("x", target, tensor)
    return p


def take_twice(p: Program) -> None:
    p.take("x", "last")
    p.take("last", "again")


def in_wanted_phase(call: Callable[[Program], None]) -> Callable[[Program], None]:
    def begun(p: Program) -> None:
        p.phase("head", 2, WANTED)
        call(p)

    return begun


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.store("k", "v", 1), "must not store KV rows"),
        (lambda p: p.store("k", "q", 0), "rows of q should have 32 numbers, found 64"),
        (lambda p: p.rope("k", 0, 2), "rows of k should have 64 numbers, found 32"),
        (lambda p: p.attend("k", "a", 0, 1.0), "rows of k should have 64 numbers, found 32"),
        (lambda p: p.matmul("k", "y", "square"), "rows of k should have 64 numbers, found 32"),
        (lambda p: p.add("x", "k"), "equally many numbers, found 64 and 32"),
        (lambda p: p.norm("k", "m", "gain"), "head width of k"),
        (lambda p: p.scale("x", "square"), "should have 1 dimensions"),
        (lambda p: p.take("x", "last"), "take needs a phase .* found x"),
        (lambda p: p.columns("x", "part", 40, 32), "x has 64 columns, found columns 40 to 71"),
        (lambda p: p.columns("x", "part", -1, 32), "found columns -1 to 30"),
        (lambda p: p.columns("x", "x", 0, 32), "x cannot be its own target"),
        (lambda p: p.embed("table", "x"), "no earlier operation may write x"),
        (lambda p: p.put("k", "wide", 40, 64), "k has 32 columns, .* in the 64 columns of wide from column 40 on"),
        (lambda p: p.put("k", "k", 0, 64), "which do not fit"),
        (lambda p: p.put("k", "x", 32, 96), "rows of x should have 96 numbers, found 64"),
        (lambda p: p.gain("k", "gain"), "rows of k should have 64 numbers, found 32"),
        (lambda p: p.match("x", "k", 1e-5), "equally many numbers, found 64 and 32"),
        (lambda p: p.match("x", "x", 1e-5), "x cannot be matched with itself"),
        (lambda p: p.predict("x", "y", "k", 3), "rows of x have 64 numbers, which are not 3 streams"),
        (lambda p: p.predict("x", "y", "k", 4), "rows of k should have 16 numbers, found 32"),
        (lambda p: p.predict("q", "q", "n", 8), "must not overwrite q"),
        (lambda p: p.correct("x", "q", "four", 4, 0), "rows of q should have 16 numbers, found 64"),
        (lambda p: p.correct("x", "sixteen", "k", 4, 0), "rows of k should have 4 numbers, found 32"),
        (lambda p: p.correct("x", "sixteen", "four", 4, 4), "there are 4 streams, numbered from 0; found stream 4"),
        (lambda p: p.add_to_streams("x", "k", 4, 1), "rows of k should have 16 numbers, found 32"),
        (lambda p: p.add_to_streams("x", "sixteen", 4, -1), "found stream -1"),
        (in_wanted_phase(lambda p: p.tanh("x")), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.sparsify("x", 1.0)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.gain("x", "gain")), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.match("x", "q", 1e-5)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.predict("x", "y", "sixteen", 4)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.correct("x", "sixteen", "four", 4, 0)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.add_to_streams("x", "sixteen", 4, 0)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.put("sixteen", "x", 16, 64)), "one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.store("k", "v", 0)), "found a phase of WANTED rows"),
        (in_wanted_phase(lambda p: p.norm("x", "m", "gain")), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.scale("x", "scalar")), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.multiply("x", 2.0)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.columns("x", "part", 0, 32)), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(lambda p: p.embed("table", "rows")), "the gathered tensor table needs a phase of ALL rows"),
        (in_wanted_phase(lambda p: p.matmul("x", LOGITS, "embed")), "cannot use x: one of them has ALL rows"),
        (in_wanted_phase(take_twice), "take needs a phase .* found last"),
    ],
)  # fmt: skip
def test_what_would_compute_wrong_rows_is_refused(call: Callable[[Program], None], message: str) -> None:
    p = program()
    p.phase("next", 0)
    with pytest.raises(ValueError, match=message):
        call(p)


@pytest.mark.parametrize(
    ("source", "target", "together"),
    [("x", "y", True), ("q", "y", False), ("n", "x", False), ("x", "q", False)],
    ids=["another product of x", "reads what another writes", "writes what others read", "writes what another writes"],
)
def test_products_share_a_phase_only_where_they_are_independent(source: str, target: str, together: bool) -> None:
    p = program()
    before = [op for op in p.ops if op.kind == MATMUL]
    p.matmul(source, target, "square")
    assert (p.ops[-1].phase is before[0].phase) == together
