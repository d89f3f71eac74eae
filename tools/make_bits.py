"""Write tests/data/tiny_bits.json: a digest of the results of every tiny model, as this machine computes them.

    python tools/make_bits.py

Run this tool after adding tiny models, which may only add lines to the file, or after changing an order of arithmetic
on purpose. Every other machine must give the digests of this file.
"""

import json
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.append(str(TESTS / "support"))

import golden_bits
import tiny_checkpoints as tiny
from tiny_models import VARIANTS

with tempfile.TemporaryDirectory() as scratch:
    for name, variant in VARIANTS.items():
        tiny.write(variant, Path(scratch) / name, seed=1)
    checkpoints = {name: Path(scratch) / name for name in VARIANTS}
    made = golden_bits.digests(checkpoints, Path(scratch))
(TESTS / "data" / "tiny_bits.json").write_text(json.dumps(made, indent=1) + "\n")
