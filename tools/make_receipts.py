"""Write tests/data/receipt_*.json: receipts of the tiny model, as this machine makes them.

    python tools/make_receipts.py

Every machine must make these bytes. A stored receipt is replaced only if the version of the rules (RULES in
gemma_py/receipts/receipt.py) or the model files have changed, because an audit of the old receipt then cannot succeed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import golden_receipts
from repository import TINY

import gemma_py
from gemma_py.receipts.receipt import parse


def main() -> int:
    with gemma_py.load(TINY) as engine:
        for name in golden_receipts.OPTIONS:
            path, data = golden_receipts.path(name), golden_receipts.made(engine, name)
            if path.exists() and path.read_bytes() != data:
                stored, made = (parse(text, path.name) for text in (path.read_bytes(), data))
                if (stored.rules, stored.model.files) == (made.rules, made.model.files):
                    print(f"{path.name}: the receipt changed, so RULES (now {made.rules}) must be increased first")
                    return 1
            path.write_bytes(data)
            print(f"wrote {path.name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
