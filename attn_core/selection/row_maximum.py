"""Chooses the backend of ``return_max_logit``: of a pass over q and k that computes the largest logit of each row.

The largest logit does not depend on the kernel that computes the output, and few kernels return it. So it has a choice
of its own: among the backends that have a ``row_maximum``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from attn_core import backends
from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.selection.choice import Selection
from attn_core.selection.forward_mode import Refusals, first_able, in_words, named_with_reasons, record
from attn_core.selection.target import Reasons, Target, backend_on, broken_rules

BY_THE_KERNEL = "by the kernel of the output"


@dataclass(frozen=True)
class RowMaximum:
    """The choice of the backend that computes a call's largest logits."""

    spec: AttentionSpec  # the call, without what does not change a logit
    target: Target
    backend: str | None  # the chosen one, or None
    refusals: Refusals  # ``((backend, reasons), ...)`` of the candidates in front of it; of all if there is none

    def __str__(self) -> str:
        return f"by a second pass over q and k: {named_with_reasons(self.backend, self.refusals)}"


def spec_of(spec: AttentionSpec) -> AttentionSpec:
    """Returns a call without what does not change a logit: values, sinks, dropout, gradients, and other results."""
    none: dict[str, Any] = {"sinks": False, "dropout": 0.0, "needs_backward": False, "bias_gradient": False}
    none |= {"aux_gradients": (), "return_lse": False, "deterministic": False, "value_dim": spec.head_dim}
    none["invariant"] = None
    return replace(spec, **none)


@from_records(maxsize=4096)
def choose(spec: AttentionSpec, target: Target) -> RowMaximum:
    """Chooses the first candidate that can compute a call's largest logits.

    Raises:
        SpecError: for a call on pages.
    """
    if spec.paged is not None:
        raise SpecError("return_max_logit=True: expected keys that are not in pages; no pass reads their logits there")
    spec = spec_of(spec)
    names = backends.row_maximum_order(target.framework, target.kind)
    backend, refused = first_able(names, lambda name: reasons(name, spec, target))
    return RowMaximum(spec, target, backend, refused)


def with_max_logit(selection: Selection) -> Selection:
    """Returns the Selection of a call that returns its largest logits, with what computes them."""
    spec, target, name = selection.spec, selection.target, selection.backend
    by_a_pass = str(choose(spec, target))
    own = name is not None and selection.parts is None and not spec.empty
    if not own or backends.load(name or "", target.kind).forward_with_maximum(spec) is None:
        return replace(selection, max_logit=by_a_pass)
    # The op that torch's compiler traces has no place for a third result.
    traced = f"; under torch.compile and torch.func {by_a_pass}" if target.framework == "torch" else ""
    return replace(selection, max_logit=BY_THE_KERNEL + traced)


def noted(choice: RowMaximum) -> str:
    """Returns the chosen backend, counts the new plan, and writes its record.

    Raises:
        SpecError: if there is none; the message has every reason.
    """
    if choice.backend is None:
        why = in_words(choice.refusals)
        raise SpecError(f"return_max_logit=True: expected a call whose logits a backend can compare: {why}")
    return record("row_maximum", choice.spec, choice.target, choice.backend, choice.refusals, "static order")


def reasons(name: str, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns every reason why a backend cannot compute the largest logits of a call on a target."""
    backend = backend_on(target, name)
    own = backend.record.row_maximum
    if own is None:
        return (f"{backend.record.forward_claims.kernel} has no largest logits",)
    unreached = () if backend.unreached is None else (backend.unreached,)
    rules = () if spec.symbolic else broken_rules(name, backend, spec, target)
    return (*backend.missing, *unreached, *unmet_claims(own.claims, spec, target.device), *rules)
