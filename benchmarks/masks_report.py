"""Renders benchmarks/results/masks-*.json, the raw times of ``benchmarks.masks``, for the performance page."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.measure import median_ratio
from benchmarks.small_calls_report import RESULTS, measured_on

WORK = 4 * 32 * 128
"""Floating-point operations of a forward per visible pair; with gradients 3.5 times as many."""
GOALS = {"plain": 0.85, "FlexAttention": 1.5}
"""Times the speed of kernels without a mask, and of torch's FlexAttention."""
IN_A_ROW = {False: 50, True: 10}
"""The calls that a candidate named "many" makes before it waits, by whether they have gradients."""
PLAIN_PAIRS = 8192 * 8193 // 2
"""The visible pairs of the call without a mask."""
ON_DEVICE = "many, ranges on the device"
OTHERS = {
    "ranges on the device": ("beside the same ranges on the device", "attention"),
    "FlexAttention": ("beside FlexAttention", "attention"),
    "a dense mask": ("beside a dense mask", "attention"),
    "many": ("JAX beside torch, in a row", "many in jax"),
    "jax.nn, a dense mask": ("JAX beside jax.nn with a dense mask", "jax"),
}
"""The other candidates of a row: the title of their column, and our candidate beside them."""

CONSTRUCTORS = {
    "16 completions of 512 on a prompt of 4096": "shared_prefix(4096, [512] * 16)",
    "tree of depth 4, 8320 tokens": "tree(parents)",
    "prefix-LM, half of 8192": "prefix_lm([4096], 8192)",
    "16 images of 256 in 8192": "blocks(np.arange(0, 8192, 256), [False, True] * 16, 8192)",
    "block diffusion, 32 of 4096": "block_diffusion(4096, 32)",
    "64 global tokens and a window of 1024": "global_and_window(64, (1024, 1024), 8192)",
}
"""The calls of ``attn_core.masks`` that ``benchmarks.masks`` times, by their names."""


def gallery(device: str = "h200") -> str:
    """Returns the constructor and the speeds of each mask on a device as a table, for the page of masks."""
    result = json.loads((RESULTS / f"masks-{device}.json").read_text(encoding="utf-8"))
    head = f"{result['device']}, {result['environment']['date']}"
    lines = [
        f"| {head} | forward | beside FlexAttention | with gradients | beside FlexAttention | beside a dense mask |",
        "|---|---|---|---|---|---|",
    ]
    for name, constructor in CONSTRUCTORS.items():
        forward, training = (
            next(row for row in result["calls"] if row["call"] == name and row["training"] == trains)
            for trains in (False, True)
        )
        cells = [f"`{constructor}`"]
        for row in (forward, training):
            cells += [f"{_speed(row, 'attention'):.0f} TFLOP/s", f"{_times(row, 'FlexAttention'):.2f}"]
        lines.append(f"| {' | '.join(cells)} | {_times(training, 'a dense mask'):.1f} |")
    return "\n".join(lines)


def section() -> str:
    """Returns the tables of every stored measurement."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("masks-*.json"))]
    texts = [_of_one(result) for result in results]
    return "\n\n".join(texts)


def _of_one(result: dict[str, Any]) -> str:
    parts = [measured_on(result | {"dtype": "bfloat16"})]
    met = {goal: 0 for goal in GOALS}
    for training in (False, True):
        rows = [row for row in result["calls"] if row["training"] == training]
        plain, *rest = rows
        name, *_ = (kernel for kernel in ("flash3", "flash4") if f"many {kernel}" in plain["seconds"])
        bare = _speed(plain, f"many {name}")
        more = [other for other, (_, ours) in OTHERS.items() if any(_has(row, other, ours) for row in rest)]
        titles = ["forward and gradients" if training else "forward", "TFLOP/s", "in a row"]
        titles += [f"beside {name}, causal, {bare:.0f}, in a row", *(OTHERS[other][0] for other in more)]
        lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        for row in rest:
            ratios = {"plain": _beside_plain(row)} | {other: _times(row, other) for other in more}
            for goal, least in GOALS.items():
                met[goal] += (ratios[goal] or 0) >= least
            speeds = [f"{_speed(row, candidate):.0f}" for candidate in ("attention", "many beside it")]
            cells = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios.values()]
            lines.append(f"| {row['call']} | {' | '.join((*speeds, *cells))} |")
        parts.append("\n".join(lines))
        if _has(plain, "many flash3", "many flash4"):
            times = median_ratio(plain["seconds"], "many flash4", "many flash3")
            parts.append(f"Without a mask, causal: flash4 runs its forward at {times:.2f} of flash3's speed.")
    timed = [row for row in result["calls"] if _has(row, "many", ON_DEVICE)]
    shares = [1 - 1 / median_ratio(row["seconds"], "many", ON_DEVICE) for row in timed]
    count = sum(row["call"] != "causal, 8192" for row in result["calls"])
    parts.append(
        f"Ranges in numpy keep their block tables. Of ranges on the device a forward makes them every time, which is "
        f"{100 * statistics.median(shares):.0f} % of its time (median of 50 calls in a row; the goal is 5 %). "
        f"{met['plain']} of {count} rows reach {GOALS['plain']} of the kernels without a mask, and "
        f"{met['FlexAttention']} of {count} are {GOALS['FlexAttention']} times as fast as FlexAttention."
    )
    return "\n\n".join(parts)


def _beside_plain(row: dict[str, Any]) -> float:
    """How many times as fast as the kernel without a mask a row is, by visible pair."""
    return median_ratio(row["seconds"], "many beside it", "many, causal") * row["pairs"] / PLAIN_PAIRS


def _has(row: dict[str, Any], *names: str) -> bool:
    return all(name in row["seconds"] for name in names)


def _median(row: dict[str, Any], name: str) -> float:
    return statistics.median(row["seconds"][name])


def _speed(row: dict[str, Any], name: str) -> float:
    """TFLOP/s, of visible pairs alone."""
    calls = IN_A_ROW[row["training"]] if name.startswith("many") else 1
    return (3.5 if row["training"] else 1.0) * calls * WORK * row["pairs"] / _median(row, name) / 1e12


def _times(row: dict[str, Any], other: str) -> float | None:
    """How many times as fast as another candidate ours is; None if one of them was not timed."""
    ours = OTHERS[other][1]
    if other == "many" and ON_DEVICE in row["seconds"]:
        other = ON_DEVICE  # a program of JAX makes its block tables in each call
    return median_ratio(row["seconds"], ours, other) if _has(row, other, ours) else None
