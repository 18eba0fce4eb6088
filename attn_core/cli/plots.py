"""The plots of ``attn bench`` and ``attn compare``. Every command that draws gets its empty figure here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from statistics import geometric_mean
from textwrap import fill
from typing import Any

from attn_core.cli.comparison import Row
from attn_core.cli.trial import Trial
from attn_core.errors import SpecError
from attn_core.selection.cross_validation import Fitting
from attn_core.selection.regret import Regret
from attn_core.selection.whole_file import write_whole

BLUE, ORANGE = "#0072b2", "#d55e00"
"""Colours that people with any kind of colour vision can tell apart (Okabe and Ito, 2008)."""

FRAMEWORK_STYLES = {"torch": (ORANGE, "o"), "jax": (BLUE, "s")}
DIRECTION_STYLES = {"forward": (BLUE, "o"), "training": (ORANGE, "^")}
"""Colour and marker. The marker tells them apart in a grey print, too."""

SLOWER = 0.95
"""A call below this speed counts as slower; closer to 1 it may be noise."""

Speeds = dict[tuple[str, str], list[tuple[float, str]]]
"""By function and direction: (times as fast, call)."""


def save(figure: Any, path: Path) -> None:
    """Writes a figure in one step, in the format that the file's ending names, PNG if it has none.

    Raises:
        SpecError: for an ending that matplotlib does not know, or a file that cannot be written.
    """
    content = BytesIO()
    try:
        figure.savefig(content, format=path.suffix[1:] or "png", dpi=150)
    except ValueError as error:
        raise SpecError(f"{path}: cannot be drawn: {error}") from None
    write_whole(content.getvalue(), path)


def empty_figure(width: float, height: float, option: str = "--plot") -> Any:
    """Returns an empty matplotlib figure.

    Args:
        width, height: in inches.
        option: the option of the command line that asks for a picture, for the error.

    Raises:
        SpecError: if matplotlib is not installed.
    """
    try:
        # Figure instead of pyplot, which may look for a display.
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SpecError(f"{option}: matplotlib is not installed; pip install 'attn-core[cli]'") from None
    return Figure(figsize=(width, height), layout="constrained")


def sweep_figure(fitting: Fitting, speeds: Speeds, chosen: Sequence[Regret]) -> Any:
    """Draws a sweep: the speed of automatic choice beside the framework's functions, and what the choice costs.

    Both panels sort the calls, so the height at 10% is a value that one call in ten does not reach.

    Args:
        speeds: how many times as fast automatic choice is; without any, the panel is left out.
        chosen: the cost of the choice in each call.
    """
    curves = {
        f"{name}, {direction}": (direction, [ratio for ratio, _ in pairs])
        for (name, direction), pairs in speeds.items()
    }
    figure = empty_figure(11 if curves else 6.5, 4.5)
    *beside, cost = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    for axes in beside:
        for label, (direction, ratios) in curves.items():
            slower = sum(ratio < SLOWER for ratio in ratios)
            facts = f"{geometric_mean(ratios):.2f} (geometric mean), {slower} of {len(ratios)} below {SLOWER}"
            _sorted_calls(axes, ratios, f"{label}: {facts}", direction, hollow="cuDNN" in label)
        axes.set(title="speed beside the framework's own functions", ylabel="times as fast (log scale)")
    costs = {
        direction: [each.ratio for each in chosen if each.training is training and math.isfinite(each.ratio)]
        for direction, training in (("forward", False), ("training", True))
    }
    for direction, ratios in costs.items():
        if ratios:
            facts = f"{geometric_mean(ratios):.3f} (geometric mean), worst {max(ratios):.2f}"
            _sorted_calls(cost, ratios, f"{direction}: {facts}", direction)
    cost.set(title="cost of automatic choice", ylabel="its time / fastest backend's time (log scale)")
    for axes in (*beside, cost):
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(xlabel="calls, sorted (%)", xlim=(0, 100), yscale="log")
        _plain_ticks(axes.yaxis)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper left")
    raw = fitting.raw
    figure.suptitle(f"attn bench in {raw['framework']} on {raw['device_name']}, {raw['date']}", fontsize=10)
    return figure


def _sorted_calls(axes: Any, ratios: Sequence[float], label: str, direction: str, hollow: bool = False) -> None:
    colour, marker = DIRECTION_STYLES[direction]
    shares = [100 * (place + 0.5) / len(ratios) for place in range(len(ratios))]
    fill = "none" if hollow else colour
    axes.plot(
        shares,
        sorted(ratios),
        color=colour,
        marker=marker,
        markersize=4,
        markerfacecolor=fill,
        linewidth=0.8,
        label=label,
    )


def _plain_ticks(axis: Any) -> None:
    """Writes plain numbers at a log axis, because powers of ten leave most of it without a number."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high > 4 * low else (1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def comparison_figure(trial: Trial, rows: Sequence[Row]) -> Any:
    """Draws one call on every backend that ran it: its time, fastest first, and its error beside the allowed error."""
    ran = sorted(((row.outcome.milliseconds, row) for row in rows if row.outcome is not None), key=lambda pair: pair[0])
    figure = empty_figure(9, 1.8 + 0.36 * max(len(ran), 1))
    times, errors = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    places = range(len(ran))
    for place, (time, row) in zip(places, ran):
        colour, marker = FRAMEWORK_STYLES[row.framework]
        # Points instead of bars: on a log scale the length of a bar means nothing.
        times.plot(time, place, marker, color=colour)
        behind = "fastest" if place == 0 else f"{time / ran[0][0]:.2g} times as long"
        times.annotate(f"   {time:.3g} ms, {behind}", (time, place), va="center", fontsize=8)
        if row.accuracy is not None:
            errors.plot(row.accuracy.worst, place, marker, color=colour)
    times.set_yticks(list(places), [f"{row.backend} in {row.framework}" for _, row in ran])
    times.set(xlabel="median time, ms (log scale)", xscale="log")
    times.invert_yaxis()
    if ran:
        # Room at the right for the text behind the last point.
        times.set_xlim(ran[0][0] / 1.5, ran[-1][0] * 8)
    _plain_ticks(times.xaxis)
    errors.axvline(1.0, color="black", linewidth=0.8)
    errors.set(xlabel="error / allowed error (1 is the limit)", xlim=(0, None))
    for axes in (times, errors):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    handles = [times.plot([], [], marker, color=colour)[0] for colour, marker in FRAMEWORK_STYLES.values()]
    figure.legend(handles, FRAMEWORK_STYLES, loc="outside lower right", ncols=2, fontsize=8, frameon=False)
    figure.suptitle(fill(str(trial.spec), 110), fontsize=9)
    return figure
