"""timed: counts a compilation, with its seconds, and writes a record of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from attn_core.call import counters, log


@contextmanager
def timed(kind: str, name: str) -> Iterator[None]:
    """Times a block that compiles; a block that raises does not count.

    Args:
        kind: one of ``counters.COMPILES``. name: the program or the kernel, for the record.
    """
    began = perf_counter()
    yield
    compiled(kind, name, perf_counter() - began)


def compiled(kind: str, name: str, seconds: float) -> None:
    """Counts a compilation of one of ``counters.COMPILES`` that took these seconds, and writes a record of it."""
    counters.count_compile(kind, seconds)
    log.emit("compile", f"{kind} took {seconds:.3f} s for {name}", kind=kind, name=name, seconds=seconds)
