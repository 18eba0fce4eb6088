"""Draws a plot of docs/lab/training.md: the two loss curves, and below them their difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from examples.training.report import difference, label, losses
from examples.training.run import FAULT, JAX, TORCH, TWIN

COLOURS = {JAX: "#c44e00", TWIN: "#808080", FAULT: "#7a2d8f"}


def draw(result: dict[str, Any], path: Path) -> None:
    """Writes the PNG.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("the plot needs matplotlib; pip install 'attn-core[cli]'") from None
    figure = Figure(figsize=(9, 7), layout="constrained")
    curves, gaps = figure.subplots(2, 1, sharex=True)
    _curves(curves, result)
    _gaps(gaps, result)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _curves(axes: Any, result: dict[str, Any]) -> None:
    axes.plot(losses(result, TORCH), color="#9ec4e8", linewidth=5, label="torch")
    axes.plot(losses(result, JAX), color=COLOURS[JAX], linewidth=1, label="JAX")
    axes.set(ylabel="loss, nats per byte", title="The same model in torch and in Flax")
    axes.legend()
    axes.grid(alpha=0.3)


def _gaps(axes: Any, result: dict[str, Any]) -> None:
    """Draws |loss - torch's loss| of each other run. The axis is logarithmic, so equal losses are at the bottom."""
    spacing = np.spacing(losses(result, TORCH).astype(np.float32))  # of float32 numbers as large as the loss
    bottom = float(spacing.min()) / 4
    for name in (FAULT, TWIN, JAX):
        if name in result["runs"]:
            gap = np.maximum(difference(result, name), bottom)
            axes.plot(gap, ".-", color=COLOURS[name], linewidth=0.8, markersize=3, label=label(result, name))
    axes.plot(spacing, color="black", linewidth=0.8, linestyle=":", label="one float32 step at that loss")
    axes.set(yscale="log", xlabel="step", ylabel="difference from torch's loss", ylim=(bottom, None))
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axes.grid(alpha=0.3)
