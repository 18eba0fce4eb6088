"""Target: the machine that a call would run on, as data, and every reason why a backend cannot run a call there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from attn_core import backends
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.caches import cached_once, from_records
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.support import BRIDGED, Build, Support, limit_to_build
from attn_core.call.after_fork import lazy_property
from attn_core.call.kinds import check_hashable, check_kind
from attn_core.call.spec import AttentionSpec

Reasons = tuple[str, ...]

JAX_GPUS = ("gpu", "cuda", "rocm")
"""JAX's names for the platform of a GPU; a device of either vendor has "gpu"."""


@dataclass(frozen=True)
class Target:
    """The machine that a call would run on, as data: any machine can be described on any other.

    Attributes:
        framework: ``"torch"`` or ``"jax"``, the framework of the caller's tensors.
        device: ``"cpu"``; an NVIDIA GPU by its compute capability, ``"sm80"``, ``"sm90"``; a GPU of AMD by its
            architecture, ``"gfx942"``; else the framework's own word in lower case: ``"tpu"``, ``"mps"``, ``"xpu"``.
        unavailable: ``((backend, reason), ...)`` for backends that are not installed there.
        builds: ``((backend, Build), ...)`` for installed builds that differ from the backend's claims.
    """

    framework: str
    device: str
    unavailable: tuple[tuple[str, str], ...] = ()
    builds: tuple[tuple[str, Build], ...] = ()

    def __post_init__(self) -> None:
        _check_place(self.framework, self.device)
        for name in ("unavailable", "builds"):
            check_kind(name, getattr(self, name), tuple, "a tuple of pairs that begin with a backend's name")
            check_hashable(name, getattr(self, name))

    @classmethod
    def here(cls, framework: str, device: str) -> Target:
        """Returns this process's installation. Probes only the backends that claim the device."""
        _check_place(framework, device)
        return local_target(framework, device)

    @lazy_property
    def kind(self) -> str:
        """``"cuda"`` for every NVIDIA GPU, ``"rocm"`` for AMD's, else the device itself."""
        return backends.kind_of(self.device)

    def out_of_reach(self, name: str) -> str | None:
        """Returns why the framework cannot call a backend on this kind of device, whatever is installed; else None."""
        check_kind("name", name, str, "a backend's name")
        return backend_on(self, name).unreached

    def build(self, name: str) -> Build | None:
        """Returns the Build of a backend that differs from the backend's claims here, or None."""
        return next((build for backend, build in self.builds if backend == name), None)

    def claims(self, name: str) -> tuple[Support, Support | None]:
        """Returns a backend's claims on this target: (forward, backward), narrowed to the installed build."""
        check_kind("name", name, str, "a backend's name")
        found = backend_on(self, name)
        return found.forward, found.backward


def _check_place(framework: object, device: object) -> None:
    check_kind("framework", framework, str, "'torch' or 'jax'")
    check_kind("device", device, str, "a name such as 'cpu' or 'sm90'")


class BackendOnTarget(NamedTuple):
    """What is known of a backend on a target before there is a call."""

    record: backends.Backend  # for this kind of device
    forward: Support  # its claims, narrowed to the installed build
    backward: Support | None  # the same of its gradient; None if it has none
    build: Build | None  # the installed build, if it differs from the backend's claims
    version: tuple[int, ...]  # of the package whose faults matter; empty if it is unknown or does not matter
    missing: tuple[str, ...]  # why it is not installed
    unreached: str | None  # why the framework cannot call it on this kind of device, whatever is installed; else None


@from_records(maxsize=1024)  # every new shape asks about the same few backends
def backend_on(target: Target, name: str) -> BackendOnTarget:
    """Returns what is known of a backend on a target before there is a call."""
    record, build = backends.load(name, target.kind), target.build(name)
    # A build for inference lacks the kernel of the gradient, whatever the backend claims.
    backward = None if build is not None and "backward" in build.without else record.backward_claims
    return BackendOnTarget(
        record,
        limit_to_build(record.forward_claims, build) or record.forward_claims,
        limit_to_build(backward, build),
        build,
        () if build is None else build.version,
        tuple(why for unavailable, why in target.unavailable if unavailable == name),
        out_of_reach(target.framework, target.device, record.framework),
    )


