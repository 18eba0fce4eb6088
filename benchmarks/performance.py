"""Writes docs/explanation/performance.md, its plots, and the table of other pages from the stored results.

python -m benchmarks.performance            # prints the page
python -m benchmarks.performance --write    # writes the page, the plots and the table; needs no GPU and no framework
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.cli.bench import draw_sweep
from attn_core.cli.bench_sweep import read
from attn_core.selection.cross_validation import Fitting
from benchmarks import (
    choice_report,
    forward_mode_report,
    grpo_report,
    jax_calls,
    jax_first_report,
    masks_report,
    page_calls_report,
    real_calls_report,
    small_calls_report,
)
from benchmarks.hopper_report import figures_of
from benchmarks.performance_plots import ONE_GPU, draw, efficiency, strategies

ROOT = Path(__file__).resolve().parent.parent
RESULTS, IMAGES = ROOT / "benchmarks/results", ROOT / "docs/images"
PAGE = ROOT / "docs/explanation/performance.md"
WITH_TABLE = (ROOT / "README.md", ROOT / "docs/index.md")
"""The pages that show the table between BEGIN and END."""
MASKS = ROOT / "docs/how_to/masks.md"
"""The page that shows the speeds of masks between BEGIN and END."""
TINY = (1, 5, 2, 16)
"""Batch, length, heads and head_dim of the CPU's small calls, whose time is almost only the call's overhead."""
BEGIN, END = "<!-- written by python -m benchmarks.performance --write -->\n", "<!-- end -->\n"

Results = dict[str, dict[str, Any]]
"""The stored results by the stem of their file."""


class Row(NamedTuple):
    """A line of the table: the call, the baseline, the figure, and where and when it was measured."""

    call: str
    compared: str
    figure: str
    where: str
    date: str


def main(arguments: list[str] | None = None) -> None:
    """Prints the page, or writes the page, the plots and the table of other pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    results = stored()
    if not parser.parse_args(arguments).write:
        print(page(results))
        return
    draw(results["hopper"], results["context-parallel"], IMAGES)
    draw_sweep(Fitting(read(RESULTS / "sweep-sm90.json")), IMAGES / "sweep-h200.png")
    PAGE.write_text(page(results), encoding="utf-8")
    for other in WITH_TABLE:
        other.write_text(with_table(other.read_text(encoding="utf-8"), table(rows(results))), encoding="utf-8")
    MASKS.write_text(with_table(MASKS.read_text(encoding="utf-8"), masks_report.gallery()), encoding="utf-8")


