"""Plots, with matplotlib (extra `plot`)."""

from pathlib import Path
from typing import Any

from gemma_py.errors import InputError, install_command
from gemma_py.paths import atomic_write, check_writable


def check_drawable(path: Path) -> None:
    """Raise InputError if no figure can be written to the path. Commands call this before a long measurement."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise InputError(f"figures need matplotlib: {install_command('plot')}") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in kinds:
        raise InputError(f"{path}: the name should end in one of {', '.join(f'.{kind}' for kind in sorted(kinds))}")
    check_writable(path)


def panels(count: int, title: str) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * count, 4.2), layout="constrained")
    figure.suptitle(title)
    axes = list(figure.subplots(1, count, squeeze=False)[0])
    for ax in axes:
        ax.grid(True, alpha=0.3)
    return figure, axes


def draw(ax: Any, label: str, x: list[int], y: list[float]) -> None:
    ax.plot(x, y, marker="o", label=label)


def finish(ax: Any, title: str, x_label: str, y_label: str, ticks: list[int], log: bool = False) -> None:
    """ticks: the x values to mark."""
    ax.set(title=title, xlabel=x_label, ylabel=y_label)
    if log:
        ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    if len(ax.lines) > 1:
        ax.legend()


def save(figure: Any, path: Path) -> None:
    with atomic_write(path) as file:
        figure.savefig(file, format=path.suffix[1:], dpi=120)
