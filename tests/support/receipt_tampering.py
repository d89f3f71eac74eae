import copy
import dataclasses
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gemma_py
from gemma_py.checks.audit import DIVERGED, EQUAL, Audited, Auditor, Verdict
from gemma_py.errors import FormatError
from gemma_py.generate.core import Request
from gemma_py.receipts.receipt import Receipt, canonical, output_digests, parse
from gemma_py.receipts.sources import receipts_in

NO_END = {1: -100.0, 6: -100.0}
PROMPT = "The list of"


def auditor(engine: gemma_py.Engine) -> Auditor:
    # This module needs pydantic. Unit tests import this file without pydantic.
    from gemma_py.server.openai.described_constraint import constraint_maker

    return Auditor(engine, constraint_maker(engine))


def made(engine: gemma_py.Engine, prompt: str, count: int, **options: Any) -> Receipt:
    receipt = list(engine.generate(prompt, count, receipt=True, **options))[-1].receipt
    assert receipt is not None
    return receipt


def usual_receipt(engine: gemma_py.Engine) -> Receipt:
    options: dict[str, Any] = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 11}
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.25, "frequency_penalty": 0.25}
    return made(engine, PROMPT, 20, **options, **penalties, logit_bias=NO_END, stop=["no such text"])


def varied_receipts(engine: gemma_py.Engine, count: int) -> list[Receipt]:
    rng, found = random.Random(5), []
    words = ["the", "list", "of", "a", "function", "is", "return", "value", "in", "None", "for", "if", "class", "def"]
    for _ in range(count):
        prompt = " ".join(rng.choice(words) for _ in range(rng.randrange(1, 30)))
        options: dict[str, Any] = {}
        if rng.random() < 0.7:
            options = {"temperature": rng.choice([0.3, 1.0, 1.5]), "seed": rng.randrange(1 << 63),
                       "top_k": rng.choice([0, 5, 40]), "top_p": rng.choice([0.8, 1.0]), "min_p": rng.choice([0.0, 0.05])}  # fmt: skip
        if rng.random() < 0.3:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
        if rng.random() < 0.3:
            options["logit_bias"] = NO_END | {rng.randrange(1536): 3.0}
        if rng.random() < 0.3:
            options["stop"] = [rng.choice("aeiou"), "=="]
        found.append(made(engine, prompt, rng.randrange(1, 16), **options))
    return found


def verdicts(engine: gemma_py.Engine, receipts: list[Receipt]) -> list[Verdict]:
    found: dict[int, Verdict] = {}
    for event in auditor(engine).audit(receipts):
        if isinstance(event, Audited):
            assert event.receipt not in found
            found[event.receipt] = event.verdict
    return [found[number] for number in range(len(receipts))]


# --- tampering by somebody who computes the Merkle root again ---------------------------------------------------------


def with_asked(receipt: Receipt, **changes: Any) -> Receipt:
    return dataclasses.replace(receipt, asked=dataclasses.replace(receipt.asked, **changes))


def with_sampling(receipt: Receipt, **changes: Any) -> Receipt:
    return with_asked(receipt, sampling={**receipt.asked.sampling, **changes})


def with_entry(entries: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*entries[:at], value, *entries[at + 1 :])


def with_bit(digest: bytes, bit: int = 0) -> bytes:
    return bytes([digest[0] ^ 1 << bit, *digest[1:]])


def text_of(engine: gemma_py.Engine, ids: tuple[int, ...]) -> dict[str, str]:
    return output_digests(engine.text_tokenizer().decode(list(ids)), "", [])


