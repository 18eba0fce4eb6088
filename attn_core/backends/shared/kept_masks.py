"""Masks that keep their additive form, so that the layers of a model convert one mask once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

from attn_core.call.observe import mask_converted

KEPT_ELEMENTS = 2**22
"""The most elements of a kept form: 16 MiB in float32. Larger calls take much longer than the conversion."""

MARK = "_attn_core_additive"
"""The attribute of a mask that keeps its forms. Callers look for it first, so that other masks cost no call."""


def keep_additive(mask: Any) -> None:
    """Lets a bool mask keep its additive forms, for the calls that read it. A change in place invalidates them."""
    if not mask.is_inference():  # inference tensors do not count their changes
        setattr(mask, MARK, (ref(mask), {}))


def additive_of(mask: Any, form: tuple[Any, ...], convert: Callable[[], Any]) -> Any:
    """Returns the additive form of a mask that has MARK: the kept one, or a new one, which is kept if it is small.

    Args:
        form: what the additive form depends on beside the mask, a key of a dict.
        convert: computes it.
    """
    import torch

    original, forms = getattr(mask, MARK)
    # A captured graph must convert the mask in every replay. Modes and transforms pass tensors of their own.
    observed = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    captured = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    # A deep copy has the attributes of its original.
    if original() is not mask or observed or captured or torch.compiler.is_compiling():
        mask_converted()
        return convert()
    # Another stream does not wait for the conversion, and a tensor made in inference mode cannot be used in training.
    stream = torch.cuda.current_stream(mask.device).cuda_stream if mask.is_cuda else 0
    key = (*form, mask._version, torch.is_inference_mode_enabled(), stream)
    result = forms.get(key)
    if result is None:
        mask_converted()
        result = convert()
        if result.numel() <= KEPT_ELEMENTS:
            forms[key] = result
    return result
