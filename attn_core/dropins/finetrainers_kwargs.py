"""Translates the ``attention_kwargs`` of Finetrainers' dispatch into our options, or refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from attn_core.call.options import check_flag
from attn_core.call.seq_info import SeqInfo, is_host_int
from attn_core.dropins.finetrainers import AttentionProvider
from attn_core.dropins.keyword_bags import Option, distances
from attn_core.errors import SpecError, shown


class HostOptions(NamedTuple):
    """The options of ``attention_kwargs`` in our terms. documents: from the ``cu_seqlens`` and ``max_seqlen`` keys."""

    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Any = None
    deterministic: bool = False
    return_lse: bool = False
    documents: SeqInfo | None = None

    @property
    def anchored(self) -> bool:
        """Whether an option counts distances from the last key, as flash-attn does."""
        return self.window is not None or self.alibi_slopes is not None


_NOTHING = HostOptions()
_OFFSETS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPTIONS = ("window_size", "softcap", "alibi_slopes", "deterministic", "return_lse", *_OFFSETS)
"""The keys that every provider takes."""
_CUDA_8BIT = ("_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp8_cuda_sm90")
_SMOOTH_V = ("_sage_qk_int8_pv_fp8_cuda", "_sage_qk_int8_pv_fp16_cuda")
_QUANTISED = tuple(word.value for word in AttentionProvider if word.startswith("_sage"))
_ONLY: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
    ("return_attn_probs", False, ("flash", "flash_varlen")),
    ("kernel_options", None, ("flex",)),
    ("smooth_k", True, ("sage_varlen", *_QUANTISED)),
    ("smooth_v", False, _SMOOTH_V),
    ("qk_quant_gran", "per_thread", (*_CUDA_8BIT, "_sage_qk_int8_pv_fp16_cuda")),
    ("pv_accum_dtype", "fp32+fp32", _CUDA_8BIT),
    ("pv_accum_dtype", "fp32", ("_sage_qk_int8_pv_fp16_cuda",)),
    ("quantization_backend", "triton", ("_sage_qk_int8_pv_fp16_triton",)),
)
"""(key, the only value that our kernels support, the providers that have the key)."""


def interpret(provider: AttentionProvider, kwargs: Mapping[str, Any] | None) -> HostOptions:
    """Translates ``attention_kwargs``. Every provider takes every option; its kernel may still refuse one.

    ``softcap=0`` and ``window_size=(-1, -1)`` are flash-attn's "none".

    Raises:
        SpecError: for unknown keys, keys of another provider, and values that our kernels do not support.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise SpecError(f"attention_kwargs={shown(kwargs)}: expected a dict or None")
    if not kwargs:
        return _NOTHING
    stated = dict(kwargs)
    for key, value in stated.items():
        if key not in OPTIONS:
            _check_fixed(provider, key, value)
    softcap = stated.get("softcap")
    return HostOptions(
        window=distances(Option("window", stated.get("window_size"), "attention_kwargs['window_size']")),
        # flash-attn writes 0 for no softcap, which ``attention`` refuses.
        softcap=None if isinstance(softcap, (int, float)) and softcap == 0 else softcap,
        alibi_slopes=stated.get("alibi_slopes"),
        deterministic=check_flag("attention_kwargs['deterministic']", stated.get("deterministic", False)),
        return_lse=check_flag("attention_kwargs['return_lse']", stated.get("return_lse", False)),
        documents=_documents(stated),
    )


def _check_fixed(provider: AttentionProvider, key: Any, value: Any) -> None:
    """Raises SpecError unless the key has the only value that the provider's kernel supports."""
    entries = [entry for entry in _ONLY if entry[0] == key]
    if not entries:
        known = dict.fromkeys((*OPTIONS, *(entry[0] for entry in _ONLY)))
        raise SpecError(f"attention_kwargs[{key!r}]: unknown; expected one of {', '.join(known)}")
    allowed = next((only for _, only, words in entries if provider.value in words), entries)
    if allowed is entries:
        words = dict.fromkeys(word for entry in entries for word in entry[2])
        raise SpecError(
            f"attention_kwargs[{key!r}]={shown(value)}: provider {provider.value} has no such option; it is one of "
            f"{', '.join(words)}"
        )
    # The types are compared too, because 1 == True and 0 == False.
    if type(value) is not type(allowed) or value != allowed:
        raise SpecError(
            f"attention_kwargs[{key!r}]={shown(value)}: expected {allowed!r}, which is how provider "
            f"{provider.value} runs here"
        )


def _documents(stated: Mapping[str, Any]) -> SeqInfo | None:
    """Returns the documents of flash-attn's four keys. Raises SpecError if only some of the keys are present."""
    there = [name for name in _OFFSETS if stated.get(name) is not None]
    if not there:
        return None
    # The host ignores an incomplete set, and then documents would see each other.
    missing = [name for name in _OFFSETS if name not in there]
    if missing:
        raise SpecError(
            f"attention_kwargs: {', '.join(there)} without {', '.join(missing)}; packed documents need all four"
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        if not is_host_int(stated[name]):
            raise SpecError(f"attention_kwargs[{name!r}]={stated[name]!r}: expected an int known on the host")
    return SeqInfo(*(stated[name] for name in _OFFSETS))
