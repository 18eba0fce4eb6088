"""What the runs say: agreement, what counts as failure, and the page docs/explanation/training.md."""

from __future__ import annotations

import statistics
import textwrap
from typing import Any

import numpy as np

from examples.training.run import FAULT, JAX, TORCH, TWIN

FIRST = 10
"""The steps that must agree closely, before rounding has been fed back often."""
CLOSE = {"float32": 1e-5, "bfloat16": 2e-4}
"""How closely, relative to the loss. In bfloat16 rounding is as large as what the planted fault does at first."""
LEARNS, FALL = 100, 1.0
"""From so many steps on, the loss must have fallen by more than this."""
UNCOUNTED = 2
"""The first steps, which compile or warm up, have no part in the median time."""


def losses(result: dict[str, Any], name: str) -> np.ndarray:
    """The loss of every step, float64 ``[steps]``."""
    return np.array(result["runs"][name]["losses"])


def difference(result: dict[str, Any], name: str, other: str = TORCH) -> np.ndarray:
    """The absolute difference of a run's losses from torch's, ``[steps]``."""
    return np.abs(losses(result, name) - losses(result, other))


def apart_at_first(result: dict[str, Any], name: str = JAX) -> float:
    """The largest difference from torch over the first steps, relative to torch's loss."""
    return float((difference(result, name) / losses(result, TORCH))[:FIRST].max())


def drop(result: dict[str, Any], name: str) -> tuple[float, float]:
    """(loss of the first step, mean of the last ten)."""
    found = losses(result, name)
    return float(found[0]), float(found[-10:].mean())


def milliseconds(run: dict[str, Any]) -> float:
    """The median time of a step."""
    return statistics.median(run["seconds"][UNCOUNTED:] or run["seconds"]) * 1e3


