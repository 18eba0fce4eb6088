"""The table at the end of the example, and its checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attn_core import PageAllocator
from examples.serving.engine import Served

TIES = {"float32": 1e-3, "bfloat16": 0.1, "float8_e4m3fn": 0.2, "int8": 0.2, "int4": 2.0}
"""By dtype of the pages, the lead of a token, in logits, that rounding can turn: in a larger batch, the matrix products
of a row round differently."""


class Run(NamedTuple):
    """The run of all chats: questions, texts by their number, what happened, seconds, and the pool at the end."""

    questions: Sequence[str]
    texts: Mapping[int, str]
    served: Served
    seconds: float
    kv: str
    token_bytes: int
    allocator: PageAllocator


class Alone(NamedTuple):
    """Numbers of chats that ran alone, and their runs."""

    numbers: list[int]
    runs: list[Served]


def show(console: Console, run: Run, alone: Alone, seconds_alone: float) -> int:
    """Prints the answers, the table and the checks; returns 1 if a check failed, otherwise 0."""
    answers = Table("question", "answer", show_lines=False)
    for number, question in enumerate(run.questions):
        answers.add_row(escape(question), escape(run.texts[number].strip()))
    console.print(answers)
    console.print(_figures(run, alone, seconds_alone))
    served, left = run.served, run.allocator.report()
    waste, holders = served.waste
    same, ties = _compared(run, alone)
    compared = f"{len(alone.numbers)} chats compared; {ties} near ties turned"
    checks = {
        f"the same tokens as one at a time ({compared})": same,
        f"waste below one page per sequence ({waste} places of {holders} sequences)": (
            waste < run.allocator.page_size * max(holders, 1)
        ),
        "all pages are free again": left.free == left.num_pages,
    }
    for what, passed in checks.items():
        console.print(f"{'[green]yes[/]' if passed else '[red]no[/]'}  {what}", highlight=False)
    return 0 if all(checks.values()) else 1


def _figures(run: Run, alone: Alone, seconds_alone: float) -> Table:
    """Returns the table of speed, pool and prefixes."""
    served, pool = run.served, run.allocator
    prefixes, count = pool.prefix_report(), sum(map(len, served.leads))
    count_alone = sum(len(leads) for each in alone.runs for leads in each.leads)
    rate = served.matched_tokens / max(served.prompt_tokens, 1)
    table = Table("figure", "value", show_header=False)
    rows = {
        "tokens/s together": f"{count / run.seconds:.1f} ({count} tokens, {served.steps} calls of the model, up to "
        f"{served.largest_batch} chats in one)",
        "tokens/s one at a time": f"{count_alone / seconds_alone:.1f} ({count_alone} tokens)",
        "bytes per token": f"{run.token_bytes} ({run.kv})",
        "pool": f"{pool.num_pages} pages of {pool.page_size} tokens, up to {served.most_used} in use "
        f"({served.most_used / pool.num_pages:.0%}), up to {served.shared} shared",
        "prefix hits": f"{rate:.0%} of the prompts' tokens ({served.matched_tokens} of {served.prompt_tokens})",
        "pages found": f"{prefixes.hits} of {prefixes.hits + prefixes.misses} full pages ({prefixes.hit_rate:.0%}); "
        f"{prefixes.evictions} cached pages evicted, {prefixes.cached} cached now",
        "pool full": f"chats that went to host memory and back: {len(served.swapped)}; "
        f"that started again: {len(served.dropped)}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _compared(run: Run, alone: Alone) -> tuple[bool, int]:
    """Returns whether answers are the same alone, and how many differ from a near tie on, which counts as the same."""
    ties = 0
    for number, one in zip(alone.numbers, alone.runs, strict=True):
        together, by_itself = run.served.answers[number], one.answers[0]
        if together == by_itself:
            continue
        pairs = zip(together, by_itself, strict=False)
        at = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(together), len(by_itself)))
        if run.served.leads[number][at] > TIES[run.kv]:
            return False, ties
        ties += 1
    return True, ties
