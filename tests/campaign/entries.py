"""Entry: one way to call the library, as data. The entry points of each framework stand in a module of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.cli.trial import Trial
from attn_core.errors import SpecError

Arrays = dict[str, Any]
MODULES = {
    framework: tuple(f"tests.campaign.{framework}_{name}" for name in ("entries", "hosts", "context"))
    for framework in ("torch", "jax")
}
"""The modules with the entry points of each framework: its own functions, the drop-ins, and context parallelism."""


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
        needs: the packages that the entry imports besides its framework.
        same_documents: whether packed queries and keys must have the same documents, and no tokens behind the last.
        kinds: the kinds of device that the entry runs on.
        parts: results of how many kernels are merged into one at most. Each merge rounds, so the bound grows with them.
        masks: whether the host says in a mask what the spec says in other words. A backend by name may then refuse it.
    """

    name: str
    run: Callable[[Trial, str | None, str], Arrays]
    refuses: Callable[[AttentionSpec], str | None]
    shared: bool = False
    share: float = 1.0
    requests: bool = True
    words: Callable[[int], list[int]] | None = None
    needs: tuple[str, ...] = ()
    same_documents: bool = False
    kinds: tuple[str, ...] = ("cpu", "cuda")
    masks: bool = False
    parts: int = 1

    @property
    def framework(self) -> str:
        """The framework: torch or jax."""
        return self.name.partition(" ")[0]


@cache
def _known(framework: str) -> dict[str, Entry]:
    return {entry.name: entry for module in MODULES[framework] for entry in import_module(module).ENTRIES}


@cache
def entries_of(framework: str) -> dict[str, Entry]:
    """Returns the entry points of a framework that can run here, by name. Imports the framework."""
    return {name: entry for name, entry in _known(framework).items() if not missing(entry)}


def left_out(framework: str) -> dict[str, str]:
    """Returns why entry points of a framework cannot run here, by name."""
    return {name: reason for name, entry in _known(framework).items() if (reason := missing(entry))}


def missing(entry: Entry) -> str:
    """Returns ``"x is not installed"`` for the packages that an entry lacks here, or an empty text."""
    absent = [name for name in entry.needs if find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else ""


def entry_of(name: str) -> Entry:
    """Returns an entry by name.

    Raises:
        SpecError: if no framework has it, or it cannot run here.
    """
    framework = name.partition(" ")[0]
    if framework not in MODULES:
        raise SpecError(f"entry={name!r}: expected a name that begins with one of {', '.join(MODULES)}")
    known = _known(framework)
    if name not in known:
        raise SpecError(f"entry={name!r}: expected one of {', '.join(known)}")
    if reason := missing(known[name]):
        raise SpecError(f"entry={name!r}: {reason}")
    return known[name]


LACK_RANGES = {"cpu": ("sdpa_flash", "math"), "cuda": ("flash4", "flash3", "flash2", "xformers", "math")}
"""By the kind of device: backends without key ranges, which compute them in parts; the last one has them."""


def ranges_refuse(spec: AttentionSpec) -> str | None:
    """An Entry's ``refuses`` for calls with key ranges on the host."""
    return without(key_ranges=True)(spec) if spec.key_ranges_shape else "key ranges alone"


def without(*features: str, key_ranges: bool = False, functions: bool = False) -> Callable[[AttentionSpec], str | None]:
    """Returns an Entry's ``refuses`` for an entry without some arguments of ``attention``.

    Args:
        key_ranges: whether it has this argument, which few entries have. functions: the same of mask_mod and score_mod.
    """

    def refuses(spec: AttentionSpec) -> str | None:
        present = {
            "window": spec.window != (None, None),
            "softcap": spec.softcap is not None,
            "alibi": spec.alibi_shape is not None,
            "packed": spec.packed,
            "mask": spec.mask_shape is not None,
            "bias": spec.bias_shape is not None,
            "key_ranges": spec.key_ranges_shape is not None,
            "functions": has_functions(spec),
            "lse": spec.return_lse,
            "gradients": spec.needs_backward,
        }
        present |= {name: bool(getattr(spec, name)) for name in ("sinks", "dropout", "deterministic")}
        has = {"key_ranges": key_ranges, "functions": functions}
        lacks = [*features, *(name for name, there in has.items() if not there)]
        missing = [name for name in lacks if present[name]]
        return f"no {', '.join(missing)}" if missing else None

    return refuses
