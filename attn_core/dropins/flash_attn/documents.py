"""Packed documents in flash-attn's functions: their checks, the places of tokens in them, and slopes for each."""

from __future__ import annotations

from functools import cache
from typing import Any

from attn_core.call.seq_info import SeqInfo
from attn_core.dropins.flash_attn.arguments import host_int
from attn_core.dropins.flash_attn.frontend import Frontend
from attn_core.errors import DTypeError, ShapeError
from attn_core.expressions.tracing import Aux, TracedFunction, trace_score
from attn_core.expressions.tree import Expression


def documents_of(
    frontend: Frontend,
    q: Any,
    offsets: tuple[Any, Any],
    longest: tuple[Any, Any],
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


def places_in_documents(frontend: Frontend, cu_seqlens: Any, tokens: int) -> tuple[Any, Any]:
    """Returns the document of each token, and its place there, integers ``[tokens]`` each.

    A token behind the last offset has the number of documents as its document.
    """
    numpy = frontend.numpy
    at = numpy.arange(tokens, dtype=numpy.int32, device=frontend.device(cu_seqlens))
    documents = frontend.searchsorted(cu_seqlens[1:], at)
    return documents, at - cu_seqlens[documents]


def with_slopes(frontend: Frontend, q: Any, k: Any, info: SeqInfo, slopes: Any) -> dict[str, Any]:
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

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, slopes: Any, queries: Any, keys: Any) -> Any:
        return score - slopes[q, h] * abs(queries[q] - keys[k])

    arrays = (Aux((1, 1), "float32"), Aux((1,), "int32"), Aux((1,), "int32"))
    return trace_score(score_mod, arrays).tree
