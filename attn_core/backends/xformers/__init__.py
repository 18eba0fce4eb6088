"""xformers' memory-efficient attention: the flash, CUTLASS and Triton split-KV operators.

The first operator that supports a call runs, in the order of ``_order``: flash, CUTLASS, split-KV; but split-KV first
for few queries of very many keys without gradient. ``flash3`` is the kernel of xformers' operator for FlashAttention 3.
Limits: no softcap, ALiBi, dropout or bias gradient. Non-causal windows and documents: flash. (CUTLASS is undefined for
a document with fewer keys than queries, split-KV needs causal documents of equal length, and lengths are on the
device.) Masks and biases: CUTLASS, if q's dtype can represent the bias, and split-KV. Corrections: see
``operators.py``.
Upstream: xformers >= 0.0.29. Its flash operator is flash-attn's if that is installed, otherwise torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from attn_core.backends.contract import Backend, Buffers, Timing
from attn_core.backends.shared import kernel_limits, known_bad, rewrites
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.support import Build, Support
from attn_core.backends.xformers import operators
from attn_core.backends.xformers.operators import TENSOR, mask_of
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = Support(
    kernel="xformers",
    devices=("sm80", "sm86", "sm89", "sm90"),
    dtypes=("bfloat16", "float16", "float32"),
    value_dim=True,
    grouped_heads=True,
    alignments=("bottom_right", "top_left"),
    causal=True,
    window=True,
    mask=True,
    bias=True,
    sinks=True,
    packed=True,
    deterministic=True,
    lse=True,
    partial=True,
    lse_gradient=True,
)
BACKWARD = replace(FORWARD, deterministic=False)

_CUTLASS = replace(FORWARD, kernel="the xformers CUTLASS kernel", packed=False)
_FLASH = replace(
    FORWARD,
    kernel="the xformers flash kernel",
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    alignments=("bottom_right",),
    mask=False,
    bias=False,
)
_SPLITK = replace(_FLASH, kernel="the xformers split-KV kernel", max_head_dim=512, mask=True, bias=True, packed=False)
_SPLITK = replace(_SPLITK, lse_gradient=False)


class Operator(NamedTuple):
    """One of xformers' operators: its claims, and the masks of its forward and backward (see ``bias.py``)."""

    forward: Support
    backward: Support | None
    masks: tuple[str | None, ...]
    gradient_masks: tuple[str | None, ...] = ()
    takes_groups: bool = True


_CAUSAL, _WINDOW = "LowerTriangularFromBottomRightMask", "LowerTriangularFromBottomRightLocalAttentionMask"
_TWO_SIDED = "LocalAttentionFromBottomRightMask"
_FLASH_MASKS = (
    None,
    _CAUSAL,
    _WINDOW,
    _TWO_SIDED,
    "BlockDiagonalMask",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
)
_CUTLASS_MASKS = (None, TENSOR, "LowerTriangularMask", _CAUSAL)
_ROW_MASKS = {  # split-KV's masks in their place, for batch rows laid end to end
    _CAUSAL: "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    _WINDOW: "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
}
_SPLITK_ROWS = 16
"""The most rows of a causal call that split-KV masks correctly."""

OPERATORS = {
    "flash": Operator(_FLASH, replace(_FLASH, deterministic=False), _FLASH_MASKS, _FLASH_MASKS),
    "cutlass": Operator(
        _CUTLASS, replace(_CUTLASS, deterministic=False), (*_CUTLASS_MASKS, _WINDOW), _CUTLASS_MASKS, takes_groups=False
    ),
    "splitk": Operator(_SPLITK, None, (None, TENSOR, *_ROW_MASKS)),
}
"""The operators in the usual order of choice. All run on the same devices."""
_MANY_KEYS = {"masked": 2**26, "grouped": 2**28}
"""Elements of the keys, counted for each query head, from which split-KV is faster than the others for few queries."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Returns every operator's reasons if none supports a call that their common claims cover."""
    if _choose_operator(spec) or unmet_claims(BACKWARD if spec.needs_backward else FORWARD, spec, device):
        return ()
    able = [word for word, operator in OPERATORS.items() if operator.backward or not spec.needs_backward]
    return tuple(dict.fromkeys(why for word in able for why in _misfits(word, spec)))


