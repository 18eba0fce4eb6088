"""FlashAttention-4: the CuTe DSL kernels of flash-attn-4. The first call of a kind compiles its kernel in about 2 s.

Tested on sm90 (Hopper). On sm100 (Blackwell) the claims follow upstream's sources and tests, up to head_dim 128; we
have not run it there. Limits: no mask, bias, ALiBi or dropout. ``shared.rewrites`` adds sinks and head widths; the
gradient of the log-sum-exp is the kernel's own. Softcap runs through ``functions.py``, not ``softcap=``. Key ranges,
mask functions and score functions: ``masked.py``.

Conventions: causal and windows become distances from the bottom-right diagonal, None if a side hides nothing (-1 would
be the distance -1). For rows that see no key the kernel itself gives out 0, log-sum-exp -inf and gradients 0; its
``learnable_sink`` would make their log-sum-exp the sink, so we do not use it. On sm90 the backward writes dq in widths
of 16 and reads it in widths of 32 (or 64), so we pad to widths on which the two agree. Atomics sum dq, and dk and dv of
grouped heads, unless ``deterministic``. A NaN or Inf in a document can reach the document before it, because the last
tile of one holds the first tokens of the next, with weight 0.

No function here synchronises or records a graph: the kernels get detached tensors. The third and later calls of a spec
launch the compiled kernels without its Python, see ``replay``.
Upstream: flash-attn-4 >= 4.0.0b30; its sources were read at b30 and b36.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attn_core.backends.contract import Backend, Buffers, Program, Timing
from attn_core.backends.flash4 import disk_cache, functions, masked, own_kernels, replay, versions
from attn_core.backends.flash4.own_kernels import Lane, OwnKernel
from attn_core.backends.flash4.recording import Recorder
from attn_core.backends.flash4.replay import BACKWARD_HALF, BackwardOperands, ForwardOperands, window, writable
from attn_core.backends.shared import first_calls, kernel_limits, rewrites
from attn_core.backends.shared.kernel_programs import KernelProgram
from attn_core.backends.shared.pages import pools, query_offsets, safe_tables
from attn_core.backends.shared.readable import readable
from attn_core.backends.support import Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs, PagedInputs

if TYPE_CHECKING:
    import jax
    from torch import Tensor

FORWARD = Support(
    kernel="FlashAttention-4",
    devices=("sm90", "sm100"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
    invariant=("batch",),
)
BACKWARD = replace(FORWARD, paged=False)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses top-left bands of packed documents, calls beyond the grid, widths over 128 on sm100, some page sizes,
    and some calls with ranges or functions."""
    reasons = [*kernel_limits.grid(spec, FORWARD.kernel, spec.batch), *masked.refusals(spec, device, FORWARD.kernel)]
    if spec.paged is not None:
        reasons += _paged_refusals(spec, device)
    reasons += _invariant_refusals(spec, device)
    edge, widest = band(spec), max(spec.head_dim, spec.value_dim)
    if spec.packed and spec.alignment == "top_left" and (edge.left is not None or edge.right is not None):
        reasons.append(
            f"alignment=top_left with causal={spec.causal}, window={spec.window} and packed documents: "
            "FlashAttention-4 is bottom-right in each document"
        )
    if device == "sm100" and 128 < widest <= 256:
        reasons.append(f"head_dim={widest}: FlashAttention-4 on sm100 is not claimed above 128")
    return tuple(reasons)


# Keys and values in pages. The Hopper kernel reads pages in one of two ways. If a page is exactly one tile of keys, it
# loads the whole tile, also the rows after the end of the sequence: they are masked, but 0 * NaN is NaN. It reads any
# other page row by row, with zeros after the end (``cp.async`` with a size of 0, seen in the compiled code). We allow
# only the second way. The tiles are flash-attn-4's own choice; we pass them explicitly, so that a later version cannot
# choose a tile of a page's size. At head_dim 96 the kernel copies rows 32 at a time into tiles of 144, so half a copy
# lies after the tile; the widths below are those whose tiles are whole copies.
# Upstream: flash-attn-4 4.0.0b36, ``flash_attn.cute``: interface.py, flash_fwd_sm90.py, paged_kv.py.

