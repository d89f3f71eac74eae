"""Render chat templates in a separate process. template.py runs this file as a program that does not import gemma_py.

A chat template is untrusted code. jinja2's sandbox blocks attributes and files, but not endless loops or huge strings
such as `'a' * 10**9`. Against loops and huge strings, the process has limits on CPU time and memory.

Each line of input is a JSON object {"template", "globals", "conversations": [messages, ...]}, and each line of output
is {"texts": [...]} or {"error"}.
"""

import datetime
import functools
import json
import pprint  # noqa: F401  (otherwise jinja2 would import pprint later, when no file can be opened)
import resource
import sys
import textwrap  # noqa: F401
from typing import Any

import jinja2
import jinja2.constants
import jinja2.debug
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

MEMORY = 1 << 30  # bytes of address space
# CPU time limit of a request. The parent process has a shorter limit, so this limit matters only if the parent has died.
SECONDS = 10
OUTPUT = 64 << 20  # limit on the characters of a rendered prompt


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, with which templates mark assistant text for training. The text inside is rendered as usual."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

    def _said(self, caller: Any) -> str:
        text: str = caller()
        return text


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Convert a value to JSON as transformers does, without the HTML escapes of jinja2."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: Any) -> None:
    raise jinja2.TemplateError(f"the template says: {message}")


@functools.lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    return environment.from_string(source)


def _render(request: dict[str, Any]) -> list[str]:
    now = datetime.datetime.now()  # read once, because all renderings of a prompt must have the same time
    template = _compiled(request["template"])
    texts = []
    for messages in request["conversations"]:
        parts, size = [], 0
        for part in template.generate(messages=messages, strftime_now=now.strftime, **request["globals"]):
            parts.append(part)
            size += len(part)
            if size > OUTPUT:
                raise jinja2.TemplateError(f"the template renders more than {OUTPUT} characters")
        texts.append("".join(parts))
    return texts


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"


def _limit() -> None:
    """Limit the address space to MEMORY, and forbid opening files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _allow(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


def main() -> None:
    # jinja2 imports modules when it first renders a template. Render one now, because no file can be opened after `_limit`.
    _compiled("{{ 'a' | trim }}").render()
    _limit()
    for line in sys.stdin.buffer:
        _allow(SECONDS)
        try:
            answer = _line({"texts": _render(json.loads(line))})
        except MemoryError:
            answer = _line({"error": f"the template needs more than {MEMORY >> 20} MiB of memory"})
        except jinja2.TemplateSyntaxError as error:
            answer = _line({"error": f"line {error.lineno}: {error.message}"})
        except RecursionError:
            answer = _line({"error": "the template recurses without end"})
        except Exception as error:
            answer = _line({"error": f"{error}" if isinstance(error, jinja2.TemplateError) else f"{error!r:.300}"})
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
