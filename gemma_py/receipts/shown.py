"""The answers that a saved response shows beside its receipts. An audit compares them with the text that the receipts' ids give.

A saved response can be the JSON of one of the three endpoints that generate text, or the chunks that a chat or completion
streamed.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

_STREAMED = {
    "text": "answer",
    "delta.content": "answer",
    "delta.reasoning_content": "reasoning",
    "delta.tool_calls": "tool_calls",
    "delta.refusal": "refusal",
}


class ShownField(NamedTuple):
    """A field of a response that shows a part of an answer.

    path: where the field is in the file. output: the part of the answer, one of OUTPUTS, or refusal, which no answer has.
    value: a text, or the name and the arguments of each tool call. Any other value than these, such as a number in place of a
    text, is kept as it is, and differs from every answer. echo: whether the text of the prompt may stand before the answer.
    """

    path: str
    output: str
    value: Any
    echo: bool = False


def shown_fields(response: dict[str, Any], prefix: str) -> dict[int, list[ShownField]]:
    """Return the fields that show the response's answers, by the index of the choice. prefix: stands before each path."""
    shown: dict[int, list[ShownField]] = {}
    choices = response.get("choices")
    for number, choice in enumerate(choices if isinstance(choices, list) else []):
        fields = list(_fields_of_choice(choice, f"{prefix}choices[{number}]"))
        if fields:
            shown[number] = fields
    if "output" in response:
        shown.setdefault(0, []).extend(_fields_of_output(response["output"], f"{prefix}output"))
    return shown


def _fields_of_choice(choice: Any, path: str) -> Iterator[ShownField]:
    if not isinstance(choice, dict):
        yield ShownField(path, "answer", choice)
        return
    if "text" in choice:
        yield ShownField(f"{path}.text", "answer", choice["text"], echo=True)
    if "message" in choice:
        message, path = choice["message"], f"{path}.message"
        if not isinstance(message, dict):
            yield ShownField(path, "answer", message)
            return
        yield ShownField(f"{path}.content", "answer", _text([message.get("content")]))
        yield ShownField(f"{path}.reasoning_content", "reasoning", _text([message.get("reasoning_content")]))
        yield ShownField(f"{path}.tool_calls", "tool_calls", _calls(message.get("tool_calls")))
        yield ShownField(f"{path}.refusal", "refusal", _text([message.get("refusal")]))


def _fields_of_output(items: Any, path: str) -> Iterator[ShownField]:
    """Yield the fields of the output items of /v1/responses."""
    if not isinstance(items, list):
        yield ShownField(path, "answer", items)
        return
    texts: dict[str, list[tuple[str, Any]]] = {"message": [], "reasoning": []}
    calls: list[tuple[str, Any]] = []
    for number, item in enumerate(items):
        where = f"{path}[{number}]"
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            calls.append((where, [item.get("name"), item.get("arguments")]))
        elif kind in ("message", "reasoning"):
            for name in ("summary", "content"):
                parts = item.get(name, [])
                for at, part in enumerate(parts if isinstance(parts, list) else [parts]):
                    # A part without a text, such as a refusal, is kept as it is.
                    text = part["text"] if isinstance(part, dict) and "text" in part else [part]
                    texts[kind].append((f"{where}.{name}[{at}].text", text))
        else:
            yield ShownField(where, "answer", item)
    for kind, output in (("message", "answer"), ("reasoning", "reasoning")):
        yield ShownField(_only(texts[kind], path), output, _text([text for _, text in texts[kind]]))
    yield ShownField(_only(calls, path), "tool_calls", [call for _, call in calls])


def _only(entries: list[tuple[str, Any]], otherwise: str) -> str:
    """Return the path of the only entry. If there is not exactly one entry, return `otherwise`."""
    return entries[0][0] if len(entries) == 1 else otherwise


def _text(parts: list[Any]) -> Any:
    """Join texts. None counts as an empty text. If a part is not a text, return all parts."""
    if all(part is None or isinstance(part, str) for part in parts):
        return "".join(part for part in parts if part is not None)
    return parts


def _calls(given: Any) -> Any:
    """Return the name and the arguments of each call. If these cannot be read, return the value as it is."""
    if given is None:
        return []
    try:
        return [[call["function"]["name"], call["function"]["arguments"]] for call in given]
    except (TypeError, KeyError):
        return given


class StreamedAnswers:
    """The answers of a stream, joined from its chunks. `add` must be called in the order of the chunks.

    ended: whether the receipts of the response came before these chunks
    """

    def __init__(self, ended: bool = False) -> None:
        self.ended = ended
        self._choices: dict[int, dict[str, list[Any]]] = {}  # the parts of each field, by the index of the choice

    def add(self, chunk: dict[str, Any]) -> None:
        for choice in chunk["choices"]:
            index = choice.get("index") if isinstance(choice, dict) else None
            if type(index) is not int or index < 0:
                continue
            if "delta" in choice:
                delta = choice["delta"] or {}
                delta = delta if isinstance(delta, dict) else {"content": [delta]}
                parts, calls = self._parts(index), delta.get("tool_calls") or []
                for name in ("content", "reasoning_content", "refusal"):
                    parts[f"delta.{name}"].append(delta.get(name))
                parts["delta.tool_calls"] += calls if isinstance(calls, list) else [calls]
            elif "text" in choice and "receipts" not in chunk:  # the chunk with the receipts repeats the whole text
                self._parts(index)["text"].append(choice["text"])

    def _parts(self, index: int) -> dict[str, list[Any]]:
        return self._choices.setdefault(index, defaultdict(list))

    def fields(self) -> dict[int, list[ShownField]]:
        """Return the fields that show the answers, by the index of the choice."""
        return {
            index: [
                ShownField(
                    f"choices[{index}].{name}",
                    _STREAMED[name],
                    _calls(values) if _STREAMED[name] == "tool_calls" else _text(values),
                    echo=name == "text",
                )
                for name, values in parts.items()
            ]
            for index, parts in self._choices.items()
        }
