"""Finetrainers' provider words for JAX: which kernels the attention of a block runs on (see attn_core.finetrainers)."""

from __future__ import annotations

from contextlib import AbstractContextManager

from attn_core import finetrainers
from attn_core.finetrainers import NATIVE, AttentionProvider
from attn_core.selection import Target
from jax_frontend.backends import here
from jax_frontend.override import use_backend

__all__ = ["AttentionProvider", "attention_provider", "list_providers"]


def attention_provider(
    provider: AttentionProvider | str = NATIVE,
    *,
    mesh: None = None,
    convert_to_fp32: bool = True,
    rotate_method: str = "allgather",
) -> AbstractContextManager[AttentionProvider]:
    """Runs every attention call of the block on a provider's kernel, as ``use_backend`` does with its backends.

    The calls are ours, with their own arguments and meaning: ``attention``, ``dot_product_attention``, ``attention_fn``
    and the layers. Packed documents are their ``seq_info``, so that flash and flash_varlen are the same here.

    Args:
        provider: a name or a member of ``AttentionProvider``. native is automatic choice; any other runs or raises.
        mesh: context parallelism is not offered; ``convert_to_fp32`` and ``rotate_method`` say how it would be done.

    Raises:
        SpecError: for a provider nobody knows, or a mesh.
    """
    return finetrainers.provided(provider, mesh, use_backend)


def list_providers(*, training: bool = False, uses_mask: bool = False) -> list[AttentionProvider]:
    """The providers that have a kernel on JAX's default device, by what the backends claim.

    Args:
        training: whether it must have a gradient.
        uses_mask: whether it must take a mask: of scores, on the varlen providers of keys.
    """
    return list(finetrainers.providers_on(Target.here("jax", here()), training=training, uses_mask=uses_mask))
