"""Attention in plain XLA operations: every feature of the spec, on any device, without torch.

Small calls compute one matrix of all their scores (``whole.py``), which XLA compiles quickly; few queries read their
keys in place there. Larger calls run the blocked maths of ``attention.py``. ``lower`` returns which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from attn_core.backends.contract import Backend, ForwardModePass, RowMaximumPass, Timing
from attn_core.backends.jax_xla import attention, fixed_tiles, paged, tiles, whole
from attn_core.backends.jax_xla.tiles import BlockSizes
from attn_core.backends.shared import kernel_limits
from attn_core.backends.shared.in_jax import usual_promotion
from attn_core.backends.support import ANY, Build, Support
from attn_core.call.functions import has_functions
from attn_core.call.masks import band
from attn_core.call.spec import BITS, DTYPES, AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    import jax

Result = TypeVar("Result")

FORWARD = Support(
    kernel="XLA's attention",
    devices=(ANY,),
    dtypes=DTYPES,
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    softcap=True,
    mask=True,
    key_ranges=True,
    mask_mod=True,
    score_mod=True,
    bias=True,
    bias_gradient=True,
    aux_gradients=True,
    alibi=True,
    sinks=True,
    packed=True,
    dropout=True,
    portable_dropout=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
    paged=True,
    paged_alibi=True,
    paged_starts=True,
    page_dtypes=tuple(BITS),
    symbolic=True,
    invariant=("batch", "prefix"),
)
BACKWARD = replace(FORWARD, paged=False, paged_alibi=False, paged_starts=False, page_dtypes=())
FORWARD_MODE = replace(BACKWARD, invariant=())

MAX_SCORES = 2**22
"""The most scores (batch * heads * q_len * kv_len) of a small call if blocks of them may be hidden."""

NOTHING_TO_SKIP = {"forward": 15 / 8, "training": 4}
"""A small call has this many times MAX_SCORES if the blocked maths would compute every block."""

LARGEST_BLOCKS = {"cpu": BlockSizes(256, 256), ANY: BlockSizes(1024, 1024)}
"""Largest blocks of the blocked maths: sized for a CPU's cache, and to keep a GPU busy (H200: 6 times 256 x 256). TPUs
and GPUs of other vendors were never measured; they have the blocks of a GPU."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses what the tiles of ``fixed_tiles`` lack; without ``invariant`` every combination of claims works.

    float64 needs jax_enable_x64, but without it no float64 array reaches a spec.
    """
    return kernel_limits.fixed_tiles(spec, device, FORWARD.kernel)


def probe() -> str:
    """Imports the functions that this backend needs and returns jax's version."""
    import jax
    from jax.custom_batching import custom_vmap  # noqa: F401

    return jax.__version__


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns ``path``, the forward's algorithm, and ``blocks``, the sizes for "blocked" on CPUs and elsewhere."""
    if spec.invariant is not None:
        return {"path": _path(spec), "query_tile": fixed_tiles.QUERY_TILE, "key_tile": fixed_tiles.KEY_TILE}
    blocks = {kind: tiles.block_sizes(spec, largest) for kind, largest in LARGEST_BLOCKS.items()}
    return {"path": _path(spec), "blocks": blocks}


def _path(spec: AttentionSpec) -> str:
    """Returns "fixed tiles", "few queries", "whole" or "blocked". The backward of few queries is that of "whole"."""
    if spec.invariant is not None:
        return "fixed tiles"
    if spec.symbolic:  # a symbolic size cannot be compared
        return "blocked"
    # The scores of a few queries take about as much memory as the keys.
    few = not (spec.packed or has_functions(spec)) and spec.q_len <= whole.FEW_QUERIES
    if few and not spec.needs_backward:  # else "whole", whose scores XLA computes once for both directions
        return "few queries"
    most: float = MAX_SCORES
    if not _may_skip_blocks(spec):
        most *= NOTHING_TO_SKIP["training" if spec.needs_backward else "forward"]
    return "whole" if few or spec.batch * spec.num_heads * spec.q_len * spec.kv_len <= most else "blocked"


