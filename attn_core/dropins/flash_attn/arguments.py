"""The arguments of flash-attn's functions in the words of ``attention``, as plain data, for both frontends.

Packed documents are part of them: their checks, the places of tokens in them, and slopes for each.

Facts from flash-attn 2.8.4 (``flash_attn/flash_attn_interface.py``), FlashAttention 3 (``hopper``) and FlashAttention-4
(``flash_attn/cute``), read on 15 August 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from attn_core.call.kinds import is_host_int, must_be_static
from attn_core.call.options import Window, check_number
from attn_core.call.seq_info import SeqInfo
from attn_core.call.tensors import Array
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import DTypeError, ShapeError, SpecError, shown
from attn_core.expressions.symbols import Array as SymbolicArray
from attn_core.expressions.symbols import Symbol
from attn_core.expressions.tracing import Aux, TracedFunction, trace_score
from attn_core.expressions.tree import Expression

FLASH_PACKAGES = ("flash3", "flash4", "flash2")
FLASH_KERNELS = (*FLASH_PACKAGES, "sdpa_flash")
"""The backends that stand for a host's FlashAttention, in order of preference; the last one is torch's own kernel."""

OPTIONS = {
    "scale": "softmax_scale",
    "window": "window_size",
    "dropout": "dropout_p",
    "seq_info.max_len_q": "max_seqlen_q",
    "seq_info.max_len_k": "max_seqlen_k",
    "seq_info.cu_seqlens_q": "cu_seqlens_q",
    "seq_info.cu_seqlens_k": "cu_seqlens_k",
    "return_lse": "return_attn_probs",
}
"""Our name of an argument, and flash-attn's, for errors."""
SELF_PACKED = OPTIONS | {
    **{f"seq_info.cu_seqlens_{side}": "cu_seqlens" for side in "qk"},
    **{f"seq_info.max_len_{side}": "max_seqlen" for side in "qk"},
    **dict.fromkeys("qkv", "qkv"),
}
KEYS_PACKED = OPTIONS | {"k": "kv", "v": "kv"}
VARLEN_PAGES = OPTIONS | {"k_pages": "k", "v_pages": "v", "max_len_q": "max_seqlen_q", "seq_lens": "cu_seqlens_k"}
CACHE = OPTIONS | {
    **{"k_pages": "k_cache", "v_pages": "v_cache", "seq_lens": "cache_seqlens", "kv_lengths": "cache_seqlens"},
    **{"kv_starts": "cache_leftpad", "cache_index": "cache_batch_idx", "cos": "rotary_cos", "sin": "rotary_sin"},
    **{"max_len_q": "max_seqlen_q", "positions": "cache_seqlens", "return_lse": "return_softmax_lse"},
}
CUTE = {name: theirs for name, theirs in (OPTIONS | CACHE).items() if name != "return_lse"} | {
    **{"sinks": "learnable_sink", "k_pages": "k", "v_pages": "v", "k_cache": "k", "v_cache": "v"},
    **{"seq_lens": "seqused_k", "kv_lengths": "seqused_k", "cache_seqlens": "seqused_k", "block_table": "page_table"},
}


def renamed(error: SpecError | TypeError, names: Mapping[str, str]) -> SpecError | TypeError:
    """Returns an error of the same type whose first word, our name of an argument, is the caller's."""
    text = str(error)
    match = re.match(r"[A-Za-z_][A-Za-z_.]*(?=[=:\[])", text)
    if match is None or match[0] not in names:
        return error
    return type(error)(names[match[0]] + text[match.end() :])


def options_of(
    softmax_scale: float | None, causal: bool, window_size: object, softcap: float | None, deterministic: bool
) -> dict[str, Any]:
    """Returns keywords of ``attention`` and ``paged_attention``."""
    return {
        "causal": causal,
        "window": window_of(window_size),
        "softcap": softcap_of(softcap),
        "scale": softmax_scale,
        "deterministic": deterministic,
    }


def window_of(window_size: Any) -> Window:
    """Returns ``window_size``, inclusive distances with -1 or None for no limit, as ``attention`` writes windows.

    An integer array of two numbers on the host is a pair, too.
    """
    if type(window_size) is tuple and len(window_size) == 2:  # first, because most windows are such
        left, right = window_size
        if type(left) is int and type(right) is int and left >= -1 and right >= -1:
            return None if left == right == -1 else (None if left == -1 else left, None if right == -1 else right)
    pair = window_size
    if type(pair).__module__ == "torch" and getattr(pair, "is_cpu", False) and tuple(pair.shape) == (2,):
        pair = pair.detach().numpy()
    if isinstance(pair, np.ndarray) and pair.dtype.kind in "iu":
        pair = pair.tolist()
    if isinstance(pair, tuple | list) and len(pair) == 2:
        sides = [None if side is None or (is_host_int(side) and side == -1) else side for side in pair]
        if all([side is None or (is_host_int(side) and side >= 0) for side in sides]):
            return None if sides == [None, None] else (sides[0], sides[1])
    raise SpecError(
        f"window_size={shown(window_size)}: expected a pair (left, right) of inclusive distances, ints of 0 or more, "
        f"or -1 without limit{must_be_static(window_size)}"
    )


