"""``python -m examples.training`` trains one small Gemma-2-like model in torch and in Flax, and compares the losses."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_core.context_parallel.layout import check_layout
from attn_core.errors import SpecError
from examples.stages import Stages

ROOT = Path(__file__).resolve().parents[2]
RESULTS, IMAGES, PAGE = ROOT / "benchmarks/results", ROOT / "docs/images", ROOT / "docs/lab/training.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains and compares; returns 0 if torch and JAX agree and the loss fell, otherwise 1."""
    parser, console = _parser(), Console()
    flags = parser.parse_args(arguments)
    if flags.ranks and (flags.attention or flags.implementation or flags.write):
        parser.error("--ranks: cannot be combined with --attention, --implementation or --write")
    if flags.layout == "documents" and not flags.packed:
        parser.error("--layout=documents: expected --packed, because dense rows have no documents to deal")
    if flags.render:
        render()
        return 0
    with Stages(console) as stages:
        with stages.stage("importing torch, JAX and Flax"):
            from examples.training.config import GemmaConfig, Options
            from examples.training.run import compare
        on_tensor_cores = (flags.device, flags.dtype) == ("cuda", "bfloat16")
        flags.implementation = flags.implementation or ("cudnn" if on_tensor_cores else "xla")
        names = ("steps", "length", "seed", "device", "dtype", "backend", "implementation")
        options = Options(**{name: getattr(flags, name) for name in names})
        if flags.attention:
            return _alone(flags.attention, options, stages, console)
        if flags.ranks:
            return _over_ranks(flags, options, stages, console)
        result = compare(GemmaConfig(), options, stages, controls=flags.write)
    failed = _show(result, console)
    for path in [*([flags.json] if flags.json else []), *([RESULTS / f"{stem(result)}.json"] if flags.write else [])]:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if flags.write:
        render()
    return 1 if failed else 0


def stem(result: dict[str, Any]) -> str:
    """Returns the name of a result's files: "training" for the CPU in float32, otherwise with device and dtype."""
    place = result["options"]["device"], result["options"]["dtype"]
    return "training" if place == ("cpu", "float32") else "-".join(("training", *place))


def render() -> None:
    """Writes docs/lab/training.md and its plots from the stored results."""
    from examples.training.plot import draw

    results = stored()
    for name, result in results.items():
        draw(result, IMAGES / f"{name}.png")
    PAGE.write_text(rendered(results), encoding="utf-8")


def stored() -> dict[str, dict[str, Any]]:
    """Reads the results in benchmarks/results, by the stems of their files, the CPU's first."""
    paths = sorted(RESULTS.glob("training*.json"), key=lambda path: (len(path.stem), path.stem))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def rendered(results: dict[str, dict[str, Any]]) -> str:
    """Returns the page."""
    from examples.training.report import page

    return page(results)


def _alone(attention: str, options: Any, stages: Stages, console: Console) -> int:
    """Trains only the Flax model, with dense rows and without softcap on scores, with the named attention."""
    from examples.training import data, report, weights
    from examples.training.config import GemmaConfig
    from examples.training.jax_nn import OURS, with_attention
    from examples.training.steps import train

    config = GemmaConfig()
    text, first = data.python_documentation(), weights.initial(config, options.seed)
    batches = itertools.islice(data.dense_batches(text, **options.dense, seed=options.seed), options.steps)
    named = {"backend": options.backend} if attention == OURS else {"implementation": options.implementation}
    with stages.stage(f"training in JAX, attention {attention}", total=options.steps) as advance:
        trainer = with_attention(attention, config, first, **named, **options.trainer)
        run = train(trainer, batches, advance)
    losses = run["losses"]
    console.print(f"{attention}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {report.milliseconds(run):.1f} ms per step")
    return 0


