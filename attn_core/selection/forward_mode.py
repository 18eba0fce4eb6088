"""Chooses the backend of a call's forward mode, as pure data with all reasons, beside the choice of its forward.

Forward over reverse, the tangents of a call's gradients, has a choice of the same kind in JAX.

The tangents of a call do not depend on the kernel that computes its results. So each has a choice of its own: the
results come from the backend of ``select``, the tangents from one that claims forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call import observe
from attn_core.call.functions import listed
from attn_core.call.observe import words_of
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.selection.target import Reasons, Target, refusals

Refusals = tuple[tuple[str, Reasons], ...]

WORDS = {
    "torch": ("torch.func.vjp, jacrev", "torch.func.jvp, jacfwd, torch.autograd.forward_ad"),
    "jax": ("jax.grad, jax.vjp", "jax.jvp, jax.linearize, jax.jacfwd"),
}
"""What reverse mode and forward mode are called, by framework."""


@dataclass(frozen=True)
class ForwardMode:
    """The choice of the backend that computes a call's tangents."""

    spec: AttentionSpec  # the call without gradients in reverse mode
    target: Target
    requested: tuple[str, ...] | None
    arrays: tuple[int, ...]  # the numbers of the aux arrays that have tangents
    backend: str | None  # the chosen one, or None
    refusals: Refusals  # ``((backend, reasons), ...)`` of the candidates in front of it; of all if there is none
    over_reverse: bool = False  # whether it is the choice of the tangents of the call's gradients

    def __str__(self) -> str:
        return named_with_reasons(self.backend, self.refusals)

    def error(self) -> SpecError:
        """Returns the error for a call whose tangents no candidate can compute."""
        reverse, forward = WORDS[self.target.framework]
        got, has = f"forward mode ({forward})", "forward mode"
        if self.over_reverse:
            got, has = "second derivatives (jax.jvp of jax.grad, jax.hessian)", "them in forward over reverse mode"
        named = "the call" if self.requested is None else f"backend={', '.join(self.requested)!r}"
        call = self.spec, self.target, self.arrays, self.over_reverse
        automatic = backends.forward_mode_order(self.target.framework, self.target.kind)
        others = [name for name in automatic if not reasons(name, *call)]
        remedy = f'; backend="{others[0]}" has {has}' if others else ""
        return SpecError(f"{named}: expected reverse mode ({reverse}), got {got}: {in_words(self.refusals)}{remedy}")


@from_records(maxsize=4096)
def choose(
    spec: AttentionSpec,
    target: Target,
    requested: tuple[str, ...] | None,
    arrays: tuple[int, ...] = (),
    over_reverse: bool = False,
) -> ForwardMode:
    """Chooses the first candidate that can compute a call's tangents.

    Args:
        requested: the backends that the caller named, of which no other may run; None for automatic choice.
        arrays: the numbers of the aux arrays that have tangents.
        over_reverse: whether the tangents are those of the call's gradients.
    """
    spec = replace(spec, needs_backward=False, bias_gradient=False, aux_gradients=())
    names = requested or backends.forward_mode_order(target.framework, target.kind)
    backend, refused = first_able(names, lambda name: reasons(name, spec, target, arrays, over_reverse))
    return ForwardMode(spec, target, requested, arrays, backend, refused, over_reverse)


def noted(choice: ForwardMode) -> str:
    """Returns the chosen backend, counts the new plan, and writes its record.

    Raises:
        SpecError: if there is none; the message has every reason.
    """
    if choice.backend is None:
        raise choice.error()
    chosen_by = "name" if choice.requested else "static order"
    return record("jvp", choice.spec, choice.target, choice.backend, choice.refusals, chosen_by)


def reasons(
    name: str, spec: AttentionSpec, target: Target, arrays: tuple[int, ...] = (), over_reverse: bool = False
) -> Reasons:
    """Returns every reason why a backend cannot compute the tangents of a call on a target; see ``choose``."""
    backend = backends.load(name, target.kind)
    if backend.forward_mode is None:
        return (f"{backend.forward_claims.kernel} has no forward mode",)
    if over_reverse and backend.framework != "jax":  # JAX differentiates the gradients of a backend of JAX
        return (f"{backend.forward_claims.kernel} has no tangents of its gradients",)
    forward, claims = refusals(name, spec, target), backend.forward_mode.claims
    if arrays and not claims.aux_gradients:
        forward = (*forward, f"tangent of {listed(arrays)}: {claims.kernel} has none")
    return (*forward, *(why for why in unmet_claims(claims, spec, target.device) if why not in forward))


# What this choice and that of the largest logits (row_maximum.py) have in common


def first_able(names: Iterable[str], why: Callable[[str], Reasons]) -> tuple[str | None, Refusals]:
    """Returns the first backend without a reason against it, or None; and the reasons against those before it."""
    refused: list[tuple[str, Reasons]] = []
    for name in names:
        against = why(name)
        if not against:
            return name, tuple(refused)
        refused.append((name, against))
    return None, tuple(refused)


def in_words(refused: Refusals) -> str:
    """Returns backends with the reasons against them, as text."""
    return "; ".join(f"{name}: {', '.join(reasons)}" for name, reasons in refused)


def named_with_reasons(backend: str | None, refused: Refusals) -> str:
    """Returns a chosen backend, or "none", with the reasons against others, as text."""
    return (backend or "none") + (f", because {in_words(refused)}" if refused else "")


def record(direction: str, spec: AttentionSpec, target: Target, backend: str, refused: Refusals, chosen_by: str) -> str:
    """Counts a new plan of "jvp" or "row_maximum", writes its record, and returns the backend."""
    observe.count("plan", target.framework, backend)
    reasons = {name: list(why) for name, why in refused}
    behind = f", behind {', '.join(reasons)}" if reasons else ""
    call, where = words_of(spec), f"{target.framework} on {target.device}"
    fields: dict[str, Any] = {"backend": backend, "framework": target.framework, "device": target.device}
    fields |= {"call": call, "chosen_by": chosen_by, "predicted_us": None, "refused": reasons, "direction": direction}
    observe.emit("plan", f"{backend} in {where}, by {chosen_by}{behind}: {direction} {call}", **fields)
    return backend
