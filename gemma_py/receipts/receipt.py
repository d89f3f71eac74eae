"""The format of a receipt: an in-toto Statement in canonical JSON.

    T tokens of the answer   L layers that store KV rows

`Receipt.document` writes a receipt, and `read` checks the structure of a document: the names, types and ranges of all
fields, and the Merkle root. Whether an answer is what its receipt says is checked by `gemma_py.checks.audit`.
"""

import base64
import binascii
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gemma_py.errors import FormatError, InputError
from gemma_py.formats.files import parse_json
from gemma_py.receipts import merkle

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:gemma-py:receipt:v1"
# The version of the rules that decide an answer: the arithmetic of a forward pass, sampling, and how text is decoded. It
# changes whenever a bit of a logit, a draw, a character of a text or a digest may change.
RULES = 2
DIGEST_BYTES = 12  # how much of a sha256 is kept for a row of logits or a layer's KV rows
ID_BYTES = 3
MOST_TOKENS, MOST_ID = 1 << 24, (1 << 8 * ID_BYTES) - 1
MOST_SEED = (1 << 63) - 1
OUTPUTS = ("answer", "reasoning", "tool_calls")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_SHA256 = re.compile("[0-9a-f]{64}")
_SEED = re.compile("0|[1-9][0-9]{0,18}")


class RootError(FormatError):
    """The Merkle root of a receipt is not the root of the receipt's fields."""


def canonical(document: Any) -> bytes:
    """Return the one serialisation of a JSON document: UTF-8, keys in ascending order, no white space."""
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise InputError("a receipt cannot hold half a surrogate pair, which is not a character") from None


def number_text(value: float) -> str:
    """Return a float as text: the shortest decimal number that is read as the same float, as Python writes it."""
    return repr(float(value) + 0.0)  # adding 0.0 turns -0.0 into 0.0


