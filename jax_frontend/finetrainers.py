"""Finetrainers' ``attention_dispatch`` for JAX arrays, and its provider words (see attn_core.dropins.finetrainers)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from attn_core.call.options import check_flag
from attn_core.dropins import finetrainers
from attn_core.dropins.finetrainers import NATIVE, VARLEN, AttentionProvider, DispatchCall
from attn_core.errors import SpecError, shown
from attn_core.selection import Target
from jax_frontend.attention import attention
from jax_frontend.dispatch.override import inside_a_task, use_backend
from jax_frontend.dispatch.plan import check_array, device_name

__all__ = ["AttentionProvider", "attention_dispatch", "attention_provider", "list_providers"]

Array = jax.Array
# Besides the context of use_backend, because flash and flash_varlen have the same backends but read masks differently.
_traced_under = jax.make_user_context(default_value=None)


@contextmanager
def attention_provider(
    provider: AttentionProvider | str = NATIVE,
    *,
    mesh: None = None,
    convert_to_fp32: bool = True,
    rotate_method: str = "allgather",
) -> Iterator[AttentionProvider]:
    """Runs every attention call of the block on a provider's kernel, like ``use_backend`` with its backends.

    It applies to ``attention_dispatch``, and to our own calls with their own arguments and meaning: ``attention``,
    ``dot_product_attention``, ``attention_fn`` and the layers. As with ``use_backend``, functions that ``jax.jit``
    compiled under another provider are traced again, but not inside an asyncio task.

    Args:
        provider: a name or a member of ``AttentionProvider``. native is automatic choice; any other runs or raises.
        mesh: must be None; ``convert_to_fp32`` and ``rotate_method`` are options of the host's context parallelism,
            which is not supported in JAX.

    Raises:
        SpecError: for an unknown provider, or a mesh.
    """
    # Ignoring the mesh would compute attention within each device only.
    if mesh is not None:
        raise SpecError(f"mesh={shown(mesh)}: expected None in JAX; use jax_frontend.context_parallel_attention(mesh=)")
    with (
        finetrainers.provided(provider, use_backend) as chosen,
        # JAX's contexts belong to a thread, so the other asyncio tasks of the thread would see this one.
        nullcontext() if inside_a_task() else _traced_under(chosen.value),
    ):
        yield chosen


def list_providers(*, training: bool = False, uses_mask: bool = False) -> list[AttentionProvider]:
    """Returns the providers that have a kernel on JAX's default device, according to what its backends support.

    Args:
        training: whether the kernel must have a backward.
        uses_mask: whether the kernel must support a mask: of scores, or of keys on the varlen providers.
    """
    return list(
        finetrainers.providers_on(Target.here("jax", device_name(None)), training=training, uses_mask=uses_mask)
    )


def attention_dispatch(
    query: Array,
    key: Array,
    value: Array,
    attn_mask: Array | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    attention_kwargs: dict[str, Any] | None = None,
    *,
    dropout_rng: Array | None = None,
) -> Any:
    """Computes attention on the active provider.

    The arguments mean the same as in ``torch_frontend.finetrainers.attention_dispatch``. A call that no backend can run
    is an error, because there is no other function to pass it to.

    Args:
        query: ``[batch, heads, q_len, head_dim]``.
        key, value: ``[batch, kv_heads, kv_len, ...]``; fewer kv heads than heads need ``enable_gqa=True``.
        attn_mask: as in torch, but for a ``BlockMask``. On ``sage_varlen``, and with ``is_causal`` on ``flash_varlen``,
            the kernel gets the mask of keys as a mask, which it takes or refuses.
        is_causal: query i sees keys 0 to i, whatever the lengths.
        attention_kwargs: the keywords of the torch function.
        dropout_rng: the PRNG key that ``dropout_p`` needs in JAX.

    Returns:
        ``[batch, heads, q_len, value_dim]``; with ``return_lse`` also the log-sum-exp ``[batch, heads, q_len]``.

    Raises:
        SpecError and its subclasses: for arguments that are invalid, or invalid on this provider.
        NoBackendError: if no backend, or not the provider's kernel, can run the call, with every reason.
    """
    check_flag("enable_gqa", enable_gqa)
    provider = finetrainers.stated_provider() or finetrainers.default_provider()
    for name, array in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if array is not None or name != "attn_mask":
            check_array(name, array)
    call = DispatchCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    finetrainers.check_operands(call)
    options = finetrainers.interpret(attention_kwargs)
    if attn_mask is not None:
        call = call._replace(attn_mask=finetrainers.with_mask_axes(provider, query, attn_mask))
    call = finetrainers.with_positive_scale(call)
    attend = finetrainers.attention_with(attention, call, options, provider, dropout_rng=dropout_rng)
    if attn_mask is not None and provider in VARLEN:
        keep, take = finetrainers.key_mask(provider, call, options, call.attn_mask), partial(jnp.take, axis=0)
        results = finetrainers.run_key_mask(provider, call, options, attend, keep, jnp, take)
    else:
        results = finetrainers.run_dense(attend, call, options)
    return results if options.return_lse else results[0]
