"""Backend: what one kernel offers, a record that its own file makes; and the records of its optional capabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from attn_core.backends.support import ANY, Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs, Tangents

if TYPE_CHECKING:
    from torch import Tensor

    from attn_core.backends.shared.kernel_programs import KernelProgram

TORCH_FLAGS = ("flash", "mem_efficient", "cudnn", "math")
"""The kernels of torch's own attention, as its flags name them: ``torch.backends.cuda.enable_flash_sdp`` and so on."""

Ranks = Mapping[str, int]
Buffers = tuple["Tensor | None", "Tensor | None"]
"""The caller's buffers for (out, lse) or (dout, dlse), see ``Backend.writes_into``; None for a result without one."""
Shortcut = Callable[..., "tuple[Any, Any] | None"]
WithMaximum = Callable[[AttentionSpec, Inputs], tuple[Any, Any, Any]]


class Jvp(Protocol):
    """Computes the tangents of out and lse along those of the tensors; see ``ForwardModePass``."""

    def __call__(
        self, spec: AttentionSpec, inputs: Inputs, tangents: Tangents, into: Any = None, *, primals: bool = False
    ) -> tuple[Any, Any, Any, Any]:
        """Returns (out, lse, dout, dlse)."""


def _refuses_nothing(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    return ()


def _none_beside_the_calls(spec: AttentionSpec, arrays: dict[str, Any]) -> dict[str, Any]:
    return {}


def _always(spec: AttentionSpec) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """How a backend runs eager calls on pages, beside its ``forward``.

    Attributes:
        shortcut: ``shortcut(spec)`` returns the function that ``Backend.paged_shortcut_of`` describes, for one plan:
            for one device, and one dtype of the sinks.
        alone: it refuses every call that is not paged, ``into`` may have any strides with dense channels, and its
            shortcut also takes offsets of queries, which it must clamp, and scales of quantised pages.
        first_for_few_queries: it comes before all others if each sequence has few queries, for it is made for decoding.
    """

    shortcut: Callable[[AttentionSpec], Shortcut]
    alone: bool = False
    first_for_few_queries: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """Kernels that XLA launches without Python.

    Attributes:
        make: ``make(spec, direction, with_dlse, as_one)`` returns the kernels of a call: of its "forward" or
            "backward", with a gradient of the log-sum-exp, and with q, k and v in one array. For the largest logits,
            ``make(spec)``.
        refuses: ``refuses(spec, device)`` returns why XLA cannot launch the kernels of a call; empty if it can.
        operands: ``operands(spec, arrays)`` returns the operands that are not the call's own arrays, by name.
    """

    make: Callable[..., KernelProgram]
    refuses: Callable[[AttentionSpec, str], tuple[str, ...]] = _refuses_nothing
    operands: Callable[[AttentionSpec, dict[str, Any]], dict[str, Any]] = _none_beside_the_calls


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardModePass:
    """How a backend computes tangents.

    Attributes:
        claims: about forward mode.
        jvp: returns (out, lse, dout, dlse): the tangents of out and lse along those of the tensors. None for a backend
            of JAX, whose forward has operations that JAX differentiates. The function takes Tangents of which at least
            one is not None. dout and dlse have the shapes and dtypes of out and lse, and are 0 in rows that see no key.
            With ``primals`` it also returns the out and lse of ``forward``; without, anything in their place. ``into``
            is None, or if the backend writes into them, buffers for dout and dlse. It is never called if
            ``spec.empty``, and never builds a graph.
        preference: its rank in automatic choice, see Backend.
    """

    claims: Support
    jvp: Jvp | None
    preference: Ranks = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowMaximumPass:
    """How a backend computes the largest logit of each row.

    A logit is what enters the softmax: a visible pair's score after scale, softcap, score function, bias and ALiBi.

    Attributes:
        claims: about ``function``.
        function: returns the largest logits, in ``spec.lse_shape`` and ``lse_dtype``. A row that sees no key has -inf.
            The spec has no sinks, dropout, pages or gradients, and v is k. The function is never called if
            ``spec.empty``, and never builds a graph.
        with_forward: ``with_forward(spec)`` returns the function that ``Backend.forward_with_maximum`` describes, or
            None. It pays off if the forward has the maxima at hand.
        program: the same as ``function``, which XLA launches without Python.
        preference: its rank in automatic choice, see Backend.
    """

    claims: Support
    function: Callable[[AttentionSpec, Inputs], Any]
    with_forward: Callable[[AttentionSpec], WithMaximum | None] | None = None
    program: Program | None = None
    preference: Ranks = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, eq=False)
