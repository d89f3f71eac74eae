"""Difficult texts, identical on every machine, for comparing our tokenizer with the `tokenizers` package."""

import random

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
    """Return the test texts for a vocabulary with these added tokens. Only every 60th <unused> token is in the texts."""
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