def sampling_document(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling options in the form of a receipt. Greedy decoding ignores seed and filters, so they are reset.

    sampling: the fields of `gemma_py.Sampling`
    """
    used = dict(sampling)
    if used["temperature"] == 0:
        used |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": None}
    return {
        **{name: number_text(used[name]) for name in FLOATS},
        "top_k": used["top_k"],
        "logit_bias": {str(token): number_text(bias) for token, bias in used["logit_bias"].items()},
        "seed": None if used["seed"] is None else str(used["seed"]),
    }


@dataclass(frozen=True)
class ModelIdentity:
    """What decides the logits: the files of the model, and two options of `load`.

    files: the sha256 of each file that the model is read from, in ascending order. fingerprint: `Engine.fingerprint`.
    quant: the option `quant` of `load`. kv: the number type of the KV cache.
    """

    files: tuple[str, ...]
    fingerprint: str
    quant: str | None
    kv: str

    def document(self) -> dict[str, Any]:
        return {"files": list(self.files), "fingerprint": self.fingerprint, "kv": self.kv, "quant": self.quant}


@dataclass(frozen=True)
class AskedFor:
    """The request, apart from the prompt.

    sampling: see `sampling_document`. marks: the token ids that mark thoughts and tool calls, or None. constraint: for
    example a JSON schema that restricts the answer, or None.
    """

    max_tokens: int
    sampling: Mapping[str, Any]
    stop: tuple[str, ...]
    ends: tuple[int, ...]
    trim: bool
    marks: Mapping[str, Any] | None
    constraint: Mapping[str, Any] | None


@dataclass(frozen=True)
class Receipt:
    """How an answer was made.

    outputs: the sha256 of the answer's text in UTF-8 and, if the answer has them, of its thoughts and tool calls.
    logits: for each token of the answer, the `row_digest` of the logits from which the token was chosen.
    kv: for each layer that stores KV rows, the first 12 bytes of the layer's `Session.kv_digest` after the last pass.
    rules: see RULES.
    """

    model: ModelIdentity
    prompt: tuple[int, ...]
    asked: AskedFor
    answer: tuple[int, ...]
    logits: tuple[bytes, ...]
    outputs: Mapping[str, str]
    finish_reason: str
    kv: tuple[bytes, ...]
    rules: int = RULES

    def document(self) -> dict[str, Any]:
        """Return the in-toto Statement as a JSON object."""
        document = self._without_tokens()
        predicate = document["predicate"]
        predicate["answer"] |= {"ids": pack_ids(self.answer), "logits": _text(b"".join(self.logits))}
        predicate["root"] = self.root()
        return document

    def to_bytes(self) -> bytes:
        return canonical(self.document())

    def root(self) -> str:
        """Return the Merkle root. The first leaf has all fields but the tokens. Each other leaf has one token
        and the digest of the token's logits.
        """
        first = len(self.prompt)
        leaves = [
            position.to_bytes(8, "big") + token.to_bytes(4, "big") + digest
            for position, (token, digest) in enumerate(zip(self.answer, self.logits, strict=True), first)
        ]
        return merkle.root([canonical(self._without_tokens()), *leaves]).hex()

    def _without_tokens(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "_type": STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": self.outputs[name]}} for name in OUTPUTS if name in self.outputs],
            "predicateType": PREDICATE,
            "predicate": {
                "rules": self.rules,
                "model": self.model.document(),
                "request": {
                    "prompt": pack_ids(self.prompt), "max_tokens": asked.max_tokens, "sampling": dict(asked.sampling),
                    "stop": list(asked.stop), "ends": list(asked.ends), "trim": asked.trim, "marks": asked.marks,
                    "constraint": asked.constraint,
                },
                "answer": {"finish_reason": self.finish_reason, "kv": _text(b"".join(self.kv))},
            },
        }  # fmt: skip


def pack_ids(ids: Sequence[int]) -> str:
    """Return token ids as base64: three bytes for each id, the most significant byte first."""
    return _text(b"".join(token.to_bytes(ID_BYTES, "big") for token in ids))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def output_digests(text: str, reasoning: str, calls: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the sha256 of an answer's text, and of its thoughts and tool calls if there are any.

    calls: the name and the arguments of each call
    """
    made = {"answer": text.encode("utf-8", "replace")}
    if reasoning:
        made["reasoning"] = reasoning.encode("utf-8", "replace")
    if calls:
        made["tool_calls"] = canonical([list(call) for call in calls])
    return {name: hashlib.sha256(data).hexdigest() for name, data in made.items()}


# --- reading ----------------------------------------------------------------------------------------------------------


class _Fields:
    """The fields of a JSON object. `take` checks one field; a field that is never taken is an error."""

    def __init__(self, value: Any, path: str, names: Sequence[str]) -> None:
        self._path = path
        if not isinstance(value, dict):
            raise FormatError(f"{path} should be a JSON object, found {_found(value)}")
        missing, unknown = [name for name in names if name not in value], sorted(set(value) - set(names))
        if missing:
            raise FormatError(f"{path} has no field {missing[0]!r}")
        if unknown:
            raise FormatError(f"{path} has an unknown field {unknown[0]!r:.80}")
        self._values: dict[str, Any] = value

    def take(self, name: str, fits: Callable[[Any], bool], expected: str) -> Any:
        value = self._values[name]
        if not fits(value):
            raise FormatError(f"{self._path}.{name} should be {expected}, found {_found(value)}")
        return value

    def bytes_of(self, name: str, size: int, most: int) -> list[bytes]:
        """Decode base64 text to pieces of `size` bytes, at most `most` of them."""
        text = self.take(name, lambda value: isinstance(value, str), "base64 text")
        if len(text) > most * size // 3 * 4 + 4:
            raise FormatError(f"{self._path}.{name} has more than {most} entries")
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            data = None
        if data is None or _text(data) != text or len(data) % size:
            raise FormatError(
                f"{self._path}.{name} should be base64 text of {size} bytes an entry, found {_found(text)}"
            )
        return [data[at : at + size] for at in range(0, len(data), size)]


def _found(value: Any) -> str:
    text = (
        repr(value)
        if not isinstance(value, int) or isinstance(value, bool) or abs(value) < 1 << 128
        else "a huge number"
    )
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None


def _is_number(value: Any) -> bool:
    """Whether the value is the text of a finite float, as `number_text` writes it."""
    if not isinstance(value, str) or not 1 <= len(value) <= 30:
        return False
    try:
        number = float(value)
    except ValueError:
        return False
    return number_text(number) == value and abs(number) < 1e300


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_whole(0, MOST_ID), value))