def _over_ranks(flags: argparse.Namespace, options: Any, stages: Stages, console: Console) -> int:
    """Trains in both frameworks, each on one rank and over several, and compares."""
    from examples.training import ranks
    from examples.training.config import GemmaConfig
    from examples.training.spread import FAULT, FIRST, ONE, RANKS, Spread, SpreadRun

    run = SpreadRun(GemmaConfig(), options, Spread(flags.ranks, flags.strategy, flags.layout, flags.packed))
    results = ranks.compare(run, stages)
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    names = {RANKS: f"{flags.ranks} ranks", FAULT: f"{flags.ranks}, planted fault"}
    table = Table(title="Losses, and the relative difference from one rank's", title_justify="left")
    for column in (
        "step",
        *(f"{framework}, {names.get(name, name)}" for framework in results for name in (ONE, *names)),
    ):
        table.add_column(column)
    for step in (step for step in range(options.steps) if step < FIRST or step % FIRST == FIRST - 1):
        table.add_row(str(step), *(cell for runs in results.values() for cell in ranks.cells(runs, step)))
    console.print(table)
    for framework, runs in results.items():
        console.print(f"{framework}: {ranks.summary(runs)}", highlight=False)
    failed = ranks.failures(results, options.dtype)
    for failure in failed:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    if not failed:
        console.print(f"[bold green]OK[/] {flags.ranks} ranks have the losses of one, in torch and in JAX")
    return 1 if failed else 0


def _show(result: dict[str, Any], console: Console) -> list[str]:
    """Prints the result; returns the failed checks."""
    from examples.training import report
    from examples.training.run import TORCH

    table = Table(title="Losses", title_justify="left")
    columns = ("first", "last 10", f"first {report.FIRST} steps", "all steps", "ms per step")
    for column in ("run", *columns):
        table.add_column(column)
    for name, run in result["runs"].items():
        began, ended = report.drop(result, name)
        apart = ("", "")
        if name != TORCH:
            apart = (f"{report.apart_at_first(result, name):.1e}", f"{report.difference(result, name).max():.1e}")
        table.add_row(name, f"{began:.4f}", f"{ended:.4f}", *apart, f"{report.milliseconds(run):.1f}")
    console.print(table)
    console.print(f"attention: {result['backends']}; the first steps' differences are relative", highlight=False)
    failed = report.failures(result)
    for failure in failed:
        console.print(f"[bold red]FAILED[/] {escape(failure)}")
    if not failed:
        console.print("[bold green]OK[/] the same losses in torch and JAX, the same kernels, one compilation")
    return failed


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _layout(text: str) -> str:
    try:
        check_layout(text)
    except SpecError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.training", description=__doc__)
    parser.add_argument("--steps", type=_positive, default=200, metavar="N", help="number of training steps (200)")
    parser.add_argument("--length", type=_positive, default=1024, metavar="N", help="tokens in a step's row (1024)")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches (0)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of products and attention")
    parser.add_argument("--backend", metavar="NAME", help="backend of attention; default: automatic choice")
    parser.add_argument("--attention", choices=("ours", "jax.nn"), help="train only the Flax model, dense")
    parser.add_argument(
        "--implementation",
        choices=("xla", "cudnn"),
        help="of jax.nn (xla; cudnn for bfloat16 on a GPU)",
    )
    parser.add_argument("--ranks", type=_positive, metavar="N", help="spread rows over N ranks; compare with one")
    parser.add_argument("--strategy", choices=("all_gather", "ring", "ulysses"), help="of --ranks; default: automatic")
    layouts = "of --ranks: zigzag, contiguous, striped, window:W or, with --packed, documents (zigzag)"
    parser.add_argument("--layout", type=_layout, default="zigzag", metavar="NAME", help=layouts)
    parser.add_argument("--packed", action="store_true", help="rows of --ranks hold packed documents, in two packings")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers to this file")
    parser.add_argument("--write", action="store_true", help="also make control runs, and write docs/lab/training.md")
    parser.add_argument("--render", action="store_true", help="only write the page and its plots from stored results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
