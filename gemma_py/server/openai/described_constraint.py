"""Rebuild the constraint of an answer, such as a JSON schema, from the answer's receipt, for an audit."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from gemma_py.checks.audit import UndecidableError
from gemma_py.errors import FormatError, install_command
from gemma_py.generate.answer import AfterThoughts, Constraint
from gemma_py.generate.engine import Engine
from gemma_py.server.openai.constraint import JsonConstraints
from gemma_py.server.openai.errors import ApiError
from gemma_py.templates.notation import CallConstraint, marks_of


def constraint_maker(engine: Engine) -> Callable[[Mapping[str, Any]], Constraint]:
    """Return a function that converts `request.constraint` of a receipt to a Constraint.

    The function raises FormatError for an invalid constraint, and UndecidableError if the constraint's version of llguidance
    is not installed.
    """
    compilers: dict[tuple[int, ...], JsonConstraints] = {}

    def json_constraint(description: Mapping[str, Any]) -> Constraint:
        try:
            import llguidance
        except ModuleNotFoundError:
            raise UndecidableError(
                f"the answer follows a JSON schema, and checking that needs llguidance: {install_command('schema')}"
            ) from None
        version, ends, schema = (description.get(name) for name in ("llguidance", "ends", "schema"))
        if version != llguidance.__version__:
            raise UndecidableError(
                f"the answer was made with llguidance {version!r:.40}, and checking it needs that version; found llguidance "
                f"{llguidance.__version__}"
            )
        vocabulary = engine.config.vocab_size
        if (
            not isinstance(ends, list)
            or not ends
            or not all(type(end) is int and 0 <= end < vocabulary for end in ends)
        ):
            raise FormatError("request.constraint.ends should be a list of token ids")
        if not isinstance(schema, str):
            raise FormatError("request.constraint.schema should be a JSON schema as text")
        compiler = compilers.get(tuple(ends))
        if compiler is None:
            compiler = compilers[tuple(ends)] = JsonConstraints(engine.text_tokenizer(), vocabulary, ends)
        try:
            return compiler.compile(json.loads(schema), "request.constraint.schema")
        except (ApiError, ValueError, RecursionError) as error:
            raise FormatError(f"request.constraint.schema: {' '.join(str(error).split()):.200}") from None

    def make(description: Mapping[str, Any]) -> Constraint:
        kind, thoughts = description.get("kind"), description.get("thoughts")
        made: Constraint
        if kind == "json_schema":
            made = json_constraint(description)
        elif kind == "tool_call" and isinstance(description.get("name"), str | None):
            marks = marks_of(engine.text_tokenizer())
            if marks is None:
                raise FormatError("request.constraint requires a tool call, but this model does not support tool calls")
            made = CallConstraint(engine.text_tokenizer(), marks, description["name"])
        else:
            raise FormatError(f"request.constraint.kind should be 'json_schema' or 'tool_call', found {kind!r:.40}")
        if thoughts is not None:
            channel, begun = (
                thoughts.get(name) if isinstance(thoughts, dict) else None for name in ("channel", "begun")
            )
            if not isinstance(channel, list) or len(channel) != 2 or not isinstance(begun, bool):
                raise FormatError("request.constraint.thoughts should have the fields channel and begun")
            made = AfterThoughts(made, (channel[0], channel[1]), begun)
        if made.description != description:
            raise FormatError("request.constraint should have exactly the fields and values that gemma_py writes")
        return made

    return make
