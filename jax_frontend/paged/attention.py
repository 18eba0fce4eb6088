"""Attention on keys and values in pages of a pool: paged_attention, explain_paged and append_kv for JAX arrays."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attn_core.backends.shared.jax_offsets import document_numbers, safe_offsets
from attn_core.call.arguments import ArrayFacts
from attn_core.call.options import Options, requested_names
from attn_core.call.pages import PagedKV
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import PagedInputs
from attn_core.errors import SpecError
from attn_core.paged import arguments
from attn_core.paged.tables import check_slots, check_values, slots_of
from attn_core.selection import Selection, Target, explain, override, select
from jax_frontend.bridge import compiled_lane
from jax_frontend.dispatch import empty_rows, ops, plan

Array = jax.Array
Metadata = tuple[tuple[int, ...], np.dtype]


def paged_attention(
    q: Array,
    k_pages: Array,
    v_pages: Array,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Any:
    """Computes attention of each sequence's new tokens to its keys and values in pages: decoding or chunked prefill.

    Query i of a sequence with n new tokens out of N sees key ``j <= i + N - n``; windows align to the same diagonal.
    The pages must already hold the new tokens' own keys and values: call ``append_kv`` first. Inference only. Under
    jit, lengths and tables are traced values, so nothing is traced again as long as the shapes stay the same.

    Args:
        q: ``[tokens, heads, head_dim]``, the new tokens of all sequences end to end.
        k_pages: ``[num_pages, page_size, kv_heads, head_dim]``, the pool.
        v_pages: ``[num_pages, page_size, kv_heads, value_dim]``.
        block_table: int32 ``[batch, width]``: each sequence's pages in order, -1 behind them; a JAX or numpy array.
        seq_lens: int32 ``[batch]``: the length of each sequence, its new tokens included.
        cu_seqlens_q: int32 ``[batch + 1]``, the offsets of the sequences in q; None if each has one new token.
        max_len_q: an int on the host, at least the most new tokens of a sequence; the tokens of q if None.
        causal, window, softcap, scale, sinks, deterministic: as in ``attention``.
        backend: a name, which runs or raises; names in order of preference; or None for automatic choice.
        return_lse: also return the log-sum-exp, ``[heads, tokens]``, natural log, float32.

    Returns:
        The output ``[tokens, heads, value_dim]``; or ``(output, lse)``. A query that sees no key has output 0 and its
        sink, or -inf, as lse. A query behind the last offset has output 0 and lse -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments. The values of tables on the host are
            checked here. Kernels check or clamp the values of other tables when they run.
        NoBackendError: if no backend, or not the requested one, can run the call; the message has every reason.
    """
    inputs = _gather_arguments(q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, sinks)
    options = arguments.check_paged_options(causal, window, softcap, scale, deterministic, return_lse, max_len_q)
    requested = requested_names(backend) or override.requested()
    call_plan = _plan(_metadata(inputs), plan.device_name(q), options, requested)
    checked = _check_values(options.max_len_q, q.shape[0], k_pages.shape, *inputs[3:6])
    if call_plan.device == "cpu":  # kernels on a GPU clamp all tables, checked or not
        call_plan = call_plan._replace(tables_checked=checked)
    return _jit_attention(call_plan, _as_arrays(inputs))


def explain_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    *,
    block_table: Any,
    seq_lens: Any,
    cu_seqlens_q: Any = None,
    max_len_q: int | None = None,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    scale: float | None = None,
    deterministic: bool = False,
    backend: str | tuple[str, ...] | None = None,
    return_lse: bool = False,
) -> Selection:
    """Returns the backend that ``paged_attention`` chooses for these arguments and why the others cannot run."""
    inputs = _gather_arguments(q, k_pages, v_pages, block_table, seq_lens, cu_seqlens_q, sinks, shapes_only=True)
    options = arguments.check_paged_options(causal, window, softcap, scale, deterministic, return_lse, max_len_q)
    requested = requested_names(backend) or override.requested()
    return compiled_lane.with_program_reasons(
        explain(*_request(_metadata(inputs), plan.device_name(q), options, requested))
    )


def append_kv(
    k_pages: Array, v_pages: Array, k: Array, v: Array, *, block_table: Any, seq_lens: Any, cu_seqlens_q: Any = None
) -> tuple[Array, Array]:
    """Writes the keys and values of new tokens into their sequences' pages, and returns the updated pool.

    Args:
        k_pages, v_pages: the pool, as in ``paged_attention``. Outside of jit they are donated: JAX reuses their memory
            and deletes the arrays that you passed. Inside your own jit, donate them there.
        k, v: ``[tokens, kv_heads, dim]``, in the pool's dtype: the last tokens of each sequence, end to end.
        block_table, seq_lens, cu_seqlens_q: as in ``paged_attention``; ``seq_lens`` count the new tokens.

    Returns:
        ``(k_pages, v_pages)``, the updated pool.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments, and for tables on the host with a page
            outside of the pool or one slot for two tokens. With tables elsewhere, a token without a valid slot is not
            written.
    """
    for name, array in (("k_pages", k_pages), ("v_pages", v_pages), ("k", k), ("v", v)):
        plan.check_array(name, array)
    _check_kinds(block_table, seq_lens, cu_seqlens_q)
    named = {"k_pages": k_pages, "v_pages": v_pages, "k": k, "v": v}
    tables = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens_q": cu_seqlens_q}
    device = plan.device_name(k_pages)
    everything = {**named, **tables}
    arguments.check_append(
        {n: None if a is None else ArrayFacts(a.shape, str(a.dtype), device) for n, a in everything.items()}
    )
    _check_values(None, k.shape[0], k_pages.shape, block_table, seq_lens, cu_seqlens_q, writes=True)
    arrays: list[Any] = [_copy_numpy(array) for array in everything.values()]
    # Under the caller's jit the donation is the caller's choice, so only an eager call donates the pool here.
    traced = any(isinstance(array, jax.core.Tracer) for array in arrays)
    return (_append if traced else _append_donated)(*arrays)  # type: ignore[no-any-return]


def _append(k_pages: Array, v_pages: Array, k: Array, v: Array, table: Array, lengths: Array, cu: Any) -> Any:
    num_pages, page_size, batch = *k_pages.shape[:2], table.shape[0]
    if k.shape[0] == 0 or table.shape[1] == 0:  # nothing to write, and an axis of size 0 has no valid index
        return k_pages, v_pages
    token = jnp.arange(k.shape[0], dtype=jnp.int32)  # as the tables; under x64 it would be int64
    ends = token + 1 if cu is None else cu[1:]  # where each sequence's new tokens end
    sequence = document_numbers(ends, k.shape[0])
    owned, sequence = sequence < batch, jnp.minimum(sequence, batch - 1)
    position = lengths[sequence] - (ends[sequence] - token)
    page = table[sequence, jnp.clip(position // page_size, 0, table.shape[1] - 1)]
    inside = owned & (position >= 0) & (position < table.shape[1] * page_size) & (page >= 0) & (page < num_pages)
    page = jnp.where(inside, page, num_pages)  # mode="drop" skips pages past the end of the pool
    return (
        k_pages.at[page, position % page_size].set(k, mode="drop"),
        v_pages.at[page, position % page_size].set(v, mode="drop"),
    )


_append_donated = jax.jit(_append, donate_argnums=(0, 1))  # without donation every append would copy the pool


@lru_cache(maxsize=4096)
def _plan(
    metadata: tuple[Metadata | None, ...], device: str, options: Options, requested: tuple[str, ...] | None
) -> plan.Plan:
    selection = select(*_request(metadata, device, options, requested))
    return plan.Plan(selection.spec, selection.backend or "", device, one_row=False, requested=selection.requested)


def _request(
    metadata: tuple[Metadata | None, ...], device: str, options: Options, requested: tuple[str, ...] | None
) -> tuple[AttentionSpec, Target, tuple[str, ...] | None]:
    facts = (entry and ArrayFacts(tuple(entry[0]), str(entry[1]), device) for entry in metadata)
    return arguments.build_spec(arguments.PagedArrays(*facts), options), Target.here("jax", device), requested  # type: ignore[arg-type]


def _metadata(inputs: PagedInputs) -> tuple[Metadata | None, ...]:
    return tuple(None if array is None else (tuple(array.shape), np.dtype(array.dtype)) for array in inputs)


def _gather_arguments(
    q: Any, k_pages: Any, v_pages: Any, block_table: Any, seq_lens: Any, cu: Any, sinks: Any, shapes_only: bool = False
) -> PagedInputs:
    for name, array in (("q", q), ("k_pages", k_pages), ("v_pages", v_pages), ("sinks", sinks)):
        if array is not None or name != "sinks":
            plan.check_array(name, array, shapes_only=shapes_only)
    _check_kinds(block_table, seq_lens, cu, shapes_only)
    return PagedInputs(q, k_pages, v_pages, block_table, seq_lens, cu, sinks)


def _check_kinds(block_table: Any, seq_lens: Any, cu: Any, shapes_only: bool = False) -> None:
    for name, table in (("block_table", block_table), ("seq_lens", seq_lens), ("cu_seqlens_q", cu)):
        if not isinstance(table, np.ndarray) and (table is not None or name != "cu_seqlens_q"):
            plan.check_array(name, table, shapes_only=shapes_only)


def _as_arrays(inputs: PagedInputs) -> PagedInputs:
    return PagedInputs(*(_copy_numpy(array) for array in inputs))


def _copy_numpy(array: Any) -> Any:
    """Copies a numpy array; without the copy JAX may share its memory, and the caller may write to it too early."""
    return jnp.array(array) if isinstance(array, np.ndarray) else array


def _check_values(
    max_len_q: int | None, tokens: int, pool: tuple[int, ...], *tables: Any, writes: bool = False
) -> bool:
    """Checks the values of tables, whose shapes have been checked before, if all are on the host; returns whether."""
    if not all(table is None or _on_host(table) for table in tables):
        return False
    block_table, seq_lens, cu = (None if table is None else np.asarray(table) for table in tables)
    assert block_table is not None and seq_lens is not None
    paged = PagedKV(num_pages=pool[0], page_size=pool[1], width=block_table.shape[1])
    check_values(paged, tokens, max_len_q, block_table, seq_lens, cu, writes=writes)
    if writes:
        offsets = np.arange(len(seq_lens) + 1) if cu is None else cu
        check_slots(slots_of(block_table, seq_lens, offsets, pool[1]))
    return True


def _on_host(table: Any) -> bool:
    concrete = not isinstance(table, jax.core.Tracer)
    return concrete and (isinstance(table, np.ndarray) or plan.device_name(table) == "cpu")


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attention(call_plan: plan.Plan, inputs: PagedInputs) -> Any:
    spec = call_plan.spec
    unchecked = inputs.cu_seqlens_q is not None and call_plan.device != "cpu"
    if unchecked:
        inputs = inputs._replace(cu_seqlens_q=safe_offsets(inputs.cu_seqlens_q, spec.q_len, whole=False))
    out, lse = ops.forward(call_plan, inputs, with_lse=spec.return_lse)
    if unchecked:  # kernels do not write the rows after the last offset
        after = jnp.arange(spec.q_len, dtype=jnp.int32) >= inputs.cu_seqlens_q[-1]
        out, lse = jnp.where(after[:, None, None], 0, out), None if lse is None else jnp.where(after, -jnp.inf, lse)
    if lse is not None and inputs.sinks is not None:
        end = None if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q[-1]
        lse = empty_rows.fill_with_sinks(lse, inputs.sinks, end)
    return (out, lse) if spec.return_lse else out


@partial(_attention.defjvp, symbolic_zeros=True)
def _derivative(call_plan: plan.Plan, primals: Any, tangents: Any) -> Any:
    zero = jax.custom_derivatives.SymbolicZero
    if all(isinstance(tangent, zero) for tangent in jax.tree.leaves(tangents, is_leaf=lambda t: isinstance(t, zero))):
        out = _attention(call_plan, *primals)
        return out, jax.tree.map(jnp.zeros_like, out)
    raise SpecError(
        "paged: keys and values in pages are for inference, their gradient is not defined; use jax.lax.stop_gradient"
    )


_jit_attention = jax.jit(_attention, static_argnums=0, inline=True)