def _is_sorted(value: Any, fits: Callable[[Any], bool]) -> bool:
    sound = isinstance(value, list) and all(map(fits, value))
    return sound and all(a < b for a, b in itertools.pairwise(value))


def _is_object(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def parse(data: bytes, where: str) -> Receipt:
    """Read a receipt from JSON. Raise FormatError, with the path of the first field that is wrong."""
    return read(parse_json(data, where), where)


def read(document: Any, where: str) -> Receipt:
    """Check the structure of a receipt. Raise FormatError at the first wrong field, and RootError if the fields are sound
    but have another Merkle root.
    """
    try:
        return _read(document)
    except FormatError as error:
        raise type(error)(f"{where}: {error}") from None


def _read(document: Any) -> Receipt:
    statement = _Fields(document, "the receipt", ("_type", "subject", "predicateType", "predicate"))
    statement.take("_type", lambda value: value == STATEMENT, repr(STATEMENT))
    statement.take("predicateType", lambda value: value == PREDICATE, repr(PREDICATE))
    outputs = _read_outputs(statement.take("subject", lambda value: isinstance(value, list), "a list"))
    predicate = _Fields(document["predicate"], "predicate", ("rules", "model", "request", "answer", "root"))
    rules = predicate.take("rules", _is_whole(1, 1 << 31), "a whole number from 1")
    model = _read_model(document["predicate"]["model"])
    prompt, asked = _read_request(document["predicate"]["request"])
    answer = _Fields(document["predicate"]["answer"], "answer", ("ids", "logits", "finish_reason", "kv"))
    ids = answer.bytes_of("ids", ID_BYTES, MOST_TOKENS)
    logits = answer.bytes_of("logits", DIGEST_BYTES, MOST_TOKENS)
    if not 1 <= len(ids) <= asked.max_tokens:
        raise FormatError(f"answer.ids should have 1 to max_tokens = {asked.max_tokens} tokens, found {len(ids)}")
    if len(logits) != len(ids):
        raise FormatError(f"answer.logits should have an entry for each of {len(ids)} tokens, found {len(logits)}")
    reason = answer.take("finish_reason", lambda value: value in ("stop", "length"), "'stop' or 'length'")
    kv = answer.bytes_of("kv", DIGEST_BYTES, 1 << 16)
    root = predicate.take("root", _is_digest, "64 lower-case hexadecimal digits")
    made = Receipt(model, prompt, asked, _numbers(ids), tuple(logits), outputs, reason, tuple(kv), rules)
    if made.root() != root:
        raise RootError(f"predicate.root is {root}, but the fields of the receipt have the root {made.root()}")
    return made


def _numbers(ids: Sequence[bytes]) -> tuple[int, ...]:
    return tuple(int.from_bytes(token, "big") for token in ids)


def _read_outputs(subject: list[Any]) -> dict[str, str]:
    outputs = {}
    for number, entry in enumerate(subject):
        fields = _Fields(entry, f"subject[{number}]", ("name", "digest"))
        name = fields.take("name", lambda value: value in OUTPUTS, f"one of {', '.join(OUTPUTS)}")
        digest = _Fields(entry["digest"], f"subject[{number}].digest", ("sha256",))
        outputs[name] = digest.take("sha256", _is_digest, "64 lower-case hexadecimal digits")
    if [name for name in OUTPUTS if name in outputs] != [entry["name"] for entry in subject] or "answer" not in outputs:
        raise FormatError("subject should be the answer, then the reasoning and the tool calls if there are any")
    return outputs


def _read_model(value: Any) -> ModelIdentity:
    model = _Fields(value, "model", ("files", "fingerprint", "kv", "quant"))
    files = model.take(
        "files", lambda value: _is_sorted(value, _is_digest) and len(value) > 0, "a list of ascending sha256 digests"
    )
    fingerprint = model.take("fingerprint", _is_digest, "64 lower-case hexadecimal digits")
    kv = model.take("kv", lambda value: value in ("float32", "bfloat16", "q8_0"), "'float32', 'bfloat16' or 'q8_0'")
    quant = model.take("quant", lambda value: value in (None, "q8_0", "q4_0"), "null, 'q8_0' or 'q4_0'")
    return ModelIdentity(tuple(files), fingerprint, quant, kv)


def _read_request(value: Any) -> tuple[tuple[int, ...], AskedFor]:
    names = ("prompt", "max_tokens", "sampling", "stop", "ends", "trim", "marks", "constraint")
    request = _Fields(value, "request", names)
    prompt = _numbers(request.bytes_of("prompt", ID_BYTES, MOST_TOKENS))
    if not prompt:
        raise FormatError("request.prompt should have at least one token, found none")
    most = request.take("max_tokens", _is_whole(1, MOST_TOKENS), f"a whole number from 1 to {MOST_TOKENS}")
    sampling = _read_sampling(value["sampling"])
    stop = request.take(
        "stop", lambda value: isinstance(value, list) and all(isinstance(text, str) and text for text in value),
        "a list of texts",
    )  # fmt: skip
    ends = request.take("ends", lambda value: _is_sorted(value, _is_whole(0, MOST_ID)), "a list of ascending token ids")
    trim = request.take("trim", lambda value: isinstance(value, bool), "true or false")
    marks = request.take("marks", _is_object, "null or a JSON object")
    if marks is not None:
        fields = _Fields(marks, "request.marks", ("channel", "call", "quote"))
        for name in ("channel", "call"):
            fields.take(
                name, lambda value: value is None or (_is_ids(value) and len(value) == 2), "null or two token ids"
            )
        fields.take("quote", _is_whole(0, MOST_ID), "a token id")
    constraint = request.take("constraint", _is_object, "null or a JSON object")
    return prompt, AskedFor(most, sampling, tuple(stop), tuple(ends), trim, marks, constraint)


def _read_sampling(value: Any) -> dict[str, Any]:
    sampling = _Fields(value, "request.sampling", (*FLOATS, "top_k", "logit_bias", "seed"))
    for name in FLOATS:
        sampling.take(name, _is_number, "a number as text")
    sampling.take("top_k", _is_whole(0, 1 << 31), "a whole number")
    bias = sampling.take("logit_bias", lambda value: isinstance(value, dict), "a JSON object")
    for token, number in bias.items():
        if _SEED.fullmatch(token) is None or int(token) > MOST_ID or not _is_number(number):
            raise FormatError(
                f"request.sampling.logit_bias should map token ids to numbers as text, found {token!r:.40}"
            )
    seed = sampling.take("seed", lambda value: value is None or (isinstance(value, str) and _SEED.fullmatch(value) is not None),
                         "null or a whole number as text")  # fmt: skip
    if seed is not None and int(seed) > MOST_SEED:
        raise FormatError(f"request.sampling.seed should be at most {MOST_SEED}, found {seed}")
    greedy = value["temperature"] == "0.0"
    if greedy and (seed is not None or (value["top_k"], value["top_p"], value["min_p"]) != (0, "1.0", "0.0")):
        raise FormatError("request.sampling has a seed or a filter, which greedy decoding does not use")
    if not greedy and seed is None:
        raise FormatError("request.sampling.seed should be a whole number as text, found None")
    return dict(value)