def stored() -> Results:
    """Reads the results in benchmarks/results that the page shows."""
    names = ("cpu", "hopper", "context-parallel")
    return {name: json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def with_table(text: str, lines: str) -> str:
    """Returns a page with these lines between its two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{lines}\n{END}{after}"


def table(lines: list[Row]) -> str:
    """Returns rows as a Markdown table."""
    head = ["| call | compared with | measured | device | date |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in lines)])


def rows(results: Results) -> list[Row]:
    """Returns the headline figures of every device."""
    return [*_hopper(results["hopper"]), *_several(results["context-parallel"]), *_cpu(results["cpu"])]


HOPPER = (
    ("attention", "attention() beside the bare kernels, forward", "automatic choice", "torch, causal, forward"),
    (
        "attention",
        "attention() beside the bare kernels, forward + backward",
        "automatic choice",
        "torch, causal, forward + backward",
    ),
    ("softcap", "softcap 50, forward", "backend='flash4' beside FlexAttention", "torch, softcap, forward"),
    ("softcap", "softcap 50, forward", "backend='flash4' beside flash4 as shipped", "torch, softcap, forward"),
    (
        "softcap",
        "softcap 50, forward + backward",
        "backend='flash4' beside FlexAttention",
        "torch, softcap, forward + backward",
    ),
    ("jax", "JAX under jit, forward", "automatic choice (flash3) beside jax.nn", "`jax.jit`, causal, forward"),
    ("jax", "JAX under jit, forward", "automatic choice (flash3) beside tokamax", "`jax.jit`, causal, forward"),
    (
        "jax",
        "JAX under jit, forward + backward",
        "automatic choice (flash4) beside jax.nn",
        "`jax.jit`, causal, forward + backward",
    ),
    ("training", "The same, wider", "automatic choice beside jax.nn cudnn", "a training step of a Flax model"),
    ("paged", "Decoding", "in pages beside contiguous", "decode 64 x 8192 tokens from pages of 16"),
)
"""For each row: the measure, the title of the group, the name of the figure, and the call's name in the table."""
NAMES = {
    "FlexAttention": "FlexAttention, compiled",
    "flash4 as shipped": "FlashAttention-4 as shipped",
    "jax.nn cudnn": "`jax.nn` with cuDNN",
    "tokamax mosaic": "tokamax",
    "attention, contiguous": "the same keys without pages",
}


def _hopper(result: dict[str, Any]) -> list[Row]:
    device = result["environment"]["device"].removeprefix("1 × ")
    lines = []
    for measure, title, name, call in HOPPER:
        group = next(group for group in result["measures"][measure]["groups"] if group["title"] == title)
        figure = next(figure for figure in group["figures"] if figure["name"] == name)
        later = [run["date"] for run in result["later"] if measure in run["measures"]]
        date = later[-1] if later else result["environment"]["date"]
        unit = figure["unit"]
        if unit.startswith("times the speed of "):
            other = unit.removeprefix("times the speed of ")
            compared, shown = NAMES.get(other, other), f"{figure['value']:.2f} times as fast"
        else:  # TFLOP/s; the detail names the bare kernel of the chosen backend
            kernel, _, speed = figure["detail"].removesuffix(" in the same run").partition(": ")
            compared, shown = f"{kernel}: {speed} {unit}", f"{figure['value']:.0f} {unit}"
        lines.append(Row(call, compared, shown, device, date))
    return lines


def _several(result: dict[str, Any]) -> list[Row]:
    lines = []
    torch = result["2"]["torch"]
    for peer in torch["peers"][:1]:
        speed = next(row for row in torch["speed"] if row["shard"] == peer["shard"])
        for word, theirs in peer["seconds"].items():
            fastest = min(statistics.median(seconds) for seconds in theirs.values())
            own = min(statistics.median(seconds) for seconds in strategies(speed["seconds"][word]).values())
            call = f"context parallelism, {peer['shard']} tokens per rank, {word}"
            compared = "torch's own `context_parallel`"
            date = speed["environment"]["date"]
            lines.append(Row(call, compared, f"{fastest / own:.2f} times as fast", "2 × NVIDIA H200", date))
    for world, frameworks in result.items():
        speed = frameworks["torch"]["speed"][-1]
        word = "forward + backward"
        call = f"context parallelism, {speed['shard']} tokens per rank, {word}"
        shown = f"{efficiency(speed['seconds'][word], int(world)):.1%} of linear speedup"
        lines.append(Row(call, ONE_GPU, shown, f"{world} × NVIDIA H200", speed["environment"]["date"]))
    return lines


def _cpu(result: dict[str, Any]) -> list[Row]:
    where = f"{result['environment']['processor']}, {result['cores']} cores"
    return [
        Row(
            figure["name"].replace("jax.jit", "`jax.jit`"),
            "`jax.nn` with XLA",
            f"{figure['value']:.1f} times as fast",
            where,
            result["environment"]["date"],
        )
        for figure in result["figures"]
        if figure["unit"] == "times jax.nn xla's speed"
    ]


def _versions(result: dict[str, Any]) -> str:
    versions = {"Python": result["environment"]["python"], **result["environment"]["versions"]}
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)


def cpu_table(figures: list[dict[str, Any]]) -> str:
    """Returns the figures of a CPU as a Markdown table."""
    lines = ["| figure | measured | goal | medians |", "|---|---|---|---|"]
    for figure in figures:
        each = ", ".join(f"{name} {value:,.1f} µs" for name, value in figure["median_microseconds"].items())
        lines.append(f"| {figure['name']} | {figure['value']:.2f} {figure['unit']} | {figure['goal'] or ''} | {each} |")
    return "\n".join(lines)


