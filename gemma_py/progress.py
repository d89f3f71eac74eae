"""The type of callbacks that receive progress reports."""

from collections.abc import Callable

# Arguments: a description of the work, the amount done, the total amount, the unit ("bytes" or "kernels"). The first call
# for each description has amount 0. If the callback raises an exception, the work stops.
ReportProgress = Callable[[str, int, int, str], None]


def no_report(what: str, done: int, total: int, unit: str) -> None:
    """The default callback, which ignores reports."""
