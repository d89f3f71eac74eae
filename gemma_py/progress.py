"""Progress reports: the library prints nothing; it calls a function that the caller provides.

A notice ("packed weights are not cached, so every start takes longer") is a Python warning, `errors.GemmaWarning`, instead:
it is visible without a progress function, appears once a process, and can be filtered or turned into an error.
"""

from collections.abc import Callable

# (what is being done, how much of it is done, how much there is in all, the unit: "bytes" or "kernels"). The first call for
# a piece of work has 0 done. If the function raises, the work ends.
ReportProgress = Callable[[str, int, int, str], None]


def no_report(what: str, done: int, total: int, unit: str) -> None:
    """Ignore the report: the default."""
