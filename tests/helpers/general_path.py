"""The general path of eager torch calls, on which every argument is checked and every observer is asked.

``general_path`` closes all shortcuts for calls that were made before, and ``shortcuts_taken`` tells which ones a call
took. A new shortcut belongs into ``SHORTCUTS``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch


class Shortcut(NamedTuple):
    """A function that runs a call in a short way, or leaves it to the general path.

    Attributes:
        module, name: the global through which it is called; of a method with the name of its class.
        declined: what it returns for a call that it leaves to the general path.
    """

    module: str
    name: str
    declined: Any


SHORTCUTS = (
    Shortcut("torch_frontend.dispatch.fast_calls", "attend", None),
    Shortcut("torch_frontend.dispatch.fast_calls", "attend_with_tables", None),
    Shortcut("torch_frontend.dispatch.fast_calls", "attend_with_ranges", None),
    Shortcut("torch_frontend.dispatch.heads_first", "attend", None),
    Shortcut("torch_frontend.paged.seen_calls", "attend", None),
    Shortcut("torch_frontend.paged.seen_caches", "attend", None),
    Shortcut("torch_frontend.paged.seen_appends", "append", False),
    Shortcut("torch_frontend.paged.append", "_append_as_before", False),
    Shortcut("torch_frontend.flash_attn.seen_kvcache", "_seen", None),
    Shortcut("torch_frontend.context_parallel.repeated_calls", "RepeatedCall.is_current", False),
)
"""All but the one inside ``attention``. Of ``seen_kvcache`` the lookup, because ``Frontend`` holds its function."""


@contextmanager
def general_path() -> Iterator[None]:
    """Calls inside of the block take no shortcut."""
    with ExitStack() as stack:
        for module, name, declined in SHORTCUTS:
            stack.enter_context(patch.object(*_place(module, name), _returning(declined)))
        # attention asks this before its own shortcut; a switch that is off sends every call to the general path.
        attention = import_module("torch_frontend.attention")
        stack.enter_context(patch.object(attention, "_others_on", _returning(False)))
        recomputed = import_module("torch_frontend.recomputed")
        stack.enter_context(patch.object(recomputed, "_can_run", recomputed._can_run.__wrapped__))
        yield


@contextmanager
def shortcuts_taken() -> Iterator[list[str]]:
    """Yields the names of the shortcuts that calls inside of the block take."""
    taken: list[str] = []
    with ExitStack() as stack:
        for module, name, declined in SHORTCUTS:
            place, attribute = _place(module, name)
            noting = _noting(getattr(place, attribute), f"{module}.{name}", declined, taken)
            stack.enter_context(patch.object(place, attribute, noting))
        attention = import_module("torch_frontend.attention")
        noting = _noting(attention.dense_plan, "torch_frontend.attention.dense_plan", None, taken)
        stack.enter_context(patch.object(attention, "dense_plan", noting))
        yield taken


@contextmanager
def remembered_on_one_rank() -> Iterator[None]:
    """Context parallelism on a single rank takes the shortcut of several ranks, which usually needs their meeting."""
    repeated_calls = import_module("torch_frontend.context_parallel.repeated_calls")

    def remember(self: Any, call: Any) -> None:
        self.known = call

    try:
        with patch.object(repeated_calls.RepeatedCall, "remember", remember):
            yield
    finally:
        repeated_calls._repeated_call.cache_clear()


def _place(module: str, name: str) -> tuple[Any, str]:
    """The module or class that has a name, and the last part of the name."""
    owner, _, attribute = name.rpartition(".")
    place = import_module(module)
    return getattr(place, owner) if owner else place, attribute


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: value


def _noting(function: Callable[..., Any], name: str, declined: Any, taken: list[str]) -> Callable[..., Any]:
    """A function that does the same and adds the name to a list if the call was not declined."""

    def run(*arguments: Any, **keywords: Any) -> Any:
        result = function(*arguments, **keywords)
        if result is not declined:
            taken.append(name)
        return result

    return run