def _may_skip_blocks(spec: AttentionSpec) -> bool:
    """Returns whether the blocked maths may find a block of scores that is hidden on a CPU."""
    edge = band(spec)
    if spec.key_ranges_shape is not None or spec.mask_mod is not None:
        return True
    if spec.packed or edge.hides_nothing(spec.q_len, spec.kv_len):
        return spec.packed
    return edge.left is not None or spec.kv_len > LARGEST_BLOCKS["cpu"].keys


def forward(spec: AttentionSpec, inputs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (out, lse) in ``spec.out_shape`` and ``spec.lse_shape``. Traceable."""
    with usual_promotion():
        if spec.paged is not None:
            if spec.invariant is not None:
                return paged.forward_in_tiles(spec, inputs)
            return paged.forward(spec, inputs, forward)
        if spec.invariant is not None:
            return fixed_tiles.forward(spec, inputs)
        if _path(spec) == "few queries":
            return whole.forward_of_few_queries(spec, inputs)
        out, lse, _ = _forward(spec, inputs)
        return out, lse


def forward_with_maximum(spec: AttentionSpec) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None:
    """See ``Backend.forward_with_maximum``. Few queries take another pass."""
    return None if _path(spec) in ("few queries", "fixed tiles") else _forward


def _forward(spec: AttentionSpec, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns out, lse and the row maxima of a call of more than a few queries."""
    with usual_promotion():
        if _path(spec) == "whole":
            return whole.forward(spec, inputs)
        return _where_it_runs(lower(spec)["blocks"], lambda blocks: attention.forward(spec, inputs, blocks))


def backward(
    spec: AttentionSpec, inputs: Inputs, out: jax.Array, lse: jax.Array, dout: jax.Array, dlse: jax.Array | None
) -> Gradients:
    """Returns the gradients from the saved out and lse. Traceable."""

    def run(blocks: BlockSizes) -> Gradients:
        return attention.backward(spec, inputs, blocks, out, lse, dout, dlse)

    with usual_promotion():
        if spec.invariant is not None:
            return fixed_tiles.backward(spec, inputs, out, lse, dout, dlse)
        if _path(spec) != "blocked":
            return whole.backward(spec, inputs, out, lse, dout, dlse)
        return _where_it_runs(lower(spec)["blocks"], run)


def row_maximum(spec: AttentionSpec, inputs: Inputs) -> jax.Array:
    """See ``RowMaximumPass``. Traceable."""
    with usual_promotion():
        return _where_it_runs(lower(spec)["blocks"], lambda blocks: attention.row_maximum(spec, inputs, blocks))


def _where_it_runs(blocks: dict[str, BlockSizes], run: Callable[[BlockSizes], Result]) -> Result:
    """Runs with the block sizes of the device that the program is compiled for, which only the compiler knows."""
    from jax.lax import platform_dependent

    if blocks["cpu"] == blocks[ANY]:
        return run(blocks["cpu"])
    return platform_dependent(cpu=lambda: run(blocks["cpu"]), default=lambda: run(blocks[ANY]))


BACKEND = Backend(
    name="jax_xla",
    framework="jax",
    requires="jax>=0.10",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    forward_mode=ForwardModePass(claims=FORWARD_MODE, jvp=None, preference={"cpu": 10, "cuda": 20, ANY: 10}),
    row_maximum=RowMaximumPass(
        claims=FORWARD_MODE,
        function=row_maximum,
        with_forward=forward_with_maximum,
        preference={"cpu": 10, "cuda": 20, ANY: 10},
    ),
    # Plain operations run what no kernel does; on a GPU they need no bridge, so they come before torch's.
    preference={"cpu": 30, "cuda": 100, ANY: 10},
    paged_preference={"cuda": 50},
    also_called={"xla": 10},
    timing=Timing(in_xla=(25.0, 45.0)),
)
