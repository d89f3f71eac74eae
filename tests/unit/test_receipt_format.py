import copy
import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

import gemma_py
from gemma_py.errors import FormatError, InputError
from gemma_py.receipts import merkle
from gemma_py.receipts.receipt import Receipt, RootError, canonical, number_text, parse, read


@pytest.fixture(scope="module")
def receipt(tiny_engine: gemma_py.Engine) -> Receipt:
    options: dict[str, Any] = {"temperature": 0.8, "seed": 3, "logit_bias": {5: -1.5}, "stop": ["\u2603", "no end"]}
    made = list(tiny_engine.generate("Hello", 12, **options, receipt=True))[-1].receipt
    assert made is not None
    return made


def test_a_receipt_is_read_as_it_was_written(receipt: Receipt) -> None:
    data = receipt.to_bytes()
    assert parse(data, "it") == receipt
    assert data == canonical(json.loads(data)) and b" " not in data.replace(b'"no end"', b"")
    assert json.loads(data)["predicate"]["request"]["sampling"]["temperature"] == "0.8"


def rfc_6962(leaves: Sequence[bytes]) -> bytes:
    """Section 2.1 of RFC 6962: split the list at the largest power of two below its length."""
    if len(leaves) == 1:
        return hashlib.sha256(b"\0" + leaves[0]).digest()
    k = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + rfc_6962(leaves[:k]) + rfc_6962(leaves[k:])).digest()


@pytest.mark.parametrize("count", [*range(1, 34), 63, 64, 65, 1000])
def test_the_root_matches_the_definition_of_rfc_6962(count: int) -> None:
    leaves = [bytes([number % 256]) * (number % 50) for number in range(count)]
    assert merkle.root(leaves) == rfc_6962(leaves)


def test_the_root_of_a_published_tree() -> None:
    """The example is from the tests of Certificate Transparency's reference implementation."""
    leaves = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    roots = {1: "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
             3: "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
             8: "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"}  # fmt: skip
    for count, root in roots.items():
        assert merkle.root([bytes.fromhex(leaf) for leaf in leaves[:count]]).hex() == root


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, 0.1, 1e-9, 1 / 3, 100.0, 5e-324, 2])
def test_numbers_are_written_in_one_way(value: float) -> None:
    text = number_text(value)
    assert float(text) == value and text != "-0.0" and number_text(float(text)) == text