@lru_cache(maxsize=4096)
def _choose_operator(spec: AttentionSpec) -> str | None:
    """Returns the operator that runs a call, or None."""
    return next((word for word in _order(spec) if not _misfits(word, spec)), None)


def _order(spec: AttentionSpec) -> tuple[str, ...]:
    """Returns the operators in the order of choice.

    Split-KV comes first where it is faster, as measured on an H200 (benchmarks/results/sweep-sm90.json): for few
    queries of many keys, if CUTLASS would repeat masked keys, or flash read the keys of a group once for each head.
    """
    keys = spec.batch * spec.num_heads * spec.kv_len * spec.head_dim
    if spec.mask_shape is not None or spec.bias_shape is not None:
        many = keys >= _MANY_KEYS["masked"]
    else:
        grouped = spec.group_size > 1 and spec.q_len > 1 and spec.window == (None, None)
        many = grouped and keys >= _MANY_KEYS["grouped"]
    if many and spec.q_len <= _SPLITK_ROWS and not spec.needs_backward:
        return ("splitk", "flash", "cutlass")
    return tuple(OPERATORS)


def modelled(spec: AttentionSpec) -> bool:
    """See ``Backend.modelled``: the model is of split-KV where it comes first. torch has the other kernels, too."""
    return _order(spec)[0] == "splitk" == _choose_operator(spec)


def _misfits(word: str, spec: AttentionSpec) -> tuple[str, ...]:
    """Returns all reasons why an operator cannot run a call, apart from the device."""
    forward, backward, device = OPERATORS[word].forward, OPERATORS[word].backward, FORWARD.devices[0]
    reasons = (*unmet_claims(forward, spec, device), *_refuses(word, spec))
    reasons += known_bad.refusals(f"xformers:{word}", spec, device)
    if spec.needs_backward and backward is None:
        reasons += (f"backward: {forward.kernel} has no gradient",)
    elif spec.needs_backward and backward is not None:
        reasons += tuple(f"backward: {why}" for why in unmet_claims(backward, spec, device) if why not in reasons)
    return reasons


def _refuses(word: str, spec: AttentionSpec) -> Iterator[str]:
    """Yields refusals of combinations that an operator lacks or computes wrongly though each claim alone holds."""
    kernel, name = OPERATORS[word].forward.kernel, mask_of(spec).name
    banded = f"causal={spec.causal}, window={spec.window}, alignment={spec.alignment}"
    described = f"{banded} with q_len {spec.q_len} and kv_len {spec.kv_len}"
    yield from _mask_refusals(word, spec, name, described)
    yield from kernel_limits.grid(spec, kernel)
    if word != "flash":
        yield from kernel_limits.tables(spec, kernel)
    if word == "splitk":
        yield from _splitk_refusals(spec, name, described)
    if word == "cutlass":
        yield from _cutlass_refusals(spec, name, described)


def _splitk_refusals(spec: AttentionSpec, name: str | None, described: str) -> Iterator[str]:
    kernel = _SPLITK.kernel
    if name in _ROW_MASKS and spec.q_len > _SPLITK_ROWS:
        yield f"{described}: {kernel} masks up to {_SPLITK_ROWS} rows"
    parts = 64 * spec.batch * spec.q_len * spec.num_heads * operators.width("splitk", spec.head_dim)
    if parts >= 2**31:  # seen: an illegal memory access
        yield f"q_len={spec.q_len}: {kernel} counts the {parts} elements of its partial results in 32 bits"


def _cutlass_refusals(spec: AttentionSpec, name: str | None, described: str) -> Iterator[str]:
    """Yields why CUTLASS cannot run the call.

    Args:
        name, described: of the mask that it would get, and the words for it.
    """
    kernel = _CUTLASS.kernel
    if name in (_CAUSAL, _WINDOW) and spec.q_len > spec.kv_len:
        yield f"{described}: {kernel} is undefined for rows that see no key"
    if spec.rounds_bias:
        yield f"bias in {spec.bias_dtype} with {spec.dtype}: {kernel} rounds a bias to q's dtype"
    elements = max(spec.q_len, spec.kv_len) * spec.num_heads * max(spec.head_dim, spec.value_dim)
    if elements >= kernel_limits.COUNTABLE:
        yield f"{elements} elements in a row of q, k or v: {kernel} counts them in 32 bits"


