"""Attention on keys and values in pages of a pool: paged_attention and explain_paged for JAX arrays."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Never, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.backends.shared.caches import from_records
from attn_core.backends.shared.in_jax import safe_offsets
from attn_core.call.hints import SharedOptions, hide_unknown, refuse_keywords
from attn_core.call.keywords import ExplainPagedKeywords, PagedKeywords
from attn_core.call.options import Options, check_options, check_paged_options, requested_names
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.errors import SpecError
from attn_core.paged import arguments
from attn_core.paged.tables import READ, TABLES, check_read
from attn_core.selection import Selection, new_plans, override
from jax_frontend.dispatch import differentiable, ops, plan
from jax_frontend.dispatch.plan import ArrayOrShape
from jax_frontend.paged.tables import as_operand, checked_tables, on_host

Array = jax.Array
Keywords = PagedKeywords[Array]


@overload
def paged_attention(
    q: Array, k_pages: Array, v_pages: Array, *, return_lse: Literal[False] = False, **options: Unpack[Keywords]
) -> Array: ...
@overload
def paged_attention(
    q: Array, k_pages: Array, v_pages: Array, *, return_lse: Literal[True], **options: Unpack[Keywords]
) -> tuple[Array, Array]: ...
@overload
def paged_attention(
    q: Array, k_pages: Array, v_pages: Array, *, return_lse: bool, **options: Unpack[Keywords]
) -> Array | tuple[Array, Array]: ...
@hide_unknown
def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_table: Array | np.ndarray,
    seq_lens: Array | np.ndarray,
    cu_seqlens_q: Array | np.ndarray | None = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    key_ranges: Array | np.ndarray | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
    alibi_slopes: Array | None = None,
    kv_starts: Array | np.ndarray | None = None,
    k_scales: Array | None = None,
    v_scales: Array | None = None,
    invariant: str | None = None,
    **unknown: Never,
) -> Array | tuple[Array, Array]:
    """Computes attention of each sequence's new tokens to its keys and values in pages: decoding or chunked prefill.

    Query i of a sequence with n new tokens out of N sees key ``j <= i + N - n``; windows align to the same diagonal.
    The pages must already hold the new tokens' own keys and values: call ``append_kv`` first. Inference only. Under
    jit, lengths and tables are traced values, so nothing is traced again as long as the shapes stay the same.

    Args:
        q: ``[tokens, heads, head_dim]``, the new tokens of all sequences end to end.
        k_pages: ``[num_pages, page_size, kv_heads, head_dim]``, the pool. In q's dtype, or quantised: float8_e4m3fn,
            int8, or uint8 with two int4 numbers a byte, ``head_dim / 2`` wide.
        v_pages: ``[num_pages, page_size, kv_heads, value_dim]``, in the dtype of k_pages.
        block_table: int32 ``[batch, width]``: each sequence's pages in order, -1 behind them; a JAX or numpy array.
        seq_lens: int32 ``[batch]``: the length of each sequence, its new tokens included.
        cu_seqlens_q: int32 ``[batch + 1]``, the offsets of the sequences in q; None if each has one new token.
        max_len_q: an int on the host, at least the most new tokens of a sequence; the tokens of q if None.
        causal, window, softcap, scale, sinks, deterministic, invariant: as in ``attention``.
        key_ranges: int32 ``[1, kv_heads or 1, tokens, 1 or 2, 2]``, a mask among the new tokens: token i of q sees the
            key of token j if ``start <= i < stop`` for a range of row j. Every query sees the keys before the new
            tokens. Causal and window hide further keys. ``attn_core.masks.tree`` builds the mask of a tree of drafts.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[heads, tokens]``, natural log, float32.
        alibi_slopes: float ``[heads]`` or ``[sequences, heads]``: adds ``-slope * |i + N - n - j|``.
        kv_starts: int32 ``[sequences]``: no query sees a key of its sequence before this one (padding on the left).
        k_scales, v_scales: the scales of quantised pages, float32 ``[num_pages, page_size, kv_heads]`` or ``[num_pages,
            kv_heads]``: a number of the pool is ``stored * scale``. The scales in use must be positive and finite,
            which is checked if they and the tables are on the host; elsewhere a NaN reaches the result.

    Returns:
        The output ``[tokens, heads, value_dim]``; or ``(output, lse)``. A query that sees no key has output 0 and its
        sink, or -inf, as lse. A query behind the last offset has output 0 and lse -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments. The values of tables on the host are
            checked here. Kernels check or clamp the values of other tables when they run.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    if unknown:
        refuse_keywords(paged_attention, unknown)
    tables, scales = (block_table, seq_lens, cu_seqlens_q), (k_scales, v_scales)
    inputs = _gather(PagedInputs(q, k_pages, v_pages, *tables, sinks, key_ranges, alibi_slopes, kv_starts, *scales))
    options = check_paged_options(causal, window, softcap, scale, deterministic, return_lse, max_len_q, invariant)
    requested = requested_names(backend) or override.requested()
    call_plan = _plan(plan.metadata_of(inputs), plan.device_name(q), options, requested)
    checked = check_read(call_plan.spec, options.max_len_q, on_host({name: getattr(inputs, name) for name in READ}))
    if call_plan.device == "cpu":  # kernels on a GPU clamp all tables, checked or not
        call_plan = call_plan._replace(tables_checked=checked)
    return _jit_attention(call_plan, PagedInputs(*map(as_operand, inputs)))


