"""Autograd helpers for unusual places: inside a custom operator, around compiled functions, before a kernel's backward.

If torch's own autograd calls a kernel's backward op, the gradients that the kernel cannot read are copied. Kernels load
16 bytes at a time, and not all ops check addresses: a gradient of another address breaks the device. torch makes
gradients contiguous for its flash and efficient kernels, but not for cuDNN, and it caches cuDNN's plans by the layout
of q, k and v alone, so a plan for one layout of the gradient would silently run on another layout.
Upstream: ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from attn_core.backends.shared.readable import readable

if TYPE_CHECKING:
    from torch import Tensor

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_KEYS = ("ADInplaceOrView", "AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ZeroTensor")
"""Dispatch keys that the dispatcher excludes below autograd, e.g. inside a custom operator.

Forward mode needs the last one."""


@contextmanager
def recording() -> Iterator[None]:
    """Records operations for autograd in its block, even inside an operator that a compiler or a transform calls.

    For backends that compute their gradient with an autograd graph.
    """
    import torch

    dispatch = torch._C
    # Inside an operator the dispatcher has excluded autograd's keys for this thread. Put them back for the block.
    excluded = dispatch._dispatch_tls_local_exclude_set()
    for name in _KEYS:
        key = getattr(dispatch.DispatchKey, name)
        excluded = excluded.remove(key) if excluded.has(key) else excluded
    with dispatch._ForceDispatchKeyGuard(dispatch._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def without_gradient(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorates a function that runs without recording for autograd. Ctrl-C cannot leave autograd switched off.

    ``torch.no_grad`` restores autograd in a Python function. If Ctrl-C arrives as that function begins, autograd stays
    off for the rest of the process. Here a function in C restores it, and Python raises KeyboardInterrupt only between
    calls of functions.
    """

    @wraps(function)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        import torch

        before = torch.is_grad_enabled()
        try:
            torch._C._set_grad_enabled(False)
            return function(*arguments, **options)
        finally:
            torch._C._set_grad_enabled(before)

    return run


def differentiable_once(result: object) -> None:
    """Allows ``retain_graph=True`` for a compiled function, and raises if its gradient is differentiated again.

    torch refuses both in one error, because a compiled backward may overwrite the saved tensors. A function compiled
    with ``donated_buffer=False`` overwrites none of them, but torch still refuses until ``bw_donated_idxs`` is an empty
    list. With an empty list alone, torch would return a second derivative that lacks terms, without an error; so the
    backward is wrapped as well. A torch without ``bw_donated_idxs`` is left as it is.

    Args:
        result: an output of the compiled function. All graphs of that function change. A result without a graph
            changes nothing.
    """
    compiled: Any = getattr(getattr(result, "grad_fn", None), "_forward_cls", None)
    metadata: Any = getattr(compiled, "metadata", None)
    if getattr(metadata, "bw_donated_idxs", ()) is None:  # () if the attribute is missing, None until it is set
        compiled.backward = staticmethod(without_create_graph(compiled.backward))
        metadata.bw_donated_idxs = []


def without_create_graph(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Wraps an autograd function's backward so that it raises under ``create_graph=True``.

    For functions whose saved tensors are not connected to the inputs: their second derivative would be wrong.
    """

    @wraps(backward)
    def run(ctx: object, *gradients: object) -> Result:
        import torch

        if torch.is_grad_enabled():
            refuse_second_derivative()
        return backward(ctx, *gradients)

    return run


def refuse_second_derivative(*_: object) -> None:
    """Raises. Registered in the place of the derivative of a backward."""
    raise RuntimeError(
        "attention has no second derivative in torch: its gradients and its tangents have no derivatives; "
        "write the call in plain operations of torch, or use jax.hessian or jax.jvp of jax.grad in JAX"
    )


Incoming = tuple["Tensor | None", ...]
"""The gradients of an op's results; None for a result that nothing depends on."""
Hook = Callable[[Incoming], Incoming | None]


def copy_unaligned(out: Tensor) -> None:
    """Copies the gradient of ``out``, the first result of an op, before the op's backward if it is unaligned."""
    node = out.grad_fn
    if node is not None:
        node.register_prehook(_aligned)


def copy_other_layouts(out: Tensor) -> None:
    """As ``copy_unaligned``, and also copies a gradient whose strides differ from ``out``'s."""
    node = out.grad_fn
    if node is not None:
        node.register_prehook(_in_strides(out.stride()))


def _aligned(gradients: Incoming) -> Incoming | None:
    dout, *others = gradients
    read = None if dout is None else readable(dout, _is_aligned)
    return None if read is dout else (read, *others)


@lru_cache(maxsize=4096)
def _in_strides(strides: tuple[int, ...]) -> Hook:
    def copied(gradients: Incoming) -> Incoming | None:
        dout, *others = gradients
        if dout is None or (dout.stride() == strides and _is_aligned(dout)):
            return None
        return (dout.new_empty_strided(dout.shape, strides).copy_(dout), *others)

    return copied


def _is_aligned(dout: Tensor) -> bool:
    try:
        return not dout.data_ptr() % 16
    except RuntimeError:  # a tensor of vmap or functorch has no address; its values get tensors of their own
        return True
