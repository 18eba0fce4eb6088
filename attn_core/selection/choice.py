"""select: chooses the backend of a call; explain: gives every reason for the choice.

The choice stops at the first backend that can run the call. A Selection computes the reasons against the others only
when they are read, so that the first call of a new shape does not pay for an explanation. Choice and explanation use
the same function, ``_reasons``, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attn_core import backends
from attn_core.backends.shared.cached_once import cached_once
from attn_core.backends.support import Build, Support, limit_to_build, unmet_claims
from attn_core.call.spec import AttentionSpec
from attn_core.errors import SpecError
from attn_core.selection import preference

Reasons = tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """The machine that a call would run on, as data: any machine can be described on any other.

    Attributes:
        framework: ``"torch"`` or ``"jax"``, the framework of the caller's tensors.
        device: ``"cpu"``, or the compute capability of an NVIDIA GPU as ``"sm80"``, ``"sm90"``, ``"sm100"``.
        unavailable: ``((backend, reason), ...)`` for backends that are not installed there.
        builds: ``((backend, Build), ...)`` for installed builds that differ from the backend's claims.
    """

    framework: str
    device: str
    unavailable: tuple[tuple[str, str], ...] = ()
    builds: tuple[tuple[str, Build], ...] = ()

    @classmethod
    def here(cls, framework: str, device: str) -> Target:
        """Returns this process's installation. Probes only the backends that claim the device."""
        return _local_target(framework, device)

    @property
    def kind(self) -> str:
        """``"cuda"`` for every NVIDIA GPU, ``"rocm"`` for AMD's, else the device itself."""
        return backends.kind_of(self.device)

    def build(self, name: str) -> Build | None:
        """Returns the Build of a backend that differs from the backend's claims here, or None."""
        return next((build for backend, build in self.builds if backend == name), None)

    def claims(self, name: str) -> tuple[Support, Support | None]:
        """Returns a backend's claims on this target: (forward, backward), narrowed to the installed build."""
        return _claims(self, name)


@lru_cache(maxsize=1024)  # narrowing copies a Support, and every new shape needs the same few copies
def _claims(target: Target, name: str) -> tuple[Support, Support | None]:
    backend, build = backends.load(name, target.kind), target.build(name)
    # A build for inference lacks the kernel of the gradient, whatever the backend claims.
    backward = None if build is not None and "backward" in build.without else backend.BACKWARD
    return limit_to_build(backend.FORWARD, build) or backend.FORWARD, limit_to_build(backward, build)


@dataclass(frozen=True)
class Selection:
    """The choice of a backend with all reasons. Errors, logs and docs all show ``str(selection)``.

    Attributes:
        spec, target: the request.
        requested: the backends the caller named, or None for automatic choice.
        backend: the chosen backend, or None.
        program_faults: why this installation cannot build the kernels that XLA would launch. Only an attempt shows it.
    """

    spec: AttentionSpec
    target: Target
    requested: tuple[str, ...] | None
    backend: str | None
    program_faults: Reasons = ()

    @cached_property
    def considered(self) -> tuple[str, ...]:
        """All backends: the candidates in the order of preference, then the ones that run only when requested."""
        candidates = self.requested or self._automatic
        return (*candidates, *(name for name in backends.names() if name not in candidates))

    @cached_property
    def refusals(self) -> tuple[tuple[str, Reasons], ...]:
        """``((backend, reasons), ...)``: every reason of every backend that cannot run the call."""
        reasons = ((name, refusals(name, self.spec, self.target)) for name in self.considered)
        return tuple((name, why) for name, why in reasons if why)

    @cached_property
    def lane(self) -> tuple[str, Reasons] | None:
        """How JAX reaches the chosen torch backend; None for other frameworks and backends.

        ``("compiled", ())``: XLA launches its kernels. ``("callback", why)``: XLA calls Python, for the reasons
        ``why``.
        """
        if self.backend is None or self.target.framework != "jax":
            return None
        backend = backends.load(self.backend, self.target.kind)
        if backend.FRAMEWORK != "torch":
            return None
        why = backends.program_refusals(backend, self.spec, self.target.device)
        if why == () and not self.program_faults:
            return "compiled", ()
        return "callback", (*(why or ()), *self.program_faults)

    def reasons(self, name: str) -> Reasons:
        """Returns why a backend cannot run the call; empty if it can."""
        return dict(self.refusals).get(name, ())

    def __str__(self) -> str:
        refused = dict(self.refusals)
        width = max(len(name) for name in self.considered)
        lines = [f"attention in {self.target.framework} on {self.target.device}: {self.spec}"]
        for name in self.considered:
            verdict = "selected" + self._lane if name == self.backend else "can run it"
            if name in refused:
                verdict = "refused: " + "; ".join(refused[name])
            elif name != self.backend and name not in self._automatic:
                verdict = "can run it when requested by name"
            lines.append(f"  {name:<{width}}  {verdict}")
        return "\n".join(lines)

    @property
    def _lane(self) -> str:
        if self.lane is None:
            return ""
        name, why = self.lane
        return f", {name} lane" + (f" ({'; '.join(why)})" if why else "")

    @cached_property
    def _automatic(self) -> tuple[str, ...]:
        return preference.order(self.spec, self.target.framework, self.target.device)


