"""Renders chat templates in a process of its own. template.py runs this file as a program; it imports nothing of gemma_py.

A template is an untrusted program. jinja2's sandbox keeps it from attributes and files, but not from loops
and from memory (`'a' * 10**9`, `range` within `range`): only a process can be bounded and killed. So this one takes a line
of JSON, {"template", "globals", "conversations": [messages, ...]}, and answers with one, {"texts": [...]} or {"error"}.
"""

import datetime
import functools
import json
import pprint  # noqa: F401  (as debug, constants and textwrap: jinja2 imports them late, when no file can be opened)
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

MEMORY = 1 << 30  # bytes of address space; Python and jinja2 take some 50 MB of them
SECONDS = 10  # of processor time for one answer; the parent process waits less, so this ends one whose parent is gone
OUTPUT = 64 << 20  # characters


class _Generation(jinja2.ext.Extension):
    """{% generation %} marks what an assistant said, for training; here it is only passed through."""

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
    """Without jinja2's escapes for HTML, as Hugging Face has it."""
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
    now = datetime.datetime.now()  # once: two renderings of one request must not fall on two days
    template = _compiled(request["template"])
    texts = []
    for messages in request["conversations"]:
        parts, size = [], 0
        for part in template.generate(messages=messages, strftime_now=now.strftime, **request["globals"]):
            parts.append(part)
            size += len(part)
            if size > OUTPUT:
                raise jinja2.TemplateError(f"it makes more than {OUTPUT} characters")
        texts.append("".join(parts))
    return texts


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer, ensure_ascii=False).encode() + b"\n"


def _limit() -> None:
    """Forbid new files and memory beyond MEMORY; each request has its own limit of processor time."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _allow(seconds: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds, hard))


def main() -> None:
    _compiled(
        "{{ 'a' | trim }}"
    ).render()  # modules that Jinja imports at its first rendering are loaded before the limits apply
    _limit()
    for line in sys.stdin.buffer:
        _allow(SECONDS)
        try:
            answer = _line({"texts": _render(json.loads(line))})
        except MemoryError:
            answer = _line({"error": f"it takes more than {MEMORY >> 20} MiB"})
        except jinja2.TemplateSyntaxError as error:
            answer = _line({"error": f"line {error.lineno}: {error.message}"})
        except RecursionError:
            answer = _line({"error": "it calls itself without end"})
        except Exception as error:
            answer = _line({"error": f"{error}" if isinstance(error, jinja2.TemplateError) else f"{error!r:.300}"})
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