DRAWN = -1  # stands, in TAMPERINGS, for the first position at which sampling chooses another token
# Each entry changes one field and recomputes the Merkle root, so that only the audit's stage for this field can find
# the change.
TAMPERINGS: dict[str, tuple[Callable[[gemma_py.Engine, Receipt], Receipt], str, int | None]] = {
    "a prompt id": (lambda e, r: dataclasses.replace(r, prompt=with_entry(r.prompt, 1, 9)), "logits", 0),
    "a longer prompt": (lambda e, r: dataclasses.replace(r, prompt=(*r.prompt, 9)), "logits", 0),
    "an answer id": (lambda e, r: dataclasses.replace(r, answer=with_entry(r.answer, 7, 9)), "text", None),
    "an answer id and the text": (
        lambda e, r: dataclasses.replace(
            r, answer=with_entry(r.answer, 7, 9), outputs=text_of(e, with_entry(r.answer, 7, 9))
        ),
        "choice", 7,
    ),
    "the text": (lambda e, r: dataclasses.replace(r, outputs=output_digests("another text", "", [])), "text", None),
    "a thought": (lambda e, r: dataclasses.replace(r, outputs={**r.outputs, "reasoning": "0" * 64}), "text", None),
    "a row of logits": (lambda e, r: dataclasses.replace(r, logits=with_entry(r.logits, 5, with_bit(r.logits[5]))), "logits", 5),
    "two rows exchanged": (
        lambda e, r: dataclasses.replace(r, logits=(r.logits[0], r.logits[2], r.logits[1], *r.logits[3:])), "logits", 1
    ),
    "a layer's keys and values": (lambda e, r: dataclasses.replace(r, kv=with_entry(r.kv, 1, with_bit(r.kv[1]))), "kv", None),
    "a layer too few": (lambda e, r: dataclasses.replace(r, kv=r.kv[:-1]), "model", None),
    "the seed": (lambda e, r: with_sampling(r, seed="12"), "choice", DRAWN),
    "the temperature": (lambda e, r: with_sampling(r, temperature="2.0"), "choice", DRAWN),
    "a temperature out of range": (lambda e, r: with_sampling(r, temperature="2.5"), "sampling", None),
    "greedy": (lambda e, r: with_sampling(r, temperature="0.0", seed=None, top_k=0, top_p="1.0", min_p="0.0"), "choice", DRAWN),
    "top_k": (lambda e, r: with_sampling(r, top_k=1), "choice", DRAWN),
    "top_p": (lambda e, r: with_sampling(r, top_p="0.01"), "choice", DRAWN),
    "min_p": (lambda e, r: with_sampling(r, min_p="1.0"), "choice", DRAWN),
    "the repetition penalty": (lambda e, r: with_sampling(r, repetition_penalty="50.0"), "choice", DRAWN),
    "the presence penalty": (lambda e, r: with_sampling(r, presence_penalty="-2.0"), "choice", DRAWN),
    "the frequency penalty": (lambda e, r: with_sampling(r, frequency_penalty="-2.0"), "choice", DRAWN),
    "the logit bias": (lambda e, r: with_sampling(r, logit_bias={"9": "100.0"}), "choice", DRAWN),
    "a logit bias outside": (lambda e, r: with_sampling(r, logit_bias={"99999": "1.0"}), "sampling", None),
    "a stop string": (
        lambda e, r: with_asked(r, stop=(e.text_tokenizer().decode(list(r.answer[:4]))[-1],)), "text", None
    ),
    "an end token": (lambda e, r: with_asked(r, ends=tuple(sorted({*r.asked.ends, r.answer[6]}))), "text", None),
    "more tokens allowed": (lambda e, r: with_asked(r, max_tokens=21), "finish", 19),
    "more tokens than the context": (lambda e, r: with_asked(r, max_tokens=1 << 24), "model", None),
    "the finish reason": (lambda e, r: dataclasses.replace(r, finish_reason="stop"), "finish", 19),
    "the answer cut": (
        lambda e, r: dataclasses.replace(r, answer=r.answer[:9], logits=r.logits[:9], outputs=text_of(e, r.answer[:9])),
        "finish", 8,
    ),
    "an id outside the vocabulary": (lambda e, r: dataclasses.replace(r, answer=with_entry(r.answer, 3, 1 << 20)), "model", None),
    "the fingerprint": (
        lambda e, r: dataclasses.replace(r, model=dataclasses.replace(r.model, fingerprint="0" * 64)), "model", None
    ),
    "a constraint": (lambda e, r: with_asked(r, constraint={"kind": "nothing"}), "sampling", None),
}  # fmt: skip


