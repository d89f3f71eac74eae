"""Draw tamperings of receipts, and count those that an audit does not find.

    python tools/tamper_receipts.py                       # 10,000 tamperings, 1,000 untouched receipts, 2,000 responses
    python tools/tamper_receipts.py --count 500 --untouched 50 --responses 100 --seed 3

Half of the tamperings change the bytes of a receipt. The other half change a field and recompute the Merkle root. Such
a change may by chance give a true receipt, which the audit must accept; the tool generates the answer anew to know.
Responses are audited with and without an edit of the answer that they show. The model is tiny.
"""

import argparse
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import receipt_tampering as tampering
from repository import TINY

import gemma_py
from gemma_py.checks.audit import EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="tamperings")
    parser.add_argument("--untouched", type=int, default=1_000, help="receipts that are audited as they are")
    parser.add_argument("--responses", type=int, default=2_000, help="responses that are edited around their receipt")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    began = time.monotonic()
    with gemma_py.load(TINY) as engine:
        receipts = tampering.varied_receipts(engine, args.untouched)
        refused = [verdict.message for verdict in tampering.verdicts(engine, receipts) if verdict.kind != EQUAL]
        print(f"{len(receipts)} untouched receipts, {len(refused)} of them refused", flush=True)
        wrong, stages = tampering.escaped(engine, receipts[:100], args.count, args.seed)
        misjudged = tampering.escaped_responses(engine, receipts[:100], args.responses, args.seed)
    print(f"{args.count} tamperings: " + ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items())))
    for escaped in wrong:
        print("not found:", escaped)
    print(f"{args.responses} responses, each untouched and edited: {len(misjudged)} of the verdicts are wrong")
    for response in misjudged:
        print("wrong verdict:", response)
    report = {"untouched": len(receipts), "refused": len(refused), "tamperings": args.count, "stages": stages}
    report |= {"not_found": len(wrong), "responses": args.responses, "misjudged": len(misjudged)}
    print(json.dumps({**report, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if wrong or refused or misjudged else 0


if __name__ == "__main__":
    sys.exit(main())
