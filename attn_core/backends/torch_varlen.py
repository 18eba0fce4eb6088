"""torch's own flash attention on paged keys and values: the kernel of ``torch.nn.attention.varlen.varlen_attn``.

Limits: paged calls only, forward only; fp16 and bf16, head_dim a multiple of 8 up to 256 and value_dim the same (a
padded pool would be a copy of it), pages of multiples of 256 tokens, bottom-right alignment; windows, no softcap.
``shared.rewrites`` adds sinks.
Upstream: ``aten::_flash_attention_forward`` with a ``block_table``, torch 2.13 and later; FlashAttention 2 inside.
Unproven: this project never ran it on a GPU, so it runs only by name. The tests cover everything around the kernel,
with a stand-in of the op's own schema.

We call the raw op, because ``varlen_attn`` wraps it in a custom op (costly in eager calls) and returns the same.
Corrections: keys are never split (``num_splits=1``), because splits are wrong for packed queries (pytorch issue 194167:
only the rows of the first sequence are written); ``max_q`` is never 1, because that path for grouped heads does not
write to ``out``; the log-sum-exp of rows that see no key (+inf in the op). Equal calls give equal bits.
While another implementation is active (``activate_flash_attention_impl``), calls are refused: it replaces the op.
"""

from __future__ import annotations

import math
from functools import cache, lru_cache, partial
from typing import Any

from attn_core.backends.shared import rewrites
from attn_core.backends.shared.aten_masks import limits
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.shared.pages.flash_paged import FLASH2_PAGES
from attn_core.backends.shared.pages.pools import pools, query_offsets, safe_tables
from attn_core.backends.support import Build, Support
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, PagedInputs

FRAMEWORK = "torch"
REQUIRES = "torch>=2.13 with CUDA"

NAME = "the aten CUDA flash kernel on pages"
FORWARD = Support(
    kernel=NAME,
    devices=("cuda",),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    head_dim_multiple=8,
    grouped_heads=True,
    alignments=("bottom_right",),
    causal=True,
    window=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    paged=True,
    unproven=True,
)
BACKWARD = None
PAGES_ALONE = True
WRITES_INTO = True

NEEDED = ("seqused_k", "block_table", "num_splits")
"""Arguments that the op lacks in some versions of torch."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses calls without pages, unsupported page sizes, old GPUs, and calls beyond the launch grid."""
    reasons = list(limits(spec, device, NAME))
    if spec.paged is None:
        reasons.append(f"keys and values not in pages: {NAME} reads only pages")
    elif spec.paged.page_size % FLASH2_PAGES:
        reasons.append(f"page_size={spec.paged.page_size}: {NAME} takes pages of multiples of {FLASH2_PAGES} tokens")
    return tuple(reasons)


def probe() -> str:
    """Checks that the op takes a block table and has a kernel, and returns torch's version."""
    import torch

    for op in _kernels():
        has = {argument.name for argument in op._schema.arguments}
        if missing := [name for name in NEEDED if name not in has]:
            raise ImportError(f"torch {torch.__version__}: {op._schema.name} takes no {', '.join(missing)}")
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError(f"torch {torch.__version__} was built without flash attention")
    return torch.__version__


@cache
def _kernels() -> tuple[Any, Any]:
    """Returns the op and its in-place form. Raises ImportError if this torch lacks one."""
    import torch

    names = ("_flash_attention_forward", "_flash_attention_forward_no_dropout_inplace")
    ops = tuple(getattr(torch.ops.aten, name, None) for name in names)
    if None in ops:
        raise ImportError(f"torch {torch.__version__} has no aten::{names[ops.index(None)]}")
    return ops[0].default, ops[1].default  # type: ignore[union-attr]


@lru_cache(maxsize=4096)
def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the op's arguments.

    The kernel treats a side of ``max_k`` or more as open, and replaces an open side next to a bounded one by ``max_k``.
    So ``max_k`` must be larger than any distance. Both lengths are upper bounds.
    """
    edge, max_q = band(spec), max(2, spec.max_len_q or 0)
    max_k = max(spec.max_len_k or spec.kv_len, max_q - 1)
    left, right = (None if side is None or side >= max_k else side for side in edge[:2])
    return {
        "max_q": max_q,
        "max_k": max_k,
        "is_causal": right == 0,
        "scale": spec.scale,
        "window_size_left": left,
        "window_size_right": None if left is None and right == 0 else right,
        "num_splits": 1,
    }


@without_gradient
def forward(spec: AttentionSpec, inputs: PagedInputs, into: Any = None) -> tuple[Any, Any]:
    """See ``Backend.forward``.

    Raises:
        RuntimeError: if another implementation has replaced the op (``activate_flash_attention_impl``).
    """
    import torch

    active = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
    if active is not None:
        raise RuntimeError(
            f"torch_varlen: the flash attention implementation {active!r} is active in its place; call "
            "torch.nn.attention.restore_flash_attention_impl(), or request another backend"
        )
    return rewrites.forward(KERNEL, spec, inputs, into)  # type: ignore[arg-type]


def _forward(spec: AttentionSpec, inputs: Any, into: Any) -> tuple[Any, Any]:
    assert spec.paged is not None
    (k, v), (table, lengths) = pools(inputs), safe_tables(spec.paged, inputs)
    # A copy, because ``lower`` caches its result and the pops below change it.
    settings, queries = dict(lower(spec)), query_offsets(spec, inputs)
    place = None if into is None else rewrites.writable(into[0])
    op = _kernels()[0] if place is None else partial(_kernels()[1], place)
    results = op(  # the op takes the lengths from seqused_k; it requires key offsets but does not read them
        *(rewrites.readable(inputs.q), k, v, queries, queries, settings.pop("max_q"), settings.pop("max_k")),
        *(0.0, settings.pop("is_causal"), False),
        seqused_k=lengths,
        block_table=table.contiguous(),
        **settings,
    )
    out, lse = results[:2] if place is None else (place, results)
    return out, lse.nan_to_num_(nan=math.nan, posinf=-math.inf, neginf=-math.inf)


def backward(spec: AttentionSpec, inputs: Any, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """Raises: paged keys and values are for inference."""
    raise NotImplementedError(f"backward: {NAME} has no gradient")


KERNEL = rewrites.Kernel(_forward, backward, lambda dim: dim)
"""The kernel that ``shared.rewrites`` completes with sinks; no width is padded."""
