"""Draw the pictures of the documentation from the code: docs/pass.svg and docs/layers.svg.

    python tools/draw.py [--check]

pass.svg is the program of a Gemma 3 layer with quantised weights, as `runtime/program.py` links it: phases, operations,
barriers. layers.svg shows which folder of the package imports which. With --check nothing is written, and the exit code
is 1 if a picture differs from the code.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from equivalence import WIDE
from layers import LAYERS, all_imports
from random_model import random_checkpoint

from gemma_py.models.families import config_from_hf
from gemma_py.models.program import (
    ADD,
    ALL,
    ATTEND,
    EMBED,
    GELU_GATE,
    MATMUL,
    NORM,
    QUANTISE,
    ROPE,
    ROPE_TABLE,
    SCALE,
    SCORES,
    STORE,
    TAKE,
    Op,
)
from gemma_py.runtime.program import BARRIER, COUNTER, link
from gemma_py.weights.store import packed_weights

_STYLE = """
  .page { fill: #ffffff } .box { fill: #eef3fb; stroke: #5b7db1 } .rows { fill: #f3f7ee; stroke: #7d9a5a }
  .frame { fill: none; stroke: #9aa4b2; stroke-dasharray: 4 4 } .bar { stroke: #b3261e; stroke-width: 4 }
  .wait { stroke: #b06f00; stroke-width: 3; stroke-dasharray: 3 5 } .dot { fill: #3b66a8 } .line { stroke: #d5dbe3 }
  text { font: 13px system-ui, sans-serif; fill: #1c2530 } .title { font-weight: 600 } .note { fill: #55606e }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12161c } .box { fill: #1d2a3d; stroke: #7fa0d3 } .rows { fill: #232d1b; stroke: #9dbb79 }
    .frame { stroke: #6b7787 } .bar { stroke: #ff8a80 } .wait { stroke: #ffc46b } .dot { fill: #8fb3ee } .line { stroke: #2f3946 }
    text { fill: #e8edf3 } .note { fill: #aab4c0 }
  }
"""


def _picture(width: int, height: int, title: str, parts: list[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _text(x: int, y: int, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x: int, y: int, to_x: int, to_y: int, kind: str) -> str:
    return f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" class="{kind}"/>'


# --- the pass ---------------------------------------------------------------------------------------------------------


@dataclass
class _Phase:
    """barrier: whether a barrier follows. by_rows: whether a tile is a group of rows, not a part of a product."""

    name: str
    barrier: bool
    by_rows: bool
    lines: list[str] = field(default_factory=list)


def _words(op: Op) -> str:
    matrix = op.tensor.rpartition(".")[2]
    return {
        EMBED: f"{op.target} = embedding",
        ROPE_TABLE: "cosines, sines",
        NORM: f"{op.target} = norm({op.source})",
        ADD: f"{op.target} += norm({op.source})" if op.tensor else f"{op.target} += {op.source}",
        SCALE: f"{op.target} *= {matrix}",
        GELU_GATE: f"{op.target} = gelu({op.target}) · {op.source}",
        QUANTISE: f"codes of {op.source}",
        TAKE: f"{op.target} = rows of {op.source}",
        ROPE: f"{op.target} = rope({op.target})",
        STORE: f"store and publish {op.source}, {op.second}",
        MATMUL: f"{op.target} = {matrix} · {op.source}",
        SCORES: f"scores of {op.source}",
        ATTEND: f"{op.target} = attention({op.source})",
    }[op.kind]


def _phases() -> list[_Phase]:
    """Phases of the first layer of a Gemma 3 with quantised matrices, and phases after the last layer."""
    family, config = config_from_hf(WIDE.config, "a small Gemma 3")
    assert len(config.layers) == 2
    checkpoint, program = random_checkpoint(family, config, "Q8_0"), family.program(config)
    table = link(program, packed_weights(checkpoint)).model.ops
    assert len(table) == len(program.ops)
    made: list[_Phase] = []
    last = -1
    for op, row in zip(program.ops, table, strict=True):
        if op.phase.layer == 1 and op.phase.rows == ALL:
            continue
        if row[COUNTER] != last:
            made.append(_Phase(op.phase.name, bool(row[BARRIER]), op.kind < MATMUL))
            last = row[COUNTER]
        if _words(op) not in made[-1].lines:
            made[-1].lines.append(_words(op))
    return made


_WIDTH, _GAP, _LEFT, _COLUMNS = 174, 20, 24, 4


def _box(phase: _Phase, x: int, y: int, height: int) -> list[str]:
    kind = "rows" if phase.by_rows else "box"
    made = [f'<rect class="{kind}" x="{x}" y="{y}" width="{_WIDTH}" height="{height}" rx="6"/>']
    made.append(_text(x + 10, y + 21, phase.name, "title"))
    made += [_text(x + 10, y + 43 + 18 * number, line) for number, line in enumerate(phase.lines)]
    edge = x + _WIDTH + _GAP // 2
    made.append(_line(edge, y, edge, y + height, "bar" if phase.barrier else "wait"))
    return made


def pass_picture() -> str:
    phases = _phases()
    start = next(n for n, phase in enumerate(phases) if phase.name.startswith("query"))
    middle = next(n for n, phase in enumerate(phases) if phase.name == "middle")
    end = next(n for n, phase in enumerate(phases) if phase.name == "end") + 1
    bands = (
        ("Before the layers", phases[:start]),
        ("Every layer: attention", phases[start:middle]),
        ("Every layer: feed-forward", phases[middle:end]),
        ("After the layers, for the rows whose logits are wanted", phases[end:]),
    )
    parts: list[str] = []
    y, width = 20, 2 * _LEFT + _COLUMNS * (_WIDTH + _GAP)
    for title, band in bands:
        parts.append(_text(_LEFT, y + 8, title, "note"))
        y += 20
        for first in range(0, len(band), _COLUMNS):
            row = band[first : first + _COLUMNS]
            height = 40 + 18 * max(len(phase.lines) for phase in row)
            for number, phase in enumerate(row):
                parts += _box(phase, _LEFT + number * (_WIDTH + _GAP), y, height)
            y += height + 14
        y += 10
    bottom = y
    x, y = 2 * _LEFT + _WIDTH + _GAP, 30
    parts += [
        _line(x, y, x, y + 22, "bar"), _text(x + 14, y + 16, "barrier: no worker continues until all have arrived"),
        _line(x, y + 30, x, y + 52, "wait"),
        _text(x + 14, y + 46, "no barrier: rows are published in position order,"),
        _text(x + 14, y + 62, "and a tile of attention waits for the last row that it reads"),
        f'<rect class="rows" x="{x - 6}" y="{y + 72}" width="12" height="14"/>',
        _text(x + 14, y + 84, "workers claim rows of tokens"),
        f'<rect class="box" x="{x - 6}" y="{y + 94}" width="12" height="14"/>',
        _text(x + 14, y + 106, "workers claim tiles of a product, or queries; no sum is split"),
        _text(x + 14, y + 128, "scores: a phase only if several workers share a position, as in decoding", "note"),
    ]  # fmt: skip
    return _picture(width, bottom, "A forward pass of Gemma 3, phase by phase", parts)


# --- the layers -------------------------------------------------------------------------------------------------------

_ABOUT = {
    "cli": "arguments, the terminal, progress",
    "server": "HTTP in OpenAI's form, the web UI",
    "checks": "verify, traces, measurements",
    "chat": "conversations, saved ones too",
    "generate": "engine, sessions, sampling, scheduler",
    "templates": "messages to token ids",
    "receipts": "how an answer was made",
    "cluster": "shards: layers in several processes",
    "replicas": "copies of the model in several processes",
    "runtime": "forward pass, workers, KV cache",
    "reference": "the specification, in scalar loops",
    "weights": "checkpoints, packed for the kernels",
    "catalog": "models by name",
    "models": "families: config, tensors, program",
    "tokenizer": "text to token ids",
    "hub": "the Hugging Face hub",
    "demo": "the demo model",
    "kernels": "arithmetic on arrays",
    "formats": "files to arrays",
}
_BASICS = LAYERS[0]  # left out of the picture, because every folder may import these modules


def layers_picture() -> str:
    """The picture of imports: a row for each folder, and a column for each folder that others import."""
    table = all_imports()
    order = [name for names in reversed(LAYERS) for name in reversed(names) if name in _ABOUT]
    assert set(order) == set(table) - {*_BASICS, "__init__", "__main__"}
    cell, top, left = 34, 110, 400
    width, height = left + cell * len(order) + 30, top + 26 * len(order) + 24
    parts = [_text(24, 34, "A dot: the folder of this row imports the folder of that column.", "title")]
    parts += [_text(24, 56, "A folder imports only folders that are below it in this picture.", "note")]
    parts += [_text(24, 76, f"{', '.join(_BASICS)} may be imported by every folder.", "note")]
    for column, name in enumerate(order):
        x = left + cell * column + cell // 2
        parts.append(f'<text transform="translate({x + 4} {top - 12}) rotate(-50)">{name}</text>')
        parts.append(_line(x, top, x, height - 20, "line"))
    for number, name in enumerate(order):
        y = top + 26 * number + 14
        parts += [_line(24, y + 12, width - 24, y + 12, "line"), _text(24, y + 4, name, "title")]
        parts.append(_text(120, y + 4, _ABOUT[name], "note"))
        for column, target in enumerate(order):
            if target in table[name]:
                parts.append(f'<circle class="dot" cx="{left + cell * column + cell // 2}" cy="{y}" r="6"/>')
    return _picture(width, height, "Which folder of gemma_py imports which", parts)


PICTURES = {"pass.svg": pass_picture, "layers.svg": layers_picture}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and exit with 1 if a picture differs from the code"
    )
    args = parser.parse_args()
    different = False
    for name, draw in PICTURES.items():
        path, made = ROOT / "docs" / name, draw()
        if args.check:
            equal = path.exists() and path.read_text() == made
            print(f"docs/{name}: {'up to date' if equal else 'differs from the code'}")
            different |= not equal
        else:
            path.write_text(made)
            print(f"docs/{name} is written")
    return int(different)


if __name__ == "__main__":
    sys.exit(main())