def drawn_change(rng: random.Random, receipt: Receipt, other: Receipt) -> Receipt:
    at, size = rng.randrange(len(receipt.answer)), len(receipt.answer)
    text = str(rng.choice([0.1, 0.5, 0.9]))
    changes: list[Callable[[], Receipt]] = [
        lambda: dataclasses.replace(receipt, prompt=with_entry(receipt.prompt, rng.randrange(len(receipt.prompt)), 9)),
        lambda: dataclasses.replace(receipt, answer=with_entry(receipt.answer, at, rng.randrange(1536))),
        lambda: dataclasses.replace(receipt, logits=with_entry(receipt.logits, at, with_bit(receipt.logits[at], at % 8))),
        lambda: dataclasses.replace(receipt, kv=with_entry(receipt.kv, at % len(receipt.kv), b"0" * 12)),
        lambda: dataclasses.replace(receipt, finish_reason="stop" if receipt.finish_reason == "length" else "length"),
        lambda: dataclasses.replace(receipt, outputs=other.outputs),
        lambda: dataclasses.replace(receipt, prompt=other.prompt),
        lambda: dataclasses.replace(receipt, answer=receipt.answer[: at + 1], logits=receipt.logits[: at + 1]),
        lambda: dataclasses.replace(receipt, asked=other.asked, answer=receipt.answer[: other.asked.max_tokens],
                                    logits=receipt.logits[: other.asked.max_tokens]),
        lambda: dataclasses.replace(other, asked=dataclasses.replace(other.asked, max_tokens=max(size, other.asked.max_tokens)),
                                    answer=receipt.answer, logits=receipt.logits),
        lambda: with_asked(receipt, max_tokens=size + rng.randrange(5)),
        lambda: with_asked(receipt, stop=(*receipt.asked.stop, rng.choice("abcdefgh"))),
        lambda: with_asked(receipt, ends=tuple(sorted({*receipt.asked.ends, rng.choice(receipt.answer)}))),
        lambda: with_asked(receipt, trim=not receipt.asked.trim),
        lambda: with_sampling(receipt, temperature="1.25", seed=str(rng.randrange(99))),
        lambda: with_sampling(receipt, repetition_penalty=text),
        lambda: with_sampling(receipt, presence_penalty=text),
        lambda: with_sampling(receipt, logit_bias={str(rng.choice(receipt.answer)): "-5.0"}),
    ]  # fmt: skip
    if receipt.asked.sampling["seed"] is not None:
        changes += [
            lambda: with_sampling(receipt, seed=str(int(receipt.asked.sampling["seed"]) ^ 1 << rng.randrange(63))),
            lambda: with_sampling(receipt, top_k=rng.randrange(9)),
            lambda: with_sampling(receipt, top_p=text),
            lambda: with_sampling(receipt, min_p=text),
        ]
    return rng.choice(changes)()


def generated_anew(engine: gemma_py.Engine, receipt: Receipt) -> Receipt:
    request: Request = auditor(engine)._request(receipt)
    generation, session = engine.generation(dataclasses.replace(request, receipt=True)), engine.session()
    *_, last = generation.tokens(session.prefill(generation.prompt), session.decode, session.kv_digest)
    assert last.receipt is not None
    return last.receipt


# --- tampering with the bytes -----------------------------------------------------------------------------------------


