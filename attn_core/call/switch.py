"""Switch: turns a debugging mode on or off for a block, or from a line on."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import Any

from attn_core.errors import SpecError, shown


class Switch:
    """Sets a context variable; as a context manager it restores the earlier state at the end of its block.

    Args:
        name: the name of the public function, for the error.

    Raises:
        SpecError: unless ``on`` is True or False.
    """

    def __init__(self, name: str, variable: ContextVar[bool], on: bool) -> None:
        if not isinstance(on, bool):
            raise SpecError(f"{name}({shown(on)}): expected True or False")
        self._variable, self._token = variable, variable.set(on)

    def __enter__(self) -> None:
        """Begins the block. The mode is on or off since the switch was made."""

    def __exit__(self, *_: Any) -> None:
        self._variable.reset(self._token)


def variable_of(name: str) -> ContextVar[bool]:
    """Returns the context variable of a mode; the environment variable ``ATTN_CORE_<NAME>`` is its first value."""
    on = os.environ.get(f"ATTN_CORE_{name.upper()}", "") not in ("", "0")
    return ContextVar(f"attn_core_{name}", default=on)
