"""Decides which tensors are plain data: the one rule for subclasses of Tensor and for layouts.

A kernel reads numbers from a tensor's memory. A subclass may interpret its memory differently or have none: a causal
bias, a masked, nested or distributed tensor. Only the types in ``PLAIN`` are what their memory holds.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as functional
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.overrides import _get_overloaded_args, has_torch_function

from attn_core.call.hints import remedy_of
from attn_core.errors import SpecError

Tensor = torch.Tensor

PLAIN = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
"""Compilers pass the last two while they trace."""

_torch_attention = torch._C._nn.scaled_dot_product_attention  # the builtin itself, even if its public name was replaced
_CAUSAL_BIAS = "torch.nn.attention.bias.CausalBias"
_PLAIN_REMEDY = "pass a plain tensor, because this subclass may interpret its memory differently"


def is_foreign(tensor: object) -> bool:
    """Returns whether the tensor's class comes from outside torch; a compiler may be unable to trace it."""
    kind = type(tensor)
    return kind not in PLAIN and isinstance(tensor, Tensor) and not kind.__module__.startswith("torch.")


def is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor is plain strided data."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def is_watched(q: Tensor) -> bool:
    """Returns whether a call on q must be one op: a mode or a trace records it, or q has no data (fake, meta)."""
    # A fake tensor may outlive its FakeTensorMode, so an inactive mode does not mean that q has data.
    without_data = type(q) is FakeTensor or (isinstance(q, Tensor) and q.is_meta)
    return without_data or are_modes_active() > 0 or are_jit_traces_active() is not None


def is_trained(tensor: Tensor) -> bool:
    """Returns whether autograd, a transform or forward mode computes a derivative by the tensor."""
    recorded = torch.is_grad_enabled()
    if recorded and tensor.requires_grad:
        return True
    if torch.compiler.is_compiling():
        return False
    transformed = torch._C._are_functorch_transforms_active()
    return (transformed and recorded and needs_gradient(tensor)) or _has_tangent(tensor)


def needs_gradient(tensor: Tensor) -> bool:
    """Returns whether any level of transforms, or autograd below them, needs the tensor's gradient."""
    while not tensor.requires_grad:
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True


def _has_tangent(tensor: Tensor) -> bool:
    """Returns whether forward mode follows the tensor, at any level of transforms."""
    while forward_ad._current_level >= 0:
        if forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


are_modes_active = torch._C._len_torch_dispatch_stack
are_jit_traces_active = torch._C._get_tracing_state


def mode_around(q: Tensor) -> AbstractContextManager[object]:
    """Returns the mode of a fake q as a context if it is not active, so that new tensors are fake, too."""
    return q.fake_mode if type(q) is FakeTensor and not are_modes_active() else nullcontext()


