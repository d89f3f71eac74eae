"""How the library says what takes long: it calls a function that its caller gives, and prints nothing.

A notice ("packed weights are not kept, so every start takes longer") is a Python warning of `errors.GemmaWarning` instead:
it is visible where nobody asked for progress, said once a process, and can be filtered or turned into an error.
"""

from collections.abc import Callable

# (what is being done, how much of it is done, how much there is, in which unit: "bytes" or "kernels"). The first call for
# a piece of work has nothing done. A function that raises ends the work.
ReportProgress = Callable[[str, int, int, str], None]


def no_report(what: str, done: int, total: int, unit: str) -> None:
    """For callers who do not want to know."""
