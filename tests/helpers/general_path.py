"""The general path of eager torch calls, on which every argument is checked and every observer is asked.

``general_path`` closes the table of prepared calls, and ``prepared_calls`` tells which forms of a call it ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch_frontend.context_parallel import repeated_calls
from torch_frontend.dispatch import prepared


@contextmanager
def general_path() -> Iterator[None]:
    """Calls inside of the block are observed, so the table of prepared calls runs none."""
    with patch.object(prepared, "is_observed", lambda: True):
        yield


@contextmanager
def prepared_calls() -> Iterator[list[str]]:
    """Yields the names of the functions that prepared the calls inside of the block."""
    names: list[str] = []
    look_up = prepared._prepared

    def noting(prepare: Any, *key: Any) -> Any:
        found = look_up(prepare, *key)
        if found is not None:
            names.append(f"{prepare.__module__}.{prepare.__name__}")
        return found

    with patch.object(prepared, "_prepared", noting):
        yield names


@contextmanager
def remembered_on_one_rank() -> Iterator[None]:
    """Context parallelism on one rank remembers calls, for which it usually needs a meeting of several."""

    def remember(self: Any, call: Any) -> None:
        self.known = call

    try:
        with patch.object(repeated_calls.RepeatedCall, "remember", remember):
            yield
    finally:
        prepared._prepared.cache_clear()
