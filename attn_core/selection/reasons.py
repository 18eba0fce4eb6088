"""Every reason why one backend cannot run a call on a target."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.spec import AttentionSpec
from attn_core.selection.target import Target

Reasons = tuple[str, ...]


def refusals(name: str, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns every reason why one backend cannot run a call on a target."""
    return tuple(reasons_of(name, spec, target))


def reasons_of(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons against a backend, so that a caller may stop at the first."""
    yield from unclaimed(name, spec, target)
    if spec.symbolic and not target.claims(name)[0].symbolic:
        return  # the rules compare sizes, and a symbol cannot be compared
    yield from broken_rules(name, spec, target)
    yield from unclaimed_gradient(name, spec, target)


def unclaimed(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons that follow from the target and from the backend's claims about the forward.

    They are the same for all numbers in place of the batch and the lengths, except for whether q_len is kv_len.
    """
    backend = backends.load(name, target.kind)
    for unavailable, why in target.unavailable:
        if unavailable == name:
            yield why
    claims = target.claims(name)[0]
    unreached = target.out_of_reach(name)
    # The bridge matters only for kernels that claim the device; the claims refuse it for the others.
    if unreached is not None and (target.framework == "torch" or claims.runs_on(target.device)):
        yield unreached
    if spec.dropout and backend.FRAMEWORK == "torch" and target.framework == "jax":
        yield f"dropout={spec.dropout}: in JAX only the XLA path has dropout"
    yield from unmet_claims(claims, spec, target.device)


def broken_rules(name: str, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns the reasons that depend on all sizes of a call: the backend's own rules, and its known faults."""
    build = target.build(name)
    version = () if build is None else build.version
    reasons = backends.load(name, target.kind).refuses(spec, target.device, build)
    if not known_bad.rows_of(name, target.device, version):
        return reasons
    return (*reasons, *known_bad.refusals(name, spec, target.device, version))


def unclaimed_gradient(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons that follow from the backend's claims about the backward; see ``unclaimed`` for the sizes."""
    if not spec.needs_backward:
        return
    claims, gradient_claims = target.claims(name)
    if gradient_claims is None:
        yield f"backward: {claims.kernel} has no gradient"
        return
    # The forward's reasons also apply to the backward; list each only once.
    forward = unmet_claims(claims, spec, target.device)
    yield from (f"backward: {why}" for why in unmet_claims(gradient_claims, spec, target.device) if why not in forward)
