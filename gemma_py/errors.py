"""The exceptions of gemma_py, and the command that messages about a missing package give."""


def install_command(extra: str) -> str:
    """Return the command that installs an optional part of gemma_py, for messages about a missing package."""
    return f"pip install 'gemma_py[{extra}]' (in a clone: pip install -e '.[{extra}]')"


class GemmaError(Exception):
    """The base class of gemma_py's exceptions. The command line prints the message of a GemmaError without a traceback."""


class GemmaWarning(UserWarning):
    """A problem that gemma_py can work around, such as a cache directory that is not writable."""


class FormatError(GemmaError):
    """A model file is damaged or violates its format."""


class UnsupportedError(GemmaError):
    """A valid model file needs a feature that gemma_py does not have."""


class ConfigError(GemmaError):
    """A model's config is incomplete or contradicts the model's weights."""


class TokenizerError(GemmaError):
    """A tokenizer cannot be built, or cannot encode a text."""


class ModelNotFoundError(GemmaError):
    """No model exists at the given path or under the given name."""


class ContextError(GemmaError):
    """A request needs more tokens than the context has. Raised before the first forward pass."""


class InputError(GemmaError):
    """An argument is invalid, such as an empty prompt or a token id outside the vocabulary."""


class ToolError(InputError):
    """A tool's declaration, call or result is invalid. field: the invalid field, such as `messages[2].tool_calls`."""

    def __init__(self, message: str, field: str) -> None:
        self.field = field
        super().__init__(message)


class Overloaded(GemmaError):
    """The server has too many requests. The client may retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        self.retry_after = retry_after
        super().__init__(message)


class TemplateError(GemmaError):
    """A chat template fails, runs too long, or changes the text of messages."""


class ComputationError(GemmaError):
    """A forward pass failed."""


class MismatchError(GemmaError):
    """Two computations that should give equal bits gave different bits."""


class WorkerError(ComputationError):
    """A worker thread raised an exception, reported a failure, stalled or died.

    layer, phase: where the worker was; None if the worker had not begun any phase
    settled: whether all workers have stopped. If False, a stalled worker may still write to the arrays of the failed pass,
    so these arrays must not be used again.
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


class ShardError(WorkerError):
    """A process that computes some of the model's layers ended, stalled or reported an error.

    worker, workers: the number of the process, from 0, and the number of processes. span: the process's layers.
    """

    def __init__(self, shard: int, shards: int, span: str, what: str) -> None:
        super().__init__(shard, shards, None, None, what)
        self.args = (f"shard {shard + 1} of {shards}, {span}, {what}",)
