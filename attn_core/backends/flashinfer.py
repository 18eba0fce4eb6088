"""FlashInfer's FA2 kernels on keys and values in pages, by ``BatchPrefillWithPagedKVCacheWrapper``.

Unproven: this project never ran it on a GPU. The tests cover everything around the wrapper, with a stand-in of its
signatures, which are those of flashinfer 0.6.

It runs only when requested by name. The wrapper's ``plan`` schedules the work on the host and needs the lengths
there, so each call waits for the GPU to copy the tables back; no other backend does. Because the tables are on the
host, their values are checked, as on a CPU. A CUDA graph cannot capture that copy, so a call during a capture raises.
FlashInfer's calls without a plan (``trtllm_batch_decode_with_kv_cache``, XQA) return no log-sum-exp, so we cannot use
them instead.

Limits: paged calls only, forward only; fp16 and bf16, head_dim 64, 128 or 256 and value_dim the same, any page size;
causal or not, windows without a right side, softcap. The pools of keys and of values must have the same strides.
``shared.rewrites`` adds sinks. FlashInfer compiles its kernels on first use, unless flashinfer-jit-cache is installed.
Correction: its log-sum-exp is to the base 2, ``[tokens, heads]``.
Each thread has a workspace of 128 MiB for each stream that it calls from: a plan lives in it until its kernel has run.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache
from importlib import import_module
from typing import Any

from attn_core.backends.shared import rewrites
from attn_core.backends.shared.aten_masks import limits
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.pages.pools import pools
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, PagedInputs
from attn_core.errors import ShapeError
from attn_core.paged.row_tables import PagedRows, rows_of_table
from attn_core.paged.tables import check_values

FRAMEWORK = "torch"
REQUIRES = "flashinfer-python>=0.6"

NAME = "the FlashInfer kernel"
FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    softcap=True,
    sinks=True,
    packed=True,
    lse=True,
    paged=True,
    unproven=True,
)
BACKWARD = None
PAGES_ALONE = True
WRITES_INTO = True

HEAD_DIMS = (64, 128, 256)
WORKSPACE = 128 * 2**20
"""Bytes of the workspace; the size that FlashInfer recommends."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses calls without pages, unsupported widths, windows with a right side, old GPUs, and too large grids."""
    reasons = list(limits(spec, device, NAME))
    if spec.paged is None:
        reasons.append(f"keys and values not in pages: {NAME} reads only pages")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim={spec.head_dim}: {NAME} takes {', '.join(map(str, HEAD_DIMS))}")
    if spec.paged is not None and _sides(spec)[1] not in (None, 0):
        reasons.append(f"window={spec.window}: {NAME} has windows without a right side only")
    return tuple(reasons)


def probe() -> str:
    """Imports FlashInfer's wrapper and returns FlashInfer's version."""
    package = import_module("flashinfer")
    # Fails here, with a reason, if this version has no such wrapper.
    _ = package.BatchPrefillWithPagedKVCacheWrapper
    return str(package.__version__)


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the arguments of the wrapper's ``plan``, except tables and dtypes."""
    (left, right), paged = _sides(spec), spec.paged
    assert paged is not None
    return {
        "num_qo_heads": spec.num_heads,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim_qk": spec.head_dim,
        "page_size": paged.page_size,
        "causal": right == 0,
        "sm_scale": spec.scale,
        "window_left": -1 if left is None else left,
        "logits_soft_cap": spec.softcap or 0.0,
    }


def _sides(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """Returns how far a query sees to the left and right; None if that hides nothing of any sequence."""
    capacity = spec.paged.capacity if spec.paged else spec.kv_len
    left, right = (None if side is None or side >= capacity else side for side in band(spec)[:2])
    return left, right


@without_gradient
def forward(spec: AttentionSpec, inputs: PagedInputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``. Waits for the GPU.

    Raises:
        RuntimeError: while a CUDA graph is captured.
        SpecError: for tables that point outside the pool, and for invalid offsets.
        ShapeError: for pools that the kernel could only read as copies.
    """
    import torch

    if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "backend='flashinfer' while a CUDA graph is captured: it reads the tables on the host, which a graph "
            "cannot capture; request 'triton_splitkv' or another backend that reads them on the GPU"
        )
    return rewrites.forward(KERNEL, spec, inputs, into)  # type: ignore[arg-type]


def _forward(spec: AttentionSpec, inputs: Any, into: Any) -> tuple[Any, Any]:
    k, v = pools(inputs)
    if k.stride() != v.stride():
        raise ShapeError(
            f"v_pages: expected the strides of k_pages, {list(k.stride())}, because {NAME} uses them for both, "
            f"got {list(v.stride())}; allocate both pools alike, because a pool is never copied"
        )
    offsets, rows = _checked_on_host(spec, inputs)
    wrapper = _wrapper(inputs.q.device)
    wrapper.plan(
        qo_indptr=offsets,
        **_plan_arguments(rows),
        **lower(spec),
        q_data_type=inputs.q.dtype,
        kv_data_type=k.dtype,
    )
    place = None if into is None or not into[0].is_contiguous() else into[0]
    out, lse = wrapper.run(rewrites.readable(inputs.q), (k, v), out=place, return_lse=True)
    return out, (lse * math.log(2)).T  # [tokens, heads] -> [heads, tokens]


def _checked_on_host(spec: AttentionSpec, inputs: Any) -> tuple[Any, PagedRows]:
    """Returns the queries' int32 offsets as a CPU tensor, and the table's rows, both checked by value."""
    import torch

    assert spec.paged is not None
    lengths = inputs.seq_lens.cpu().numpy()
    table, cu = inputs.block_table.cpu().numpy(), inputs.cu_seqlens_q
    offsets = torch.arange(spec.q_len + 1, dtype=torch.int32, device="cpu") if cu is None else cu.cpu()
    check_values(spec.paged, spec.q_len, spec.max_len_q, table, lengths, offsets.numpy())
    return offsets, rows_of_table(table, lengths, spec.paged.page_size)


def _plan_arguments(rows: PagedRows) -> dict[str, Any]:
    import torch

    return {f"paged_kv_{name}": torch.from_numpy(array) for name, array in rows._asdict().items()}


_PER_THREAD = threading.local()
"""Each thread's wrappers, by device and stream: simultaneous calls must not plan in one workspace."""


def _wrapper(device: Any) -> Any:
    """Returns this thread's wrapper for a device and its current stream."""
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    wrappers: dict[Any, Any] = _PER_THREAD.__dict__.setdefault("wrappers", {})
    if (device, stream) not in wrappers:
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        # NHD: a page is [page_size, kv_heads, head_dim], as in our pools.
        wrappers[device, stream] = wrapper(workspace, kv_layout="NHD", backend="fa2")
    return wrappers[device, stream]


def backward(spec: AttentionSpec, inputs: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Raises: paged keys and values are for inference."""
    raise NotImplementedError(f"backward: {NAME} has no gradient")


KERNEL = rewrites.Kernel(_forward, backward, lambda dim: dim)
"""The kernel that ``shared.rewrites`` completes with sinks; no width is padded."""
