"""The functions of FlashAttention 3 (``hopper/flash_attn_interface.py`` of flash-attention), for torch tensors.

They run on any device, on the kernel that selection picks. Results have FlashAttention 3's form: without
``return_attn_probs`` the output, else ``(out, softmax_lse)``, with -inf for a query that sees no key.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attn_core.backends.flash3 import forward_of_e4m3
from attn_core.call.options import Options, check_flag, check_options
from attn_core.call.tensors import Inputs
from attn_core.dropins.flash_attn.hopper import FlashAttention3
from attn_core.errors import DeviceError, DTypeError, ShapeError, SpecError
from attn_core.selection import NoBackendError
from torch_frontend.dispatch import plan, tensor_kinds
from torch_frontend.dispatch.plan import on_device
from torch_frontend.flash_attn.frontend import TORCH

Tensor = torch.Tensor

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

BACKEND = "flash3_fp8"
NAMES = ("q_descale", "k_descale", "v_descale")
E4M3 = torch.float8_e4m3fn


def _is_scaled(tensors: tuple[object, ...], factors: tuple[object, ...]) -> bool:
    """Returns whether a call has a tensor in float8_e4m3fn or a factor."""
    if any([each is not None for each in factors]):
        return True
    return any([isinstance(each, Tensor) and each.dtype is E4M3 for each in tensors])


def _attend_scaled(
    tensors: tuple[Tensor, Tensor, Tensor],
    factors: tuple[Tensor | None, Tensor | None, Tensor | None],
    options: dict[str, Any],
    with_lse: bool,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Returns out in bfloat16, or (out, lse), of dense q, k and v in float8_e4m3fn; None for a call without such ones.

    Args:
        tensors: ``[batch, length, heads, dim]`` each.
        factors: q_descale, k_descale and v_descale, float32 ``[batch, kv_heads]``: a number is ``stored * factor``.
            None for 1.
        options: keywords of ``attention``. with_lse: return_attn_probs.

    Raises:
        TypeError, DTypeError, ShapeError, DeviceError, SpecError: naming the argument; also if this machine has no
            FlashAttention 3 with such kernels, with the reason.
    """
    if not _is_scaled(tensors, factors):
        return None
    options = {**options, "return_lse": check_flag("return_attn_probs", with_lse)}
    named = dict(zip(NAMES, factors, strict=True))
    for name, each in (*zip("qkv", tensors, strict=True), *named.items()):
        if name in "qkv" or each is not None:
            plan.check_tensor(name, each)
    for name, each in zip("qkv", tensors, strict=True):
        if each.dtype is not E4M3:
            raise DTypeError(f"{name}: expected float8_e4m3fn, as factors and float8 tensors need, got {each.dtype}")
    q = tensors[0]
    if torch.compiler.is_compiling() or tensor_kinds.is_watched(q):
        raise SpecError("q: float8_e4m3fn runs eagerly alone, not under torch.compile or a transform")
    if torch.is_grad_enabled() and any([each.requires_grad for each in tensors]):
        raise SpecError("q: float8_e4m3fn has no gradient; call the function inside torch.no_grad()")
    inputs = Inputs(*tensors)
    entries = Inputs(*[entry and (entry[0], torch.bfloat16, entry[2]) for entry in plan.metadata(inputs)])
    arguments = entries, check_options(Options(**options)), False, False, (BACKEND,)
    try:
        planned = plan.plan(*arguments)  # cached, so that a repeated call selects nothing again
    except NoBackendError as error:
        reasons = "; ".join(error.selection.reasons(BACKEND))
        raise SpecError(f"q: float8_e4m3fn cannot run here: {reasons}; pass bfloat16") from None
    spec = planned.spec
    sizes = torch.Size((spec.batch, spec.num_kv_heads))
    for name, each in named.items():
        if each is not None:
            _check_factor(name, each, sizes, q.device)
    if spec.empty:
        out, lse = planned.forward(spec, inputs._replace(q=q.to(torch.bfloat16)))
    else:
        dense = tuple([None if each is None else each.contiguous() for each in factors])
        out, lse = on_device(forward_of_e4m3, q.device)(spec, inputs, dense)
    return (out, lse) if options["return_lse"] else out


def _check_factor(name: str, factor: Tensor, sizes: torch.Size, device: torch.device) -> None:
    if factor.dtype is not torch.float32:
        raise DTypeError(f"{name}: expected dtype float32, got {factor.dtype}")
    if factor.shape != sizes:
        raise ShapeError(f"{name}: expected [batch, kv_heads] = {list(sizes)}, got {list(factor.shape)}")
    if factor.device != device:
        raise DeviceError(f"{name}: expected the device of q ({device}), got {factor.device}")


class _Functions(FlashAttention3[Tensor]):
    frontend = replace(TORCH, attend_scaled=_attend_scaled)


flash_attn_func = _Functions.flash_attn_func
flash_attn_qkvpacked_func = _Functions.flash_attn_qkvpacked_func
flash_attn_varlen_func = _Functions.flash_attn_varlen_func
flash_attn_with_kvcache = _Functions.flash_attn_with_kvcache