def distances(value: object, where: str) -> tuple[int | None, int | None] | None:
    """Returns flash-attn's window_size, in which -1 is unbounded, as distances; None if both sides are unbounded."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(map(is_host_int, value)):
        raise SpecError(f"{where}={shown(value)}: expected two distances (left, right) as ints, -1 for unbounded")
    left, right = (None if distance < 0 else distance for distance in value)
    return None if left is None and right is None else (left, right)


def softcap_of(softcap: float | None) -> float | None:
    """Returns ``softcap`` as ``attention`` writes it: 0 and less switch it off there, None here."""
    number = check_number("softcap", softcap)
    return None if number is None or number <= 0 else softcap


def host_int(name: str, value: object) -> int:
    """Returns a length in tokens. Raises SpecError unless it is an int that int32 has, also as an array on the CPU."""
    number = value if is_host_int(value) else number_on_host(value)
    if is_host_int(number) and 0 <= number < 2**31:
        return number  # type: ignore[no-any-return]
    expected = f"{name}={shown(number)}: expected the longest sequence in tokens, an int32 on the host"
    static = must_be_static(number)
    if not static:  # no array, or one that was read
        raise SpecError(f"{expected}, from 0 to {2**31 - 1}")
    here = isinstance(value, np.ndarray) or getattr(value, "is_cpu", False)
    reason = "" if here else ", because reading a device would wait for it"
    of_torch = type(value).__module__.partition(".")[0] == "torch"
    raise SpecError(
        f"{expected}{reason}{f'; pass int({name}), computed once before the calls' if of_torch else static}"
    )


def number_on_host(value: Any) -> Any:
    """Returns an integer array without axes as an int if it is on the CPU; any other value as it is."""
    try:
        if tuple(value.shape) != () or "int" not in str(value.dtype):
            return value
        if isinstance(value, np.ndarray) or getattr(value, "is_cpu", False):
            return int(value)
        return int(value) if {device.platform for device in value.devices()} == {"cpu"} else value
    except (AttributeError, TypeError, ValueError, RuntimeError):  # no array, or one without a value
        return value


def refuse(**arguments: object) -> None:
    """Raises SpecError for the first argument that is not None, with what to do instead."""
    for name, value in arguments.items():
        if value is not None:
            raise SpecError(f"{name}: expected None, got {shown(value)}; {REMEDIES[name]}")


def check_hints(**hints: object) -> None:
    """Checks the types of hints about speed, which change no result: ints, True, False or None."""
    for name, value in hints.items():
        if value is not None and not isinstance(value, bool) and not is_host_int(number_on_host(value)):
            raise SpecError(f"{name}={shown(value)}: expected an int, True, False or None; a hint without effect here")


_FUNCTION = "the functions of FlashAttention-4 are CuTe DSL; attention({0}=) takes a plain function of indices"
REMEDIES = {
    "qv": "softmax(q k' + qv v') v is attention(concatenate(q, qv), concatenate(k, v), v, scale=softmax_scale)",
    **dict.fromkeys(
        ("q_descale", "k_descale", "v_descale"),
        "tensors with scales of their own run in torch's flash_attn_func of FlashAttention 3 alone; pass bfloat16, "
        "which use_backend('flash3_fp8') quantises",
    ),
    "seqused_q": "pass cu_seqlens_q without the unused queries",
    "seqused_k": "pass cu_seqlens_k and keys without the unused ones",
    "rotary_seqlens": "rotary positions begin at cache_seqlens; rotate q and k before the call",
    "gather_kv_indices": "attention(mask=) hides the keys that an index list leaves out",
    "score_mod": _FUNCTION.format("score_mod"),
    "mask_mod": _FUNCTION.format("mask_mod"),
    "score_mod_bwd": "the derivative of attention(score_mod=) is computed",
    "aux_tensors": "they belong to score_mod and mask_mod; attention(aux=) has them",
    "aux_scalars": "they belong to score_mod and mask_mod; attention(aux=) has them",
    "block_sparse_tensors": "attention(mask_mod=) and attention(key_ranges=) skip the blocks that they hide",
    "block_sparse_tensors_bwd": "attention(mask_mod=) and attention(key_ranges=) skip the blocks that they hide",
    "cu_seqlens_k_new": "pass k as [batch, seqlen_new, kv_heads, head_dim]",
}
"""What to do instead of an argument that is refused."""


_CHUNKS = {
    "rows": "mask_mod=lambda b, h, q, k: (q + seqlen_k - seqlen_q) // n == k // n",
    "documents": "mask_mod=lambda b, h, q, k, at_q, at_k: at_q[q] // n == at_k[k] // n, aux=(at_q, at_k)",
    "cache": "mask_mod=lambda b, h, q, k, lengths: (q + lengths[b] - seqlen_q) // n == k // n, aux=(lengths,)",
}
_PLACES = {
    "rows": "",
    "documents": ", with every token's place in its document, the last query's that of the last key",
    "cache": ", with lengths=kv_lengths, in which the new keys count",
}


def refuse_chunks(attention_chunk: object, of: str = "rows") -> None:
    """Raises SpecError unless ``attention_chunk`` is 0. of: "rows", "documents" or "cache", as the function takes."""
    if not is_host_int(attention_chunk) or attention_chunk != 0:
        raise SpecError(
            f"attention_chunk={shown(attention_chunk)}: expected 0; attention({_CHUNKS[of]}) hides keys of other "
            f"chunks{_PLACES[of]}"
        )


def check_packed(name: str, array: Array, parts: int, packed: bool) -> None:
    """Raises ShapeError unless an array holds ``parts`` tensors before its heads."""
    axes = f"[total, {parts}, heads, head_dim]" if packed else f"[batch, seqlen, {parts}, heads, head_dim]"
    if array.ndim != (4 if packed else 5) or array.shape[-3] != parts:
        raise ShapeError(f"{name}: expected {axes}, got {list(array.shape)}")


def documents_of(
    frontend: Frontend,
    q: Array,
    offsets: tuple[Array, Array],
    longest: tuple[object, object],
    sides: tuple[str, str] = ("_q", "_k"),
) -> SeqInfo:
    """Returns the documents of a call, checked except for the values of the offsets.

    Args:
        offsets: cu_seqlens_q and cu_seqlens_k. longest: max_seqlen_q and max_seqlen_k.
        sides: the ends of the caller's names of these arguments.
    """
    frontend.check_array("q", q)
    lengths = []
    for side, array, length in zip(sides, offsets, longest, strict=True):
        frontend.check_array(f"cu_seqlens{side}", array)
        if array.ndim != 1 or array.shape[0] < 2:
            raise ShapeError(f"cu_seqlens{side}: expected [documents + 1], got {list(array.shape)}")
        if array.dtype != frontend.numpy.int32:
            raise DTypeError(f"cu_seqlens{side}: expected dtype int32, got {array.dtype}; cast it to int32")
        lengths.append(host_int(f"max_seqlen{side}", length))
    return SeqInfo(*offsets, *lengths)


def places_in_documents(frontend: Frontend, cu_seqlens: Array, tokens: int) -> tuple[Any, Any]:
    """Returns the document of each token, and its place there, integers ``[tokens]`` each.

    A token behind the last offset has the number of documents as its document.
    """
    numpy = frontend.numpy
    at = numpy.arange(tokens, dtype=numpy.int32, device=frontend.device(cu_seqlens))
    documents = frontend.searchsorted(cu_seqlens[1:], at)
    return documents, at - cu_seqlens[documents]


def with_slopes(frontend: Frontend, q: Array, k: Array, info: SeqInfo, slopes: Array | None) -> dict[str, Any]:
    """Returns the keywords that add ALiBi: the slopes, or a function if each document has its own."""
    if slopes is None:
        return {}
    frontend.check_constant("alibi_slopes", slopes)
    documents = info.cu_seqlens_q.shape[0] - 1
    if slopes.ndim != 2 or documents == 1 or q.ndim != 3 or k.ndim != 3:
        return {"alibi_slopes": slopes}
    if tuple(slopes.shape) != (documents, q.shape[1]):
        raise ShapeError(
            f"alibi_slopes: expected [heads] = [{q.shape[1]}] or [documents, heads] = [{documents}, {q.shape[1]}], got "
            f"{list(slopes.shape)}"
        )
    numpy = frontend.numpy
    of_query, queries = places_in_documents(frontend, info.cu_seqlens_q, q.shape[0])
    _, keys = places_in_documents(frontend, info.cu_seqlens_k, k.shape[0])
    more = numpy.diff(info.cu_seqlens_k) - numpy.diff(info.cu_seqlens_q)  # keys of a document than queries
    of_query = of_query.clip(max=documents - 1)  # a token behind the last offset sees no key
    wide = frontend.cast(slopes, numpy.promote_types(q.dtype, numpy.float32))
    arrays = wide[of_query], queries + more[of_query], keys
    return {"score_mod": TracedFunction(slopes_of_tokens(), arrays)}


@cache
def slopes_of_tokens() -> Expression:
    """Returns ``score - slope * |q - k|`` in places of documents: ALiBi whose slopes differ between documents.

    Its arrays: the slopes of each query, float ``[tokens, heads]``; and int32 ``[tokens]``: the place of each
    query, counted so that the last query stands at the last key of its document, and the place of each key.
    """

    def score_mod(
        score: Symbol,
        b: Symbol,
        h: Symbol,
        q: Symbol,
        k: Symbol,
        slopes: SymbolicArray,
        queries: SymbolicArray,
        keys: SymbolicArray,
    ) -> Symbol:
        return score - slopes[q, h] * abs(queries[q] - keys[k])

    arrays = (Aux((1, 1), "float32"), Aux((1,), "int32"), Aux((1,), "int32"))
    return trace_score(score_mod, arrays).tree