def out_of_reach(framework: str, device: str, owner: str) -> str | None:
    """Returns why a framework cannot call kernels on tensors of another one on a device, or None if it can.

    Args:
        owner: the framework of the kernels' tensors.
    """
    if framework == owner:
        return None
    if framework == "torch":
        return "runs in JAX only"
    if backends.kind_of(device) in BRIDGED:
        return None
    return f"device {device}: the bridge from JAX to torch's kernels runs on CPUs and NVIDIA GPUs"


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
    if spec.dropout and target.framework == "jax" and backend.record.framework == "torch":
        yield f"dropout={spec.dropout}: in JAX only the XLA path has dropout"
    yield from unmet_claims(backend.forward, spec, target.device)


def broken_rules(name: str, backend: BackendOnTarget, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns the reasons that depend on all sizes of a call: the backend's own rules, and its known faults."""
    reasons = backend.record.refuses(spec, target.device, backend.build)
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


# This process


@from_records(maxsize=64)
def local_target(framework: str, device: str) -> Target:
    """Returns the Target that describes this process, with a reason for every backend that it cannot use."""
    kind, missing, builds = backends.kind_of(device), [], []
    for name in backends.names():
        backend = backends.load(name, kind)
        # Not probed: selection refuses it anyway, and on a TPU the probe would import torch for nothing.
        if not backend.forward_claims.runs_on(device) or out_of_reach(framework, device, backend.framework):
            continue
        reason = backends.availability(name, kind)[1]
        if reason is None and backend.framework == "torch" and framework == "jax":
            reason = bridge_reason()
        if reason is None:
            try:
                build = backends.installed_build(name, device)
                builds += [] if build is None else [(name, build)]
            except Exception as error:  # a broken package may raise anything while it is inspected
                if type(error).__name__ == "OutOfMemoryError":  # is temporary, but a reason would be cached for good
                    raise
                reason = f"not available: {type(error).__name__}: {error} (needs {backend.requires})"
        if reason is not None:
            missing.append((name, reason))
    return Target(framework, device, tuple(missing), tuple(builds))


@cached_once
def bridge_reason() -> str | None:
    """Returns why JAX cannot reach torch's kernels in this process, or None if it can."""
    try:
        import jax_tvm_ffi  # noqa: F401
        import tvm_ffi  # noqa: F401
    except Exception as error:  # any failure of the import is the reason
        return f"the bridge from JAX is not available: {type(error).__name__}: {error} (needs jax-tvm-ffi>=0.1.3)"
    return None


class Availability(NamedTuple):
    """A backend on this machine: either its version, or the reason why it cannot be used."""

    version: str | None
    reason: str | None

    def __str__(self) -> str:
        return f"available ({self.version})" if self.reason is None else self.reason


def availability(framework: str, device: str) -> dict[str, Availability]:
    """Returns the availability of every backend in a framework on a device. Imports each kernel as proof."""
    return {name: _availability(name, framework, device) for name in backends.names()}


def _availability(name: str, framework: str, device: str) -> Availability:
    """Returns the availability of one backend; of several reasons against it the first one here."""
    kind = backends.kind_of(device)
    backend = backends.load(name, kind)
    unreached = out_of_reach(framework, device, backend.framework)
    if unreached is not None and framework == "jax":  # before a probe, which imports torch
        return Availability(None, unreached)
    version, reason = backends.availability(name, kind)
    if reason is not None:
        return Availability(None, reason)
    if not backend.forward_claims.runs_on(device):
        return Availability(
            None, f"{backend.forward_claims.kernel} runs on {' or '.join(backend.forward_claims.devices)}, not {device}"
        )
    if unreached is not None:
        return Availability(None, unreached)
    if backend.framework == "torch" and framework == "jax" and bridge_reason():
        return Availability(None, bridge_reason())
    return Availability(version, None)


def jax_device_name(device: Any) -> str:
    """Returns the name of a ``jax.Device``: "cpu", "sm90", "gfx942", or its platform in lower case, such as "tpu".

    XLA's compute capability of a GPU is "9.0" for NVIDIA's, and for AMD's the architecture, "gfx942" (see
    ``MakeComputeCapabilityString`` in github.com/openxla/xla, xla/pjrt/gpu/se_gpu_pjrt_client.cc).
    """
    platform = str(device.platform).lower()
    if platform not in JAX_GPUS:
        return platform
    capability = str(device.compute_capability)
    if capability.startswith("gfx"):
        return capability.partition(":")[0]  # the rest, "sramecc+:xnack-", names features
    return "sm" + capability.replace(".", "")
