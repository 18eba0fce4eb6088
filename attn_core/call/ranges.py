"""The ranges that profilers show: their names, and the switch for profilers that torch does not announce."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from attn_core.call.spec import AttentionSpec
from attn_core.call.switch import Switch, variable_of

_enabled = variable_of("ranges")

enabled = _enabled.get
"""Returns whether ranges are on. The bound method of the context variable itself, because every call reads it."""


def ranges(on: bool = True) -> Switch:
    """Switches NVTX ranges on or off: ``ranges(True)`` from here on, ``with ranges(True):`` for a block.

    Each attention call on torch tensors then marks its forward and its backward with an NVTX range, named by
    ``range_name``, which Nsight Systems shows. A backward has its range if the forward ran while ranges were on. A
    build of torch without NVTX (for CPUs) warns instead. ``torch.profiler`` shows the ranges without this switch, and
    JAX names its operations always. ``ATTN_CORE_RANGES=1`` switches the ranges on when the package is imported. The
    switch belongs to the current thread or task.

    Raises:
        SpecError: unless ``on`` is True or False.
    """
    return Switch("ranges", _enabled, on)


@lru_cache(maxsize=4096)
def range_name(backend: str, spec: AttentionSpec, direction: str) -> str:
    """Returns the name of a call's range: ``attn.flash3 forward b2 q2048 kv2048 h8:2 d64 bf16 causal w256``.

    The parts are: the backend; the direction, "forward" or "backward"; batch; query length; key length; query heads and
    kv heads; head_dim, and value_dim if it differs; dtype; then a word for each feature that the call has. No part
    contains a slash, because XLA's tools split names there.
    """
    return f"attn.{backend} {direction} {words_of(spec)}"


@lru_cache(maxsize=4096)
def words_of(spec: AttentionSpec) -> str:
    """Returns the parts of a range's name that describe the call: ``b2 q2048 kv2048 h8:2 d64 bf16 causal w256``."""
    value_dim = f":{spec.value_dim}" if spec.value_dim != spec.head_dim else ""
    words = [
        f"b{spec.batch}",
        f"q{spec.q_len}",
        f"kv{spec.kv_len}",
        f"h{spec.num_heads}:{spec.num_kv_heads}",
        f"d{spec.head_dim}{value_dim}",
        DTYPE_WORDS[spec.dtype],
        *(word(spec) for word in FEATURE_WORDS.values()),
    ]
    return " ".join(filter(None, words)).replace("/", ":")  # a symbolic size may contain a division


def _window(spec: AttentionSpec) -> str:
    left, right = spec.window
    if spec.causal and left is not None and right in (None, 0):
        return f"w{left + 1}"  # as ``window=W``: W keys, self included
    return "" if (left, right) == (None, None) else f"w{'' if left is None else left}:{'' if right is None else right}"


def _alignment(spec: AttentionSpec) -> str:
    anchored = spec.causal or spec.alibi_shape is not None or spec.window != (None, None)
    return "top_left" if anchored and spec.alignment == "top_left" else ""


def _pages(spec: AttentionSpec) -> str:
    if spec.paged is None:
        return ""
    return f"pages{spec.paged.page_size}" + ("" if spec.paged.dtype is None else f":{spec.paged.dtype}")


DTYPE_WORDS = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}

FEATURE_WORDS: dict[str, Callable[[AttentionSpec], str]] = {
    "causal": lambda spec: "causal" if spec.causal else "",
    "alignment": _alignment,
    "window": _window,
    "softcap": lambda spec: "" if spec.softcap is None else f"softcap{spec.softcap:g}",
    "mask_shape": lambda spec: "mask" if spec.mask_shape else "",
    "key_ranges_shape": lambda spec: f"ranges{spec.key_ranges_shape[3]}" if spec.key_ranges_shape else "",
    "mask_mod": lambda spec: "" if spec.mask_mod is None else "mask_mod",
    "score_mod": lambda spec: "" if spec.score_mod is None else "score_mod",
    "bias_shape": lambda spec: "bias" if spec.bias_shape else "",
    "alibi_shape": lambda spec: "alibi" if spec.alibi_shape else "",
    "sinks": lambda spec: "sinks" if spec.sinks else "",
    "documents": lambda spec: "" if spec.documents is None else f"docs{spec.documents}",
    "paged": _pages,
    "dropout": lambda spec: f"dropout{spec.dropout:g}" if spec.dropout else "",
    "deterministic": lambda spec: "deterministic" if spec.deterministic else "",
    "partial": lambda spec: "partial" if spec.partial else "",
    "invariant": lambda spec: "" if spec.invariant is None else f"same-bits-{spec.invariant}",
}
"""The word of each feature in a name, by the field of the spec; empty if the call does not have the feature."""