PAGED_TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}
"""By head dimension, the number of queries and keys in a tile."""
WINDOWED_KEYS = {256: 64}
"""By head dimension, the number of keys in a tile of a call with a window, if it differs."""


def paged_tile(spec: AttentionSpec) -> tuple[int, int]:
    """Returns the (queries, keys) of a tile, for a call in pages that ``refuses`` allows."""
    (queries, keys), (left, right) = PAGED_TILES[spec.head_dim], window(spec)
    windowed = left is not None or right not in (None, 0)
    return queries, WINDOWED_KEYS.get(spec.head_dim, keys) if windowed else keys


def _paged_refusals(spec: AttentionSpec, device: str) -> Iterator[str]:
    """Yields refusals of key ranges, sm100, widths, and the page size per width that the kernel reads past the end."""
    page_size, name = spec.paged.page_size if spec.paged else 0, FORWARD.kernel
    if spec.key_ranges_shape is not None:
        yield f"key_ranges of shape {list(spec.key_ranges_shape)}: {name} does not take them with keys in pages"
    if device == "sm100":
        yield f"keys and values in pages of {page_size}: {name} is not claimed for them on sm100"
    if spec.head_dim not in PAGED_TILES or spec.value_dim != spec.head_dim:
        widths = ", ".join(map(str, PAGED_TILES))
        yield f"head_dim={spec.head_dim}/{spec.value_dim}: {name} reads pages at {widths}, keys and values alike"
    elif page_size == paged_tile(spec)[1]:
        why = "reads last pages to their end, so a NaN left there by another sequence would reach the output"
        yield f"page_size={page_size} with head_dim={spec.head_dim}: {name} {why}"


def _invariant_refusals(spec: AttentionSpec, device: str) -> list[str]:
    """Returns why a call with ``invariant`` has other bits in another batch, or is not known to have the same."""
    if spec.invariant is None:
        return []
    lacks = {
        "pages": spec.paged is not None,
        "key_ranges or functions": spec.key_ranges_shape is not None or has_functions(spec),
        f"device {device}": device != "sm90",  # the number of query stages depends on the longest document
    }
    return [f"invariant={spec.invariant!r} with {what}: {FORWARD.kernel} has none" for what in lacks if lacks[what]]


LARGEST_TILE = 256
"""The most query rows of a tile on sm90."""


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the kernel's keywords for "forward" and "backward", and the softcap, which needs score functions."""
    left, right = (None, None) if masked.by_blocks(spec) else window(spec)
    causal = left is None and right == 0
    longest = spec.max_len_q
    if spec.invariant is not None and longest is not None:
        longest = max(longest, LARGEST_TILE + 1)  # for fewer queries the kernel takes a tile of their size
    both = {
        "causal": causal,
        "window_size_left": left,
        "window_size_right": None if causal else right,
        "max_seqlen_q": longest,
        "max_seqlen_k": spec.max_len_k,
    }
    scale = spec.scale or 1.0  # never None in a spec
    # Parts of the keys, and sums in any order, would depend on the batch.
    whole = {} if spec.invariant is None else {"num_splits": 1}
    ordered = spec.deterministic or spec.invariant is not None
    tiled = {"window_size_left": spec.kv_len} if _needs_small_tiles(spec, left, right) else {}
    return {
        "forward": {"softmax_scale": scale / (spec.softcap or 1.0), **whole, **both},  # functions.py: why divided
        "backward": {"softmax_scale": scale, "deterministic": ordered, **both, **tiled},
        "softcap": spec.softcap,
    }


def _needs_small_tiles(spec: AttentionSpec, left: int | None, right: int | None) -> bool:
    """Returns whether the backward is faster with a window that hides nothing.

    Without causal and window the kernel takes tiles of 80 queries at these widths, and of 64 otherwise. A score
    function has too few registers in the large ones: on 2 H200s a softcapped row took 17.4 ms in shards that are whole
    rectangles, and 8.4 ms in shards whose parts are all causal.
    """
    plain = left is None and right is None and not masked.by_blocks(spec)
    return plain and spec.softcap is not None and 96 < max(spec.head_dim, spec.value_dim) <= 128


