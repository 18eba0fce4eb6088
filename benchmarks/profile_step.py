"""Profiles training steps of a small model on this CPU, and draws the fastest as in docs/how_to/profile.md.

python -m benchmarks.profile_step                                        # prints the ranges of a step
python -m benchmarks.profile_step --png docs/images/profile-step.png     # also draws them
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import environment
from torch_frontend.module import Attention

WIDTH, HEADS, TOKENS, BATCH = 256, 4, 1024, 2
LAYERS: tuple[dict[str, Any], ...] = ({"window": 256}, {"softcap": 50.0}, {})
"""The options of each layer's attention, besides causal. The second one needs another backend than the others."""
PHASES = ("forward", "backward", "optimizer")
COLOURS = {"sdpa_flash": "#0072B2", "math": "#D55E00"}  # of Okabe and Ito, for every kind of colour vision
OTHER = "#8C8C8C"


class Event(NamedTuple):
    """A range or an operation on the host; times in milliseconds since the step began."""

    name: str
    start: float
    length: float


class Block(nn.Module):
    """A transformer block without normalisation in its MLP."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention(HEADS, WIDTH, num_kv_heads=2, causal=True, **options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Takes and returns ``[batch, tokens, WIDTH]``."""
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


Timeline = tuple[list[Event], list[Event], list[Event]]
"""The phases, the attention ranges and the torch operations of a step."""


def fastest_step(warm_up: int = 3, steps: int = 12) -> Timeline:
    """Trains, profiles each step after the warm-up, and returns the fastest one: other programs disturb it least."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**options) for options in LAYERS))
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(BATCH, TOKENS, WIDTH)

    def step() -> None:
        with record_function("forward"):
            loss = model(x).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(warm_up):
        step()
    timelines = []
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU]) as record:
            step()
        timelines.append(_timeline(list(record.events() or ())))
    return min(timelines, key=lambda timeline: timeline[0][-1].start)


def _timeline(events: list[Any]) -> Timeline:
    begin = min(event.time_range.start for event in events if event.name in PHASES)
    every = [
        Event(each.name, (each.time_range.start - begin) / 1000, each.time_range.elapsed_us() / 1000)
        for each in sorted(events, key=lambda each: each.time_range.start)
    ]
    phases, ranges = ([e for e in every if e.name in PHASES], [e for e in every if e.name.startswith("attn.")])
    return phases, ranges, [e for e in every if e.name.startswith("aten::")]


def backend_of(name: str) -> str:
    """Returns the backend that a range names."""
    return name.split(" ", 1)[0].removeprefix("attn.")


def draw(phases: list[Event], ranges: list[Event], operations: list[Event], path: Path, where: str) -> None:
    """Draws the timeline as a PNG.

    Raises:
        SystemExit: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError:
        raise SystemExit("the picture needs matplotlib; pip install 'attn-core[cli]'") from None
    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for event in phases:
        axes.barh(2, event.length, left=event.start, height=0.6, color="#E3E3E3", edgecolor="#555555", linewidth=0.8)
        if event.length > phases[-1].start / 8:
            axes.text(event.start + event.length / 2, 2, event.name, ha="center", va="center", fontsize=11)
    for number, event in enumerate(ranges, start=1):
        colour, is_backward = COLOURS[backend_of(event.name)], " backward " in event.name
        axes.barh(
            1, event.length, left=event.start, height=0.6, color=colour, edgecolor="white" if is_backward else colour,
            hatch="///" if is_backward else None, linewidth=0,
        )  # fmt: skip
        axes.text(event.start + event.length / 2, 1.34, str(number), ha="center", va="bottom", fontsize=10)
    axes.broken_barh([(event.start, event.length) for event in operations], (-0.3, 0.6), color=OTHER, linewidth=0)
    axes.set_yticks([2, 1, 0], ["your own\nrecord_function", "attn-core's ranges", "torch's operations"], fontsize=10)
    axes.set_xlabel(f"milliseconds of one training step, on one thread ({where})")
    axes.set_xlim(0, max(event.start + event.length for event in phases))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    keys = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    keys.append(Patch(facecolor=OTHER, edgecolor="white", hatch="///", label="hatched: backward"))
    figure.legend(handles=keys, loc="outside upper right", ncols=len(keys), frameon=False, fontsize=10)
    lines = [f"{number}  {event.length:5.1f} ms  {event.name}" for number, event in enumerate(ranges, start=1)]
    figure.supxlabel("\n".join(lines), fontsize=9, family="monospace", x=0.14, ha="left")
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    """Prints the ranges of a step, and draws them if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", type=Path, help="the file to write the timeline to")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # on a busy machine, threads would wait for each other
    phases, ranges, operations = fastest_step()
    for event in (*phases, *ranges):
        print(f"{event.start:8.2f} ms {event.length:8.2f} ms  {event.name}")
    if chosen.png is not None:
        draw(phases, ranges, operations, chosen.png, str(environment()["processor"]))


if __name__ == "__main__":
    main()
