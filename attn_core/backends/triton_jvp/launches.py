"""The launches of the kernels: their tiles, grids, numbers and constants; and a program for XLA."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.shared import kernel_programs
from attn_core.backends.shared.first_calls import shapes
from attn_core.backends.shared.kernel_programs import Buffer, KernelProgram
from attn_core.backends.shared.readable import dense_channels, readable
from attn_core.backends.shared.rewrites import power_of_two
from attn_core.backends.shared.triton import Description, Numbers, launch
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Inputs

if TYPE_CHECKING:
    from torch import Tensor
    from triton.runtime import KernelInterface


class Tiles(NamedTuple):
    """The tiles of a launch: queries, keys and channels of the values; warps, and stages of the pipeline.

    shared: the KiB of shared memory with all tangents, as compiled for compute capability 9.0.
    """

    queries: int
    keys: int
    values: int
    warps: int
    stages: int
    shared: int


# By channels of the logits. Compiled for compute capability 9.0, the first of each line spills no register in bfloat16.
# float32 has less to choose from: a product of three TF32 products has its operands in shared memory twice.
HALF = {
    64: (Tiles(64, 64, 64, 4, 2, 80), Tiles(64, 32, 64, 4, 2, 48)),
    128: (Tiles(128, 64, 128, 8, 2, 192), Tiles(64, 32, 128, 4, 2, 96)),
    256: (
        Tiles(128, 32, 128, 8, 2, 224),
        Tiles(64, 32, 128, 4, 2, 160),
        Tiles(64, 32, 128, 4, 1, 96),
        Tiles(32, 32, 128, 4, 1, 48),
    ),
}
SINGLE = {
    64: (Tiles(64, 32, 64, 4, 1, 96), Tiles(32, 32, 64, 4, 1, 40)),
    128: (Tiles(64, 32, 64, 4, 1, 192), Tiles(32, 32, 128, 4, 1, 80)),
    256: (Tiles(16, 32, 128, 4, 1, 96),),
}
SMALLEST = SINGLE[256][0]
"""The tiles with the most programs."""


Table = dict[int, tuple[Tiles, ...]]
"""Tiles by channels of the logits."""


def tiles(spec: AttentionSpec, shared_memory: int) -> Tiles:
    """Returns the tiles of a call on a GPU whose programs have so many bytes of shared memory."""
    channels = max(power_of_two(spec.head_dim), min(power_of_two(spec.value_dim), 128))
    return fitting_tiles(spec, HALF, SINGLE, channels, shared_memory)


def fitting_tiles(spec: AttentionSpec, half: Table, single: Table, channels: int, shared_memory: int) -> Tiles:
    """Returns the first tiles that fit into shared memory and are no taller than the rows, else the smallest.

    Args:
        half, single: the tiles for half precision, and for float32. channels: of the logits.
    """
    table = single if spec.dtype == "float32" else half
    channels = next(limit for limit in table if channels <= limit)
    queries = spec.q_len if spec.max_len_q is None else spec.max_len_q
    rows = 64 if queries <= 64 else 128
    fitting = [each for each in table[channels] if each.shared * 1024 <= shared_memory]
    return next((each for each in fitting if each.queries <= rows), table[channels][-1])


def programs(spec: AttentionSpec, tile: Tiles) -> int:
    """Returns the number of programs of a launch."""
    rows, longest = (spec.documents, spec.max_len_q) if spec.packed else (spec.batch, spec.q_len)
    parts = -(-spec.value_dim // min(tile.values, power_of_two(spec.value_dim)))
    return (rows or 0) * spec.num_heads * parts * -(-(longest or 0) // tile.queries)


def attend(
    spec: AttentionSpec,
    strides: tuple[tuple[int, ...], ...],
    moves: tuple[bool, ...],
    primals: bool,
    settings: Numbers,
    tile: Tiles,
) -> Description:
    """Returns the grid, the numbers and the constants of ``kernels.attend``.

    Args:
        strides: of q, k, v, dq, dk and dv, or of what stands in for an absent tangent.
        moves: which of dq, dk, dv and dsinks exist.
        settings: the arguments from ``lower``.
    """
    longest = spec.q_len if spec.max_len_q is None else spec.max_len_q
    # Packed tensors have no batch axis.
    steps = [step for each in strides for step in ((0, *each[:2]) if spec.packed else each[:3])]
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        spec.kv_len,
        -(-longest // tile.queries),
        settings["left"],
        settings["right"],
        *steps,
    )
    flags = ("PACKED", "BOTTOM_RIGHT", "LEFT", "SOFTCAP", "SINKS")
    constants = {
        **{"HEADS": spec.num_heads, "GROUP": spec.group_size},
        **{"HEAD_DIM": spec.head_dim, "VALUE_DIM": spec.value_dim},
        **{"HEAD_WIDTH": power_of_two(spec.head_dim), "VALUE_WIDTH": min(tile.values, power_of_two(spec.value_dim))},
        **{name: settings[name] for name in flags},
        **dict(zip(("DQ", "DK", "DV", "DSINKS"), moves, strict=True)),
        **{"PRIMALS": primals, "PRECISION": "tf32x3" if spec.dtype == "float32" else "ieee"},
        **{"QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages},
    }
    return (programs(spec, tile), 1, 1), numbers, constants


# The kernel that computes the largest logit of each row.

# By channels of the logits, as above; Tiles.values is unused. Compiled for compute capability 9.0, the first
# of each line spills no register in a call without tables, and up to 128 channels two programs share a multiprocessor.
HALF_OF_MAXIMUM = {
    64: (Tiles(128, 64, 0, 8, 3, 44), Tiles(64, 64, 0, 4, 2, 26)),
    128: (Tiles(128, 64, 0, 8, 3, 84), Tiles(64, 64, 0, 4, 2, 50)),
    256: (Tiles(128, 64, 0, 8, 2, 128), Tiles(64, 64, 0, 4, 2, 96), Tiles(64, 32, 0, 4, 1, 48)),
}
SINGLE_OF_MAXIMUM = {
    64: (Tiles(64, 64, 0, 4, 2, 80), Tiles(64, 32, 0, 4, 1, 48)),
    128: (Tiles(64, 32, 0, 4, 1, 96), Tiles(32, 32, 0, 4, 1, 36)),
    256: (Tiles(16, 32, 0, 4, 1, 64),),
}

_ABSENT = {"mask": "q", "bias": "q", "alibi_slopes": "q", "key_ranges": "q", "cu_seqlens_q": "q", "cu_seqlens_k": "q"}
"""The operands that a call may lack. The kernel gets another pointer then, and does not read it."""
MAXIMUM_READS = ("q", "k", *_ABSENT)
"""The operands in the order of the kernel's arguments."""


