"""Compares the runs, decides what counts as failure, and renders docs/lab/training.md."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

import numpy as np

from examples.training.run import FAULT, JAX, TORCH, TWIN

FIRST = 10
"""The number of first steps that must agree closely, because little rounding has accumulated."""
CLOSE = {"float32": 1e-5, "bfloat16": 2e-4}
"""The largest difference, relative to the loss. In bfloat16, rounding is as large as the first effect of the fault."""
LEARNS, FALL = 100, 1.0
"""In runs of at least LEARNS steps, the loss must fall by more than FALL."""
UNCOUNTED = 2
"""The number of first steps that the median time leaves out, because they compile or warm up."""


def losses(result: dict[str, Any], name: str) -> np.ndarray:
    """Returns the loss of every step, float64 ``[steps]``."""
    return np.array(result["runs"][name]["losses"])


def difference(result: dict[str, Any], name: str, other: str = TORCH) -> np.ndarray:
    """Returns the absolute difference of a run's losses from torch's, ``[steps]``."""
    return np.abs(losses(result, name) - losses(result, other))


def apart_at_first(result: dict[str, Any], name: str = JAX) -> float:
    """Returns the largest difference from torch over the first steps, relative to torch's loss."""
    return float((difference(result, name) / losses(result, TORCH))[:FIRST].max())


def drop(result: dict[str, Any], name: str) -> tuple[float, float]:
    """Returns the loss of the first step, and the mean of the last ten."""
    curve = losses(result, name)
    return float(curve[0]), float(curve[-10:].mean())


def milliseconds(run: dict[str, Any]) -> float:
    """Returns the median time of a step in milliseconds."""
    return statistics.median(run["seconds"][UNCOUNTED:] or run["seconds"]) * 1e3


def failures(result: dict[str, Any]) -> list[str]:
    """Returns the failed checks as sentences."""
    failed, close = [], CLOSE[result["options"]["dtype"]]
    if not apart_at_first(result) <= close:
        failed.append(
            f"the first {FIRST} losses differ by {apart_at_first(result):.1e} of the loss; expected {close:g}"
        )
    if result["traces"] != 1:
        failed.append(f"JAX traced the step {result['traces']} times, expected once")
    if result["backends"][TORCH] != result["backends"][JAX]:
        reached = "without jax-tvm-ffi, JAX cannot reach torch's kernels"
        failed.append(f"the attention kernels differ: {result['backends']}; {reached}")
    planted = FAULT in result["runs"] and result["options"]["dtype"] == "float32"
    if planted and not apart_at_first(result, FAULT) > close:
        failed.append(f"the planted fault changes losses by {apart_at_first(result, FAULT):.1e}; expected > {close:g}")
    for name in (TORCH, JAX):
        began, ended = drop(result, name)
        if len(losses(result, name)) >= LEARNS and not ended < began - FALL:
            failed.append(f"{name} did not learn: the loss went from {began:.2f} to {ended:.2f}")
    return failed


