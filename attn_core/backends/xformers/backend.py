"""xformers' memory-efficient attention: CUTLASS, flash, FlashAttention-3 and Triton split-KV.

``xformers`` runs flash if it supports the call, else CUTLASS, as xformers itself does. ``xformers_flash``,
``xformers_cutlass``, ``xformers_flash3`` and ``xformers_splitk`` run one operator each. FlashAttention-3 runs only by
name: xformers would also choose its backward, which a forward-only build lacks.
Limits: no softcap, ALiBi, dropout or bias gradient. Non-causal windows: flash and flash3, without documents.
Documents: flash and flash3. (CUTLASS is undefined for a document with fewer keys than queries, split-KV needs causal
documents of equal length, and lengths are on the device.) Masks and biases: CUTLASS, if q's dtype can represent the
bias, and split-KV, which has no gradient. sm75 has CUTLASS alone. Corrections: see ``operators.py``.
Upstream: xformers >= 0.0.29. Its flash operator is flash-attn's if that is installed, otherwise torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from attn_core.backends.shared import kernel_limits, known_bad, rewrites
from attn_core.backends.shared.claims import unmet_claims
from attn_core.backends.support import Build, Support
from attn_core.backends.xformers import operators
from attn_core.backends.xformers.bias import TENSOR, mask_of
from attn_core.backends.xformers.limits import cutlass_refusals
from attn_core.call.masks import band
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Gradients, Inputs

FRAMEWORK = "torch"
REQUIRES = "xformers>=0.0.29"

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

_CUTLASS = replace(FORWARD, kernel="the xformers CUTLASS kernel", devices=(*FORWARD.devices, "sm75"), packed=False)
_FLASH = replace(
    FORWARD,
    kernel="the xformers flash kernel",
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    alignments=("bottom_right",),
    mask=False,
    bias=False,
)
_FLASH3 = replace(_FLASH, kernel="the xformers FlashAttention-3 kernel", devices=("sm90",))
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
    *(None, _CAUSAL, _WINDOW, _TWO_SIDED, "BlockDiagonalMask"),
    *("BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionFromBottomRightMask"),
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
    "flash3": Operator(_FLASH3, replace(_FLASH3, deterministic=False), _FLASH_MASKS, _FLASH_MASKS),
    "splitk": Operator(_SPLITK, None, (None, TENSOR, *_ROW_MASKS)),
}
_ORDER = ("flash", "cutlass")
"""The operators that ``xformers`` chooses from; both run on the same devices."""


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Returns every operator's reasons if none supports a call that their common claims cover."""
    if _choose_operator(spec) or unmet_claims(BACKWARD if spec.needs_backward else FORWARD, spec, device):
        return ()
    return tuple(dict.fromkeys(why for word in _ORDER for why in _misfits(word, spec)))


@lru_cache(maxsize=4096)
def _choose_operator(spec: AttentionSpec) -> str | None:
    """Returns the operator that ``xformers`` runs, or None."""
    return next((word for word in _ORDER if not _misfits(word, spec)), None)


def _misfits(word: str, spec: AttentionSpec) -> tuple[str, ...]:
    """Returns all reasons why an operator cannot run a call, apart from the device."""
    forward, backward, device = OPERATORS[word].forward, OPERATORS[word].backward, FORWARD.devices[0]
    reasons = (*unmet_claims(forward, spec, device), *_refuses(word, spec, device, None))
    reasons += known_bad.refusals(f"xformers_{word}", spec, device)
    if spec.needs_backward and backward is not None:
        reasons += tuple(f"backward: {why}" for why in unmet_claims(backward, spec, device) if why not in reasons)
    return reasons