class NoBackendError(NotImplementedError):
    """No backend, or no requested backend, can run the call. ``error.selection`` has every reason."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        if selection.requested:
            names = ", ".join(selection.requested)
            lead = f"backend={names!r} cannot run this call, and a backend requested by name never falls back"
        else:
            lead = "no backend can run this call"
        super().__init__(f"{lead}\n{selection}")

    def __reduce__(self) -> tuple[type[NoBackendError], tuple[Selection]]:  # for pickling between processes
        return NoBackendError, (self.selection,)


@lru_cache(maxsize=64)  # small, because the reasons of a call take 10 KiB once they are read
def explain(spec: AttentionSpec, target: Target, backend: str | tuple[str, ...] | None = None) -> Selection:
    """Returns the Selection of a call, even if no backend can run it. Pure: the result depends on the arguments only.

    Raises:
        SpecError: for an unknown name, or an empty tuple of names.
    """
    requested = (backend,) if isinstance(backend, str) else backend
    if requested is not None and not requested:
        raise SpecError(f"backend={backend!r}: expected a backend's name, names in order of preference, or None")
    for name in requested or ():
        # A wrong name is an error even behind a name that can run the call.
        backends.check_name(name)
    candidates = requested or preference.order(spec, target.framework, target.device)
    chosen = next((name for name in candidates if next(_reasons(name, spec, target), None) is None), None)
    return Selection(spec, target, requested, chosen)


def select(spec: AttentionSpec, target: Target, backend: str | tuple[str, ...] | None = None) -> Selection:
    """Chooses the backend of a call.

    Args:
        backend: None for automatic choice; a name, which runs or raises; or names in order of preference, of which the
            first that supports the call runs.

    Raises:
        NoBackendError: if none can run the call, with every reason.
        SpecError: for an unknown name.
    """
    selection = explain(spec, target, backend)
    if selection.backend is None:
        raise NoBackendError(selection)
    return selection


def refusals(name: str, spec: AttentionSpec, target: Target) -> Reasons:
    """Returns every reason why one backend cannot run a call on a target."""
    return tuple(_reasons(name, spec, target))


def _reasons(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
    """Yields the reasons against a backend, cheapest checks first, so that a caller may stop at the first."""
    backend = backends.load(name, target.kind)
    for unavailable, why in target.unavailable:
        if unavailable == name:
            yield why
    if backend.FRAMEWORK == "jax" and target.framework == "torch":
        yield "runs in JAX only"
    if spec.dropout and backend.FRAMEWORK == "torch" and target.framework == "jax":
        yield f"dropout={spec.dropout}: in JAX only the XLA path has dropout"
    claims, gradient_claims = target.claims(name)
    forward = unmet_claims(claims, spec, target.device)
    yield from forward
    if spec.symbolic and not claims.symbolic:
        return  # the rules below compare sizes, and a symbol cannot be compared
    yield from backend.refuses(spec, target.device, target.build(name))
    if not spec.needs_backward:
        return
    if gradient_claims is None:
        yield f"backward: {claims.kernel} has no gradient"
        return
    # The forward's reasons also apply to the backward; list each only once.
    yield from (f"backward: {why}" for why in unmet_claims(gradient_claims, spec, target.device) if why not in forward)


@lru_cache(maxsize=64)
def _local_target(framework: str, device: str) -> Target:
    """Returns the Target that describes this process, with a reason for every backend that it cannot use."""
    kind, missing, builds = backends.kind_of(device), [], []
    for name in backends.names():
        backend = backends.load(name, kind)
        # Not probed: its claims already refuse the device.
        if not backend.FORWARD.runs_on(device):
            continue
        if backend.FRAMEWORK == "jax" and framework == "torch":
            continue
        reason = backends.availability(name, kind)[1]
        if reason is None and backend.FRAMEWORK == "torch" and framework == "jax":
            reason = bridge_reason()
        if reason is None:
            try:
                build = backends.installed_build(name, device)
                builds += [] if build is None else [(name, build)]
            except Exception as error:  # a broken package may raise anything while it is inspected
                if type(error).__name__ == "OutOfMemoryError":  # is temporary, but a reason would be cached for good
                    raise
                reason = f"not available: {type(error).__name__}: {error} (needs {backend.REQUIRES})"
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