def page(results: Results) -> str:
    """Returns docs/explanation/performance.md."""
    cpu, hopper = results["cpu"], results["hopper"]
    goals = [figure for _, figure in figures_of(hopper) if figure["goal"]]
    small_calls = "\n\n".join(map(small_calls_report.section, small_calls_report.stored().values()))
    met, missed = (sum(figure["held"] is verdict for figure in goals) for verdict in (True, False))
    return f"""# Performance

This page shows how fast attn-core is, on which device that was measured, and how to measure it on yours. `python -m
benchmarks.performance --write` writes this page from the raw times in `benchmarks/results`. The two sides of a
comparison took turns, and ratios are medians over rounds. Only torch's own `context_parallel` was timed by itself.

```python
import torch
from torch_frontend import attention, explain

q = torch.randn(1, 64, 4, 64)
print(explain(q, q, q, causal=True))  # the kernel that runs here, for these shapes
```

## Headlines

{table(rows(results))}

The rows above the training step have bfloat16, batch 4, 4096 tokens, 32 query heads on 8 kv heads of 128 channels, and
softcap 50 if they name softcap. Context parallelism has one causal row of the same heads. Linear speedup means that N
GPUs are N times as fast as one.

![TFLOP/s of attention and of other libraries on an H200](../images/performance-h200.png)

Dark bars are forward, light bars forward + backward. Without a light bar, the installed package has no backward.

![Efficiency of context parallelism on two and four H200s](../images/performance-context-parallel.png)

## All results

| file in `benchmarks/results` | contents |
|---|---|
| `hopper.md` | one H200: every figure, the tests, and all that was not run; {met} goals met, {missed} missed |
| `context_parallel.md` | two and four H200s: every strategy, errors next to one GPU, long rows |
| `sweep-sm90.md`, `sweep-sm90-h100.md` | an H200, an H100: every backend on random calls, and automatic choice |
| `sweep-cpu.md`, `sweep-jax-cpu.md` | two cores: the same in torch and in JAX |

## What automatic choice costs

The time of the chosen backend divided by the time of the fastest one, over random calls that its models did not see,
the host's time included. The goals on a GPU are 1.03, 1.20 and 1.35, on a CPU 1.05 and, for the worst call, 1.4. The
models were fitted to the H200: its figures come from cross-validation, and settings of the fit were chosen with a look
at its calls. The other devices run the package as it is, on calls that nothing was chosen by.

{choice_report.section()}

![Sorted speeds beside F.sdpa, and the sorted cost of the choice, on an H200](../images/sweep-h200.png)

`attn bench --plot` draws this for your machine. Every point is a call; the calls are sorted, and points below 1 at the
left are slower than torch's own function.

## Random calls in JAX on a GPU

Automatic choice under `jax.jit` beside `jax.nn.dot_product_attention`, in XLA and in cuDNN, each call a program of its
own. Numbers are times as fast, for the calls that both sides ran; the goal is that none is below 0.95. The constants
for JAX in `attn_core/selection/jax_on_gpu.py` were set on calls of another seed, but for CAUSAL_BESIDE_TABLE, which was
added after this run because of call #8. `python -m benchmarks.jax_calls --json` writes the raw times.

{jax_calls.section()}

## JAX beside torch on a GPU

The same kernel in both frameworks, calls in a row for 0.15 s and then a wait, and how XLA reaches the kernel: "XLA"
launches it itself, "operator" is torch's operator without Python, "callback" is Python. Below are attentions of other
JAX packages on the same arrays. `python -m benchmarks.jax_first --json` writes the raw times; it also measures a
training step of one decoder layer of an 8B model on 8192 tokens, the last table here.

{jax_first_report.section()}

## Forward mode

One pass of `triton_jvp` gives out, the log-sum-exp and both tangents. A rate counts 4 operations per visible pair and
channel for a forward, 12 with tangents; its share of another kernel's rate is above 1 if the tangents cost less than
their operations. `python -m benchmarks.forward_mode --json` writes the raw times.

{forward_mode_report.section()}

## Pages

Drafts are several new tokens of a sequence: 8 sequences of 8192 tokens, heads 64/8. Uneven lengths are drawn up to 8192
for 64 sequences, heads 28/4. One kv head is 16 sequences of 16384, and the long sequence has heads 64/8. Other calls
have heads 32/8, and all have head_dim 128. A rate counts the bytes of keys and values as they are stored. Pages in
float8 and int8 need half the memory and int4 a quarter; converting them takes part of what fewer bytes save. A cache is
dense, with FlashAttention's own function beside ours; one tiny call shows the host's time. In JAX, several calls run in
a row, and the wait for the last counts. `python -m benchmarks.page_calls --json` writes the raw times.

{page_calls_report.section()}

## On a CPU

Measured on {cpu["environment"]["date"]}: {cpu["environment"]["processor"]}, {cpu["cores"]} cores, {_versions(cpu)}.

{cpu_table(cpu["figures"])}

Small calls run with torch on one thread, on tensors of {TINY} (batch, seq, heads, head_dim). torch's own
`scaled_dot_product_attention` gets its own layout, (batch, heads, seq, head_dim). A call through the bridge goes from a
jitted JAX function to torch's CPU kernel and back; its time includes the kernel.

## Small calls

Small calls take as long as Python needs, so they show what attention() adds. Cells are microseconds: ours, then what
replaces it. Where the other side lacks a feature, it gets a mask or a bias that was prepared outside the timing, or
does without the feature. `python -m benchmarks.small_calls --json` writes the raw times.

{small_calls}

## Calls of real models

attention() beside torch's own `F.scaled_dot_product_attention` on the same tensors: masks and biases, head dims between
the usual ones, short rows, decoding. A time is the host's or the device's, whichever is longer. `python -m
benchmarks.real_calls --json` writes the raw times. torch prepares a plan for every new shape of a call that it runs in
cuDNN; both sides ran each shape before.

{real_calls_report.section()}

## Masks and scores

Key ranges and score functions, which run on FlashAttention-4 on a Hopper GPU: 32 query heads on 8 kv heads of 128
channels in bfloat16, one row for masks, 4 x 4096 causal for scores. Speeds count visible pairs alone, and each call
waits for the GPU, so that the host's time counts. FlexAttention is torch's own, compiled, with block tables that were
made before the timing. "In a row" are 50 calls before a wait, or 10 with gradients, as in a model: their host's time
hides behind the GPU's. There the calls take turns with the kernel without a mask, and JAX with torch's ranges on the
device, whose block tables are made in each call, too. Masks with many short rows are furthest from a kernel without a
mask: the start of a thread block and the blocks at the border weigh most there. `python -m benchmarks.masks --json`
writes the raw times.

{masks_report.section()}

A prompt that is computed once, in training. The model is small: on a GPU its steps wait for the host, so that memory
alone shows the difference.

{grpo_report.section()}

## Measure your own machine

```bash
python -m benchmarks.cpu --write                         # the CPU's figures, and this page
python -m benchmarks.small_calls --device cpu            # tiny torch calls of every kind, beside their rivals; or cuda
python -m benchmarks.real_calls                          # calls of real models beside F.sdpa, on a GPU
python -m benchmarks.jax_calls                           # random calls in JAX beside jax.nn
python -m benchmarks.jax_first --json jax-first.json     # JAX beside torch and other JAX packages, on a GPU
python -m benchmarks.page_calls --json page-calls.json   # keys and values in pages and caches, on a GPU
python -m benchmarks.forward_mode --json forward.json    # tangents, on a GPU
python -m benchmarks.masks --json masks.json             # key ranges and functions beside FlexAttention, on a GPU
python -m benchmarks.grpo_step --json grpo.json          # a training step on completions that share a prompt
python -m benchmarks.cpu_flex --json flex.json           # windows, documents, softcaps beside compiled FlexAttention
python -m benchmarks.hopper --json hopper.json           # the figures of a GPU
attn bench --json times.json                             # every backend on random calls, side by side
python -m benchmarks.sweep_report times.json --write times   # from a clone: tables, plots, the cost of the choice
python -m benchmarks.sweep_preference times.json --write attn_core/selection/measured   # the models of the choice
```
"""


if __name__ == "__main__":
    main()
