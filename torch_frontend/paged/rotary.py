"""apply_rotary: rotary position embeddings of queries and keys, for torch tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Never

import numpy as np
import torch

from attn_core.backends.shared.triton import Description, Direct, has_triton, launch, remember
from attn_core.call.hints import hide_unknown, refuse_keywords
from attn_core.call.options import check_flag
from attn_core.paged import rotary
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.plan import on_device
from torch_frontend.paged.tables import index_of

Tensor = torch.Tensor


@hide_unknown
def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, *, positions: Tensor | np.ndarray, interleaved: bool = False, **unknown: Never
) -> Tensor:
    """Rotates pairs of channels by angles that depend on each token's position: a rotary embedding.

    Args:
        x: ``[..., heads, head_dim]``, queries or keys, such as ``[tokens, heads, head_dim]``.
        cos, sin: ``[max_positions, rotary_dim / 2]``, of the angles; rotary_dim is at most head_dim, and channels
            behind it do not change. Any float dtype; float64 for a float64 x alone.
        positions: int32 or int64 ``[...]``, one for each token of x; a tensor on x's device or a numpy array.
        interleaved: whether the pairs are channels ``(2i, 2i + 1)``, as in GPT-J, and not ``(i, i + rotary_dim / 2)``,
            as in GPT-NeoX and Llama.

    Returns:
        An array like x. It is computed in float32 (a float64 x in float64) and rounded once. torch, our GPU kernel and
        JAX return the same bits; ``append_kv(rotary=)`` writes them, too.

    Raises:
        ShapeError, DTypeError, DeviceError, SpecError: for invalid arguments. Positions on the CPU are checked;
            positions on a GPU are clamped to the rows of cos.
    """
    if unknown:
        refuse_keywords(apply_rotary, unknown)
    check_flag("interleaved", interleaved)
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        plan.check_tensor(name, tensor)
    positions = index_of(x, "positions", positions)
    named = {"x": x, "cos": cos, "sin": sin, "positions": positions}
    tensor_kinds.check_data(x, cos=cos, sin=sin, positions=positions)
    entries = tuple([(t.shape, t.dtype, t.device) for t in named.values()])
    # Symbolic sizes cannot be compared. The op checks them when it runs.
    if all([type(size) is int for entry in entries for size in entry[0]]):
        (_check if torch.compiler.is_compiling() else _check_metadata)(entries)
    if (torch.is_grad_enabled() and any([tensor.requires_grad for tensor in (x, cos, sin)])) or _is_transformed():
        if not torch.compiler.is_compiling():
            check_values(x, cos, positions)
        return rotate(x, cos, sin, positions, interleaved, x.dtype)  # torch's own operations, with their gradients
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(x):
        return torch.ops.attn.apply_rotary(x, cos, sin, positions, interleaved)  # type: ignore[no-any-return]
    return run(x, cos, sin, positions, interleaved)


def run(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotates x after checking everything: by torch's operations, on a GPU with our kernel."""
    _check_metadata(tuple([(t.shape, t.dtype, t.device) for t in (x, cos, sin, positions)]))
    check_values(x, cos, positions)
    if x.is_cuda and x.numel() and has_triton():
        return on_device(rotate_on_gpu, x.device)(x, cos, sin, positions, interleaved)  # type: ignore[no-any-return]
    return rotate(x, cos, sin, positions, interleaved, x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, dtype: torch.dtype) -> Tensor:
    """Returns x ``[..., heads, head_dim]`` rotated, rounded once to a dtype. torch rounds after every operation."""
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    # Clamped, because indexing stops the GPU at a wrong position. An index must be int64.
    rows = positions.to(torch.int64).clamp(0, cos.shape[0] - 1)
    cosine, sine = (table[rows].to(kind).unsqueeze(-2) for table in (cos, sin))  # [..., 1, rotary_dim / 2]
    width = 2 * cos.shape[1]
    wide, rest = x[..., :width].to(kind), x[..., width:]
    first, second = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = first * cosine - second * sine, second * cosine + first * sine
    pairs = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((pairs.to(dtype), rest.to(dtype)), -1)


