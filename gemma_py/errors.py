"""The exceptions of gemma_py. A message says what was expected, what was found, and where."""


class GemmaError(Exception):
    """Any failure that a user can act on. The command line prints it as one line."""


class GemmaWarning(UserWarning):
    """Something works, but not as well as it could."""


class FormatError(GemmaError):
    """A model file that is damaged, malicious or not of the format that it claims."""


class UnsupportedError(GemmaError):
    """A valid file that needs something this runtime does not support."""


class ConfigError(GemmaError):
    """A model description that is incomplete or contradicts its weights."""


class TokenizerError(GemmaError):
    """A tokenizer that cannot be built, or text that it cannot encode."""


class ModelNotFoundError(GemmaError):
    """No model at the path or under the name given."""


class ContextError(GemmaError):
    """More tokens than the context holds; raised before any work starts."""


class InputError(GemmaError):
    """An invalid argument or input: ids outside the vocabulary, an empty prompt, a closed engine."""


class ToolError(InputError):
    """An invalid declaration, call or result of a tool. `field`: its place in the request, such as `messages[2].tool_calls`."""

    def __init__(self, message: str, field: str) -> None:
        self.field = field
        super().__init__(message)


class Overloaded(GemmaError):
    """There is no room for a request now; there may be after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class TemplateError(GemmaError):
    """A chat template that fails, does not end, or renders text that cannot be encoded safely."""


class ComputationError(GemmaError):
    """A forward pass that failed."""


class MismatchError(GemmaError):
    """Two ways to compute one result gave different bits. The message says where they differ."""


class WorkerError(ComputationError):
    """A worker raised, reported a failure, stalled or died. layer, phase: where it was; None before it entered any.

    settled: every worker has left the failed run, so the arrays of the run may be used again. Where it is False, a stalled
    worker may still write to them when it wakes, so they must not be used again.
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
