"""Backend: the members of a backend module, and functions that read its optional members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attn_core.backends.support import Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs


class Backend(Protocol):
    """The members of a backend module, in this order.

    FRAMEWORK: ``"torch"`` or ``"jax"``, the framework of the tensors that forward and backward take.
    REQUIRES: the upstream packages with their ranges, for people and for the advice of ``attn doctor``.
    FORWARD, BACKWARD: its claims; BACKWARD is None if there is no gradient.

    Optional: with ``WRITES_INTO = True`` forward and backward take a last argument ``into``, buffers for their results:
    (out, lse) or Gradients, with None for a result without a buffer. The returned tensors are the results; the caller
    copies a result that is not the buffer itself. ``WRITES_GRADIENTS = False`` says that backward's never are. The
    buffers are contiguous; with ``WRITES_STRIDED = True`` only their channels need be dense, in a call on pages.
    ``build()`` (see Support's Build), ``warm_up(spec)``, ``shortcut(spec)``, ``paged_shortcut(spec)``,
    ``FORWARD_MODE`` with ``jvp``, ``ROW_MAXIMUM`` with ``row_maximum``,
    ``forward_with_maximum(spec)``, ``modelled(spec)``, and ``variant(word)``: see the functions below.
    """

    FRAMEWORK: str
    REQUIRES: str
    FORWARD: Support
    BACKWARD: Support | None

    def refuses(self, spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
        """Returns reasons that no single claim expresses, such as combinations; empty if there are none.

        Faults of upstream versions are rows of ``known_bad.json``, which selection reads.

        device: such as ``"sm90"``. build: describes the installed package if the backend defines ``build()``; None
        otherwise, also while planning for another machine. Assume the most restrictive build then.
        """

    def probe(self) -> str:
        """Imports the kernel's symbols and returns the version. Errors of the import propagate."""

    def lower(self, spec: AttentionSpec) -> dict[str, Any]:
        """Returns the kernel's arguments for a spec, without tensors. Pure."""

    def forward(self, spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
        """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Never called if ``spec.empty``.

        lse is -inf for rows that see no key, also with sinks. Any lse will do if the spec neither returns it nor needs
        a backward nor is partial. A backend that claims ``paged`` also takes PagedInputs.
        """

    def backward(self, spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
        """Returns the gradients from the saved out and lse. dlse is None if nothing depends on the log-sum-exp."""


def shortcut(backend: Backend, spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None] | None:
    """Returns a backend's fast path for eager calls on q, k, v, a mask and a bias, or None.

    A backend may define ``shortcut(spec)``: None, or a function of (q, k, v), with a mask or a bias in the spec of
    (q, k, v, mask, bias), the absent one None. It returns the (out, lse) of ``forward`` and under the framework's
    autograd records the same backward kernel that ``backward`` calls, so that both give the same bits. Rows that see no
    key have gradients 0, the gradient of lse is right if the spec returns lse, and a second derivative raises. Without
    ``spec.return_lse`` any lse will do. The function may return None for values that its kernel computes wrongly, such
    as NaN in a hidden key; then the call takes ``forward`` and ``backward``. It is never called under autocast, a mode
    or a transform. It pays off if Python costs more than the kernel. Most backends define none.

    The function may have an attribute ``heads_first``: the same function of ``[batch, heads, seq, dim]`` tensors, with
    an output in that layout. Hosts with that layout then need no views, which cost as much as a small call's kernel.
    """
    # A shortcut runs the kernel of ``forward``, which is never called for an empty spec.
    others = (
        spec.packed
        or spec.sinks
        or spec.alibi_shape
        or spec.key_ranges_shape
        or has_functions(spec)
        or spec.dropout
        or spec.paged
        or spec.partial
    )
    shortcut_of = getattr(backend, "shortcut", None)
    return None if shortcut_of is None or spec.empty or others else shortcut_of(spec)


def paged_shortcut(backend: Backend, spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None]:
    """Returns a backend's fast path for eager paged calls without ``cu_seqlens_q``.

    It is a function of (q, k_pages, v_pages, block_table, seq_lens, sinks), the sinks None if there are none, and
    returns the (out, lse) of ``forward``. Without ``spec.return_lse`` lse may be anything, also None. It may return
    None; then the call takes ``forward``. If ``paged_shortcut_takes_all``, it also takes cu_seqlens_q, k_scales
    and v_scales. A backend may define ``paged_shortcut(spec)``, which returns such a
    function for one plan: for one device, and one dtype of the sinks. Otherwise it is ``forward`` itself.
    """
    shortcut_of = getattr(backend, "paged_shortcut", None)
    if shortcut_of is not None:
        return shortcut_of(spec)  # type: ignore[no-any-return]
    return lambda q, k, v, table, lengths, sinks: backend.forward(
        spec,
        PagedInputs(q, k, v, table, lengths, None, sinks),  # type: ignore[arg-type]
    )


def paged_shortcut_takes_all(backend: Backend) -> bool:
    """Returns whether the backend has ``PAGED_SHORTCUT_TAKES_ALL = True``.

    Then its paged shortcut also takes offsets of queries, which it must clamp, and scales of quantised pages.
    """
    return getattr(backend, "PAGED_SHORTCUT_TAKES_ALL", False)


def writes_into(backend: Backend) -> bool:
    """Returns whether the backend's functions take ``into``."""
    return getattr(backend, "WRITES_INTO", False)


def writes_gradients(backend: Backend) -> bool:
    """Returns whether the backend's kernels write gradients into the buffers that ``backward`` takes."""
    return writes_into(backend) and getattr(backend, "WRITES_GRADIENTS", True)


def writes_strided(backend: Backend) -> bool:
    """Returns whether ``into`` of a call on pages may have any strides with dense channels."""
    return getattr(backend, "WRITES_STRIDED", False)


def reads_pages_alone(backend: Backend) -> bool:
    """Returns whether the backend has ``PAGES_ALONE = True``: it refuses every call that is not paged."""
    return getattr(backend, "PAGES_ALONE", False)


def program_refusals(backend: Backend, spec: AttentionSpec, device: str) -> tuple[str, ...] | None:
    """Returns why XLA cannot launch the kernels of a call without Python; empty if it can.

    None for a backend without ``program_refuses(spec, device)``, which has no ``program`` either.
    """
    refuses = getattr(backend, "program_refuses", None)
    return None if refuses is None else refuses(spec, device)


def operator_functions(backend: Backend) -> Any:
    """Returns the ``operator_program.Functions`` of a backend whose programs are operators of torch, else None.

    Such a backend has ``operator_functions()``. The programs of other backends are kernels.
    """
    functions = getattr(backend, "operator_functions", None)
    return None if functions is None else functions()


def backend_warm_up(backend: Backend) -> Callable[[AttentionSpec], None] | None:
    """Returns the backend's ``warm_up(spec)``, which compiles its kernels on the current device, or None."""
    return getattr(backend, "warm_up", None)


def forward_mode(backend: Backend) -> Support | None:
    """Returns what the backend claims about forward mode, its ``FORWARD_MODE``; None if it has none.

    A backend of JAX that claims it has a forward whose operations JAX differentiates. A backend of torch has a ``jvp``.
    """
    return getattr(backend, "FORWARD_MODE", None)


def modelled(backend: Backend, spec: AttentionSpec) -> bool:
    """Returns whether a measured cost model of the backend is about the kernel that a call runs.

    A backend that chooses between kernels, of which one has the model, defines ``modelled(spec)``.
    """
    function = getattr(backend, "modelled", None)
    return function is None or function(spec)


Jvp = Callable[..., tuple[Any, Any, Any, Any]]
"""``(spec, inputs, tangents, into=None, *, primals=False) -> (out, lse, dout, dlse)``, see ``jvp_of``."""


def jvp_of(backend: Backend) -> Jvp:
    """Returns the backend's ``jvp``: the tangents of out and lse along the tangents of a call's tensors.

    It takes the spec, Inputs, and Tangents of which at least one is not None. dout and dlse have the shapes and dtypes
    of out and lse, and are 0 in rows that see no key. With ``primals`` it also returns the out and lse of ``forward``;
    without, anything in their place. ``into`` is None, or with ``WRITES_INTO = True`` buffers for dout and dlse, as in
    ``Backend``. It is never called if ``spec.empty``, and never builds a graph.
    """
    jvp: Jvp = getattr(backend, "jvp")  # noqa: B009 (a member that few backends have)
    return jvp


def row_maximum_claims(backend: Backend) -> Support | None:
    """Returns what the backend claims about its ``row_maximum``, its ``ROW_MAXIMUM``; None if it has none."""
    return getattr(backend, "ROW_MAXIMUM", None)


RowMaximum = Callable[[AttentionSpec, Inputs], Any]
"""``(spec, inputs) -> row maxima``, see ``row_maximum_of``."""


def row_maximum_of(backend: Backend) -> RowMaximum:
    """Returns the backend's ``row_maximum``: the largest logit of each row, in ``spec.lse_shape`` and ``lse_dtype``.

    A logit is what enters the softmax: a visible pair's score after scale, softcap, score function, bias and ALiBi. A
    row that sees no key has -inf. The spec has no sinks, dropout, pages or gradients, and v is k. The function is never
    called if ``spec.empty``, and never builds a graph. A backend may also define ``row_maximum_program(spec)``, the
    same as a KernelProgram, which XLA launches without Python.
    """
    function: RowMaximum = getattr(backend, "row_maximum")  # noqa: B009 (a member that few backends have)
    return function


def forward_with_maximum(backend: Backend, spec: AttentionSpec) -> Callable[..., tuple[Any, Any, Any]] | None:
    """Returns a backend's forward that also returns the row maxima, or None if another pass must compute them.

    A backend may define ``forward_with_maximum(spec)``: None, or a function ``(spec, inputs) -> (out, lse, maxima)``:
    the out and lse of ``forward``, bit for bit, and the result of ``row_maximum_of``. It pays off if the forward has
    the maxima at hand.
    """
    function_of = getattr(backend, "forward_with_maximum", None)
    return None if function_of is None or spec.empty or spec.paged else function_of(spec)
