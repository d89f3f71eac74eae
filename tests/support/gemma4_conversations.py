"""Random conversations with system messages, tools, calls, results and thoughts, and the token ids that transformers
gives.
"""

import gzip
import json
import random
from typing import Any, NamedTuple

from repository import DATA

GOLDEN = DATA / "gemma4_conversations.json.gz"
_TEXTS = [
    "Hello!", "What is the weather in Rome?", "  padded text \n", "Two\n\nparagraphs.\n\n\n- and\n- a list", "1 < 2 and [x] -> y",
    "<b>bold</b> {braces: \"quoted\"}", "日本語 🙂 é", "tab\there", "def f(x):\n    return x[0] * 2\n", "a" * 40, "The end...", "?",
]  # fmt: skip
_WORDS = ["place", "days", "Unit", "query_text", "limit", "from-to", "id"]


class Drawn(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool | None


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 2 else 5)
    if kind == 0:
        return rng.choice([True, False, None])
    if kind == 1:
        return rng.choice([0, -3, 42, 1.5, -0.25, 100000])
    if kind == 5:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {word: _value(rng, depth + 1) for word in rng.sample(_WORDS, rng.randrange(4))}
    return rng.choice(_TEXTS)


def _schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    made: dict[str, Any] = {"type": rng.choice(["string", "number", "boolean", "integer"])}
    if rng.random() < 0.7:
        made["description"] = rng.choice(_TEXTS).strip()
    if made["type"] == "string" and rng.random() < 0.3:
        made["enum"] = ["celsius", "1 < 2", "é"]
    if depth < 2 and rng.random() < 0.2:
        made |= {"type": "array", "items": {"type": "string"}}
    elif depth < 2 and rng.random() < 0.2:
        made |= {"type": "object", "properties": _properties(rng, depth + 1)}
    return made


def _properties(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    return {word: _schema(rng, depth) for word in rng.sample(_WORDS, rng.randint(1, 3))}


def _tool(rng: random.Random, name: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": rng.choice(_TEXTS).strip()}
    if rng.random() < 0.8:
        properties = _properties(rng)
        function["parameters"] = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": function}


def _exchange(rng: random.Random, tools: list[dict[str, Any]], last: bool) -> list[dict[str, Any]]:
    """A user message, at random calls with results, and an answer. The last exchange may lack the answer."""
    made: list[dict[str, Any]] = [{"role": "user", "content": rng.choice(_TEXTS)}]
    for _ in range(rng.randrange(3) if tools else 0):
        calls = []
        for _ in range(rng.randint(1, 2)):
            arguments = {word: _value(rng) for word in rng.sample(_WORDS, rng.randrange(3))}
            function = {"name": rng.choice(tools)["function"]["name"], "arguments": arguments}
            calls.append({"id": f"call_{rng.randrange(10**6)}", "type": "function", "function": function})
        message = {"role": "assistant", "content": rng.choice(["", "", "Let me look."]), "tool_calls": calls}
        if rng.random() < 0.5:
            message["reasoning_content"] = rng.choice(_TEXTS)
        made.append(message)
        for call in calls:
            made.append({"role": "tool", "tool_call_id": call["id"], "content": rng.choice(_TEXTS)})
    if not last or (len(made) == 1 and rng.random() < 0.1):
        answer = {"role": "assistant", "content": rng.choice(_TEXTS)}
        if rng.random() < 0.5:
            answer["reasoning_content"] = rng.choice(_TEXTS)
        made.append(answer)
    return made


def draw(count: int, seed: int = 4) -> list[Drawn]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        tools = [_tool(rng, f"tool_{number}") for number in range(rng.choice([0, 0, 1, 2, 3]))]
        messages = [{"role": "system", "content": rng.choice(_TEXTS)}] if rng.random() < 0.5 else []
        exchanges = rng.randint(1, 4)
        for number in range(exchanges):
            messages += _exchange(rng, tools, number == exchanges - 1)
        made.append(Drawn(messages, tools, rng.choice([None, False, True])))
    return made


def read_golden() -> list[list[int]]:
    ids: list[list[int]] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return ids


def write_golden(ids: list[list[int]]) -> None:
    GOLDEN.write_bytes(gzip.compress(json.dumps(ids, separators=(",", ":")).encode(), mtime=0))
