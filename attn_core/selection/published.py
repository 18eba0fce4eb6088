"""Orders for cards that this project does not own, from figures that others published: a row of ``published.json``
each, with its sources and their dates.

A row decides only where no measured table does. A row without ``first`` changes nothing: its sources disagree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec

DATA = Path(__file__).with_suffix(".json")


class Figures(NamedTuple):
    """What others measured on one card.

    Attributes:
        device: such as ``"sm80"``, in both frameworks: JAX runs the same kernels.
        calls: the fields of ``AttentionSpec``, with their values, that the measured calls had; empty for all calls.
        first: the backends that were faster, best first; they come directly before ``ahead_of`` if they came after it.
        ahead_of: the backend that they were compared with.
        figures: what was measured, in words.
        sources: link -> date.
    """

    device: str
    calls: Mapping[str, Any]
    first: tuple[str, ...]
    ahead_of: str
    figures: str
    sources: Mapping[str, str]

    def __str__(self) -> str:
        sources = ", ".join(f"{link} ({date})" for link, date in self.sources.items())
        return f"order from published figures, not ours: {self.figures}: {sources}; `attn tune` measures yours"

    def ordered(self, usual: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the usual order with ``first`` before ``ahead_of``, as far as it has these backends."""
        place = usual.index(self.ahead_of) if self.ahead_of in usual else len(usual)
        before, after = usual[:place], usual[place:]
        first = tuple(name for name in self.first if name in after)
        return (*before, *first, *(name for name in after if name not in first))


@cache
def rows() -> tuple[Figures, ...]:
    """Returns all rows."""
    return tuple(Figures(**row | {"first": tuple(row["first"])}) for row in json.loads(DATA.read_text("utf-8")))


def figures_for(spec: AttentionSpec, device: str) -> Figures | None:
    """Returns the row of a call on a device, or None. No row is about keys and values in pages."""
    if spec.paged is not None:
        return None
    for row in rows():
        if row.device == device and all(getattr(spec, name) == value for name, value in row.calls.items()):
            return row
    return None
