"""Which tensors are plain data: the one rule for subclasses of Tensor, and for layouts that kernels cannot read.

A kernel reads numbers out of a tensor's memory. A subclass may mean something else by them, or have none: a causal
bias, a masked, nested or distributed tensor. Only the subclasses named here mean what their numbers say.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import _get_overloaded_args, has_torch_function

from attn_core.errors import SpecError

Tensor = torch.Tensor

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
"""Compilers show the last two while they trace."""

_torch_attention = torch._C._nn.scaled_dot_product_attention  # the builtin itself, whatever stands in its place
_CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"


def is_foreign(tensor: Any) -> bool:
    """Whether this is a subclass that others than torch wrote, which no compiler can be expected to follow."""
    kind = type(tensor)
    return kind not in PLAIN and isinstance(tensor, Tensor) and not kind.__module__.startswith("torch.")


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is what the numbers in its memory say, one after another in strides."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def is_watched(q: Any) -> bool:
    """Whether a call on q is to be one op: a dispatch mode or a trace records it, or q has no numbers (fake, meta)."""
    without_numbers = type(q) is FakeTensor or (isinstance(q, Tensor) and q.is_meta)
    return without_numbers or are_modes_active() > 0 or are_jit_traces_active() is not None


are_modes_active = torch._C._len_torch_dispatch_stack
are_jit_traces_active = torch._C._get_tracing_state


def beside(q: Tensor, made: Tensor) -> Tensor:
    """A tensor of our own in the form that ops accept together with q: fake if q is fake."""
    fake = type(q) is FakeTensor and type(made) is not FakeTensor
    return q.fake_mode.from_tensor(made, static_shapes=True) if fake else made  # type: ignore[attr-defined, no-any-return]


def constant(q: Tensor, array: np.ndarray) -> Tensor:
    """A host array as a CPU tensor that ops accept together with q. A trace of the call keeps its values."""
    made = torch.from_numpy(array)
    return beside(q, torch.ops.aten.lift_fresh_copy(made) if are_modes_active() else made)


def placed(q: Tensor, array: Any) -> Tensor:
    """An array of offsets as a tensor on the device of q."""
    if isinstance(array, np.ndarray) and not torch.compiler.is_compiling() and is_watched(q):
        return constant(q, array).to(q.device)
    return torch.as_tensor(array, device=q.device)


def check(name: str, tensor: Tensor) -> None:
    """Raises SpecError unless the tensor is plain data."""
    kind = type(tensor)
    if kind not in PLAIN:
        told = f"{kind.__module__}.{kind.__qualname__}"
        remedy = {
            _CAUSAL_BIAS: "say causal=True, alignment='top_left' for upper left, 'bottom_right' for lower right",
            "torch.distributed.tensor.DTensor": "pass its to_local(), if that is a whole call of its own",
            "torch.nested._internal.nested_tensor.NestedTensor": "pass its values() with seq_info=",
        }.get(told, "pass a plain tensor, for what the subclass means by its numbers is not known here")
        raise SpecError(f"{name}: expected a plain torch.Tensor, got {told}; {remedy}")
    if tensor.is_nested:
        raise SpecError(f"{name}: expected a plain torch.Tensor, got a nested one; pack its rows and pass seq_info=")
    if tensor.layout is not torch.strided:
        raise SpecError(f"{name}: expected a strided tensor, got the layout {tensor.layout}; pass {name}.to_dense()")


def as_causal(mask: Any, is_causal: bool, query: Tensor) -> tuple[Any, bool]:
    """torch's ``CausalBias`` as the ``(attn_mask, is_causal)`` that it stands for; other masks as they are.

    Raises:
        ValueError: for a ``CausalBias`` beside ``is_causal``, as torch's own function does.
    """
    kind = type(mask)
    if kind in PLAIN or f"{kind.__module__}.{kind.__qualname__}" != _CAUSAL_BIAS:
        return mask, is_causal
    if is_causal:
        raise ValueError("attn_mask: expected no CausalBias beside is_causal=True, for both say what is causal")
    if mask.variant.name == "UPPER_LEFT" or mask.seq_len_q == mask.seq_len_kv:
        return None, True
    return mask._materialize(query.device)[(None,) * (query.dim() - 2)], False  # two axes may mean a mask of keys


def torchs_own(*call: Any, **options: Any) -> Any:
    """torch's own attention, which asks the subclasses among its tensors what to do.

    Some subclasses know attention as the function under the name ``scaled_dot_product_attention``, some as the builtin.
    Our own function may stand under the name. Then subclasses are asked about the function under the name first. One
    that does not know it calls it again, which ends here a second time: now subclasses are asked about the builtin.
    """
    if torch.compiler.is_compiling():
        return _torch_attention(*call, **options)
    again = getattr(_asking, "now", False)
    place = functional.scaled_dot_product_attention
    if not again and place is not _torch_attention and has_torch_function(call[:4]):
        kinds = tuple(type(tensor) for tensor in _get_overloaded_args(call[:4]))
        _asking.now = True
        try:
            for kind in kinds:
                found = kind.__torch_function__(place, kinds, call, options)
                if found is not NotImplemented:
                    return found
        finally:
            _asking.now = False
    _asking.now = False
    with torch._C._EnableTorchFunction() if again else nullcontext():
        return _torch_attention(*call, **options)


_asking = threading.local()
