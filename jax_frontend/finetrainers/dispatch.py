"""Finetrainers' ``attention_dispatch`` for JAX arrays, and its provider words (see attn_core.dropins.finetrainers)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax

from attn_core.call.options import flag
from attn_core.dropins import finetrainers
from attn_core.dropins.finetrainers import NATIVE, AttentionProvider
from attn_core.selection import Target
from jax_frontend.backends import here
from jax_frontend.finetrainers.call import Call, on_provider
from jax_frontend.override import inside_a_task, use_backend

__all__ = ["AttentionProvider", "attention_dispatch", "attention_provider", "list_providers"]

Array = jax.Array

_traced_under = jax.make_user_context(default_value=None)


@contextmanager
def attention_provider(
    provider: AttentionProvider | str = NATIVE,
    *,
    mesh: None = None,
    convert_to_fp32: bool = True,
    rotate_method: str = "allgather",
) -> Iterator[AttentionProvider]:
    """Runs every attention call of the block on a provider's kernel, as ``use_backend`` does with its backends.

    The calls are ``attention_dispatch``, and our own with their own arguments and meaning: ``attention``,
    ``dot_product_attention``, ``attention_fn`` and the layers. As with ``use_backend``, what ``jax.jit`` compiled under
    another provider is traced anew, but not inside an asyncio task.

    Args:
        provider: a name or a member of ``AttentionProvider``. native is automatic choice; any other runs or raises.
        mesh: context parallelism is not offered; ``convert_to_fp32`` and ``rotate_method`` say how it would be done.

    Raises:
        SpecError: for a provider nobody knows, or a mesh.
    """
    with (
        finetrainers.provided(provider, mesh, use_backend) as chosen,
        nullcontext() if inside_a_task() else _traced_under(chosen.value),
    ):
        yield chosen


def list_providers(*, training: bool = False, uses_mask: bool = False) -> list[AttentionProvider]:
    """The providers that have a kernel on JAX's default device, by what the backends claim.

    Args:
        training: whether it must have a gradient.
        uses_mask: whether it must take a mask: of scores, on the varlen providers of keys.
    """
    return list(finetrainers.providers_on(Target.here("jax", here()), training=training, uses_mask=uses_mask))


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
    """Attention on the active provider: ``query [batch, heads, q_len, head_dim]``, and so the result.

    The arguments mean what they mean to ``torch_frontend.finetrainers.attention_dispatch``; what no backend takes is an
    error here, as there is no other function to hand it to.

    Args:
        key, value: ``[batch, kv_heads, kv_len, ...]``; fewer kv heads than heads need ``enable_gqa=True``. On native,
            without ``attention_kwargs``, all three may lack the batch, or batch and heads.
        attn_mask: bool, True = visible, or float, added; broadcastable to ``[batch, heads, q_len, kv_len]``. Two axes
            are ``[q_len, kv_len]``; on the varlen providers ``[batch, kv_len]`` of keys, bool, and on flex and
            xformers what the shape says.
        is_causal: query i sees keys 0 to i, whatever the lengths.
        attention_kwargs: the words of the torch function.
        dropout_rng: the PRNG key that ``dropout_p`` needs in JAX.

    Returns:
        ``[batch, heads, q_len, value_dim]``; with ``return_lse`` also the log-sum-exp ``[batch, heads, q_len]``.

    Raises:
        SpecError and its kinds: for what means nothing, or nothing on this provider; NoBackendError: where no backend,
        or not the provider's kernel, can run the call, with every reason.
    """
    flag("enable_gqa", enable_gqa)
    provider = finetrainers.stated_provider() or finetrainers.default_provider()
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, dropout_rng)
    return on_provider(provider, call, attention_kwargs)
