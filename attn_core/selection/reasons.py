"""Every reason why one backend cannot run a call on a target."""

from __future__ import annotations

from collections.abc import Iterator

from attn_core.backends.shared import known_bad
from attn_core.backends.shared.claims import unmet_claims
from attn_core.call.spec import AttentionSpec
from attn_core.selection.target import BackendOnTarget, Target, backend_on

Reasons = tuple[str, ...]


def refusals(name: str, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns every reason why one backend cannot run a call on a target."""
    return tuple(reasons_of(name, spec, target))


def reasons_of(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons against a backend, so that a caller may stop at the first."""
    backend = backend_on(target, name)
    yield from unclaimed(backend, spec, target)
    if spec.symbolic and not backend.forward.symbolic:
        return  # the rules compare sizes, and a symbol cannot be compared
    yield from broken_rules(name, backend, spec, target)
    if spec.needs_backward:
        yield from unclaimed_gradient(backend, spec, target)


def unclaimed(backend: BackendOnTarget, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons that follow from the target and from the backend's claims about the forward.

    They are the same for all numbers in place of the batch and the lengths, except for whether q_len is kv_len.
    """
    yield from backend.missing
    # The bridge matters only for kernels that claim the device; the claims refuse it for the others.
    if backend.unreached and (target.framework == "torch" or backend.forward.runs_on(target.device)):
        yield backend.unreached
    if spec.dropout and target.framework == "jax" and backend.module.FRAMEWORK == "torch":
        yield f"dropout={spec.dropout}: in JAX only the XLA path has dropout"
    yield from unmet_claims(backend.forward, spec, target.device)


def broken_rules(name: str, backend: BackendOnTarget, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns the reasons that depend on all sizes of a call: the backend's own rules, and its known faults."""
    reasons = backend.module.refuses(spec, target.device, backend.build)
    if not known_bad.rows_of(name, target.device, backend.version):
        return reasons
    return (*reasons, *known_bad.refusals(name, spec, target.device, backend.version))


def unclaimed_gradient(backend: BackendOnTarget, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons that follow from the backend's claims about the backward; see ``unclaimed`` for the sizes."""
    if backend.backward is None:
        yield f"backward: {backend.forward.kernel} has no gradient"
        return
    # The forward's reasons also apply to the backward; list each only once.
    forward = unmet_claims(backend.forward, spec, target.device)
    yield from (f"backward: {why}" for why in unmet_claims(backend.backward, spec, target.device) if why not in forward)
