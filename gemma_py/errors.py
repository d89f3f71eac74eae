"""What can go wrong, as types. A message says what was expected, what was found, and where."""


class GemmaError(Exception):
    """Any failure that a user can act on. The command line prints it as one line."""


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
    """Arguments or input that cannot be meant: ids outside the vocabulary, an empty prompt, a closed engine."""


class ComputationError(GemmaError):
    """A forward pass that gave no numbers."""
