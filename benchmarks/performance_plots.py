"""Draws the plots of docs/explanation/performance.md from the stored results."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

ONE_GPU = "one GPU"


def strategies(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Returns the seconds of the strategies, without one GPU and without runs that send nothing."""
    return {name: each for name, each in seconds.items() if name != ONE_GPU and not name.endswith("nothing sent")}


def efficiency(seconds: dict[str, list[float]], world: int) -> float:
    """Returns the time of one GPU divided by the time of the fastest strategy and by the number of ranks."""
    each = (
        statistics.median(one / (world * several) for one, several in zip(seconds[ONE_GPU], times, strict=True))
        for times in strategies(seconds).values()
    )
    return max(each)


def draw(hopper: dict[str, Any], context_parallel: dict[str, Any], folder: Path) -> None:
    """Writes both plots of the page as PNG files.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise SystemExit("the plots need matplotlib; pip install 'attn-core[cli]'") from None
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, title, groups in zip(figure.subplots(1, 3), BARS, BARS.values(), strict=True):
        _bars(axes, title, [_speeds(hopper, *group) for group in groups])
    figure.savefig(folder / "performance-h200.png", dpi=120)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (world, frameworks) in zip(figure.subplots(1, 2), context_parallel.items(), strict=True):
        _lines(axes, int(world), frameworks["torch"]["speed"])
    figure.savefig(folder / "performance-context-parallel.png", dpi=120)


BARS = {
    "torch, causal": (
        ("attention", "attention() beside the bare kernels, forward"),
        ("attention", "attention() beside the bare kernels, forward + backward"),
    ),
    "torch, softcap 50": (("softcap", "softcap 50, forward"), ("softcap", "softcap 50, forward + backward")),
    "jax.jit, causal": (("jax", "JAX under jit, forward"), ("jax", "JAX under jit, forward + backward")),
}
"""The groups of each panel: forward, and forward + backward."""


def _speeds(result: dict[str, Any], measure: str, title: str) -> dict[str, float]:
    """Returns the TFLOP/s of our call with automatic choice, and of every other library."""
    group = next(group for group in result["measures"][measure]["groups"] if group["title"] == title)
    ours = ("attention", "attention in JAX")
    return {
        "attention" if name in ours else name.removeprefix("bare "): speed
        for name, speed in group["tflops"].items()
        if name in ours or not name.startswith("attention")
    }


def _bars(axes: Any, title: str, speeds: list[dict[str, float]]) -> None:
    forward, both = speeds
    names = sorted(forward, key=lambda name: forward[name])
    places = range(len(names))
    colours = [("#c44e00", "#f0b48a") if name == "attention" else ("#35618f", "#a9c3de") for name in names]
    axes.barh([at + 0.2 for at in places], [forward[name] for name in names], 0.38, color=[each[0] for each in colours])
    axes.barh(
        [at - 0.2 for at in places], [both.get(name, 0.0) for name in names], 0.38, color=[each[1] for each in colours]
    )
    axes.set_yticks(list(places), names)
    axes.set(title=title, xlabel="TFLOP/s\n(pale: forward + backward)")
    axes.grid(axis="x", alpha=0.3)


def _lines(axes: Any, world: int, speed: list[dict[str, Any]]) -> None:
    for word, style in (("forward", "o--"), ("forward + backward", "o-")):
        shares = [efficiency(row["seconds"][word], world) for row in speed]
        axes.plot([row["shard"] // 1024 for row in speed], shares, style, label=word)
    axes.set(title=f"{world} GPUs", xlabel="tokens per rank, in units of 1024", ylabel="share of linear speedup")
    axes.set(ylim=(0.8, 1.02), xticks=[row["shard"] // 1024 for row in speed])
    axes.grid(alpha=0.3)
    axes.legend()