def drawn_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    at = rng.randrange(len(data))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:at]
    if kind == 2:
        return data[: len(data) // 2] + other[len(other) // 2 :]
    document, others = json.loads(data), json.loads(other)
    places = list(_places(document))
    holder, name = rng.choice(places)
    if kind == 3:
        there = [at for at in _places(others) if at[1] == name]
        holder[name] = there[0][0][name] if there else None
    elif kind == 4:
        holder[name] = rng.choice([10**400, -1, -(10**30), 1.5, "", None, [], {}, True, [[]] * 50])
    else:
        text = canonical({name: holder[name]})[1:-1] if isinstance(name, str) else b'"rules":1'
        return data.replace(text, text + b"," + text, 1)
    return json.dumps(document).encode()


def _places(document: Any) -> Any:
    """Yield (object or list, key) for each value of a JSON document."""
    entries = (
        document.items() if isinstance(document, Mapping) else enumerate(document) if isinstance(document, list) else ()
    )
    for name, inner in list(entries):
        yield document, name
        yield from _places(inner)


def escaped(
    engine: gemma_py.Engine, receipts: list[Receipt], count: int, seed: int
) -> tuple[list[str], dict[str, int]]:
    """Draw tamperings: half change bytes, half change a field and recompute the Merkle root.

    Return the changed receipts that an audit accepted, and the number of tamperings that each stage found.
    """
    rng, wrong, stages, waiting = random.Random(seed), list[str](), dict[str, int](), list[Receipt]()
    for number in range(count):
        receipt, other = rng.choice(receipts), rng.choice(receipts)
        if number % 2:
            waiting.append(drawn_change(rng, receipt, other))
            continue
        data = drawn_bytes(rng, receipt.to_bytes(), other.to_bytes())
        try:
            if parse(data, "drawn") not in (receipt, other):
                wrong.append(f"the structure of {data!r}")
            stages["unchanged"] = stages.get("unchanged", 0) + 1
        except FormatError:
            stages["structure"] = stages.get("structure", 0) + 1
    for receipt in list(waiting):
        try:
            parse(receipt.to_bytes(), "drawn")
        except FormatError:
            stages["structure"] = stages.get("structure", 0) + 1
            waiting.remove(receipt)
    for receipt, verdict in zip(waiting, verdicts(engine, waiting), strict=True):
        stage = verdict.stage or "true"
        stages[stage] = stages.get(stage, 0) + 1
        if verdict.kind == EQUAL and generated_anew(engine, receipt) != receipt:
            wrong.append(f"{receipt}")
    return wrong, stages


# --- tampering with the response around a receipt ---------------------------------------------------------------------

Documents = list[dict[str, Any]]


def _chunks(*choices: dict[str, Any]) -> Documents:
    return [{"id": "a", "choices": [{"index": 0, **choice}]} for choice in choices]


# The documents of a response that shows a text. The receipt is added to the last document later.
# Arguments: the prompt's text, the answer's text.
RESPONSES: dict[str, Callable[[str, str], Documents]] = {
    "chat": lambda prompt, text: [{"choices": [{"message": {"role": "assistant", "content": text, "refusal": None}}]}],
    "completion": lambda prompt, text: [{"choices": [{"index": 0, "text": text}]}],
    "echo": lambda prompt, text: [{"choices": [{"index": 0, "text": prompt + text}]}],
    "responses": lambda prompt, text: [
        {"output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]}
    ],
    "stream of a chat": lambda prompt, text: [
        *_chunks({"delta": {"role": "assistant", "content": ""}}, {"delta": {"content": text[:3]}}),
        *_chunks({"delta": {"content": text[3:]}}, {"delta": {}, "finish_reason": "length"}),
        {"id": "a", "choices": []},
    ],
    "stream of a completion": lambda prompt, text: [
        *_chunks({"text": prompt}, {"text": text[:3]}, {"text": text[3:]}), {"id": "a", "choices": []}
    ],
}  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def response_around(engine: gemma_py.Engine, receipt: Receipt, form: str, in_batch: bool = False) -> Documents:
    """in_batch: as a row of a batch's output."""
    tokenizer = engine.text_tokenizer()
    text, prompt = tokenizer.decode(receipt.answer), tokenizer.decode(receipt.prompt[1:])
    assert output_digests(text, "", []) == receipt.outputs, (
        "the answer must not end at a stop string or an end token, which is not part of the text"
    )
    *before, last = RESPONSES[form](prompt, text)
    last["receipts"] = [json.loads(receipt.to_bytes())]
    return [*before, {"custom_id": "a", "response": {"status_code": 200, "body": last}} if in_batch else last]


def lines_of(documents: Documents) -> bytes:
    return b"\n".join(json.dumps(document).encode() for document in documents)


def shown_texts(documents: Documents) -> list[tuple[Any, Any]]:
    return [at for at in _places(documents) if at[1] in ("text", "content") and isinstance(at[0][at[1]], str)]


def edited_response(rng: random.Random, documents: Documents, other: str) -> Documents:
    """Change a text that a response shows, or add a thought, a refusal, a tool call or a choice. other: a text to use
    instead.
    """
    made = copy.deepcopy(documents)
    holder, name = rng.choice(shown_texts(made))
    text, at = holder[name], rng.randrange(len(holder[name]) + 1)
    changes: list[Callable[[], Any]] = [
        lambda: holder.update({name: text[:at] + rng.choice("aé \n\u200b") + text[at:]}),
        lambda: holder.update({name: text[:at] + text[at + 1 :]}),
        lambda: holder.update({name: other}),
        lambda: holder.update({name: rng.choice([7, [], {}, [text], True])}),
    ]
    if name == "content":
        changes += [
            lambda: holder.update(reasoning_content="Well"),
            lambda: holder.update(tool_calls=[CALL]),
        ]
    if "role" in holder:
        changes.append(lambda: holder.update(refusal="No"))
    outer = made[-1]["response"]["body"] if "response" in made[-1] else made[-1]
    if "choices" in outer:
        changes.append(lambda: outer["choices"].extend([{"index": 1, "text": "more"}] * (1 + (not outer["choices"]))))
    else:
        changes.append(lambda: outer["output"].append({"type": "message", "content": [{"text": "more"}]}))
    while made == documents:
        rng.choice(changes)()
    return made


def file_verdicts(engine: gemma_py.Engine, files: list[bytes]) -> list[Verdict]:
    """For each file: its first verdict that is not EQUAL, else EQUAL."""
    found = [(number, entry) for number, data in enumerate(files) for entry in receipts_in(data, "it")]
    made = [Verdict(EQUAL, "") for _ in files]
    sound = []
    for number, entry in found:
        if entry.receipt is None:
            made[number] = Verdict(DIVERGED, entry.problem, "structure")
        else:
            sound.append((number, entry.receipt, entry.shown))
    for event in auditor(engine).audit([receipt for _, receipt, _ in sound], [shown for _, _, shown in sound]):
        number = sound[event.receipt][0]
        if isinstance(event, Audited) and made[number].kind == EQUAL:
            made[number] = event.verdict
    return made


def escaped_responses(engine: gemma_py.Engine, receipts: list[Receipt], count: int, seed: int) -> list[str]:
    """Draw responses in every form, and an edit of each. Return the untouched responses that an audit refused, and the
    edited responses that an audit accepted.
    """
    rng, files = random.Random(seed), list[tuple[bytes, bool]]()
    texts = [engine.text_tokenizer().decode(receipt.answer) for receipt in receipts]
    whole = [
        receipt
        for receipt, text in zip(receipts, texts, strict=True)
        if receipt.outputs == output_digests(text, "", [])
    ]
    for _ in range(count):
        receipt, form = rng.choice(whole), rng.choice(list(RESPONSES))
        documents = response_around(engine, receipt, form, not form.startswith("stream") and rng.random() < 0.3)
        files.append((lines_of(documents), False))
        files.append((lines_of(edited_response(rng, documents, f"{rng.choice(texts)}!")), True))
    found = file_verdicts(engine, [data for data, _ in files])
    return [
        f"{'edited' if edited else 'untouched'}: {data!r}: {verdict.message}"
        for (data, edited), verdict in zip(files, found, strict=True)
        if (verdict.kind != EQUAL) != edited
    ]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