REQUEST = ("predicate", "request")
WRONG: list[tuple[tuple[str | int, ...], Any]] = [
    (("_type",), "https://in-toto.io/Statement/v0.1"),
    (("predicateType",), "urn:gemma-py:receipt:v2"),
    (("subject",), []),
    (("subject", 0, "name"), "text"),
    (("subject", 0, "digest", "sha256"), "0" * 63),
    (("subject", 0, "digest", "sha256"), "A" * 64),
    (("predicate", "rules"), 0),
    (("predicate", "rules"), 10**400),
    (("predicate", "rules"), True),
    (("predicate", "model", "files"), []),
    (("predicate", "model", "files"), ["b" * 64, "a" * 64]),
    (("predicate", "model", "fingerprint"), "z" * 64),
    (("predicate", "model", "kv"), "float16"),
    (("predicate", "model", "quant"), "q2_k"),
    ((*REQUEST, "prompt"), ""),
    ((*REQUEST, "prompt"), "AAA"),
    ((*REQUEST, "prompt"), "AAAA AAAA"),
    ((*REQUEST, "prompt"), "AAB="),
    ((*REQUEST, "prompt"), [1, 2]),
    ((*REQUEST, "max_tokens"), 0),
    ((*REQUEST, "max_tokens"), -5),
    ((*REQUEST, "max_tokens"), 10**300),
    ((*REQUEST, "max_tokens"), 12.0),
    ((*REQUEST, "max_tokens"), 11),
    ((*REQUEST, "stop"), [""]),
    ((*REQUEST, "stop"), "a"),
    ((*REQUEST, "ends"), [3, 2]),
    ((*REQUEST, "ends"), [-1]),
    ((*REQUEST, "ends"), [1 << 24]),
    ((*REQUEST, "trim"), 1),
    ((*REQUEST, "marks"), {"channel": None, "call": None}),
    ((*REQUEST, "marks"), {"channel": [1], "call": None, "quote": 2}),
    ((*REQUEST, "constraint"), []),
    ((*REQUEST, "sampling", "temperature"), 0.8),
    ((*REQUEST, "sampling", "temperature"), "0.80"),
    ((*REQUEST, "sampling", "temperature"), "nan"),
    ((*REQUEST, "sampling", "temperature"), "inf"),
    ((*REQUEST, "sampling", "temperature"), "-0.0"),
    ((*REQUEST, "sampling", "temperature"), "0.0"),
    ((*REQUEST, "sampling", "top_k"), -1),
    ((*REQUEST, "sampling", "seed"), None),
    ((*REQUEST, "sampling", "seed"), 3),
    ((*REQUEST, "sampling", "seed"), "03"),
    ((*REQUEST, "sampling", "seed"), "-3"),
    ((*REQUEST, "sampling", "seed"), "9223372036854775808"),
    ((*REQUEST, "sampling", "logit_bias"), {"5": -1.5}),
    ((*REQUEST, "sampling", "logit_bias"), {"05": "1.0"}),
    (("predicate", "answer", "ids"), ""),
    (("predicate", "answer", "logits"), "AAAA"),
    (("predicate", "answer", "logits"), "AAAAAAAAAAAAAAAA"),
    (("predicate", "answer", "finish_reason"), "cancelled"),
    (("predicate", "answer", "kv"), "AAAA"),
    (("predicate", "root"), "0" * 63),
]  # fmt: skip