def _refuses(word: str, spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses combinations that an operator lacks or computes wrongly though each claim alone holds."""
    kernel, name = OPERATORS[word].forward.kernel, mask_of(spec).name
    banded = f"causal={spec.causal}, window={spec.window}, alignment={spec.alignment}"
    described = f"{banded} with q_len {spec.q_len} and kv_len {spec.kv_len}"
    reasons = [*_mask_refusals(word, spec, name, described), *kernel_limits.grid(spec, kernel)]
    reasons += () if word == "flash" else kernel_limits.tables(spec, kernel)
    if word == "splitk" and name in _ROW_MASKS and spec.q_len > _SPLITK_ROWS:
        reasons.append(f"{described}: {kernel} masks up to {_SPLITK_ROWS} rows")
    parts = 64 * spec.batch * spec.q_len * spec.num_heads * operators.width("splitk", spec.head_dim)
    if word == "splitk" and parts >= 2**31:  # seen: an illegal memory access
        reasons.append(f"q_len={spec.q_len}: {kernel} counts the {parts} elements of its partial results in 32 bits")
    if word == "cutlass":
        if name in (_CAUSAL, _WINDOW) and spec.q_len > spec.kv_len:
            reasons.append(f"{described}: {kernel} is undefined for rows that see no key")
        reasons += cutlass_refusals(spec, device, kernel)
    return tuple(reasons)


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
    """Imports the operators of automatic choice and returns xformers' version."""
    *_, version = (_probe(word) for word in _ORDER)
    return version


def _probe(word: str) -> str:
    import xformers  # type: ignore[import-not-found]

    operator = operators.load_operator(word)[1]
    if not operator.is_available():
        raise ImportError(f"this installation has no kernel for {operator.NAME}")
    if word == "splitk":
        import triton  # type: ignore[import-not-found]  # noqa: F401
    return xformers.__version__


def build() -> Build | None:
    """See ``_build``. If flash-attn was compiled for some head dimensions only, ``xformers`` has the same limits."""
    return _build("flash")


def _build(word: str) -> Build | None:
    """Finds the head dimensions of the installed build of a flash kernel, and whether it has a gradient."""
    if word not in operators.COMPILED:
        return None
    installed = operators.widths(word)
    without = () if operators.runs(word, installed[0], backward=True) else ("backward",)
    head_dims = () if installed == operators.COMPILED[word] else installed
    return Build(operators.load_operator(word)[1].NAME, without, head_dims=head_dims)


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

    def forward(spec: AttentionSpec, inputs: Inputs, into: Any) -> tuple[Any, Any]:
        return operators.forward(_lower(word, spec), spec, inputs)

    def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, into: Any) -> Gradients:
        return operators.backward(_lower(word, spec), spec, inputs, out, lse, dout)

    return rewrites.Kernel(forward, backward, partial(operators.width, word), same_width=word != "cutlass")


def forward(spec: AttentionSpec, inputs: Inputs) -> tuple[Any, Any]:
    """See ``Backend.forward``."""
    return rewrites.forward(_kernel(lower(spec)["operator"]), spec, inputs)


def backward(spec: AttentionSpec, inputs: Inputs, out: Any, lse: Any, dout: Any, dlse: Any) -> Gradients:
    """See ``Backend.backward``."""
    return rewrites.backward(_kernel(lower(spec)["operator"]), spec, inputs, out, lse, dout, dlse)


VARIANTS = {f"xformers_{word}": word for word in ("cutlass", "flash", "flash3", "splitk")}


def variant(word: str) -> Any:
    """Returns one operator as a backend of its own: flash, cutlass, flash3 or splitk."""
    return SimpleNamespace(
        FRAMEWORK=FRAMEWORK,
        REQUIRES=REQUIRES,
        FORWARD=OPERATORS[word].forward,
        BACKWARD=OPERATORS[word].backward,
        refuses=partial(_refuses, word),
        probe=partial(_probe, word),
        build=partial(_build, word),
        lower=partial(_lower, word),
        **{half.__name__: partial(half, _kernel(word)) for half in (rewrites.forward, rewrites.backward)},
    )
