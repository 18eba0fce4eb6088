"""The rows that people train: named rows with goals, and rows drawn by a seed. For ``benchmarks.context_rows``."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, NamedTuple

from attn_core.context_parallel.cost.choose import CANDIDATES
from attn_core.context_parallel.layout import LAYOUTS, layout_for_window

STRATEGIES = CANDIDATES[1]
REST = 0.03
"""The seconds between turns, in both frameworks."""
DRAWN = 10
"""The number of rows that the seed draws."""


class Row(NamedTuple):
    """A causal row of one batch.

    Attributes:
        lengths: of packed documents; None for one document.
        window: the keys that a query sees, itself included; None for all.
        goals: the least efficiency of (a forward, forward + backward); None for a row without a goal.
    """

    name: str
    tokens: int
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    lengths: tuple[int, ...] | None = None
    window: int | None = None
    softcap: float | None = None
    goals: tuple[float, float] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of ``attention``, without the documents."""
        return {"causal": True, "window": self.window, "softcap": self.softcap}

    @property
    def ways(self) -> tuple[tuple[str, str], ...]:
        """Every (strategy, layout). One that cannot run the row is shown as refused."""
        shared = [layout_for_window(self.window)] if self.window is not None and not self.lengths else []
        layouts = (*LAYOUTS, *shared)
        return tuple(product(STRATEGIES, layouts))

    @property
    def words(self) -> str:
        """The row in words."""
        parts = [f"{self.tokens} tokens", f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"]
        parts += [f"{len(self.lengths)} documents"] if self.lengths else []
        parts += [f"window {self.window}"] if self.window else []
        parts += [f"softcap {self.softcap:g}"] if self.softcap else []
        return ", ".join(parts)

    def shortened(self, tokens: int = 96) -> Row:
        """Returns a row of the same kind that a CPU computes at once."""
        factor, lengths = tokens / self.tokens, None
        if self.lengths:
            lengths = tuple(max(1, int(length * factor)) for length in self.lengths)
            tokens = sum(lengths)
        elif self.tokens % 2:
            tokens += 1 - tokens % 2
        window = None if self.window is None else max(2, int(self.window * factor))
        ratio = self.heads // self.kv_heads
        sizes = {"heads": 2 * ratio, "kv_heads": 2, "head_dim": self.head_dim // 8}
        return self._replace(tokens=tokens, lengths=lengths, window=window, **sizes)


SEVEN = (9000, 8168, 6000, 4400, 3000, 2000, 200)
NAMED = (
    Row("packed", sum(SEVEN), lengths=SEVEN, goals=(0.85, 0.88)),
    Row("window", 32768, window=4096, goals=(0.90, 0.92)),
    Row("softcap", 16384, 32, 16, softcap=50.0, goals=(0.90, 0.88)),
    Row("gemma", 16384, 16, 8, 256, window=4096, softcap=50.0, goals=(0.85, 0.88)),
    Row("forty heads", 24576, 40, 40, goals=(0.94, 0.91)),
    Row("odd", 10007, goals=(0.80, 0.88)),
    Row("plain", 32768),
    Row("plain of 16384", 16384),
    Row("window of 16384", 16384, window=1024),
)
"""Rows with goals, those of an earlier measurement of shapes outside the benchmark; and rows that show other things."""


def drawn(seed: int, count: int = DRAWN) -> tuple[Row, ...]:
    """Returns rows drawn by a seed: packed, windowed, softcapped and plain, of three widths and odd lengths."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        heads, kv_heads = generator.choice(((32, 8), (16, 8), (24, 24), (28, 4), (32, 32)))
        dim = generator.choice((64, 128, 256))
        # A row of 256 channels has half of the tokens, so that each row takes about as long.
        tokens = 2 * generator.randrange(4000, 18000) // (2 if dim == 256 else 1) + 1
        kind = ("packed", "window", "softcap", "plain")[number % 4]
        more: dict[str, Any] = {}
        if kind == "packed":
            cuts = sorted(generator.sample(range(1, tokens), generator.randrange(2, 24)))
            more["lengths"] = tuple(end - start for start, end in zip((0, *cuts), (*cuts, tokens), strict=True))
        if kind == "window" or generator.random() < 0.2:
            more["window"] = generator.choice((512, 1024, 4096))
        if kind == "softcap":
            more["softcap"] = generator.choice((30.0, 50.0))
        rows.append(Row(f"drawn {number + 1}", tokens, heads, kv_heads, dim, **more))
    return tuple(rows)


def rows_of(seed: int, only: list[str] | None = None, *, small: bool = False) -> tuple[Row, ...]:
    """Returns the named rows and the drawn ones; ``only`` those whose names begin with one of the words.

    Raises:
        ValueError: for a word that begins no name.
    """
    rows = (*NAMED, *drawn(seed))
    for word in only or ():
        if not any(row.name.startswith(word) for row in rows):
            raise ValueError(f"--only {word}: expected the beginning of one of {', '.join(row.name for row in rows)}")
    chosen = [row for row in rows if not only or row.name.startswith(tuple(only))]
    return tuple(row.shortened() if small else row for row in chosen)