def match_fake(q: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor of our own in the form that ops accept together with q: fake if q is fake."""
    fake = type(q) is FakeTensor and type(tensor) is not FakeTensor
    return q.fake_mode.from_tensor(tensor, static_shapes=True) if fake else tensor  # type: ignore[attr-defined, no-any-return]


def constant(q: Tensor, array: np.ndarray) -> Tensor:
    """Returns a host array as a CPU tensor that ops accept together with q; a trace records it as a constant."""
    tensor = torch.from_numpy(array)
    return match_fake(q, torch.ops.aten.lift_fresh_copy(tensor) if are_modes_active() else tensor)


def to_device_of(q: Tensor, array: Tensor | np.ndarray) -> Tensor:
    """Returns an array of offsets as a tensor on q's device."""
    if isinstance(array, np.ndarray) and not torch.compiler.is_compiling() and is_watched(q):
        return constant(q, array).to(q.device)
    return torch.as_tensor(array, device=q.device)


def check(name: str, tensor: Tensor) -> None:
    """Raises SpecError unless the tensor is plain data."""
    kind = type(tensor)
    if kind not in PLAIN:
        name_of_kind = f"{kind.__module__}.{kind.__qualname__}"
        # By name, because torch.distributed.tensor takes long to import and may be missing.
        remedy = {
            "torch.distributed.tensor.DTensor": "pass its to_local(), if that is a complete call by itself",
            "torch.nested._internal.nested_tensor.NestedTensor": (
                f"pass {name}.values() and seq_info=(None, {name}.offsets().int(), the longest row)"
            ),
        }.get(name_of_kind, remedy_of(tensor) or _PLAIN_REMEDY)
        raise SpecError(f"{name}: expected a plain torch.Tensor, got {name_of_kind}; {remedy}")
    if tensor.is_nested:
        raise SpecError(
            f"{name}: expected a plain torch.Tensor, got a nested one of the layout torch.strided; build it with "
            "layout=torch.jagged, which attention() takes as packed documents"
        )
    if tensor.layout is not torch.strided:
        raise SpecError(f"{name}: expected a strided tensor, got the layout {tensor.layout}; pass {name}.to_dense()")
    if torch.compiler.is_compiling():
        return
    if tensor.is_quantized:
        raise SpecError(f"{name}: expected a tensor of numbers, got a quantised one; pass {name}.dequantize()")
    # Inline, because this runs for every tensor of a call.
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        if torch._C._functorch.peek_interpreter_stack() is None and not are_modes_active():
            raise SpecError(
                f"{name}: expected a tensor with data, got one that escaped from a transform such as torch.vmap"
            )
    elif kind is not FakeTensor and tensor.untyped_storage().nbytes() < tensor.nbytes and not fits_its_storage(tensor):
        raise SpecError(
            f"{name}: expected a tensor with its memory, got a storage of {tensor.untyped_storage().nbytes()} bytes "
            f"for the shape {list(tensor.shape)}; FSDP frees the storage of a parameter outside of its layer"
        )


def fits_its_storage(tensor: Tensor) -> bool:
    """Returns whether a plain tensor's last element is inside its storage. Tensors without data always fit."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or not tensor.numel():
        return True
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or torch._is_functional_tensor(tensor):
        return True
    # torch has no negative strides, so the last element has the highest address.
    last = tensor.storage_offset() + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def is_cut(tensor: Tensor) -> bool:
    """Returns whether a strided tensor reaches beyond its storage. Wrappers of transforms have no storage: False."""
    try:
        return tensor.untyped_storage().nbytes() < tensor.nbytes and not fits_its_storage(tensor)
    except (RuntimeError, NotImplementedError):
        return False


def check_data(q: Tensor, **others: Tensor | None) -> None:
    """Raises SpecError for a fake tensor beside a q with data, or the reverse, outside of a mode that converts them."""
    if torch.compiler.is_compiling() or are_modes_active():
        return
    if type(q) is FakeTensor:
        for name, tensor in others.items():
            if isinstance(tensor, Tensor) and type(tensor) is not FakeTensor and not q.fake_mode.allow_non_fake_inputs:
                raise SpecError(f"{name}: expected a FakeTensor, as q is, got a tensor with data")
        return
    for name, tensor in others.items():
        if type(tensor) is FakeTensor:
            raise SpecError(f"{name}: expected a tensor with data, as q has, got a FakeTensor")


def as_causal(mask: Any, is_causal: bool, query: Tensor) -> tuple[Any, bool]:
    """Converts torch's ``CausalBias`` to an equivalent ``(attn_mask, is_causal)``; returns other masks unchanged.

    Raises:
        ValueError: for a ``CausalBias`` together with ``is_causal``, as torch's own function does.
    """
    kind = type(mask)
    if kind in PLAIN or f"{kind.__module__}.{kind.__qualname__}" != _CAUSAL_BIAS:
        return mask, is_causal
    if is_causal:
        raise ValueError("attn_mask: expected no CausalBias together with is_causal=True, both define the causal mask")
    # Both variants are the same matrix if it is square, and is_causal is the upper left one.
    if mask.variant.name == "UPPER_LEFT" or mask.seq_len_q == mask.seq_len_kv:
        return None, True
    # Four axes, because a mask with two could be read as a mask of keys.
    return mask._materialize(query.device)[(None,) * (query.dim() - 2)], False


def torch_attention(*call: Any, **options: Any) -> Tensor:
    """Calls torch's own attention; its tensors' subclasses may override it through ``__torch_function__``.

    Some subclasses recognise the function under the public name ``scaled_dot_product_attention``, some only the
    builtin. If our function has replaced the public name, subclasses are first offered the function under the public
    name. A subclass that does not recognise it calls it again, and so arrives here a second time: then subclasses are
    offered the builtin.
    """
    if torch.compiler.is_compiling():
        return _torch_attention(*call, **options)
    reentered = getattr(_dispatching, "active", False)
    public = functional.scaled_dot_product_attention
    if not reentered and public is not _torch_attention and has_torch_function(call[:4]):
        kinds = tuple(type(tensor) for tensor in _get_overloaded_args(call[:4]))
        _dispatching.active = True
        try:
            for kind in kinds:
                result = kind.__torch_function__(public, kinds, call, options)
                if result is not NotImplemented:
                    return result
        finally:
            _dispatching.active = False
    _dispatching.active = False
    # A subclass usually calls again inside DisableTorchFunctionSubclass, which would hide the builtin from subclasses.
    with torch._C._EnableTorchFunction() if reentered else nullcontext():
        return _torch_attention(*call, **options)


_dispatching = threading.local()
