"""Backend: the members of a backend module, the defaults of the optional ones, and functions that read some of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from attn_core.backends.support import Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs


class Backend(Protocol):
    """The members of a backend module, in this order. OPTIONAL has the defaults of those that it need not define.

    FRAMEWORK: ``"torch"`` or ``"jax"``, the framework of the tensors that forward and backward take.
    REQUIRES: the upstream packages with their ranges, for people and for the advice of ``attn doctor``.
    FORWARD, BACKWARD: its claims; BACKWARD is None if there is no gradient.

    WRITES_INTO: forward and backward take a last argument ``into``, buffers for their results: (out, lse) or Gradients,
        with None for a result without a buffer. The returned tensors are the results; the caller copies a result that
        is not the buffer itself. The buffers are contiguous.
    WRITES_GRADIENTS: False says that backward's results never are the buffers.
    PAGES_ALONE: it refuses every call that is not paged, ``into`` may have any strides with dense channels, and its
        paged shortcut also takes offsets of queries, which it must clamp, and scales of quantised pages.
    FORWARD_MODE: what it claims about forward mode, or None. A backend of JAX that claims it has a forward whose
        operations JAX differentiates. A backend of torch has a ``jvp``.
    ROW_MAXIMUM: what it claims about its ``row_maximum``, or None.
    OPERATOR_FUNCTIONS: the ``operator_program.Functions`` of a backend whose programs are operators of torch, or None.
        The programs of other backends are kernels.

    Optional functions are also ``build()`` (see Support's Build), ``warm_up(spec)``, which compiles its kernels on the
    current device, ``shortcut(spec)``, ``paged_shortcut(spec)`` and ``forward_with_maximum(spec)``, see the functions
    below, ``program`` with ``program_operands(spec, arrays)``, and ``variant(word)``.
    """

    FRAMEWORK: str
    REQUIRES: str
    FORWARD: Support
    BACKWARD: Support | None
    WRITES_INTO: bool
    WRITES_GRADIENTS: bool
    PAGES_ALONE: bool
    FORWARD_MODE: Support | None
    ROW_MAXIMUM: Support | None
    OPERATOR_FUNCTIONS: Any
    build: Callable[[], Build | None] | None
    warm_up: Callable[[AttentionSpec], None] | None
    program_operands: Callable[[AttentionSpec, dict[str, Any]], dict[str, Any]]

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

    def program_refuses(self, spec: AttentionSpec, device: str) -> tuple[str, ...] | None:
        """Returns why XLA cannot launch the kernels of a call without Python; empty if it can.

        None, the default, for a backend without ``program``.
        """

    def modelled(self, spec: AttentionSpec) -> bool:
        """Returns whether a measured cost model of the backend is about the kernel that a call runs; usually True.

        For a backend that chooses between kernels, of which one has the model.
        """

    def jvp(
        self, spec: AttentionSpec, inputs: Inputs, tangents: Any, into: Any = None, *, primals: bool = False
    ) -> Any:
        """Returns (out, lse, dout, dlse): the tangents of out and lse along those of the tensors. For FORWARD_MODE.

        It takes Tangents of which at least one is not None. dout and dlse have the shapes and dtypes of out and lse,
        and are 0 in rows that see no key. With ``primals`` it also returns the out and lse of ``forward``; without,
        anything in their place. ``into`` is None, or with WRITES_INTO buffers for dout and dlse. It is never called if
        ``spec.empty``, and never builds a graph.
        """

    def row_maximum(self, spec: AttentionSpec, inputs: Inputs) -> Any:
        """Returns the largest logit of each row, in ``spec.lse_shape`` and ``lse_dtype``. For ROW_MAXIMUM.

        A logit is what enters the softmax: a visible pair's score after scale, softcap, score function, bias and ALiBi.
        A row that sees no key has -inf. The spec has no sinks, dropout, pages or gradients, and v is k. The function is
        never called if ``spec.empty``, and never builds a graph. A backend may also define
        ``row_maximum_program(spec)``, the same as a KernelProgram, which XLA launches without Python.
        """


OPTIONAL: dict[str, Any] = {
    **{"WRITES_INTO": False, "WRITES_GRADIENTS": True, "PAGES_ALONE": False},
    **dict.fromkeys(("FORWARD_MODE", "ROW_MAXIMUM", "OPERATOR_FUNCTIONS", "build", "warm_up", "paged_shortcut")),
    **{"shortcut": lambda spec: None, "forward_with_maximum": lambda spec: None},
    **{"program_refuses": lambda spec, device: None, "program_operands": lambda spec, arrays: {}},
    **{"program": None, "row_maximum_program": None, "modelled": lambda spec: True},
}
"""The defaults of members that a backend need not define."""


def completed(module: Any) -> Backend:
    """Gives a backend's module the optional members that it does not define, and returns it."""
    for name, default in OPTIONAL.items():
        if not hasattr(module, name):
            setattr(module, name, default)
    return module  # type: ignore[no-any-return]


def shortcut(backend: Any, spec: AttentionSpec) -> Callable[..., tuple[Any, Any] | None] | None:
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
    return None if spec.empty or others else backend.shortcut(spec)


def paged_shortcut(backend: Any, spec: AttentionSpec) -> Callable[..., tuple[Any, Any]]:
    """Returns a backend's fast path for eager paged calls without ``cu_seqlens_q``.

    It is a function of (q, k_pages, v_pages, block_table, seq_lens, sinks), the sinks None if there are none, and
    returns the (out, lse) of ``forward``. Without ``spec.return_lse`` lse may be anything, also None. It may return
    None; then the call takes ``forward``. With PAGES_ALONE it also takes cu_seqlens_q, k_scales and v_scales. A backend
    may define ``paged_shortcut(spec)``, which returns such a function for one plan: for one device, and one dtype of
    the sinks. Otherwise it is ``forward`` itself.
    """
    if backend.paged_shortcut is not None:
        return backend.paged_shortcut(spec)  # type: ignore[no-any-return]
    return lambda q, k, v, table, lengths, sinks: backend.forward(  # type: ignore[no-any-return]
        spec, PagedInputs(q, k, v, table, lengths, None, sinks)
    )


def forward_with_maximum(backend: Any, spec: AttentionSpec) -> Callable[..., tuple[Any, Any, Any]] | None:
    """Returns a backend's forward that also returns the row maxima, or None if another pass must compute them.

    A backend may define ``forward_with_maximum(spec)``: None, or a function ``(spec, inputs) -> (out, lse, maxima)``:
    the out and lse of ``forward``, bit for bit, and the result of ``row_maximum``. It pays off if the forward has the
    maxima at hand.
    """
    return None if spec.empty or spec.paged else backend.forward_with_maximum(spec)
