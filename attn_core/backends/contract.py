"""Backend: what a backend module offers, and functions that read its optional members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attn_core.backends.support import Build, Support
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


class Backend(Protocol):
    """What a backend module offers, in this order.

    FRAMEWORK: ``"torch"`` or ``"jax"``: whose tensors forward and backward take.
    REQUIRES: the upstream packages with their ranges, for people.
    FORWARD, BACKWARD: its claims; BACKWARD is None when there is no gradient.

    Besides, a module may have: ``WRITES_INTO = True``, and then its forward and backward take a last argument ``into``,
    buffers for their results: (out, lse) or Gradients. What they return counts; a result that is not the buffer itself
    is copied there by the caller. ``build()`` (see Support's Build), ``warm_up(spec)``, ``shortcut(spec)`` and
    ``variant(word)``: see the functions below.
    """

    FRAMEWORK: str
    REQUIRES: str
    FORWARD: Support
    BACKWARD: Support | None

    def refuses(self, spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
        """Reasons that join two facts, known upstream bugs among them; empty when there are none.

        device: such as ``"sm90"``; build: what is particular about the installed one, None for an ordinary one.
        """

    def probe(self) -> str:
        """Imports the kernel's symbols and returns the version; raises whatever the import raises."""

    def lower(self, spec: AttentionSpec) -> dict[str, Any]:
        """The kernel's own arguments for a spec: pure, no tensor."""

    def forward(self, spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
        """(out, lse), shapes as ``spec.out_shape`` and ``spec.lse_shape``; never called when ``spec.empty``.

        lse is -inf where no key is seen, sinks or not. One that claims ``paged`` takes PagedInputs as well.
        """

    def backward(self, spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        """Gradients from the saved out and lse; dlse is None when nothing depends on the log-sum-exp."""


def shortcut(backend: Backend, spec: AttentionSpec) -> Callable[[Any, Any, Any], tuple[Any, Any]] | None:
    """What a backend offers for eager calls on q, k and v alone, where calling it costs more than the kernel.

    A backend may define ``shortcut(spec)``: None, or a function of (q, k, v) that returns the (out, lse) of ``forward``
    and under the framework's autograd records the same backward kernel that ``backward`` calls, so that both give the
    same bits. Most backends have none, and run through ``forward`` and ``backward``.
    """
    offered = getattr(backend, "shortcut", None)
    return None if offered is None or spec.empty else offered(spec)


def writes_into(backend: Backend) -> bool:
    """Whether the backend's functions take ``into``."""
    return getattr(backend, "WRITES_INTO", False)


def reads_pages_alone(backend: Backend) -> bool:
    """Whether the backend has ``PAGES_ALONE = True``: it refuses every call but those on keys and values in pages."""
    return getattr(backend, "PAGES_ALONE", False)


def program_refusals(backend: Backend, spec: AttentionSpec, device: str) -> tuple[str, ...] | None:
    """Why XLA cannot launch the kernels of a call by itself, as far as data tell; empty when it can.

    None for a backend that hands out no kernels: only one with a ``program_refuses(spec, device)`` does.
    """
    refuses = getattr(backend, "program_refuses", None)
    return None if refuses is None else refuses(spec, device)


def own_warm_up(backend: Backend) -> Callable[[AttentionSpec], None] | None:
    """What a backend that compiles its kernels offers for doing so ahead, on the current device."""
    return getattr(backend, "warm_up", None)