def changed(document: Any, path: Sequence[str | int], value: Any) -> Any:
    made = copy.deepcopy(document)
    at = made
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = value
    return made


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{path[-1]}={str(value)[:20]}" for path, value in WRONG])
def test_a_field_that_violates_the_format_is_named(receipt: Receipt, path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(FormatError) as caught:
        read(changed(receipt.document(), path, value), "it")
    named = {"name": "subject[0].name", "sha256": "sha256", "temperature": "sampling"}.get(str(path[-1]), str(path[-1]))
    assert not isinstance(caught.value, RootError)
    assert named in str(caught.value) and len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def paths_of(document: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path] + [found for name, value in inner for found in paths_of(value, (*path, name))]


def test_a_missing_field_and_an_unknown_field_are_errors(receipt: Receipt) -> None:
    document = receipt.document()
    for path in paths_of(document)[1:]:
        if not isinstance(path[-1], str) or path[-1] in ("5", "channel"):
            continue
        without, beside = copy.deepcopy(document), copy.deepcopy(document)
        for made in (without, beside):
            at: Any = made
            for name in path[:-1]:
                at = at[name]
            value = at.pop(path[-1]) if made is without else at.setdefault("unknown", 1)
            assert value is not None or path[-1] in ("quant", "marks", "constraint")
        for made in (without, beside):
            with pytest.raises(FormatError):
                read(made, "it")


@pytest.mark.parametrize(("path", "value"), [
    ((*REQUEST, "max_tokens"), 13), ((*REQUEST, "trim"), True), ((*REQUEST, "stop"), []), ((*REQUEST, "ends"), []),
    ((*REQUEST, "sampling", "seed"), "4"), ((*REQUEST, "sampling", "top_p"), "0.5"), (("predicate", "rules"), 3),
    (("predicate", "answer", "finish_reason"), "stop"), (("predicate", "root"), "0" * 64),
    (("predicate", "model", "quant"), "q8_0"), (("subject", 0, "digest", "sha256"), "0" * 64),
])  # fmt: skip
def test_a_changed_field_changes_the_root(receipt: Receipt, path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(RootError, match="root"):
        read(changed(receipt.document(), path, value), "it")


def test_the_root_covers_positions_tokens_and_digests(receipt: Receipt) -> None:
    swapped = (receipt.logits[1], receipt.logits[0], *receipt.logits[2:])
    others = [
        dataclasses.replace(receipt, logits=swapped),
        dataclasses.replace(receipt, answer=(receipt.answer[0] + 1, *receipt.answer[1:])),
        dataclasses.replace(receipt, prompt=(*receipt.prompt, 5)),
        dataclasses.replace(receipt, kv=receipt.kv[::-1]),
    ]
    assert len({made.root() for made in [receipt, *others]}) == 5


@pytest.mark.parametrize("data", [
    b"", b"{}", b"[]", b"null", b"\xff\xfe", b'{"a":1,"a":1}', b"[" * 100_000, b'{"a":' * 100_000, b"NaN",
    b'{"predicate":' + b"1" * 5000 + b"}", b'{"_type":"\\ud800"}',
])  # fmt: skip
def test_hostile_documents_are_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        parse(data, "it")
    assert str(caught.value).startswith("it: ") and len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_a_key_that_appears_twice_is_an_error(receipt: Receipt) -> None:
    data = receipt.to_bytes().replace(b'"trim":false', b'"trim":false,"trim":false')
    with pytest.raises(FormatError, match="'trim' appears twice"):
        parse(data, "it")


def test_greedy_decoding_has_no_seed_and_no_filters(tiny_engine: gemma_py.Engine) -> None:
    made = [
        list(tiny_engine.generate("Hello", 4, temperature=0, seed=seed, top_k=seed, receipt=True))[-1].receipt
        for seed in (1, 2)
    ]
    assert made[0] is not None and made[0] == made[1]
    document = made[0].document()
    for name, value in (("seed", "1"), ("top_k", 4), ("top_p", "0.5"), ("min_p", "0.5")):
        with pytest.raises(FormatError, match="which greedy decoding does not use"):
            read(changed(document, (*REQUEST, "sampling", name), value), "it")


def test_the_size_of_a_receipt(tiny_engine: gemma_py.Engine) -> None:
    """A receipt has at most 4 KB, plus 20 bytes for each token of the answer and 4 bytes for each token of the prompt."""
    sizes = {}
    for prompt, count in ((5, 10), (5, 400), (405, 10)):
        made = list(tiny_engine.generate([2] * prompt, count, logit_bias={1: -100, 6: -100}, receipt=True))[-1].receipt
        assert made is not None
        sizes[prompt, count] = len(made.to_bytes())
    assert sizes[5, 10] - 10 * 20 - 5 * 4 < 4096
    assert math.isclose(sizes[5, 400] - sizes[5, 10], 390 * 20, abs_tol=8)
    assert math.isclose(sizes[405, 10] - sizes[5, 10], 400 * 4, abs_tol=8)


def test_an_answer_that_is_incomplete_has_no_receipt(tiny_engine: gemma_py.Engine) -> None:
    tokens = tiny_engine.generate("Hello", 4, receipt=True)
    assert [token.receipt is None for token in tokens] == [True, True, True, False]
    assert all(token.receipt is None for token in tiny_engine.generate("Hello", 4))
    conversation = gemma_py.Conversation(tiny_engine, template="gemma", max_tokens=9)
    with pytest.raises(InputError, match="no complete answer"):
        conversation.receipt()
    stream = conversation.send("Hello")
    while not conversation.messages:
        next(stream)
        stream.close()
        break
    with pytest.raises(InputError, match="no complete answer"):
        conversation.receipt()


def test_half_a_surrogate_pair_is_refused(tiny_engine: gemma_py.Engine) -> None:
    with pytest.raises(InputError, match="surrogate"):
        list(tiny_engine.generate("Hello", 4, stop=["\ud800"], receipt=True))[-1].receipt.to_bytes()  # type: ignore[union-attr]
