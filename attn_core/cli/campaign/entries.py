"""Entry: one way to call the library, as data. The entry points of each framework stand in a module of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial
from attn_core.errors import SpecError

Arrays = dict[str, Any]
MODULES = {"torch": "attn_core.cli.campaign.torch_entries", "jax": "attn_core.cli.campaign.jax_entries"}


class Entry(NamedTuple):
    """One way to call the library.

    Attributes:
        name: such as ``"torch attention"``; the first word is the framework.
        run: takes (trial, backend, device) and returns float64 arrays: out, and lse, dq, dk, dv, dbias, dsinks as far
            as the call returns them, in the shapes of the spec.
        refuses: returns why a spec cannot be written as a call of this entry, or None.
        shared: whether the cases of a block share their structure, because each structure is compiled.
        share: the share of a block's cases that run; less than 1 for an entry that is slow.
        requests: whether the caller can request a backend by name.
        words: returns the words that dropout draws for a seed, or None if the entry has no dropout.
    """

    name: str
    run: Callable[[Trial, str | None, str], Arrays]
    refuses: Callable[[AttentionSpec], str | None]
    shared: bool = False
    share: float = 1.0
    requests: bool = True
    words: Callable[[int], list[int]] | None = None

    @property
    def framework(self) -> str:
        """The framework: torch or jax."""
        return self.name.partition(" ")[0]


@cache
def entries_of(framework: str) -> dict[str, Entry]:
    """Returns the entry points of a framework by name. Imports the framework."""
    return {entry.name: entry for entry in import_module(MODULES[framework]).ENTRIES}


def entry_of(name: str) -> Entry:
    """Returns an entry by name.

    Raises:
        SpecError: if no framework has it.
    """
    framework = name.partition(" ")[0]
    if framework not in MODULES:
        raise SpecError(f"entry={name!r}: expected a name that begins with one of {', '.join(MODULES)}")
    known = entries_of(framework)
    if name not in known:
        raise SpecError(f"entry={name!r}: expected one of {', '.join(known)}")
    return known[name]


def without(*features: str) -> Callable[[AttentionSpec], str | None]:
    """Returns an Entry's ``refuses`` for an entry without some arguments of ``attention``."""

    def refuses(spec: AttentionSpec) -> str | None:
        present = {
            "window": spec.window != (None, None),
            "softcap": spec.softcap is not None,
            "alibi": spec.alibi_shape is not None,
            "packed": spec.packed,
            "mask": spec.mask_shape is not None,
            "bias": spec.bias_shape is not None,
            "lse": spec.return_lse,
            "gradients": spec.needs_backward,
        }
        present |= {name: bool(getattr(spec, name)) for name in ("sinks", "dropout", "deterministic")}
        missing = [name for name in features if present[name]]
        return f"no {', '.join(missing)}" if missing else None

    return refuses
