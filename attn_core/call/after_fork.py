"""Makes locks and cached properties usable in a forked child, whatever other threads of its parent were doing.

A child has only the thread that forked. A lock that another thread held stays locked there for ever, so the first call
that needs it would hang.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

Value = TypeVar("Value")
Lock = TypeVar("Lock")


def after_fork(function: Callable[[], object]) -> None:
    """Runs a function in every child that this process forks, before anything else there."""
    if hasattr(os, "register_at_fork"):  # a system without fork has no children of this kind
        os.register_at_fork(after_in_child=function)


def free_in_children(lock: Lock) -> Lock:
    """Returns the lock, which a forked child finds free. For locks of modules, because it is never forgotten."""
    after_fork(lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


class lazy_property(cached_property[Value]):
    """``functools.cached_property`` without its lock, which Python 3.11 still has: one for all objects of a class.

    Two threads may both compute the value, so it must depend on the object alone.
    """

    if sys.version_info < (3, 12):

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = instance.__dict__[self.attrname] = self.func(instance)
            return value