class Timing:
    """What automatic choice knows of a backend's times beside its cost model. A pair is of (forward, training).

    Attributes:
        caution: its predicted times count as this many times as long.
        compiles_for_seconds: it does for each kind of call, so that ``attn tune`` times it in few calls.
        skips_blocks: it skips hidden blocks as fast as kernels without key ranges skip keys behind a band, so that
            automatic choice does not run its calls with key ranges in parts on these.
        new_length: host microseconds of decoding in torch beyond the model's, which was measured on calls that repeat.
        in_callback: host microseconds in JAX on a GPU if XLA calls Python. From single jitted calls (seed 8 of
            ``benchmarks/jax_calls.py`` of revision 1a60ea3e) on an H200 host on 2026-11-24, less JAX's own time for
            such a call. Most ran without XLA's autotuning, which compiles for minutes.
        in_xla: the same if XLA launches the kernels itself.
        behind: a backend that it never ranks before, because where both run a call, it was never faster.
        behind_without_time: the same for calls of which it has no predicted time.
        beside_table: the share of the model's times, the host's and the device's, that a call with a mask or bias takes
            if its causal is the kernel's own; the models saw it as a part of the mask.
        model_of: the backends whose models it has: those of its kernel, or of one that is slower or faster by about
            the same factor whatever the call; None for models of its own.
        of_model: these factors, of the host and of the device.
    """

    caution: float = 1.0
    compiles_for_seconds: bool = False
    skips_blocks: bool = False
    new_length: float = 0.0
    in_callback: tuple[float, float] = (125.0, 600.0)
    in_xla: tuple[float, float] = (10.0, 20.0)
    behind: str | None = None
    behind_without_time: str | None = None
    beside_table: float = 1.0
    model_of: tuple[str, str] | None = None
    of_model: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptPlans:
    """Plans that a backend's package prepares for every new shape of a call, and keeps until the process ends.

    Attributes:
        most: the most shapes that automatic choice in torch gives to the backend in a process.
        by: who keeps them, for people.
    """

    most: int
    by: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Backend:
    """One kernel. A file of attn_core/backends makes the record once, as ``BACKEND``; a plug-in registers it.

    Attributes:
        name: of the backend, which callers pass.
        framework: ``"torch"`` or ``"jax"``, the framework of the tensors that forward and backward take.
        requires: the upstream packages with their ranges, for people and for the advice of ``attn doctor``.
        forward_claims, backward_claims: what it can run; the second is None if there is no gradient.
        refuses: ``refuses(spec, device, build)`` returns reasons that no single claim expresses, such as combinations;
            empty if there are none. Faults of upstream versions are rows of ``known_bad.json``, which selection reads.
            device: such as ``"sm90"``. build: describes the installed package if there is a ``build``; None otherwise,
            also while planning for another machine. Assume the most restrictive build then.
        probe: imports the kernel's symbols and returns the version. Errors of the import propagate.
        lower: returns the kernel's arguments for a spec, without tensors. Pure.
        forward: ``forward(spec, inputs)`` returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. It is never
            called if ``spec.empty``. lse is -inf for rows that see no key, also with sinks. Any lse will do if the spec
            neither returns it nor needs a backward nor is partial. A backend that claims ``paged`` also takes
            PagedInputs.
        backward: ``backward(spec, inputs, out, lse, dout, dlse)`` returns the gradients from the saved out and lse.
            dlse is None if nothing depends on the log-sum-exp. None if there is no gradient.
        build: describes the installed package, see Build.
        warm_up: compiles the kernels of a spec on the current device.
        shortcut: ``shortcut(spec)`` returns the function that ``shortcut_of`` describes, or None.
        pages: how eager calls on pages run.
        program: its kernels for XLA.
        forward_mode: how it computes tangents.
        row_maximum: how it computes the largest logits.
        writes_into: the functions that write into the caller's buffers: "forward", "backward", "jvp". If there are any,
            all of them take a last argument ``into``: (out, lse), Gradients or (dout, dlse), with None for a result
            without a buffer. The returned tensors are the results; the caller copies a result that is not the buffer
            itself, as those of the functions that are not named never are. The buffers are contiguous.
        modelled: returns whether a measured cost model of the backend is about the kernel that a call runs. For a
            backend that chooses between kernels, of which one has the model.
        variants: other kernels of the same package, each a backend of its own.
        on: the records of the same backend for kinds of devices with kernels of their own, ``{"cuda": record}``; this
            one is for the CPU and all other kinds. Of a plug-in: a folder of attn_core/backends has files for kinds.
        preference: its rank in automatic choice by kind of device, the lowest first; ANY is for every kind on which no
            backend has a rank. A backend without a rank runs only when requested.
        paged_preference: the same for keys and values in pages, on kinds of devices where the order is another one.
        keeps_order_on: kinds of devices on which, once proven, it is a candidate for calls with ``invariant``, after
            faster ones. One backend for each kind.
        in_pages: the backend that reads pages with the bits of its dense calls, if that is not itself.
        timing: see Timing.
        kept_plans: what its package keeps for every shape; None if it keeps nothing.
        torch_flag: the kernel of torch's own attention that it is, or whose arithmetic it has. Where torch's flag for
            that kernel is off, it does not run.
        reaches_next_document: a tile of its keys may hold the first tokens of the next packed document, and 0 * NaN is
            NaN. So a NaN there reaches documents before it; docs/reference/semantics.md names these backends.
        splits_keys: where it splits the keys of few queries, a row that is NaN may be 0 in the output.
        for_cache_rows: on a GPU it is fast on many queries of a dense cache's rows as packed documents, and never reads
            past a document's end, where the cache may hold NaN.
        also_called: names of other libraries for the same kernel, in lower case, each with the rank among the backends
            that have the name.
    """

    name: str
    framework: str
    requires: str
    forward_claims: Support
    backward_claims: Support | None
    refuses: Callable[[AttentionSpec, str, Build | None], tuple[str, ...]]
    probe: Callable[[], str]
    lower: Callable[[AttentionSpec], dict[str, Any]]
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Gradients] | None
    build: Callable[[], Build | None] | None = None
    warm_up: Callable[[AttentionSpec], None] | None = None
    shortcut: Callable[[AttentionSpec], Shortcut | None] | None = None
    pages: Pages | None = None
    program: Program | None = None
    forward_mode: ForwardModePass | None = None
    row_maximum: RowMaximumPass | None = None
    writes_into: tuple[str, ...] = ()
    modelled: Callable[[AttentionSpec], bool] = _always
    variants: tuple[Backend, ...] = ()
    on: Mapping[str, Backend] = field(default_factory=dict)
    preference: Ranks = field(default_factory=dict)
    paged_preference: Ranks = field(default_factory=dict)
    keeps_order_on: tuple[str, ...] = ()
    in_pages: str | None = None
    timing: Timing = Timing()
    kept_plans: KeptPlans | None = None
    torch_flag: str | None = None
    reaches_next_document: bool = False
    splits_keys: bool = False
    for_cache_rows: bool = False
    also_called: Ranks = field(default_factory=dict)

    def shortcut_of(self, spec: AttentionSpec) -> Shortcut | None:
        """Returns the fast path for eager calls on q, k, v, a mask and a bias, or None.

        It is a function of (q, k, v), with a mask or a bias in the spec of (q, k, v, mask, bias), the absent one None.
        It returns the (out, lse) of ``forward`` and under the framework's autograd records the same backward kernel
        that ``backward`` calls, so that both give the same bits. Rows that see no key have gradients 0, the gradient of
        lse is right if the spec returns lse, and a second derivative raises. Without ``spec.return_lse`` any lse will
        do. The function may return None for values that its kernel computes wrongly, such as NaN in a hidden key; then
        the call takes ``forward`` and ``backward``. It is never called under autocast, a mode or a transform. It pays
        off if Python costs more than the kernel. Most backends have none.

        The function may have an attribute ``heads_first``: the same function of ``[batch, heads, seq, dim]`` tensors,
        with an output in that layout. Hosts with that layout then need no views, which cost as much as a small call's
        kernel.
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
        return None if self.shortcut is None or spec.empty or others else self.shortcut(spec)

    def paged_shortcut_of(self, spec: AttentionSpec) -> Shortcut:
        """Returns the fast path for eager paged calls without ``cu_seqlens_q``.

        It is a function of (q, k_pages, v_pages, block_table, seq_lens, sinks), the sinks None if there are none, and
        returns the (out, lse) of ``forward``. Without ``spec.return_lse`` lse may be anything, also None. It may return
        None; then the call takes ``forward``. If the backend has ``pages`` alone, it also takes cu_seqlens_q, k_scales
        and v_scales. A backend without ``pages`` has ``forward`` itself.
        """
        if self.pages is not None:
            return self.pages.shortcut(spec)
        return lambda q, k, v, table, lengths, sinks: self.forward(
            spec, PagedInputs(q, k, v, table, lengths, None, sinks)
        )

    def forward_with_maximum(self, spec: AttentionSpec) -> WithMaximum | None:
        """Returns a forward that also returns the row maxima, or None if another pass must compute them.

        It is a function ``(spec, inputs) -> (out, lse, maxima)``: the out and lse of ``forward``, bit for bit, and the
        largest logits of ``row_maximum``.
        """
        own = None if self.row_maximum is None else self.row_maximum.with_forward
        return None if own is None or spec.empty or spec.paged else own(spec)

    def program_refuses(self, spec: AttentionSpec, device: str) -> tuple[str, ...] | None:
        """Returns why XLA cannot launch the kernels of a call without Python; empty if it can, None without kernels."""
        return None if self.program is None else self.program.refuses(spec, device)

    @property
    def takes_pages_alone(self) -> bool:
        """Whether it refuses every call that is not paged, see ``Pages``."""
        return self.pages is not None and self.pages.alone

    @property
    def runs_everywhere(self) -> bool:
        """Whether it is the framework's own operations, which run on every device."""
        return ANY in self.forward_claims.devices
