"""What can go wrong, as types. A message says what was expected, what was found, and where."""


class GemmaError(Exception):
    """Any failure that a user can act on. The command line prints it as one line."""


class GemmaWarning(UserWarning):
    """Something works, but not as well as it could."""


class FormatError(GemmaError):
    """A model file that is damaged, hostile or not of the form it claims."""


class UnsupportedError(GemmaError):
    """A sound file that asks for something this runtime does not do."""


class ConfigError(GemmaError):
    """A model description that is incomplete or contradicts its weights."""


class TokenizerError(GemmaError):
    """A tokenizer that cannot be built, or text that it cannot take."""


class ModelNotFoundError(GemmaError):
    """No model at the path or under the name given."""


class ContextError(GemmaError):
    """More tokens than the context holds; raised before any work starts."""


class InputError(GemmaError):
    """An invalid argument or input: ids outside the vocabulary, an empty prompt, a closed engine."""


class ToolError(InputError):
    """A declaration, a call or a result of a tool that is invalid. `field`: where it stands, such as `messages[2].tool_calls`."""

    def __init__(self, message: str, field: str) -> None:
        self.field = field
        super().__init__(message)


class Overloaded(GemmaError):
    """No room for a request now; there may be some after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class TemplateError(GemmaError):
    """A chat template that fails, never ends, or makes of a conversation what cannot be encoded safely."""


class ComputationError(GemmaError):
    """A forward pass that gave no numbers."""


class MismatchError(GemmaError):
    """Two ways to one result that gave different bits. The promise is broken, and the message says where."""


class WorkerError(ComputationError):
    """A worker that raised, gave up, stalled or died, and where; layer and phase are None before it entered any.

    `settled`: every worker has left the run, so its arrays are nobody's and may be used again. If not, a stalled worker
    may still write to arrays of the failed run, once it wakes and until its next wait: drop them.
    """

    def __init__(
        self, worker: int, workers: int, layer: int | None, phase: int | None, what: str, name: str | None = None
    ) -> None:
        self.worker, self.workers, self.layer, self.phase, self.what = worker, workers, layer, phase, what
        self.settled = True
        where = f"in layer {layer}, phase {phase if name is None else name}"
        if layer is None:
            where = "before its first phase"
        super().__init__(f"worker {worker} of {workers} {what} {where}")