def failures(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, as sentences; empty when all is well."""
    found, close = [], CLOSE[result["options"]["dtype"]]
    if not apart_at_first(result) <= close:
        found.append(f"the first {FIRST} losses differ by {apart_at_first(result):.1e}, relatively; expected {close:g}")
    if result["traces"] != 1:
        found.append(f"JAX traced the step {result['traces']} times, expected once")
    if result["backends"][TORCH] != result["backends"][JAX]:
        reached = "without jax-tvm-ffi JAX cannot reach torch's"
        found.append(f"not the same attention kernels: {result['backends']}; {reached}")
    planted = FAULT in result["runs"] and result["options"]["dtype"] == "float32"
    if planted and not apart_at_first(result, FAULT) > close:
        found.append(f"the planted fault shows by {apart_at_first(result, FAULT):.1e} only, no more than {close:g}")
    for name in (TORCH, JAX):
        began, ended = drop(result, name)
        if len(losses(result, name)) >= LEARNS and not ended < began - FALL:
            found.append(f"{name} did not learn: the loss went from {began:.2f} to {ended:.2f}")
    return found


def agreement_table(result: dict[str, Any]) -> str:
    """Each run beside torch's, as a Markdown table."""
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
    """A run's name in words."""
    window = result["model"]["window"]
    return {
        TWIN: "torch, every weight moved to a neighbouring float32",
        FAULT: f"JAX with a planted fault: {window + 1} keys in the window for {window}",
    }.get(name, name)


def swap_table(result: dict[str, Any]) -> str:
    """The swap with jax.nn, as a Markdown table."""
    found = result["swap"]
    (ours, theirs) = found["runs"].values()
    names = [f"ours ({_kernels(found['backends'])})", f"jax.nn ({found['implementation']})"]
    lines = ["| attention | first loss | last loss | median ms per step |", "|---|---|---|---|"]
    for name, run in zip(names, (ours, theirs)):
        lines.append(f"| {name} | {run['losses'][0]:.4f} | {run['losses'][-1]:.4f} | {milliseconds(run):.1f} |")
    return "\n".join(lines)


def _kernels(backends: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(backends))


def page(results: dict[str, dict[str, Any]]) -> str:
    """docs/explanation/training.md.

    Args:
        results: by the stem of their file, "training" and whichever others there are.
    """
    return (
        "\n\n".join(
            [_head(), *(_section(stem, result) for stem, result in results.items()), _swap_how(), _over_ranks()]
        )
        + "\n"
    )


def _head() -> str:
    return f"""# Training in both frameworks

Evidence that torch and JAX train alike. `examples/training` trains one small Gemma-2-like decoder twice, in torch and
in Flax NNX, from the same weights on the same batches of real text, and compares the loss of every step.

```bash
pip install -e '.[torch,jax,cli]'         # from a clone
python -m examples.training               # torch and JAX, on the CPU
python -m examples.training --steps 20    # a first look
python -m examples.training --ranks 2     # rows spread over two ranks, beside one
python -m examples.training --device cuda --dtype bfloat16
python -m examples.training --write       # also the control runs below; writes this page
```

- **The model**: grouped kv heads, softcaps on scores and logits, RoPE by each document's own positions, a sliding
  window on every other layer, GeGLU, norms before and after each block, tied embeddings. `torch_gemma.py` uses
  `torch_frontend.module.Attention`, `flax_gemma.py` uses `jax_frontend.nnx.Attention`.
- **The text**: the language reference that `help()` shows (`pydoc_data.topics`), as bytes. It comes with Python;
  nothing is downloaded. Paragraphs are packed into one row, and `seq_info` says where each begins. The last token of a
  paragraph does not predict the first of the next.
- **Once for both**: weights, batches, learning rates and RoPE's table are made in numpy. AdamW is torch's and optax's
  with the same numbers; `config.py` explains why the two definitions agree.
- **One compilation**: every row has the same number of offsets; unused ones name empty documents. The bound on a
  document's length is constant. JAX traces the step once.

No `backend` is named: selection chooses the same attention kernel in both frameworks. Each framework has its own matrix
products, norms, loss and optimizer, which round differently. The remaining difference comes from these, and every step
feeds it back.

The run fails (exit code 1) if the first losses differ by more than rounding, if the kernels are not the same, if JAX
traced twice, or, from {LEARNS} steps on, if the loss did not fall by more than {FALL:g}."""


def _section(stem: str, result: dict[str, Any]) -> str:
    """One machine's part of the page."""
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
        run shows what rounding alone does: torch again, from weights that differ in their last bit; its largest
        difference is {largest[TWIN]}. The fourth run shows a fault: one key more in the windows, in JAX only, gives
        {largest[FAULT]}."""


def _swap_read(result: dict[str, Any]) -> str:
    found = result["swap"]
    return f"""The Flax model with its attention swapped, {found["rows"]} rows of {found["length"]} tokens, neither
        packed nor with a softcap on scores (jax.nn has neither), step by step in turn:"""


def _swap_how() -> str:
    return """## Attention swapped in the Flax model

`python -m examples.training --attention jax.nn --implementation cudnn` trains the Flax model alone, with
`jax.nn.dot_product_attention`; `--attention ours` trains the same model with ours. Both have dense rows and no softcap
on scores. `examples.training.jax_nn.with_attention` makes either for a benchmark."""


def _over_ranks() -> str:
    return f"""## Rows spread over ranks

`python -m examples.training --ranks 2` trains the model by [context parallelism](context_parallel.md): in torch over
two processes that `torch.distributed.run` starts (gloo on a CPU, NCCL on GPUs), in JAX over two devices of one process
(on a CPU, XLA makes two). `shard_sequence` cuts each step's tokens, targets and weights. A rank's loss is its share of
the mean over all tokens, and gradients are summed over ranks. `--strategy` and `--layout` override automatic choice.
Rows are dense, because offsets of packed documents are part of a plan, and JAX would compile a step for each.

Every step's loss is compared with that of the same model on one rank. So is the norm of AdamW's running mean of
gradients, because AdamW hides a factor that all gradients share. The run fails (exit code 1) if losses differ by more
than 1e-5 of themselves in the first {FIRST} steps (in bfloat16 2e-4), or by more than 1e-4 in any step (3e-2), if JAX's
losses differ from torch's, or if a planted fault does not show: for {FIRST} steps the model names another layout than
that of its shards."""
