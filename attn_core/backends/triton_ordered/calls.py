"""The calls of the kernels on torch tensors: operands, buffers and launches."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from attn_core.backends.shared.in_order import merge
from attn_core.backends.shared.in_order.order import how
from attn_core.backends.shared.programs.triton import launch
from attn_core.backends.triton_ordered import gradients, launches
from attn_core.call.counters import operand_copied
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs


class Kernels(NamedTuple):
    """The Triton kernels of a forward and of a backward."""

    attend: Any
    row_sums: Any
    sink_sums: Any
    of_keys: Any
    of_queries: Any


@cache
def kernels() -> Kernels:
    """Returns the kernels."""
    from attn_core.backends.triton_ordered import gradient_kernels, row_sums
    from attn_core.backends.triton_ordered import kernels as forward_kernels

    of_rows, of_tiles = (row_sums.row_sums, row_sums.sink_sums), (gradient_kernels.of_keys, gradient_kernels.of_queries)
    return Kernels(forward_kernels.attend, *of_rows, *of_tiles)


@cache
def multiprocessors(device: int) -> int:
    import torch

    # A CPU tensor has device -1: tests run the kernels in Triton's interpreter.
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device >= 0 else 1


def _current(tensor: Any) -> int:
    """Returns the current device, because Triton launches there; -1 for a CPU tensor."""
    import torch

    return torch.cuda.current_device() if tensor.is_cuda else -1


def _dense(tensor: Any) -> Any:
    """Returns the tensor, or a contiguous copy if its channels are not next to each other."""
    if tensor.stride(-1) == 1:
        return tensor
    operand_copied()
    return tensor.contiguous()


def _aligned(dout: Any) -> Any:
    """Returns a gradient, or a contiguous copy if its rows do not all begin at multiples of 16 elements.

    Triton reads such rows with other instructions, and then adds their channels in another order.
    """
    if dout.data_ptr() % 16 == 0 and not any(step % 16 for step in dout.stride()[:-1]):
        return dout
    operand_copied()
    return dout.contiguous()


def _operands(inputs: Inputs) -> tuple[Any, ...]:
    """Returns what all kernels read: q, k, v, offsets, sinks and slopes; q stands for what is absent."""
    q = _dense(inputs.q)
    offsets = [q if each is None else each.contiguous() for each in (inputs.cu_seqlens_q, inputs.cu_seqlens_k)]
    sinks = q if inputs.sinks is None else inputs.sinks.contiguous()
    slopes = q if inputs.alibi_slopes is None else inputs.alibi_slopes.float().contiguous()
    return (q, _dense(inputs.k), _dense(inputs.v), *offsets, sinks, slopes)


def _layout(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([(tensor.stride(), tensor.dtype) for tensor in tensors])


def buffer(into: Any, shape: tuple[int, ...], kind: Any, device: Any) -> Any:
    """Returns a contiguous tensor for a result: the caller's if it is contiguous."""
    import torch

    if into is not None and into.is_contiguous():
        return into
    return torch.empty(shape, dtype=kind, device=device)


def forward(spec: AttentionSpec, inputs: Inputs, into: Any, settings: dict[str, Any]) -> tuple[Any, Any]:
    """Returns (out, lse).

    Args:
        into: a buffer or None for each. settings: from ``launches.settings_of``.
    """
    import torch

    operands = _operands(inputs)
    q, sinks = operands[0], operands[5]
    way, current = how(spec, multiprocessors(q.get_device())), _current(q)
    out = buffer(into[0], spec.out_shape, q.dtype, q.device)
    lse = buffer(into[1], spec.lse_shape, torch.float32, q.device)
    parts, part_lse = out, lse
    if way.shares:
        tokens = spec.batch * spec.q_len
        size = (way.shares, tokens, spec.num_heads, spec.value_dim)
        parts = torch.empty(size, dtype=torch.float32, device=q.device)
        part_lse = torch.empty((way.shares, spec.num_heads, tokens), dtype=torch.float32, device=q.device)
    tensors = (*operands, parts, part_lse)
    key = ("ordered attend", spec, way, _layout(operands), current)
    launch(kernels().attend, key, tensors, lambda: launches.attend(spec, tensors, settings, way))
    if way.shares:
        rows = out if spec.packed else out.flatten(0, 1)
        merge.launch_merge(spec, (parts, part_lse, sinks, rows, lse), way.shares, current)
    return out, lse


def backward(
    spec: AttentionSpec, inputs: Inputs, saved: tuple[Any, ...], into: Any, settings: dict[str, Any]
) -> Gradients:
    """Returns the gradients.

    Args:
        saved: (out, lse, dout, dlse), dlse None if nothing depends on the log-sum-exp.
        into: Gradients of buffers, or None. settings: from ``launches.settings_of``.
    """
    import torch

    _, of_rows, of_sinks, of_keys, of_queries = kernels()
    (q, k, v, *rest), (out, lse, dout, dlse) = _operands(inputs), saved
    (*offsets, sinks, slopes), current = rest, _current(q)
    out, dout, lse = _dense(out), _aligned(_dense(dout)), lse.contiguous()
    # The log-sum-exp stands for an absent dlse, and the kernel does not read it.
    incoming = lse if dlse is None else dlse.contiguous()
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    sums = (out, dout, lse, incoming, shift, delta)
    seen: tuple[Any, ...] = (spec, dlse is None, _layout(sums), current)
    launch(of_rows, ("ordered sums", *seen), sums, lambda: gradients.row_sums(spec, sums, dlse is not None))

    dq, dk, dv = (
        buffer(part, tuple(tensor.shape), tensor.dtype, q.device)
        for part, tensor in zip(into or (None, None, None), inputs[:3])
    )
    read = (q, k, v, dout, shift, delta, *offsets, slopes)
    tiles = gradients.tiles(spec)
    place = (spec, tiles, _layout(read), current)
    keys, queries = (*read, dk, dv), (*read, dq)
    launch(of_keys, ("ordered dk, dv", *place), keys, lambda: gradients.of_keys(spec, keys, settings, tiles[0]))
    launch(of_queries, ("ordered dq", *place), queries, lambda: gradients.of_queries(spec, queries, settings, tiles[1]))
    if not spec.sinks:
        return Gradients(dq, dk, dv)
    dsinks = torch.empty(spec.num_heads, dtype=torch.float32, device=q.device)
    about = (sinks, shift, delta, dsinks)
    launch(of_sinks, ("ordered sinks", spec, sinks.dtype, current), about, lambda: gradients.sink_sums(spec, about))
    return Gradients(dq, dk, dv, dsinks=dsinks.to(inputs.sinks.dtype))
