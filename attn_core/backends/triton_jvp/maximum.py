"""The launch of the kernel that computes the largest logit of each row: its claims, tiles, and program for XLA."""

from __future__ import annotations

from functools import cache
from typing import Any

from attn_core.backends.shared.programs import triton_programs
from attn_core.backends.shared.programs.kernel_programs import Buffer, KernelProgram
from attn_core.backends.shared.programs.triton import Description, launch, with_dense_channels
from attn_core.backends.triton_jvp.launches import Tiles, width
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

# By channels of the logits, as in ``launches``; Tiles.values is unused. Compiled for compute capability 9.0, the first
# of each line spills no register in a call without tables, and up to 128 channels two programs share a multiprocessor.
HALF = {
    64: (Tiles(128, 64, 0, 8, 3, 44), Tiles(64, 64, 0, 4, 2, 26)),
    128: (Tiles(128, 64, 0, 8, 3, 84), Tiles(64, 64, 0, 4, 2, 50)),
    256: (Tiles(128, 64, 0, 8, 2, 128), Tiles(64, 64, 0, 4, 2, 96), Tiles(64, 32, 0, 4, 1, 48)),
}
SINGLE = {
    64: (Tiles(64, 64, 0, 4, 2, 80), Tiles(64, 32, 0, 4, 1, 48)),
    128: (Tiles(64, 32, 0, 4, 1, 96), Tiles(32, 32, 0, 4, 1, 36)),
    256: (Tiles(16, 32, 0, 4, 1, 64),),
}

_ABSENT = {"mask": "q", "bias": "q", "alibi_slopes": "q", "key_ranges": "q", "cu_seqlens_q": "q", "cu_seqlens_k": "q"}
"""The operands that a call may lack. The kernel gets another pointer then, and does not read it."""
READS = ("q", "k", *_ABSENT)
"""The operands in the order of the kernel's arguments."""


def tiles(spec: AttentionSpec, shared_memory: int) -> Tiles:
    """Returns the tiles of a call on a GPU whose programs have so many bytes of shared memory."""
    table = SINGLE if spec.dtype == "float32" else HALF
    channels = next(limit for limit in table if width(spec.head_dim) <= limit)
    longest = spec.q_len if spec.max_len_q is None else spec.max_len_q
    rows = 64 if longest <= 64 else 128
    fitting = [each for each in table[channels] if each.shared * 1024 <= shared_memory]
    return next((each for each in fitting if each.queries <= rows), table[channels][-1])


