"""What other libraries have, and what it is here: keywords of their attention functions, and objects that are masks.

The public functions take ``**unknown: Never``, which costs 16 ns. A wrapper that catches Python's own TypeError would
cost 190 ns. A type checker refuses every unknown keyword, and ``inspect.signature`` does not show the parameter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, NamedTuple, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
Record = TypeVar("Record")

_ALIGNED = 'add alignment="top_left" for the diagonal of torch and jax.nn, which differs if q_len is not kv_len'
_DROPPING = "it always drops, so pass 0 in evaluation"
_SEEN = "bool, True = visible; an additive float mask is bias="
_OFFSETS = "SeqInfo(cu_seqlens_q, cu_seqlens_k, max_len_q, max_len_k), or SeqInfo.from_lengths([...])"
_SEGMENTS = "SeqInfo.from_lengths([...]) if segments lie one after the other, else a mask of equal segments"
_SEQUENCES = "offsets of the new tokens, because each row of block_table is one document"
_LAST = "the new tokens are the last ones of their sequence"
_LENGTHS = "int32 [batch], with the new tokens"
_NAMES = "a name from available_backends(), or None for automatic choice"
_UNWEIGHTED = "it gives (out, lse); no kernel returns the weights"
_GENERATOR = "a torch.Generator in torch, a PRNG key in JAX"
_UNCAPPED = "None switches it off"
_CHOSEN = "leave it out, because the kernel chooses it"
_SAME = "the same value"
_PAGES = "paged_attention() reads keys and values in pages"

KEYWORDS: dict[str, str | dict[str, str]] = {
    # torch.nn.functional.scaled_dot_product_attention
    "is_causal": {"causal": _ALIGNED},
    "attn_mask": {"mask": _SEEN},
    "dropout_p": {"dropout": _DROPPING},
    "enable_gqa": "leave it out, because the numbers of heads of q and k already say it",
    # flash-attn
    "softmax_scale": {"scale": _SAME},
    "window_size": {"window": "(left, right) as there, with None instead of -1"},
    "cu_seqlens": {"cu_seqlens_q": _SAME, "seq_info": _OFFSETS},
    "cu_seqlens_q": {"seq_info": _OFFSETS},
    "cu_seqlens_k": {"seq_lens": _LENGTHS, "seq_info": _OFFSETS},
    "max_seqlen": {"max_len_q": _SAME, "seq_info": _OFFSETS},
    "max_seqlen_q": {"max_len_q": _SAME, "seq_info": _OFFSETS},
    "max_seqlen_k": {"seq_info": _OFFSETS},
    "max_len_q": {"seq_info": _OFFSETS},
    "return_attn_probs": {"return_lse": _UNWEIGHTED},
    "return_softmax_lse": {"return_lse": "it gives (out, lse)"},
    "learnable_sink": {"sinks": _SAME},
    "cache_seqlens": {"seq_lens": _LENGTHS, "kv_lengths": _LENGTHS},
    "cache_leftpad": {"kv_starts": _SAME},
    "cache_batch_idx": {"cache_index": _SAME},
    "seqused_k": {"seq_lens": _LENGTHS, "kv_lengths": _LENGTHS},
    "page_table": {"block_table": _SAME},
    "block_table": _PAGES,
    "k_cache": {"k_pages": "[num_pages, page_size, kv_heads, head_dim]"},
    "v_cache": {"v_pages": "[num_pages, page_size, kv_heads, value_dim]"},
    "num_splits": _CHOSEN,
    "pack_gqa": _CHOSEN,
    "out": "only paged_attention() of torch_frontend writes into a buffer; JAX's arrays never change",
    # xformers
    "attn_bias": {"bias": "a bool mask is mask=, packed documents are seq_info="},
    "p": {"dropout": _DROPPING},
    "op": {"backend": _NAMES},
    # jax.nn, and kernels for JAX
    "implementation": {"backend": _NAMES},
    "local_window_size": {"window": "(left, right) as there, and (n, n) for an int n; an int here is a number of keys"},
    "query_seq_lengths": "leave it out, and ignore the output of padding queries",
    "key_value_seq_lengths": {"mask": "(jnp.arange(kv_len) < lengths[:, None])[:, None, None, :]"},
    "return_max_logit": "attention() has it",
    "return_residual": {"return_lse": "it gives (out, lse)"},
    "segment_ids": {
        "q_segment_ids": "int32 [batch, length]; kv_segment_ids= too, if keys have others",
        "seq_info": _SEGMENTS,
    },
    "query_segment_ids": {"q_segment_ids": _SAME},
    "decoder_segment_ids": {"q_segment_ids": _SAME},
    "segment_positions": {"q_positions": _SAME},
    "q_segment_ids": {"seq_info": _SEGMENTS, "cu_seqlens_q": _SEQUENCES},
    "kv_segment_ids": {"seq_info": _SEGMENTS, "cu_seqlens_q": _SEQUENCES},
    "q_positions": {"mask": "or alignment=, if the queries are the last ones or the first ones", "seq_lens": _LAST},
    "kv_positions": {"mask": "or leave it out, if the keys lie in order", "seq_lens": _LAST},
    "sm_scale": {"scale": _SAME},
    "soft_cap": {"softcap": _UNCAPPED},
    "logit_cap": {"softcap": _UNCAPPED},
    "logits_soft_cap": {"softcap": _UNCAPPED},
    "attn_logits_soft_cap": {"softcap": _UNCAPPED},
    "dropout_rate": {"dropout": _DROPPING},
    "dropout_key": {"dropout_rng": _GENERATOR},
    "rng": {"dropout_rng": _GENERATOR},
    "generator": {"dropout_rng": _GENERATOR},
    "precision": "set jax.default_matmul_precision around the call",
    # FlexAttention
    "score_mod": "bias=, alibi_slopes= and softcap= change scores",
    "block_mask": {"mask_mod": "pass block_mask.mask_mod", "mask": _SEEN},
    # SageAttention and Transformer Engine
    "tensor_layout": {"layout": "'bshd' for NHD, 'bhsd' for HND"},
    "qkv_format": {"layout": "'bshd' or 'bhsd'; packed tensors need seq_info="},
    # transformers, and torch's layers
    "attention_mask": {"mask": "attention_mask[:, None, None, :] != 0, if it is a padding mask [batch, kv]"},
    "padding_mask": {"mask": "padding_mask[:, None, None, :], which is bool and True at real tokens"},
    "key_padding_mask": {"mask": "~key_padding_mask[:, None, None, :], because True hides there and shows here"},
    "position_ids": {
        "q_segment_ids": "(position_ids == 0).cumsum(-1) in int32 if the positions restart at each document, because "
        "q_positions= alone does not separate documents; leave it out if they never restart",
        "seq_info": _OFFSETS,
    },
    "scaling": {"scale": _SAME},
    "sliding_window": {"window": "with causal=True an int means that many keys, self included"},
    "s_aux": {"sinks": _SAME},
    "attn_implementation": {"backend": _NAMES},
    "need_weights": {"return_lse": _UNWEIGHTED},
    "device": "tensors say their own; `attn explain --device h100` answers for a GPU that is not here",
}
"""Keyword -> {our keyword: how to write the value}, of which the first that a function has counts; or, if no function
has one, what to do instead."""

_TRANSPOSED = "pass q, k and v as [batch, shard, heads, head_dim]"
_OF_SHARDS = {"tensor_layout": _TRANSPOSED, "qkv_format": _TRANSPOSED}
"""The same for functions with a mesh, whose ``layout`` says which positions a shard holds."""


_BLOCKS = "pass seq_info=SeqInfo.from_lengths([...]) with the lengths of its blocks"
_BOTTOM_RIGHT, _TOP_LEFT = "causal=True, alignment='bottom_right'", "causal=True, alignment='top_left'"
_GAPS = "gather the used keys, because documents have no gaps between them, and pass seq_info="


class Meaning(NamedTuple):
    """What a class of masks says about a call.

    Attributes:
        causal: whether it is causal.
        alignment: the corner of its diagonal; None if it has no diagonal.
        window: whether it has a window.
        documents: whether it has blocks.
        bias: whether it has a bias.
    """

    causal: bool
    alignment: str | None
    window: bool = False
    documents: bool = False
    bias: bool = False

    @property
    def remedy(self) -> str:
        """How to write it."""
        words = [_BLOCKS] if self.documents else []
        if self.causal:
            words.append(_TOP_LEFT if self.alignment == "top_left" else _BOTTOM_RIGHT)
        if self.window:
            words.append("window=W" if self.causal else "window=(left, right)")
        text = ", ".join(words) + (" and the tensor as bias=" if self.bias else "")
        return text if self.documents else f"pass {text}"


MASKS: dict[str, Meaning | str] = {
    # xformers.ops.fmha.attn_bias
    "BlockDiagonalMask": Meaning(False, None, documents=True),
    "BlockDiagonalCausalMask": Meaning(True, "top_left", documents=True),
    "BlockDiagonalCausalFromBottomRightMask": Meaning(True, "bottom_right", documents=True),
    "BlockDiagonalCausalLocalAttentionMask": Meaning(True, "top_left", True, True),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": Meaning(True, "bottom_right", True, True),
    "LowerTriangularMask": Meaning(True, "top_left"),
    "LowerTriangularMaskWithTensorBias": Meaning(True, "top_left", bias=True),
    "LowerTriangularFromBottomRightMask": Meaning(True, "bottom_right"),
    "LowerTriangularFromBottomRightLocalAttentionMask": Meaning(True, "bottom_right", True),
    "LocalAttentionFromBottomRightMask": Meaning(False, "bottom_right", True),
    "BlockDiagonalPaddedKeysMask": _GAPS,
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}",
    "BlockDiagonalLocalAttentionPaddedKeysMask": f"{_GAPS}, window=(left, right)",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}, window=W",
    "BlockDiagonalGappyKeysMask": _GAPS,
    "BlockDiagonalCausalWithOffsetGappyKeysMask": f"{_GAPS}, {_BOTTOM_RIGHT}",
    "PagedBlockDiagonalPaddedKeysMask": _PAGES,
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": _PAGES,
    "PagedBlockDiagonalGappyKeysMask": _PAGES,
    "PagedBlockDiagonalCausalWithOffsetGappyKeysMask": _PAGES,
    # torch.nn.attention
    "BlockMask": "pass it as mask_mod= in torch, or its mask_mod; causal=, window= or seq_info= if they describe it",
    "CausalBias": f"pass {_TOP_LEFT} for upper left, {_BOTTOM_RIGHT} for lower right",
    # splash attention, of JAX and of tokamax
    "CausalMask": f"pass {_TOP_LEFT}",
    "LocalMask": "pass window=(left, right), alignment='top_left'",
    "ChunkedCausalMask": f"{_BLOCKS}, {_TOP_LEFT}",
    "FullMask": "leave mask= away",
    "NumpyMask": "pass its array as a bool mask [1, 1, q_len, kv_len]",
    "MultiHeadMask": "pass a bool mask [1, heads, q_len, kv_len], or causal= and window= if they describe it",
    "LogicalAnd": "pass causal= and window= if they describe it, else key_ranges= or a bool mask",
    "LogicalOr": "pass key_ranges= or a bool mask",
    "SegmentIds": "pass seq_info=SeqInfo.from_lengths([...]) with the lengths of the segments",
}
"""By the name of a class of masks: what it means, if options say all of it, or else what to pass instead."""


def hide_unknown(function: Function) -> Function:
    """Leaves ``*positional`` and ``**unknown`` out of a signature, for ``help`` and ``inspect.signature``."""
    signature = inspect.signature(function)
    hidden = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = [each for each in signature.parameters.values() if each.kind not in hidden]
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function


class SharedOptions:
    """The options that a function has in common with another, such as ``attention``: it takes them as ``**options``.

    As a decorator it shows them in the function's signature, for ``help`` and ``inspect.signature``.

    Args:
        function: the other one, which has the types and the defaults.
        names: of the options.
    """

    def __init__(self, function: Callable[..., object], names: Collection[str]) -> None:
        self._parameters = inspect.signature(function).parameters
        self._defaults = {name: each.default for name, each in self._parameters.items() if name in names}

    def __call__(self, function: Function) -> Function:
        hide_unknown(function)
        signature = inspect.signature(function)
        own = dict(signature.parameters)
        keywords = {name: own.pop(name) for name in [*own] if own[name].kind is inspect.Parameter.KEYWORD_ONLY}
        shared = {name: self._parameters[name] for name in self._parameters if name in (*self._defaults, *keywords)}
        parameters = [*own.values(), *(shared | keywords).values()]  # in the order of the other function
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    def given(self, function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those options of a call of the function that are not its defaults.

        Raises:
            TypeError: as ``refuse_keywords``, for keywords that it does not have.
        """
        unknown = {name: value for name, value in options.items() if name not in self._defaults}
        if unknown:
            refuse_keywords(function, unknown)
        return {name: value for name, value in options.items() if value is not self._defaults[name]}

    def complete(self, function: Callable[..., object], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all options of a call of the function, with the defaults of those that its caller left out.

        Raises:
            TypeError: as ``refuse_keywords``, for keywords that it does not have.
        """
        return {**self._defaults, **self.given(function, options)}


def refuse_keywords(function: Callable[..., object], unknown: Mapping[str, object]) -> NoReturn:
    """Raises TypeError for keywords that a function does not have, with our word for each that another library has."""
    ours = [name for name in inspect.signature(function).parameters if name != "self"]
    raise TypeError("\n".join([_sentence(word, function.__name__, ours) for word in unknown]))


def refuses_other_options(kind: type[Record]) -> type[Record]:
    """Makes a dataclass refuse keywords that it does not have as ``refuse_keywords`` does."""
    init, names = kind.__init__, {field.name for field in fields(kind)}  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: Record, *positional: Any, **options: Any) -> None:
        if unknown := {name: value for name, value in options.items() if name not in names}:
            refuse_keywords(kind, unknown)
        init(self, *positional, **options)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def refuse_unknown(
    function: Callable[..., object], unknown: Mapping[str, object], positional: Sequence[object]
) -> NoReturn:
    """Raises TypeError for arguments behind q, k and v, where torch's function has its mask; else for keywords."""
    if positional:
        raise TypeError(
            f"{function.__name__}() takes 3 positional arguments but {3 + len(positional)} were given; pass options by "
            "keyword, a mask as mask= (bool, True = visible)"
        )
    refuse_keywords(function, unknown)


def meaning(word: str, ours: Sequence[str]) -> str | dict[str, str] | None:
    """Returns the entry of ``KEYWORDS`` for a keyword, as it is for a function with these parameters."""
    return (_OF_SHARDS.get(word) if "mesh" in ours else None) or KEYWORDS.get(word)


def _sentence(word: str, function: str, ours: Sequence[str]) -> str:
    """Returns the error for an unknown keyword: which of ours means the same, that none does, or which one is close."""
    known = meaning(word, ours)
    if known is None:
        from difflib import get_close_matches

        close = get_close_matches(word, ours, n=1)
        hint = f"did you mean {close[0]}=?" if close else f"expected one of {', '.join(ours)}"
        return f"{function}() got an unexpected keyword argument {word!r}; {hint}"
    if isinstance(known, str):
        return f"{word}: {function}() has no such argument; {known}"
    for name, note in known.items():
        if name in ours:
            return f"{word}: expected {name}=; {note}"
    return f"{word}: {function}() has no {' or '.join(known)}; leave it out"


def remedy_of(value: object) -> str | None:
    """Returns what to pass instead of an object, or None if it is no such mask."""
    known = MASKS.get(type(value).__name__)
    return known.remedy if isinstance(known, Meaning) else known