@from_records(maxsize=4096)
def _plan(
    metadata: tuple[plan.Metadata | None, ...], device: str, options: Options, requested: tuple[str, ...] | None
) -> plan.Plan:
    new_plans.evicted(_plan)
    spec = _spec(metadata, device, options)
    return plan.Plan(spec, plan.backend_of(spec, device, requested), device, one_row=False, requested=requested)


def _spec(metadata: tuple[plan.Metadata | None, ...], device: str, options: Options) -> AttentionSpec:
    return arguments.build_spec(PagedInputs(*plan.facts_of(metadata, device)), options)


_shared = SharedOptions(paged_attention, ExplainPagedKeywords.__optional_keys__)


@_shared
def explain_paged(
    q: ArrayOrShape,
    k_pages: ArrayOrShape,
    v_pages: ArrayOrShape,
    *,
    block_table: ArrayOrShape | np.ndarray,
    seq_lens: ArrayOrShape | np.ndarray,
    **options: Unpack[ExplainPagedKeywords[ArrayOrShape]],
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    said = _shared.complete(explain_paged, {**options}) | {"block_table": block_table, "seq_lens": seq_lens}
    given = PagedInputs(q, k_pages, v_pages, **{name: said[name] for name in PagedInputs._fields if name not in "qkv"})
    inputs = _gather(given, shapes_only=True)
    if isinstance(q, jax.Array):
        plan.check_array("q", q)  # not deleted, because its device counts
    device, call = plan.device_name(q), check_options(Options.of(said))
    requested = requested_names(said["backend"]) or override.requested()
    return plan.explanation(_spec(plan.metadata_of(inputs), device, call), device, requested)


def _gather(inputs: PagedInputs, shapes_only: bool = False) -> PagedInputs:
    """Returns the arguments, each checked by itself. Tables, ranges and starts may be numpy's."""
    for name, array in zip(arguments.ARGUMENTS, inputs, strict=True):
        is_numpy = isinstance(array, np.ndarray) and name in ("key_ranges", "kv_starts")
        if name not in TABLES and not is_numpy and (array is not None or name in ("q", "k_pages", "v_pages")):
            plan.check_array(name, array, shapes_only=shapes_only)
    tables = checked_tables(inputs.block_table, inputs.seq_lens, inputs.cu_seqlens_q, shapes_only=shapes_only)
    return inputs._replace(**dict(zip(TABLES, tables, strict=True)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(call_plan: plan.Plan, inputs: PagedInputs) -> Array | tuple[Array, Array]:
    """Runs a planned call on pages. Offsets that nobody could check are clamped first."""
    spec = call_plan.spec
    unchecked = inputs.cu_seqlens_q is not None and call_plan.device != "cpu"
    if unchecked:
        inputs = inputs._replace(cu_seqlens_q=safe_offsets(inputs.cu_seqlens_q, spec.q_len, whole=False))
    out, lse, _ = ops.forward(call_plan, inputs, with_lse=spec.return_lse)
    if unchecked:  # kernels do not write the rows after the last offset
        after = jnp.arange(spec.q_len, dtype=jnp.int32) >= inputs.cu_seqlens_q[-1]
        out, lse = jnp.where(after[:, None, None], 0, out), None if lse is None else jnp.where(after, -jnp.inf, lse)
    if lse is not None and inputs.sinks is not None:
        end = None if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q[-1]
        lse = differentiable.fill_with_sinks(lse, inputs.sinks, end)
    return (out, lse) if spec.return_lse else out


@partial(_attention.defjvp, symbolic_zeros=True)
def _derivative(call_plan: plan.Plan, primals: tuple[PagedInputs], tangents: tuple[PagedInputs]) -> Any:
    zero = jax.custom_derivatives.SymbolicZero
    if all(isinstance(tangent, zero) for tangent in jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, zero))):
        out = _attention(call_plan, *primals)
        return out, jax.tree.map(jnp.zeros_like, out)
    raise SpecError(
        "paged: keys and values in pages are for inference, their gradient is not defined; use jax.lax.stop_gradient"
    )


_jit_attention = jax.jit(_attention, static_argnums=0, inline=True)
