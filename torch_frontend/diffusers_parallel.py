"""Runs diffusers' context parallelism on ours: ``with installed():``, or ``install()`` once for the process.

diffusers shards a model's rows by hooks (``model.enable_parallelism(config=ContextParallelConfig(...))``), and its
attention backend ``native`` then calls one function of its dispatcher for every call. While installed, ours is there:
ring, Ulysses and both together, with gradients, on the kernels that ``use_backend`` and ``attention_provider`` choose.
Its other backends keep diffusers' function. Tested with diffusers 0.42.1; the function is private there.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from attn_core.dropins.replacement import Replacement
from attn_core.errors import SpecError

__all__ = ["install", "installed", "is_installed", "uninstall"]

Tensor = torch.Tensor

_DISPATCH, _NAME, _NATIVE = (
    "diffusers.models.attention_dispatch",
    "_templated_context_parallel_attention",
    "_native_attention_forward_op",
)


def _apply() -> Callable[[], None]:
    """Puts our function in place of diffusers' own, and returns what takes it back."""
    host = import_module(_DISPATCH)
    for name in (_NAME, _NATIVE):
        if not hasattr(host, name):
            raise RuntimeError(f"{_DISPATCH}: expected a function {name}, as in diffusers 0.42.1; found none")
    before = getattr(host, _NAME)
    ours = _attention_in_place_of(before, getattr(host, _NATIVE))
    setattr(host, _NAME, ours)

    def restore() -> None:
        if getattr(host, _NAME) is ours:  # otherwise another library's function stays
            setattr(host, _NAME, before)

    return restore


_replacement = Replacement(_apply)
installed = _replacement.installed
"""Replaces diffusers' context-parallel attention with ours in a block, in every thread.

Raises:
    ImportError: if diffusers cannot be imported.
    RuntimeError: if this version of diffusers has no such function.
"""
install = _replacement.install
"""Puts our attention in diffusers' place until ``uninstall``. Idempotent. Raises as ``installed``."""
uninstall = _replacement.uninstall
"""Undoes all calls of ``install``. Running blocks of ``installed`` keep our attention until their end."""
is_installed = _replacement.is_installed
"""Returns whether our attention is in diffusers' place now."""


def _attention_in_place_of(
    theirs: Callable[..., Tensor | tuple[Tensor, Tensor]], native: object
) -> Callable[..., Tensor | tuple[Tensor, Tensor]]:
    """Returns the function that stands in for diffusers', with its signature.

    Args:
        native: the forward of diffusers' backend ``native``, whose calls run here.
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        *,
        forward_op: Callable[..., object],
        backward_op: Callable[..., object],
        _parallel_config: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Runs a call on ``[batch, shard, heads, head_dim]``, this rank's consecutive part of the positions."""
        config = _parallel_config.context_parallel_config
        ulysses_alone = config.ring_degree == 1
        # diffusers' Ulysses calls torch's function on whole rows, which is exact with a mask, with dropout, and for
        # uneven parts.
        exact = ulysses_alone and (attn_mask is not None or dropout_p or config.ulysses_anything)
        if forward_op is not native or return_lse or exact:
            options = {"forward_op": forward_op, "backward_op": backward_op, "_parallel_config": _parallel_config}
            flags = (attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
            return theirs(query, key, value, *flags, **options)
        _check(config, attn_mask, enable_gqa, query, key)
        return _run(config, query, key, value, dropout_p, is_causal, scale)

    return attention


def _run(
    config: Any, query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Runs a call on diffusers' mesh, by the strategy that its degrees of parallelism mean."""
    from torch_frontend.context_parallel.attention import context_parallel_attention  # few programs have a mesh

    both = config.ring_degree > 1 and config.ulysses_degree > 1
    mesh = config._mesh["ring", "ulysses"] if both else config._ring_mesh
    return context_parallel_attention(
        query,
        key,
        value,
        mesh=config._ulysses_mesh if config.ring_degree == 1 else mesh,
        # What diffusers' ring does: rotate_method="allgather".
        strategy="ulysses" if config.ring_degree == 1 else "all_gather",
        layout="contiguous",
        causal=is_causal,
        alignment="top_left",
        scale=scale,
        dropout=dropout,
    )


def _check(config: Any, attn_mask: Tensor | None, enable_gqa: bool, query: Tensor, key: Tensor) -> None:
    """Raises SpecError for what our context parallelism cannot honour."""
    if attn_mask is not None:
        raise SpecError(
            "attn_mask: expected None with ring_degree > 1, because every rank would need another part of it; "
            "ContextParallelConfig(ulysses_degree=) takes masks"
        )
    if config.ring_anything:
        raise SpecError("ring_anything=True: expected False; parts of different lengths need their positions")
    if config.ring_degree > 1 and not config.convert_to_fp32:
        raise SpecError("convert_to_fp32=False: expected True; results of ranks are merged in float32")
    if not enable_gqa and query.shape[2] != key.shape[2]:
        raise SpecError(
            f"enable_gqa=False with {query.shape[2]} heads of query and {key.shape[2]} of key: pass enable_gqa=True"
        )
