"""Reports about the progress of long work, which the library sends to a function of the caller."""

from collections.abc import Callable

# The arguments are a description of the work, the amount done, the total amount, and the unit ("bytes" or "kernels").
# The first call for a piece of work has amount 0. If the function raises an exception, the work ends.
ReportProgress = Callable[[str, int, int, str], None]


def no_report(what: str, done: int, total: int, unit: str) -> None:
    """Ignore a progress report. Parameters named `progress` have this default."""
