"""Masks tell the text of messages from the template's own text in a rendered prompt.

A template is rendered twice. In the first rendering, each character of a message's text, except white space, is replaced by
a code point of Unicode's private-use planes. In the second rendering, only delimiters are replaced: the characters with
which a control token begins or ends. So a control token in a rendering never comes from a message. If the renderings differ
in more than the replaced characters, then the template changes or inspects the text of messages.

In tool declarations and tool calls, only delimiters are replaced, in the first rendering too. Templates sort the keys and
compare the types of declarations, so masks of other characters would change the prompt.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gemma_py.errors import InputError

# The first code points of three ranges of masks: for system, user and tool texts; for the model's texts; for delimiters.
_OTHERS, _ANSWERS, _DELIMITERS, _END = 0xF0000, 0x100000, 0x10FF00, 0x110000
_ROOM = 0xFF00  # limit on the distinct characters that one plane can mask
_PRIVATE = re.compile(f"[{chr(_OTHERS)}-{chr(_END - 1)}]")
_MASKED = f"{chr(_OTHERS)}-{chr(_END - 1)}"
MESSAGE = re.compile(rf"([{_MASKED}](?:[\s{_MASKED}]*[{_MASKED}])?)")
OF_OTHERS = re.compile(f"[{chr(_OTHERS)}-{chr(_ANSWERS - 1)}{chr(_DELIMITERS)}-{chr(_END - 1)}]")
_TEXTS = ("content", "reasoning_content", "reasoning")


class Masks:
    """The masks of one prompt.

    messages: for the first rendering; every character of the texts is masked, except white space
    delimited: the messages for the second rendering; only delimiters are masked
    tools: the tool declarations for both renderings; only delimiters are masked
    """

    def __init__(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any], delimiters: str) -> None:
        given = json.dumps([messages, tools], ensure_ascii=False)
        try:
            given.encode("utf-8")
        except UnicodeEncodeError:
            raise InputError("the messages or tools contain an unpaired surrogate, which is not a character") from None
        private = _PRIVATE.findall(given)  # private-use characters of a message would look like masks, so mask them too
        masked = sorted({*delimiters, *private})
        if len(masked) > _END - _DELIMITERS - 2:
            raise InputError("the messages contain too many different private-use characters")
        self._originals = np.arange(_OTHERS, _END, dtype="<u4")
        self._originals[_DELIMITERS - _OTHERS :][: len(masked)] = [ord(character) for character in masked]
        self._table = {ord(character): _DELIMITERS + number for number, character in enumerate(masked)}
        self.tools = self._delimited(list(tools))
        self.messages: list[dict[str, Any]] = []
        self.delimited: list[dict[str, Any]] = []
        places: dict[int, list[tuple[dict[str, Any], str]]] = {_OTHERS: [], _ANSWERS: []}
        # Each turn of a conversation runs this loop over all messages. The loop avoids calls of Python functions, which are slow.
        for message in messages:
            whole, partly = {**message}, {**message}
            mine = places[_ANSWERS if message["role"] == "assistant" else _OTHERS]
            for name in message:
                if name in _TEXTS:
                    partly[name] = message[name].translate(self._table)
                    mine += ((whole, name),)
                elif name != "role":
                    whole[name] = partly[name] = self._delimited(message[name])
            self.messages += (whole,)
            self.delimited += (partly,)
        for plane, texts in places.items():
            self._mask(plane, texts)

    def _delimited(self, value: Any) -> Any:
        """Return a copy of the value with all delimiters in strings and keys masked."""
        if isinstance(value, str):
            return value.translate(self._table)
        if isinstance(value, Mapping):
            return {self._delimited(key): self._delimited(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._delimited(inner) for inner in value]
        return value

    def _mask(self, plane: int, texts: list[tuple[dict[str, Any], str]]) -> None:
        """Mask texts in place with code points of one plane. texts: (message, field name) of each text.

        numpy masks all texts at once. A Python loop over the characters of a long conversation would delay each turn.
        """
        codes = characters("".join([message[name] for message, name in texts]))
        distinct = np.unique(codes)
        letters = ~np.array([chr(code).isspace() for code in distinct], bool)
        count = np.count_nonzero(letters)
        if count > _ROOM:
            raise InputError(f"the messages contain more than {_ROOM:,} different characters")
        self._originals[plane - _OTHERS :][:count] = distinct[letters]
        mask = distinct.copy()
        mask[letters] = np.arange(plane, plane + count)
        masked = mask[np.searchsorted(distinct, codes)].tobytes().decode("utf-32-le")
        at = 0
        for message, name in texts:
            end = at + len(message[name])
            message[name], at = masked[at:end], end

    def original(self, text: str) -> np.ndarray:
        """Return the characters of the first rendering, with the original characters in place of masks."""
        return self._unmasked(text, _OTHERS)

    def original_of_delimiters(self, text: str) -> np.ndarray:
        """Return the characters of the second rendering, with the original delimiters in place of masks.

        Other private-use characters were written by the template itself and stay unchanged.
        """
        return self._unmasked(text, _DELIMITERS)

    def _unmasked(self, text: str, first: int) -> np.ndarray:
        codes = characters(text)
        return np.where(codes < first, codes, self._originals[np.maximum(codes, _OTHERS) - _OTHERS])


def characters(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), "<u4")
