"""tools/estimate_arm64.py finds the instructions of a loop that multiplies."""

import estimate_arm64
import pytest

ROW = ["\tsdot\tv0.4s, v1.16b, v2.4b[0]"] * 64
DECODE = [
    "_ZN6module7one_rowB2v3E:",
    "\tmov\tx0, x1",
    ".LBB0_1:",
    "\tldr\tq1, [x0]",
    "\tcbz\tx2, .LBB0_4",
    "\tcbz\tx3, .LBB0_4",  # the path without a jump has more blocks, but fewer instructions
    "\tmov\tx4, x5",
    ".LBB0_3:  // a comment",
    *ROW,
    "\tb.ne\t.LBB0_1",
    "\tret",
    ".LBB0_4:",
    *(["\tfneg\tv3.4s, v3.4s"] * 3),
    "\tb\t.LBB0_3",
    "_ZN6module5otherE:",
    "\tudot\tv0.4s, v1.16b, v2.16b",
]
TILE = [
    ".LBB0_1:",
    "\tfmul\tv0.4s, v0.4s, v1.4s",
    ".LBB0_2:",
    *(["\tsmlal\tv0.4s, v1.4h, v2.4h"] * 64),
    "\tb.ne\t.LBB0_2",
    "\tb.ne\t.LBB0_1",
]


def found(lines: list[str], rows: int) -> list[str]:
    return [
        instruction.split("\t")[0] for instruction in estimate_arm64.executed(estimate_arm64.blocks_of(lines), rows)
    ]


def test_functions_are_found_by_name() -> None:
    assert set(estimate_arm64.functions("\n".join(DECODE))) == {"one_row", "other"}


def test_the_shortest_path_of_a_loop_is_taken() -> None:
    lines = estimate_arm64.functions("\n".join(DECODE))["one_row"]
    assert found(lines, 1) == ["ldr", "cbz", "cbz", "mov", *["sdot"] * 64, "b.ne"]


def test_an_inner_loop_is_executed_for_each_half_of_a_run() -> None:
    assert found(TILE, 1) == ["fmul", *["smlal"] * 64, "b.ne", *["smlal"] * 64, "b.ne", "b.ne"]


def test_unreachable_code_is_not_the_entry_of_a_loop() -> None:
    lines = [
        *["\tb\t.LBB0_2", ".LBB0_1:", "\tfneg\tv3.4s, v3.4s", ".LBB0_2:", "\tmov\tx0, x1", ".LBB0_3:"],
        *[*ROW, "\tb.ne\t.LBB0_2", "\tb.ne\t.LBB0_1"],
    ]
    assert found(lines, 1) == ["mov", *["sdot"] * 64, "b.ne"]


def test_one_round_of_the_innermost_loop_is_taken() -> None:
    fmla = "\tfmla\tv0.4s, v1.4s, v2.4s"
    lines = [".LBB0_1:", fmla, ".LBB0_2:", "\tldr\tq1, [x0]", *[fmla] * 3, "\tb.ne\t.LBB0_2", "\tb.ne\t.LBB0_1"]
    blocks = estimate_arm64.blocks_of(lines, estimate_arm64.FLOAT_MULTIPLY_ADDS)
    instructions, count = estimate_arm64.innermost(blocks)
    assert [instruction.split("\t")[0] for instruction in instructions] == ["ldr", "fmla", "fmla", "fmla", "b.ne"]
    assert count == 12


def test_another_number_of_multiply_adds_is_an_error() -> None:
    with pytest.raises(SystemExit, match="1024 multiply-adds were expected, but 512 were found"):
        found(DECODE, 2)


@pytest.mark.parametrize(
    ("instruction", "count"),
    [
        ("usmmla\tv0.4s, v1.16b, v2.16b", 16),
        ("sudot\tv0.4s, v1.16b, v2.4b[1]", 8),
        ("smlal2\tv0.4s, v1.8h, v2.h[1]", 4),
        ("smull\tv0.4s, v1.4h, v2.4h", 4),
        ("smull\tx0, w1, w2", 0),
        ("fmla\tv0.4s, v1.4s, v2.4s", 0),
        ("mul\tx0, x1, x2", 0),
    ],
)
def test_multiply_adds_of_an_instruction(instruction: str, count: int) -> None:
    assert estimate_arm64.multiply_adds(instruction) == count
