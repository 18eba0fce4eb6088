"""select: chooses the backend of a call; explain: gives every reason for the choice.

The choice stops at the first backend that can run the call. A Selection computes the reasons against the others only
when they are read, so that the first call of a new shape does not pay for an explanation. Choice and explanation use
the same function, ``reasons_of``, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from attn_core import backends
from attn_core.call.after_fork import lazy_property
from attn_core.call.kinds import check_kind
from attn_core.call.options import requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference, same_bits
from attn_core.selection.reasons import Reasons, broken_rules, reasons_of, refusals, unclaimed, unclaimed_gradient
from attn_core.selection.target import Target, backend_on


def lane_of(name: str, spec: AttentionSpec, target: Target, program_faults: Reasons = ()) -> tuple[str, Reasons] | None:
    """Returns how JAX reaches a backend; see ``Selection.lane``."""
    if target.framework != "jax":
        return None
    backend = backends.load(name, target.kind)
    if backend.FRAMEWORK != "torch":
        return None
    why = backend.program_refuses(spec, target.device)
    if why == () and not program_faults:
        return "compiled", ()
    return "callback", (*(why or ()), *program_faults)


@dataclass(frozen=True)
class Selection:
    """The choice of a backend with all reasons. Errors, logs and docs all show ``str(selection)``: its ``text()``.

    Attributes:
        spec, target: the request.
        requested: the backends the caller named, or None for automatic choice.
        backend: the chosen backend, or None.
        program_faults: why this installation cannot build the kernels that XLA would launch. Only an attempt shows it.
        mask: how much of the scores the call's mask leaves, if its values are on the host.
        parts: how kernels without key ranges compute the call's in parts; None if one kernel computes them.
        max_logit: what computes the largest logits; None if the call does not return them.
    """

    spec: AttentionSpec
    target: Target
    requested: tuple[str, ...] | None
    backend: str | None
    program_faults: Reasons = ()
    mask: str | None = None
    parts: str | None = None
    max_logit: str | None = None

    @lazy_property
    def considered(self) -> tuple[str, ...]:
        """All backends: the candidates in the order of preference, then the ones that run only when requested."""
        candidates = self.requested or self.automatic
        return (*candidates, *(name for name in backends.names() if name not in candidates))

    @lazy_property
    def refusals(self) -> tuple[tuple[str, Reasons], ...]:
        """``((backend, reasons), ...)``: every reason of every backend that cannot run the call."""
        reasons = ((name, refusals(name, self.spec, self.target)) for name in self.considered)
        chosen = None if self.parts is None else self.backend  # it runs other calls than this one
        return tuple((name, why) for name, why in reasons if why and name != chosen)

    @lazy_property
    def lane(self) -> tuple[str, Reasons] | None:
        """How JAX reaches the chosen torch backend; None for other frameworks and backends.

        ``("compiled", ())``: XLA launches its kernels. ``("callback", why)``: XLA calls Python, for the reasons
        ``why``.
        """
        if self.backend is None or self.parts is not None:
            return None
        return lane_of(self.backend, self.spec, self.target, self.program_faults)

    @lazy_property
    def predicted(self) -> dict[str, float]:
        """The predicted microseconds of each backend that has a cost model, whether or not it can run the call."""
        if self.parts is not None:
            return {}
        return preference.predicted(self.spec, self.target.framework, self.target.device)

    @lazy_property
    def forward_mode(self) -> str:
        """The backend that computes the call's tangents in forward mode, or "none"; with the reasons against others."""
        from attn_core.selection import forward_mode

        return str(forward_mode.choose(self.spec, self.target, self.requested))

    @property
    def source(self) -> str | None:
        """What the predictions are derived from; None if the static order of ``attn_core.backends`` decides."""
        return preference.source(self.target.framework, self.target.device) if self.predicted else None

    def reasons(self, name: str) -> Reasons:
        """Returns why a backend cannot run the call; empty if it can."""
        return dict(self.refusals).get(name, ())

    def text(self, everything: bool = False) -> str:
        """Returns the explanation in lines of at most 80 columns.

        It says which backend runs the call and why, which others can, and which need one change: an installation or
        another argument.

        Args:
            everything: list every backend with every reason instead.
        """
        from attn_core.selection import explanation, explanation_text

        return explanation_text.text(explanation.explanation(self), everything)

    def __str__(self) -> str:
        return self.text()

    @lazy_property
    def automatic(self) -> tuple[str, ...]:
        """The candidates of automatic choice, best first. All other backends run only when requested by name."""
        return same_bits.candidates(self.spec, self.target)


class NoBackendError(NotImplementedError):
    """No backend, or no requested backend, can run the call. ``error.selection`` has every reason."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        super().__init__(selection)


def explain(spec: AttentionSpec, target: Target, backend: str | tuple[str, ...] | None = None) -> Selection:
    """Returns the Selection of a call, even if no backend can run it. Pure: the result depends on the arguments only.

    Raises:
        SpecError: for an unknown name, an empty tuple of names, or an argument of another type.
    """
    check_kind("spec", spec, AttentionSpec, "an AttentionSpec")
    check_kind("target", target, Target, "a Target, such as Target('torch', 'cpu')")
    return _explained(spec, target, requested_names(backend))


@lru_cache(maxsize=64)  # small, because the reasons of a call take 10 KiB once they are read
def _explained(spec: AttentionSpec, target: Target, requested: tuple[str, ...] | None) -> Selection:
    for name in requested or ():
        # A wrong name is an error even behind a name that can run the call.
        backends.check_name(name)
    candidates = requested or same_bits.candidates(spec, target)
    chosen = next((name for name in candidates if next(reasons_of(name, spec, target), None) is None), None)
    selection = Selection(spec, target, requested, chosen)
    if requested is None:
        vars(selection)["automatic"] = candidates  # so that nobody computes it again
    return selection


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


def choose(
    spec: AttentionSpec, target: Target, requested: tuple[str, ...] | None, claimed: dict[str, bool]
) -> tuple[str, tuple[str, ...]] | None:
    """Chooses for a call that differs from earlier ones in the batch and the lengths alone, as ``explain`` does.

    Args:
        requested: names that ``explain`` has accepted, or None.
        claimed: by backend, whether its claims cover these calls. One dict serves all calls that differ in the batch
            and the lengths alone, and for which q_len == kv_len is equally true. This function fills it.

    Returns:
        The chosen backend and all candidates, best first; None if no candidate can run the call.
    """
    candidates = requested or same_bits.candidates(spec, target)
    for name in candidates:
        backend, covered = backend_on(target, name), claimed.get(name)
        if covered is None:
            covered = not any(unclaimed(backend, spec, target))
            covered = covered and not (spec.needs_backward and any(unclaimed_gradient(backend, spec, target)))
            claimed[name] = covered
        if covered and not broken_rules(name, backend, spec, target):
            return name, candidates
    return None
