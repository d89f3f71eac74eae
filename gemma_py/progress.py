"""Progress reports of long work, which the library sends to a function that the caller provides."""

from collections.abc import Callable

# The arguments: a description of the work, the amount done, the total amount, and the unit ("bytes" or "kernels"). The first
# call for a piece of work has amount 0. An exception in the function ends the work.
ReportProgress = Callable[[str, int, int, str], None]


def no_report(what: str, done: int, total: int, unit: str) -> None:
    """Ignore a progress report. This is the default for parameters named `progress`."""
