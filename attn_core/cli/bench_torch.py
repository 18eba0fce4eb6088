"""The calls of a sweep as torch functions: on a backend of ours, and on torch's own F.scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attn_core.call.masks import band
from attn_core.call.seq_info import SeqInfo
from attn_core.call.spec import AttentionSpec
from attn_core.cli.bench_timing import Run
from attn_core.selection.sweep import SweepCase

SDPA = "F.sdpa"
"""The name under which a caller runs torch's own function."""


def has_sdpa(spec: AttentionSpec) -> bool:
    """Returns whether torch's F.scaled_dot_product_attention has arguments for the call."""
    special = spec.packed or spec.sinks or spec.softcap is not None or spec.alibi_shape is not None
    dense = [shape for shape in (spec.mask_shape, spec.bias_shape) if shape is not None]
    if special or len(dense) > 1:
        return False
    if _sees_all(spec):
        return True
    # is_causal is aligned top left, and cannot be combined with a mask.
    return spec.causal and spec.window[0] is None and spec.q_len == spec.kv_len and not dense


def _sees_all(spec: AttentionSpec) -> bool:
    return band(spec).hides_nothing(spec.q_len, spec.kv_len)


def caller(case: SweepCase, spec: AttentionSpec, device: Any) -> Run:
    """Returns a function that runs the call on a backend by name: ``(out,)``, with a backward ``(out, dq, dk, dv)``.

    Under the name SDPA it runs torch's own function, if ``has_sdpa(spec)``.
    """
    import torch

    from torch_frontend import attention

    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=of, generator=generator)

    row = () if spec.packed else (spec.batch,)
    q = normal(*row, spec.q_len, spec.num_heads, spec.head_dim)
    k = normal(*row, spec.kv_len, spec.num_kv_heads, spec.head_dim)
    v = normal(*row, spec.kv_len, spec.num_kv_heads, spec.value_dim)
    keywords = {name: getattr(spec, name) for name in ("causal", "alignment", "window", "softcap", "scale")}
    keywords |= {
        "mask": None if spec.mask_shape is None else _mask(spec.mask_shape, device),
        "bias": None if spec.bias_shape is None else normal(*spec.bias_shape),
        "alibi_slopes": None if spec.alibi_shape is None else _slopes(spec, device),
        "sinks": normal(spec.num_heads, of=torch.float32) if spec.sinks else None,
        "seq_info": None if case.lengths is None else _documents(case.lengths, device),
    }
    sdpa = _sdpa(spec, q, k, v, keywords) if has_sdpa(spec) else None

    def forward(backend: str) -> torch.Tensor:
        if backend == SDPA and sdpa is not None:
            return sdpa()
        return attention(q, k, v, backend=backend, **keywords)

    if not spec.needs_backward:
        return lambda backend: (forward(backend),)
    learned, dout = [tensor.requires_grad_() for tensor in (q, k, v)], normal(*spec.out_shape)

    def train(backend: str) -> tuple[Any, ...]:
        out = forward(backend)
        return (out.detach(), *torch.autograd.grad(out, learned, dout))

    return train


def _sdpa(spec: AttentionSpec, q: Any, k: Any, v: Any, keywords: dict[str, Any]) -> Callable[[], Any]:
    import torch.nn.functional as F

    dense = keywords["mask"] if keywords["mask"] is not None else keywords["bias"]
    options: dict[str, Any] = {"attn_mask": dense, "is_causal": not _sees_all(spec), "scale": spec.scale}
    options["enable_gqa"] = spec.group_size > 1

    def sdpa() -> Any:
        heads_first = (tensor.transpose(1, 2) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(*heads_first, **options)
        return out.transpose(1, 2)

    return sdpa


def _mask(shape: tuple[int, int, int, int], device: Any) -> Any:
    """Returns a mask that leaves each row a key: padding if all queries share one row of it, else a random fifth."""
    import torch

    batch, _, rows, keys = shape
    if rows == 1:
        lengths = torch.linspace(keys // 2, keys, batch, device=device).long().clamp(min=1)
        return torch.arange(keys, device=device) < lengths[:, None, None, None]  # [batch, 1, 1, keys]
    generator = torch.Generator(device=device).manual_seed(1)
    mask = torch.rand(shape, device=device, generator=generator) > 0.2
    return mask | torch.eye(rows, keys, dtype=torch.bool, device=device)  # the diagonal: no row without keys


def _slopes(spec: AttentionSpec, device: Any) -> Any:
    import torch

    return 2.0 ** (-8.0 * torch.arange(1, spec.num_heads + 1, device=device, dtype=torch.float32) / spec.num_heads)


def _documents(lengths: tuple[int, ...], device: Any) -> SeqInfo:
    import torch

    return SeqInfo.from_lengths(lengths, array=lambda offsets: torch.from_numpy(offsets).to(device))
