"""The chat template of a model, together with the tokenizer and the control tokens around thoughts and tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from gemma_py.errors import InputError, ToolError
from gemma_py.templates.notation import Marks, marks_of
from gemma_py.templates.template import ROLES, Encoded, Template, checked_messages, encode
from gemma_py.templates.tools import calls_and_results, declarations
from gemma_py.tokenizer import Tokenizer

NO_TOOLS = "This model's chat template does not support tools."


class ChatFormat:
    """A chat template, and the control tokens that mark the model's thoughts and tool calls.

    knows_tools: whether the template and the vocabulary support tools
    knows_thinking: whether the template and the vocabulary support thoughts
    """

    def __init__(self, template: Template, tokenizer: Tokenizer) -> None:
        self.template, self.tokenizer = template, tokenizer
        self._marks = marks_of(tokenizer)
        self.knows_tools = template.knows_tools and self._marks is not None
        self.knows_thinking = template.knows_thinking and self._marks is not None and self._marks.channel is not None

    def marks(self, tools: bool) -> Marks | None:
        """Return the marks to recognise in an answer, or None for a model without marks.

        tools: whether the request declares tools; otherwise tool calls are not recognised
        """
        return self._marks if self._marks is None or (tools and self.knows_tools) else self._marks.without_calls()

    def check_thinking(self, thinking: bool | None) -> None:
        if thinking and not self.knows_thinking:
            raise InputError(
                f"this model does not think before it answers, because {self.template.name} has no switch for thoughts"
            )

    def prompt(
        self,
        messages: Any,
        tools: Sequence[Mapping[str, Any]] = (),
        thinking: bool | None = None,
        known: Mapping[str, list[int]] | None = None,
        encoded: Encoded | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt. messages, tools: in OpenAI's format. known, encoded: see `template.encode`."""
        self.check_thinking(thinking)
        declared = declarations(tools)
        if declared and not self.knows_tools:
            raise ToolError(NO_TOOLS, "tools")
        checked = checked_messages(messages, (*ROLES, "tool") if self.knows_tools else ROLES)
        extras = calls_and_results(messages)
        for number, extra in enumerate(extras):
            if extra and not self.knows_tools:
                raise ToolError(NO_TOOLS, f"messages[{number}]")
        told = [message | extra for message, extra in zip(checked, extras, strict=True)]
        pieces = self.template.pieces(told, declared, thinking if self.knows_thinking else None)
        return encode(pieces, self.tokenizer, known, encoded)