def tiles_of_maximum(spec: AttentionSpec, shared_memory: int) -> Tiles:
    """Returns the tiles of a call on a GPU whose programs have so many bytes of shared memory."""
    return fitting_tiles(spec, HALF_OF_MAXIMUM, SINGLE_OF_MAXIMUM, power_of_two(spec.head_dim), shared_memory)


def maximum(spec: AttentionSpec, strides: dict[str, tuple[int, ...]], settings: Numbers, tile: Tiles) -> Description:
    """Returns the grid, the numbers and the constants of the kernel.

    Args:
        strides: of q, k and each table, in elements.
        settings: the arguments from ``lower``.
    """
    longest = spec.q_len if spec.max_len_q is None else spec.max_len_q
    blocks = -(-(longest or 0) // tile.queries)
    steps = [(0, *strides[name][:2]) if spec.packed else strides[name][:3] for name in "qk"]
    tables = {"mask": spec.mask_shape, "bias": spec.bias_shape, "alibi_slopes": spec.alibi_shape}
    axes = {"mask": 4, "bias": 4, "alibi_slopes": 2, "key_ranges": 2}
    for name, shape in (tables | {"key_ranges": spec.key_ranges_shape}).items():
        # An axis of size 1 broadcasts, and so does one that is missing in front.
        present = [0 if size == 1 else step for size, step in zip(shape or (), strides.get(name, ()), strict=True)]
        present = present[: axes[name]]
        steps.append((*(0,) * (axes[name] - len(present)), *present))
    all_steps = [step for each in steps for step in each]
    numbers = (
        settings["scale"],
        settings["softcap"],
        spec.q_len,
        spec.kv_len,
        blocks,
        settings["left"],
        settings["right"],
        *all_steps,
    )
    constants = {
        **{"HEADS": spec.num_heads, "GROUP": spec.group_size, "HEAD_DIM": spec.head_dim},
        **{"HEAD_WIDTH": power_of_two(spec.head_dim), "PRECISION": "tf32x3" if spec.dtype == "float32" else "ieee"},
        **{name: settings[name] for name in ("PACKED", "BOTTOM_RIGHT", "LEFT", "SOFTCAP")},
        **{"MASK": spec.mask_shape is not None, "BIAS": spec.bias_shape is not None},
        **{"SLOPES": spec.alibi_shape is not None, "RANGES": (spec.key_ranges_shape or (0,) * 4)[3]},
        **{"QUERIES": tile.queries, "KEYS": tile.keys, "num_warps": tile.warps, "num_stages": tile.stages},
    }
    rows = spec.documents if spec.packed else spec.batch
    return ((rows or 0) * spec.num_heads * blocks, 1, 1), numbers, constants


@cache
def _maximum_kernel() -> KernelInterface:
    from attn_core.backends.triton_jvp import kernels

    return kernels.row_maximum


def run_maximum(spec: AttentionSpec, inputs: Inputs, settings: Numbers, tile: Tiles) -> Tensor:
    """Returns the row maxima of a call on torch tensors."""
    import torch

    q = readable(inputs.q, dense_channels)
    tensors = {"q": q, "k": readable(inputs.k, dense_channels)}
    tensors |= {name: getattr(inputs, name) for name in ("bias", "alibi_slopes") if getattr(inputs, name) is not None}
    if inputs.mask is not None:
        tensors["mask"] = inputs.mask.view(torch.uint8)  # Triton reads no bits
    for name in ("key_ranges", "cu_seqlens_q", "cu_seqlens_k"):
        if getattr(inputs, name) is not None:
            tensors[name] = getattr(inputs, name).contiguous()
    result = torch.empty(spec.lse_shape, dtype=torch.float32, device=q.device)
    if spec.packed:  # a document that is longer than the caller said has rows that no program writes
        result.fill_(-torch.inf)
    operands = (*(tensors.get(name, q) for name in MAXIMUM_READS), result)
    strides = {name: tuple(each.stride()) for name, each in tensors.items()}
    kinds = tuple(each.dtype for each in operands)
    key = ("row_maximum", spec, tuple(strides.items()), kinds)
    launch(_maximum_kernel(), key, operands, lambda: maximum(spec, strides, settings, tile))
    return result


def maximum_program(spec: AttentionSpec, settings: Numbers, tile: Tiles) -> KernelProgram:
    """Returns the call as one kernel on XLA's buffers, which are contiguous; slopes are float32."""
    import torch

    (q, k, _), offsets = shapes(spec), (spec.documents or 0) + 1 if spec.packed else None
    operands: dict[str, tuple[Any, str]] = {
        "q": (q, spec.dtype),
        "k": (k, spec.dtype),
        "mask": (spec.mask_shape, "bool"),
        "bias": (spec.bias_shape, spec.bias_dtype or spec.dtype),
        "alibi_slopes": (spec.alibi_shape, "float32"),
        "key_ranges": (spec.key_ranges_shape, "int32"),
        "cu_seqlens_q": (offsets and (offsets,), "int32"),
        "cu_seqlens_k": (offsets and (offsets,), "int32"),
    }
    buffers = {name: Buffer(name, tuple(shape), kind) for name, (shape, kind) in operands.items() if shape is not None}
    strides = {name: torch.empty(each.shape, device="meta").stride() for name, each in buffers.items()}
    buffers["row_maximum"] = Buffer("row_maximum", spec.lse_shape, "float32")
    built = kernel_programs.Program(buffers)
    built.add(_maximum_kernel(), MAXIMUM_READS, ("row_maximum",), lambda _: maximum(spec, strides, settings, tile))
    return built.built()