def _mask_refusals(word: str, spec: AttentionSpec, name: str | None, described: str) -> Iterator[str]:
    """Yields refusals of bands that an operator has no mask for, unless its claims already refuse them."""
    operator, square = OPERATORS[word], spec.q_len == spec.kv_len and not spec.packed
    claims = operator.forward
    already_refused = name == TENSOR or (spec.packed and not claims.packed)
    already_refused = already_refused or not (square or spec.alignment in claims.alignments)
    if name not in operator.masks and not already_refused:
        where = f" in each of {spec.documents} documents" if spec.packed else ""
        yield f"{described}{where}: {claims.kernel} has no such mask"
    elif name in operator.masks and spec.needs_backward and operator.backward and name not in operator.gradient_masks:
        yield f"{described}, with gradients: the backward of {claims.kernel} gives infs and NaNs for windows"


def probe() -> str:
    """Imports all operators and returns xformers' version."""
    import triton  # noqa: F401
    import xformers

    for word in OPERATORS:
        operator = operators.load_operator(word)[1]
        if not operator.is_available():
            raise ImportError(f"this installation has no kernel for {operator.NAME}")
    return xformers.__version__


def build() -> Build:
    """Finds the head dimensions of the installed flash kernel, and whether it has a gradient.

    If flash-attn was compiled for some head dimensions only, ``xformers`` has the same limits.
    """
    installed = operators.flash_widths()
    without = () if operators.runs(installed[0], backward=True) else ("backward",)
    head_dims = () if installed == operators.COMPILED else installed
    return Build(operators.load_operator("flash")[1].NAME, without, head_dims=head_dims)


def lower(spec: AttentionSpec) -> dict[str, Any]:
    """Returns the arguments of the chosen operator; ``operator`` is None if none supports the call."""
    word = _choose_operator(spec)
    return {"operator": None} if word is None else _lower(word, spec)


@lru_cache(maxsize=4096)
def _lower(word: str, spec: AttentionSpec) -> dict[str, Any]:
    """Returns the operator's ``attn_bias`` by class and window, its scale, and how to convert operands and results.

    groups: the layout of grouped heads in the forward. laid_end_to_end: batch rows become documents of one row.
    empty_rows: some rows may see no key.
    """
    mask = mask_of(spec)
    as_rows = word == "splitk" and mask.name in _ROW_MASKS
    return {
        "operator": word,
        "attn_bias": _ROW_MASKS[mask.name] if as_rows and mask.name else mask.name,
        "window": mask.window,
        "scale": spec.scale,
        "groups": None if spec.group_size == 1 else "five axes" if OPERATORS[word].takes_groups else "repeated",
        "laid_end_to_end": as_rows,
        "empty_rows": spec.packed or mask.name == TENSOR or band(spec).empties_a_row(spec.q_len, spec.kv_len),
    }


@cache
def _kernel(word: str) -> rewrites.Kernel:
    """Returns an operator's forward and backward."""

    def forward(spec: AttentionSpec, inputs: Inputs, into: Buffers | None) -> tuple[Tensor, Tensor]:
        return operators.forward(_lower(word, spec), spec, inputs)

    def backward(
        spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, into: Gradients | None
    ) -> Gradients:
        return operators.backward(_lower(word, spec), spec, inputs, out, lse, dout)

    return rewrites.Kernel(forward, backward, partial(operators.width, word), same_width=word != "cutlass")


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """See ``Backend.forward``."""
    return rewrites.forward(_kernel(lower(spec)["operator"]), spec, inputs)


def backward(
    spec: AttentionSpec, inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Gradients:
    """See ``Backend.backward``."""
    return rewrites.backward(_kernel(lower(spec)["operator"]), spec, inputs, out, lse, dout, dlse)


BACKEND = Backend(
    name="xformers",
    framework="torch",
    requires="xformers>=0.0.29",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=backward,
    build=build,
    modelled=modelled,
    # It launches the kernels beside it, and one of its own that splits the keys.
    preference={"cuda": 60},
    also_called={"cutlass": 20},
    # It has a predicted time where it runs its split-KV kernel; else it launches the kernels of sdpa_efficient and
    # FlashAttention-2.
    timing=Timing(behind_without_time="sdpa_efficient"),
)
