"""The tables of ``attn support`` in a terminal: what every backend claims, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from attn_core.backends import Backend
from attn_core.cli.support_table import BOTH, FORWARD_ONLY, GROUPS, NONE, built, cell, head_dims

TITLES = {
    **{"grouped_heads": "GQA", "value_dim": "value dim", "causal": "causal", "window": "window"},
    **{"softcap": "soft cap", "mask": "mask", "key_ranges": "key ranges", "bias": "bias", "alibi": "ALiBi"},
    **{"mask_mod": "mask mod", "score_mod": "score mod"},
    **{"sinks": "sinks", "packed": "packed"},
    **{"lse": "LSE", "lse_gradient": "gradient of LSE", "bias_gradient": "gradient of bias"},
    "aux_gradients": "gradient of aux",
    **{"deterministic": "equal bits", "dropout": "dropout", "portable_dropout": "same dropout"},
    **{"invariant": "same bits, batch", "invariant prefix": "same bits, prefix"},
    **{"paged_alibi": "ALiBi, pages", "paged_starts": "starts, pages"},
    "paged_recent": "rings, pages",
    **{"paged": "pages", "partial": "part of keys", "symbolic": "jax. export"},
    **{"approximate": "approximate", "unproven": "never run"},
}
"""The short title of every claim. It breaks at spaces, because many columns are narrow."""

SHORT = {BOTH: BOTH, FORWARD_ONLY: "fwd", NONE: "·"}
STYLES = {BOTH: "green", FORWARD_ONLY: "yellow", NONE: "dim"}
"""How a cell of the page looks in a terminal."""

LEGEND = f"{SHORT[BOTH]} forward and backward, {SHORT[FORWARD_ONLY]} only forward, {SHORT[NONE]} refused"


def tables() -> Iterator[Table]:
    """Yields a table of claims for each group, and one of devices, dtypes and head dimensions."""
    shown = {name.replace("`", ""): backend for name, backend in built().items()}
    for title, group in GROUPS.items():
        yield _claims(title, list(group), shown)
    yield _limits(shown)


def _claims(title: str, claims: list[str], shown: dict[str, Backend]) -> Table:
    table = _table(title)
    for claim in claims:
        table.add_column("\n".join(TITLES[claim].split()), justify="center")
    for name, backend in shown.items():
        marks = [cell(backend, claim) for claim in claims]
        table.add_row(name, *(Text(SHORT[mark], STYLES[mark]) for mark in marks))
    return table


def _limits(shown: dict[str, Backend]) -> Table:
    table = _table("Limits")
    for title in ("devices", "dtypes", "head_dim", "gradient"):
        table.add_column(title)
    for name, backend in shown.items():
        forward = backend.FORWARD
        dtypes = ", ".join(dtype.replace("bfloat", "bf").replace("float", "fp") for dtype in forward.dtypes)
        devices = ", ".join(forward.devices)
        table.add_row(name, devices, dtypes, head_dims(forward), "no" if backend.BACKWARD is None else "yes")
    return table


def _table(title: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left", title_style="bold")
    table.add_column("backend", no_wrap=True)
    return table