def describe(
    spec: AttentionSpec, strides: dict[str, tuple[int, ...]], settings: dict[str, Any], tile: Tiles
) -> Description:
    """Returns the grid, the numbers and the constants of the kernel.

    Args:
        strides: of q, k and each table, in elements.
        settings: the arguments from ``lower``.
    """
    longest = spec.q_len if spec.max_len_q is None else spec.max_len_q
    blocks = -(-(longest or 0) // tile.queries)
    steps = [(0, *strides[name][:2]) if spec.packed else strides[name][:3] for name in "qk"]
    shapes = {"mask": spec.mask_shape, "bias": spec.bias_shape, "alibi_slopes": spec.alibi_shape}
    axes = {"mask": 4, "bias": 4, "alibi_slopes": 2, "key_ranges": 2}
    for name, shape in (shapes | {"key_ranges": spec.key_ranges_shape}).items():
        # An axis of size 1 broadcasts, and so does one that is missing in front.
        present = [0 if size == 1 else step for size, step in zip(shape or (), strides.get(name, ()), strict=True)]
        present = present[: axes[name]]
        steps.append((*(0,) * (axes[name] - len(present)), *present))
    numbers = (
        *(settings["scale"], settings["softcap"]),
        *(spec.q_len, spec.kv_len, blocks, settings["left"], settings["right"]),
        *(step for each in steps for step in each),
    )
    constants = {
        **{"HEADS": spec.num_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim},
        **{"HEAD_WIDTH": width(spec.head_dim), "PRECISION": "tf32x3" if spec.dtype == "float32" else "ieee"},
        **{name: settings[name] for name in ("PACKED", "BOTTOM_RIGHT", "LEFT", "SOFTCAP")},
        **{"MASK": spec.mask_shape is not None, "BIAS": spec.bias_shape is not None},
        **{"SLOPES": spec.alibi_shape is not None, "RANGES": (spec.key_ranges_shape or (0,) * 4)[3]},
        **{"QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages},
    }
    rows = spec.documents if spec.packed else spec.batch
    return ((rows or 0) * spec.num_heads * blocks, 1, 1), numbers, constants


@cache
def _kernel() -> Any:
    from attn_core.backends.triton_jvp import kernels

    return kernels.row_maximum


def run(spec: AttentionSpec, inputs: Inputs, settings: dict[str, Any], tile: Tiles) -> Any:
    """Returns the row maxima of a call on torch tensors."""
    import torch

    q, device = with_dense_channels(inputs.q), inputs.q.get_device()
    tensors = {"q": q, "k": with_dense_channels(inputs.k)}
    tensors |= {name: getattr(inputs, name) for name in ("bias", "alibi_slopes") if getattr(inputs, name) is not None}
    if inputs.mask is not None:
        tensors["mask"] = inputs.mask.view(torch.uint8)  # Triton reads no bits
    for name in ("key_ranges", "cu_seqlens_q", "cu_seqlens_k"):
        if getattr(inputs, name) is not None:
            tensors[name] = getattr(inputs, name).contiguous()
    result = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    if spec.packed:  # a document that is longer than the caller said has rows that no program writes
        result.fill_(-torch.inf)
    operands = (*(tensors.get(name, q) for name in READS), result)
    strides = {name: tuple(each.stride()) for name, each in tensors.items()}
    kinds = tuple(each.dtype for each in operands)
    # The current device, because Triton launches there. Tests run the kernel on the CPU, in Triton's interpreter.
    current = torch.cuda.current_device() if device >= 0 else device
    key = ("row_maximum", spec, tuple(strides.items()), kinds, current)
    launch(_kernel(), key, operands, lambda: describe(spec, strides, settings, tile))
    return result


def program(spec: AttentionSpec, settings: dict[str, Any], tile: Tiles) -> KernelProgram:
    """Returns the call as one kernel on XLA's buffers, which are contiguous; slopes are float32."""
    import torch

    rows, offsets = (() if spec.packed else (spec.batch,)), (spec.documents or 0) + 1 if spec.packed else None
    shapes: dict[str, tuple[Any, str]] = {
        "q": ((*rows, spec.q_len, spec.num_heads, spec.head_dim), spec.dtype),
        "k": ((*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim), spec.dtype),
        "mask": (spec.mask_shape, "bool"),
        "bias": (spec.bias_shape, spec.bias_dtype or spec.dtype),
        "alibi_slopes": (spec.alibi_shape, "float32"),
        "key_ranges": (spec.key_ranges_shape, "int32"),
        "cu_seqlens_q": (offsets and (offsets,), "int32"),
        "cu_seqlens_k": (offsets and (offsets,), "int32"),
    }
    buffers = {name: Buffer(name, tuple(shape), kind) for name, (shape, kind) in shapes.items() if shape is not None}
    buffers["row_maximum"] = Buffer("row_maximum", spec.lse_shape, "float32")
    place = {name: number for number, name in enumerate(buffers)}
    read = [name if name in buffers else "q" for name in READS]
    kinds = tuple(_kind(torch, buffers[name].dtype) for name in (*read, "row_maximum"))
    strides = {name: torch.empty(each.shape, device="meta").stride() for name, each in buffers.items()}
    how, at = describe(spec, strides, settings, tile), tuple(place[name] for name in read)
    step = triton_programs.step(_kernel(), at, (place["row_maximum"],), kinds, how)
    return KernelProgram(tuple(buffers.values()), (step,))


def _kind(torch: Any, dtype: str) -> Any:
    return torch.uint8 if dtype == "bool" else getattr(torch, dtype)  # Triton reads no bits