def agreement_table(result: dict[str, Any]) -> str:
    """Returns a Markdown table that compares each run with torch's."""
    lines = [
        f"| run | first loss | mean of the last 10 | first {FIRST} steps, largest relative difference | all steps, "
        "largest difference | median ms per step |",
        "|---|---|---|---|---|---|",
    ]
    for name, run in result["runs"].items():
        began, ended = drop(result, name)
        apart = ["", ""]
        if name != TORCH:
            apart = [_small(apart_at_first(result, name)), _small(difference(result, name).max())]
        cells = [label(result, name), f"{began:.4f}", f"{ended:.4f}", *apart, f"{milliseconds(run):.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _small(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def label(result: dict[str, Any], name: str) -> str:
    """Returns a description of a run."""
    window = result["model"]["window"]
    return {
        TWIN: "torch, with every weight moved to a neighbouring float32",
        FAULT: f"JAX with a planted fault: {window + 1} keys in the window instead of {window}",
    }.get(name, name)


def swap_table(result: dict[str, Any]) -> str:
    """Returns the swap with jax.nn as a Markdown table."""
    swap = result["swap"]
    (ours, theirs) = swap["runs"].values()
    names = [f"ours ({_kernels(swap['backends'])})", f"jax.nn ({swap['implementation']})"]
    lines = ["| attention | first loss | last loss | median ms per step |", "|---|---|---|---|"]
    for name, run in zip(names, (ours, theirs)):
        lines.append(f"| {name} | {run['losses'][0]:.4f} | {run['losses'][-1]:.4f} | {milliseconds(run):.1f} |")
    return "\n".join(lines)


def _kernels(backends: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(backends))


def page(results: dict[str, dict[str, Any]]) -> str:
    """Returns docs/lab/training.md.

    Args:
        results: the results by the stems of their files, such as "training".
    """
    return (
        "\n\n".join(
            [_head(), *(_section(stem, result) for stem, result in results.items()), _swap_how(), _over_ranks()]
        )
        + "\n"
    )


def _head() -> str:
    return f"""# Training in both frameworks

This page shows that torch and JAX train a model in the same way. `examples/training` trains one small Gemma-2-like
decoder twice, in torch and in Flax NNX, from the same weights on the same batches of real text, and compares the loss
of every step.

```bash
pip install -e '.[torch,jax,cli]'         # from a clone
python -m examples.training               # torch and JAX, on the CPU
python -m examples.training --steps 20    # a first look
python -m examples.training --ranks 2     # rows spread over two ranks, compared with one
python -m examples.training --device cuda --dtype bfloat16
python -m examples.training --write       # also the control runs below; writes this page
```

- **The model**: grouped kv heads, softcaps on scores and logits, RoPE by each document's own positions, a sliding
  window on every other layer, GeGLU, norms before and after each block, tied embeddings. `torch_gemma.py` uses
  `torch_frontend.module.Attention`, `flax_gemma.py` uses `jax_frontend.nnx.Attention`.
- **The text**: the language reference that `help()` shows (`pydoc_data.topics`), as bytes. It comes with Python, so
  nothing is downloaded. Paragraphs are packed into one row, and `seq_info` says where each begins. The last token of a
  paragraph does not predict the first token of the next.
- **The same numbers**: weights, batches, learning rates and RoPE's table are computed once, in numpy. torch's AdamW and
  optax's have the same numbers; `config.py` explains why the two definitions agree.
- **One compilation**: every row has the same number of offsets; unused offsets describe empty documents. The bound on a
  document's length is constant. So JAX traces the step once.

No `backend` is named, and selection chooses the same attention kernel in both frameworks. Each framework has its own
matrix products, norms, loss and optimizer, which round differently. The small difference between the losses comes from
this rounding, and every step carries it on.

The run fails (exit code 1) if the first losses differ by more than rounding, if the kernels differ, if JAX traced
twice, or if the loss of a run of {LEARNS} steps or more did not fall by more than {FALL:g}."""


def _section(stem: str, result: dict[str, Any]) -> str:
    """Returns the part of the page for one machine."""
    where, options = result["environment"], result["options"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    place = result["device"] if options["device"] != "cpu" else f"CPU ({where['processor']})"
    written = f"""Written by `python -m examples.training --write` on {where["date"]}: {place}, torch on
        {result["torch_threads"]} thread(s), Python {where["python"]}, {versions}. Raw numbers:
        `benchmarks/results/{stem}.json`. Other work on the machine may affect step times; the runs of the first table
        ran one after another."""
    picture = f"![The two loss curves, and their difference](../images/{stem}.png)"
    parts = [f"## {place}, {options['dtype']}", _paragraph(written), _paragraph(_setting(result)), picture]
    parts.append(agreement_table(result))
    if TWIN in result["runs"]:
        parts.append(_paragraph(_controls_read(result)))
    if result["swap"]:
        parts += [_paragraph(_swap_read(result)), swap_table(result)]
    return "\n\n".join(parts)


def _paragraph(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def _setting(result: dict[str, Any]) -> str:
    options, model, text = result["options"], result["model"], result["text"]
    return f"""{options["steps"]} steps of {options["length"]} tokens, out of {text["tokens"]:,};
        {result["parameters"]:,} float32 parameters in {model["num_layers"]} layers, {model["num_heads"]} heads on
        {model["num_kv_heads"]} kv heads of {model["head_dim"]} channels, softcap {model["attention_softcap"]:g} on
        scores and {model["final_softcap"]:g} on logits, windows of {model["window"]} keys. Attention ran on
        {_kernels(result["backends"][TORCH])} in torch and on {_kernels(result["backends"][JAX])} in JAX."""


def _controls_read(result: dict[str, Any]) -> str:
    began, ended = drop(result, TORCH)
    largest = {name: f"{difference(result, name).max():.1e}" for name in (JAX, TWIN, FAULT)}
    return f"""The loss fell by {began - ended:.2f}; torch and JAX never differed by more than {largest[JAX]}. The third
        run shows the effect of rounding alone: it is torch again, from weights that differ in their last bit, and its
        largest difference is {largest[TWIN]}. The fourth run shows the effect of a fault: one more key in the windows,
        in JAX only, changes losses by up to {largest[FAULT]}."""


def _swap_read(result: dict[str, Any]) -> str:
    swap = result["swap"]
    return f"""The next table compares the Flax model with our attention and with jax.nn's, on {swap["rows"]} rows of
        {swap["length"]} tokens. jax.nn has neither packed documents nor a softcap on scores, so this comparison has
        neither. The two models took their steps in turns."""


def _swap_how() -> str:
    return """## Attention swapped in the Flax model

`python -m examples.training --attention jax.nn --implementation cudnn` trains only the Flax model, with
`jax.nn.dot_product_attention`; `--attention ours` trains the same model with ours. Both have dense rows and no softcap
on scores. `examples.training.jax_nn.with_attention` returns either of them for a benchmark."""


def _over_ranks() -> str:
    return f"""## Rows spread over ranks

`python -m examples.training --ranks 2` trains the model by
[context parallelism](../explanation/context_parallel.md): in torch over two processes that `torch.distributed.run`
starts (gloo on a CPU, NCCL on GPUs), in JAX over two devices of one process (on a CPU, XLA provides two).
`shard_sequence` cuts each step's tokens, targets and weights. A rank's loss is its share of the mean over all tokens,
and gradients are summed over ranks. `--strategy` names a strategy instead of automatic choice, and `--layout` another
layout than zigzag.

Rows are dense. With `--packed` they hold packed documents, in two packings that take turns: the documents are a part of
the plan, and JAX compiles each plan. `--packed --layout documents` deals the documents to the ranks, short ones whole.

The loss of every step is compared with the loss of the same model on one rank. The norm of AdamW's running mean of
gradients is compared, too, because AdamW hides a factor that all gradients share. The run fails (exit code 1) if losses
differ by more than 1e-5 of their size in the first {FIRST} steps (2e-4 in bfloat16), or by more than 1e-4 in any step
(3e-2 in bfloat16), or if JAX's losses differ from torch's. It also fails if a planted fault has no effect: for {FIRST}
steps, the model names another layout than the layout of its shards, or has dealt documents in reverse."""