def program_refuses(spec: AttentionSpec, device: str) -> tuple[str, ...]:
    """Returns why ``program`` cannot express a supported call."""
    reasons = [] if device == "sm90" else [f"{device}: proven on sm90 only"]
    if spec.paged is not None:
        reasons.append("keys and values in pages: torch operations make tables safe before the kernel")
    return tuple(reasons)


@lru_cache(maxsize=4096)
def keywords(spec: AttentionSpec, half: str) -> dict[str, Any]:
    """Returns the keywords of a direction's kernel that are no tensors; half: "forward" or "backward"."""
    how = lower(spec)
    if spec.score_mod is not None:
        return {**how[half], **masked.score_keywords(spec, half)}
    if how["softcap"] is None:
        return how[half]
    score = functions.softcap_functions(how["softcap"])
    if half == "forward":
        return {**how[half], "score_mod": score.forward}
    return {**how[half], "score_mod": score.recompute, "score_mod_bwd": score.gradient}


def probe() -> str:
    """Imports the kernels and returns the version of flash-attn-4. Raises what ``versions.installed`` raises."""
    version = versions.installed()
    own_kernels.entry_points()
    return version


build = versions.build


def forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None = None) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``. Raises RuntimeError if a CUDA graph would capture the compilation."""
    launches = replay.launches_of(spec, "forward", inputs.q)
    if launches is not None:
        return replay.forward(launches, spec, inputs, into, _forward_by_entry_points)
    disk_cache.use()
    kernel = _kernel(spec, gradient=False)
    remedy = () if spec.paged is None else ("run the same call once before the capture",)
    return first_calls.run(
        "flash4",
        replay.compiled_key(spec, "forward", inputs.q),
        lambda: rewrites.forward(kernel, spec, inputs, into),
        lambda: f"the flash4 forward of ({spec})",
        *remedy,
    )


def backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    into: Gradients | None = None,
) -> Gradients:
    """See ``Backend.backward``, and ``forward`` for the error."""
    launches = replay.launches_of(spec, "backward", inputs.q) if dlse is None else None
    if launches is not None:
        return replay.backward(launches, spec, inputs, out, lse, dout, into, None, _backward_by_entry_points)
    disk_cache.use()
    kernel = _kernel(spec, gradient=True)
    return first_calls.run(
        "flash4",
        replay.compiled_key(spec, BACKWARD_HALF[dlse is None], inputs.q),
        lambda: rewrites.backward(kernel, spec, inputs, out, lse, dout, dlse, into),
        lambda: f"the flash4 backward of ({spec})",
    )


@lru_cache(maxsize=1024)
def program(spec: AttentionSpec, direction: str, with_dlse: bool = False, as_one: bool = False) -> KernelProgram:
    """Returns the kernels of a call that ``program_refuses`` allows, and the buffers between them.

    Operands are the fields of ``Inputs``; in a backward also out, lse, dout, and ``with_dlse`` dlse, 0 in rows that see
    no key; ``as_one`` q, k and v are the operand qkv. Those of ``program_operands`` replace the call's. Buffers have
    the kernel's widths: operands are padded with zeros, and results are cut. Compiles nothing. Raises Unrecordable if
    flash-attn-4 works differently from the version that we tested.
    """
    import torch

    from attn_core.backends.flash4 import recorded_program

    own = _kernel(spec, direction == "backward").runs(spec)

    def run(recorder: Recorder, inputs: Inputs, operands: Any, dsinks: Tensor | None) -> None:
        tables = masked.operands(own, inputs, direction, recorder)
        if direction == "forward":
            plain = torch.empty_like(operands.lse) if spec.sinks else operands.lse
            _forward_by_entry_points(own, operands._replace(lse=plain), tables, recorder)
            if spec.sinks:
                add_sinks(operands.out, plain, inputs.sinks, operands.lse, recorder)
        else:
            _backward_by_entry_points(own, operands, tables, recorder)
            if spec.sinks:
                out, lse, dout, dlse = operands.out, operands.lse, operands.dout, operands.dlse
                sink_gradient(inputs.sinks, out, lse, dout, dlse, dsinks, recorder)

    return recorded_program.program(replace(own, sinks=spec.sinks), direction, with_dlse, as_one, run)


def program_operands(spec: AttentionSpec, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns the operands of a program that are not the call's own arrays, by name."""
    sinks = {"sinks": arrays["sinks"].astype("float32")} if "sinks" in arrays else {}
    return masked.program_operands(spec, arrays) | sinks