def rotate_on_gpu(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Returns ``rotate`` in the dtype of x, by one launch of a Triton kernel."""
    return _rotate_on_gpu(x, cos, sin, positions, interleaved)[0]


def repeated_on_gpu() -> Callable[..., Tensor]:
    """Returns ``rotate_on_gpu`` for tensors of one metadata, which repeats its launches by the tensors' strides."""
    seen: dict[Hashable, Direct] = {}

    def rotate_again(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        key = (x.stride(), cos.stride(), sin.stride(), positions.stride(), interleaved)
        direct = seen.get(key)
        if direct is not None:
            out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
            addresses = [tensor.data_ptr() for tensor in (x, cos, sin, positions, out)]
            if not any([address & 15 for address in addresses]):
                direct(*addresses)
                return out
        out, direct = _rotate_on_gpu(x, cos, sin, positions, interleaved)
        remember(seen, key, direct)
        return out

    return rotate_again


def _rotate_on_gpu(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool
) -> tuple[Tensor, Direct | None]:
    """Returns the rotated x, and the direct launch if it fits other tensors with the metadata and strides of these."""
    from attn_core.paged import kernels

    rows = x.detach().reshape(-1, *x.shape[-2:])  # [tokens, heads, head_dim]; a view if the strides allow one
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    tables = tuple(table if table.stride(-1) == 1 else table.contiguous() for table in (cos.detach(), sin.detach()))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    flat = out.view(rows.shape)
    tensors = (rows, *tables, positions.reshape(-1).contiguous(), flat)
    strides = *rows.stride()[:2], tables[0].stride(0), tables[1].stride(0), *flat.stride()[:2]
    numbers = (cos.shape[0], *strides)

    def describe() -> Description:
        tokens, heads, head_dim = rows.shape
        constants = {
            **{"HEAD_DIM": head_dim, "WIDE": 1 << (head_dim - 1).bit_length(), "ROTARY_DIM": 2 * cos.shape[1]},
            **{"INTERLEAVED": interleaved, "DOUBLE": x.dtype == torch.float64, "num_warps": 1 if head_dim <= 64 else 2},
            "enable_fp_fusion": False,
        }
        return (tokens, heads, 1), numbers, constants

    current = torch.cuda.current_device() if x.is_cuda else -1
    dtypes = tuple(tensor.dtype for tensor in tensors[:4])
    key = ("rotate", dtypes, tuple(rows.shape), cos.shape[1], numbers, interleaved, current)
    direct = launch(kernels.rotate, key, tensors, describe)
    copied = [mine.data_ptr() != own.data_ptr() for mine, own in zip(tensors, (x, cos, sin, positions))]
    return out, None if any(copied) else direct


def check_values(x: Tensor, cos: Tensor, positions: Tensor) -> None:
    """Checks the positions if they are on the CPU."""
    if x.is_cpu and x.numel() and not tensor_kinds.is_watched(x) and not _is_transformed():
        rotary.check_position_values(positions.numpy(), cos.shape[0])


def _is_transformed() -> bool:
    """Returns whether a transform such as ``torch.vmap`` runs, which has no rule for our op."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def _check(entries: tuple[plan.Metadata, ...]) -> None:
    """Checks the metadata of x, cos, sin and positions."""
    facts = [plan.facts(*entry) for entry in entries]
    rotary.check_apply(dict(zip(("x", "cos", "sin", "positions"), facts, strict=True)))


_check_metadata = lru_cache(maxsize=1024)(_check)
"""A call whose metadata passed before is not checked again."""


# FRAGMENT, because dispatch.ops defines the namespace.
_library = torch.library.Library("attn", "FRAGMENT")
_library.define(
    "apply_rotary(Tensor x, Tensor cos, Tensor sin, Tensor positions, bool interleaved) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("apply_rotary", run, "CompositeExplicitAutograd")
torch.library.register_fake("attn::apply_rotary", lambda x, *_: x.new_empty(x.shape), lib=_library)