def _forward(spec: AttentionSpec, inputs: Any, into: Buffers | None) -> tuple[Tensor, Tensor]:
    if spec.paged is not None:
        return _paged_forward(spec, inputs, into)
    launches = replay.launches_of(spec, "forward", inputs.q)
    return replay.forward(launches, spec, inputs, into, _forward_by_entry_points)


def _paged_forward(spec: AttentionSpec, inputs: PagedInputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
    """Returns (out, lse). The queries are always packed, even with one query per sequence."""
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    out, lse = (None, None) if into is None else map(writable, into)
    results = own_kernels.entry_points()[0](
        readable(inputs.q),
        k,
        v,
        cu_seqlens_q=query_offsets(spec, inputs),
        seqused_k=lengths,
        page_table=table,
        tile_mn=paged_tile(spec),
        return_lse=True,
        out=out,
        lse=lse,
        **keywords(spec, "forward"),
    )
    return results[0], results[1]


def _forward_by_entry_points(
    spec: AttentionSpec, operands: ForwardOperands, tables: tuple[Tensor, ...], lane: Lane
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) by flash-attn-4's Python. tables: ``masked.operands``; lane: see ``own_kernels``."""
    results = lane.entry_points()[0](
        **operands._asdict(),
        return_lse=True,
        **keywords(spec, "forward"),
        **masked.tensor_keywords(spec, tables, lane),
    )
    return results[0], results[1]


def _backward(
    spec: AttentionSpec,
    inputs: Inputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    into: Gradients | None,
    dlse: Tensor | None = None,
) -> Gradients:
    launches = replay.launches_of(spec, BACKWARD_HALF[dlse is None], inputs.q)
    return replay.backward(launches, spec, inputs, out, lse, dout, into, dlse, _backward_by_entry_points)


def _backward_by_entry_points(
    spec: AttentionSpec, operands: BackwardOperands, tables: tuple[Tensor, ...], lane: Lane
) -> Gradients:
    """Returns the gradients by flash-attn-4's Python, as ``_forward_by_entry_points``."""
    results = lane.entry_points()[1](
        **operands._asdict(), **keywords(spec, "backward"), **masked.tensor_keywords(spec, tables, lane)
    )
    return Gradients(*results[:3])


def _backward_width(dim: int) -> int:
    """Returns the head dimension at which the backward writes and reads dq in the same widths."""
    return -(-dim // 32) * 32 if dim <= 128 else -(-dim // 64) * 64


@lru_cache(maxsize=4096)
def _kernel(spec: AttentionSpec, gradient: bool) -> rewrites.Kernel:
    """Returns the kernel with the widths of its forward or of its backward (``gradient``).

    Values keep their own width if the kernel is tuned for that: head_dim in (128, 192] with value_dim up to 128, except
    in the backward of grouped heads.
    """
    apart = 128 < spec.head_dim <= 192 and spec.value_dim <= 128 and not (gradient and spec.group_size > 1)
    width = _backward_width if gradient else rewrites.whole_eights
    return rewrites.Kernel(
        _forward,
        _backward,
        width,
        same_width=not apart,
        lse_gradient=True,
        add_sinks=add_sinks,
        sink_gradient=sink_gradient,
    )


# A sink joins the softmax of a row by the row's log-sum-exp; ``shared.rewrites`` has the formulas. Our own kernels do
# it in one pass, with the same bits in torch and in programs of XLA, which torch's operations and XLA's would not have.

SINK_ROWS = 8
"""As in ``sinks_kernel``, which only a GPU's process can import."""


def add_sinks(
    out: Tensor, lse: Tensor, sinks: Tensor, into: Tensor | None = None, lane: Lane = own_kernels
) -> tuple[Tensor, Tensor]:
    """Adds the sinks to a forward's results: scales out in place, and returns (out, lse with sinks).

    Args:
        out: ``[..., tokens, heads, dim]``; lse: float32 ``[..., heads, tokens]``; sinks: ``[heads]``.
        into: a buffer for the log-sum-exp, or None.
        lane: launches the kernel, see ``own_kernels``.
    """
    import torch

    lse = lse.contiguous()
    new = torch.empty_like(lse) if into is None or not into.is_contiguous() else into
    if out.numel():
        lane.launch(_sink_kernel("AddSinks", out), (out, lse, _as_read(sinks, lse), new))
    return out, new


def sink_gradient(
    sinks: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    into: Tensor | None = None,
    lane: Lane = own_kernels,
) -> Tensor:
    """Returns the gradient of the sinks, ``[heads]`` in their dtype, from out and lse with sinks.

    Args:
        into: a float32 buffer for it, or None.
    """
    import torch

    result = torch.empty(sinks.shape, dtype=lse.dtype, device=sinks.device) if into is None else into
    if out.numel() == 0:
        return result.zero_().to(sinks.dtype)
    # The kernel reads four channels at once. A width between two multiples of eight gets channels of zeros.
    width = rewrites.whole_eights(out.shape[-1])
    out, dout = (replay.readable(rewrites.padded(tensor, width)) for tensor in (out, dout))
    *rows, heads, tokens = lse.shape
    shape = heads, rows[0] if rows else 1, -(-tokens // SINK_ROWS)
    sums = torch.empty(shape, dtype=lse.dtype, device=sinks.device)
    dlse = None if dlse is None else dlse.contiguous()
    lane.launch(
        _sink_kernel("SinkGradient", out, dlse is not None),
        (out, lse.contiguous(), dout, dlse, _as_read(sinks, lse), sums),
    )
    lane.launch(_sink_kernel("SumOfSinks", sums), (sums, result))
    return result if into is not None else result.to(sinks.dtype)


def _as_read(sinks: Tensor, lse: Tensor) -> Tensor:
    """Returns the sinks as the kernels read them: in the dtype of the log-sum-exp, float32, dense."""
    return sinks.detach().to(lse.dtype).contiguous()


def _sink_kernel(name: str, tensor: Tensor, *choices: bool) -> OwnKernel:
    """Returns a kernel for tensors of this dtype and as many axes."""
    return _named_sink_kernel(name, str(tensor.dtype), tensor.dim(), choices)


@lru_cache(maxsize=32)
def _named_sink_kernel(name: str, dtype: str, axes: int, choices: tuple[bool, ...]) -> OwnKernel:
    def code() -> Any:
        from attn_core.backends.flash4 import sinks_kernel

        return getattr(sinks_kernel, name)(*choices)

    return OwnKernel(f"attn_core.{name}({dtype}, {axes} axes, {choices})", code)


BACKEND = Backend(
    name="flash4",
    framework="torch",
    requires="flash-attn-4>=4.0.0b30",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=versions.build,
    program=Program(make=program, refuses=program_refuses, operands=program_operands),
    writes_into=("forward", "backward"),
    # It compiles on the first call, so it comes after kernels that need not.
    preference={"cuda": 20},
    paged_preference={"cuda": 20},
    also_called={
        "flash": 30,
        "fa": 30,
        "flash_attention": 40,
        "fa4": 10,
        "flash_4": 10,
        "flash_attention_4": 10,
        "flash_attn_4": 10,
    },
    # On an H200 parts of flash3 took 1.3 to 7 times as long, measured on 2026-11-26.
    timing=Timing(skips_blocks=True),
    reaches_next_document=True,
)
