"""Hypothesis strategies for whole attention calls, from sizes, features and a seed for the numbers.

Sizes are few, small and mostly distinct primes, so that swapped axes cannot fit. ``calls`` combines features freely,
three times out of four only features that a backend claims. ``compiled_calls`` draws from a dozen signatures and
varies only values that do not make XLA compile again: the numbers, the mask, and the ends of documents. ``corners``
are fixed calls that no draw may leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from oracle_cases import fill

from attn_core import AttentionSpec
from attn_core.backends.support import Support
from attn_core.call.functions import AUX
from attn_core.call.spec import DTYPES
from attn_core.call.tensors import Inputs
from attn_core.cli.trial import functions_of
from attn_core.expressions import exp, maximum, tanh, to_float, trace_score, where
from attn_core.expressions.properties import aux_numbers
from attn_core.expressions.tracing import Aux
from tests.campaign.functions import MASKS, SCORES, fields_of

LARGE = {
    "float64": (-(2.0**30), float(np.finfo(np.float64).min), 1.75 * 2.0**1023),
    "float32": (-(2.0**30), -1.75 * 2.0**127, float(np.finfo(np.float32).min), 1.75 * 2.0**127),
    "bfloat16": (-(2.0**30), -1.75 * 2.0**127, -(2 - 2.0**-7) * 2.0**127, 1.75 * 2.0**127),
    "float16": (-65504.0, 57344.0),
}
"""Biases by their dtype that callers hide keys with, and as large ones above 0; log2(e) times some overflows."""

EXACT = ("the torch math kernel", "XLA's attention", "the aten CPU flash kernel")
"""The kernels that compute rows of large biases exactly. docs/reference/semantics.md says what others do."""

LAYOUTS = ("contiguous", "heads_outside", "sliced", "stepped", "one_head_expanded")
"""The memory layouts of torch's q, k, v and output gradient; see ``both_frontends.laid_out``."""


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One call to ``attention`` with everything that its results are judged by.

    Attributes:
        spec: the call, with gradients if it needs any.
        inputs: numpy arrays in the layout of Inputs, float64 numbers that their dtypes represent.
        dout, dlse: the incoming gradients.
        window: the window as the caller writes it: an int, a pair or None.
        layout: one of LAYOUTS.
        one_row: packed arrays are passed as ``[1, tokens, ...]``.
        low_rank: leading axes of 1 are left out of mask and bias.
        extras_dtype: of bias, slopes and sinks.
        seed: of all numbers, dropout included.
    """

    spec: AttentionSpec
    inputs: Inputs
    dout: np.ndarray
    dlse: np.ndarray
    window: Any
    layout: str = "contiguous"
    one_row: bool = False
    low_rank: bool = False
    extras_dtype: str = "float32"
    seed: int = 0

    def __repr__(self) -> str:
        offsets = [cu.tolist() for cu in (self.inputs.cu_seqlens_q, self.inputs.cu_seqlens_k) if cu is not None]
        return (
            f"Call({self.spec}; window={self.window!r}, layout={self.layout}, one_row={self.one_row}, "
            f"low_rank={self.low_rank}, extras_dtype={self.extras_dtype}, cu_seqlens={offsets}, seed={self.seed})"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would print every array
        printer.text(repr(self))

    @property
    def inference(self) -> Call:
        """The same call without gradients."""
        return replace(self, spec=replace(self.spec, needs_backward=False, bias_gradient=False, aux_gradients=()))

    @property
    def learned(self) -> tuple[str, ...]:
        """The inputs with gradients."""
        if not self.spec.needs_backward:
            return ()
        bias, sinks = ("bias",) * self.spec.bias_gradient, ("sinks",) * self.spec.sinks
        return ("q", "k", "v", *bias, *sinks, *(AUX[number] for number in self.spec.aux_gradients))

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of ``attention`` that are plain values."""
        names = ("causal", "alignment", "softcap", "scale", "dropout", "deterministic", "return_lse")
        return {name: getattr(self.spec, name) for name in names} | {"window": self.window} | functions_of(self.spec)

    def dtype_of(self, name: str) -> str:
        """The dtype in which an input (or ``dout``, ``dlse``) is passed."""
        if name == "dlse":
            return self.spec.lse_dtype
        if name in AUX:
            return str(self.spec.aux[AUX.index(name)].dtype)
        if name in ("mask", "key_ranges"):
            return "bool" if name == "mask" else "int32"
        return self.extras_dtype if name in ("bias", "alibi_slopes", "sinks") else self.spec.dtype

    def arrays(self) -> dict[str, np.ndarray]:
        """q, k, v, and the tables, slopes, sinks and key ranges that are present, in the caller's shapes."""
        names = ("q", "k", "v", "mask", "bias", "alibi_slopes", "sinks", "key_ranges", *AUX)
        actual = {name: getattr(self.inputs, name) for name in names if getattr(self.inputs, name) is not None}
        if self.one_row:
            actual |= {name: actual[name][None] for name in ("q", "k", "v")}
        if self.low_rank:
            short = {name: _without_leading_ones(actual[name]) for name in ("mask", "bias") if name in actual}
            # Fewer axes that may be meant as the batch are refused, so such a table keeps its four.
            batch = self.spec.batch
            actual |= {name: one for name, one in short.items() if batch == 1 or one.shape[:1] != (batch,)}
        return actual


MISREAD: dict[str, Callable[[AttentionSpec], dict[str, Any]]] = {
    "a window one wider": lambda spec: {"window": (spec.window[0] + 1, spec.window[1])},
    "the other alignment": lambda spec: {"alignment": "top_left"},
    "a scale one percent off": lambda spec: {"scale": 1.01 * spec.scale},
    "another softcap": lambda spec: {"softcap": spec.softcap * (1.013 if spec.dtype == "float32" else 1.066)},
}
"""What a faulty kernel may take for the fields of a spec (aligned bottom right), by the fault's name."""


def misread(call: Call, fault: str) -> Call:
    """The call as a kernel with a fault of MISREAD computes it."""
    fields = MISREAD[fault](call.spec)
    return replace(call, spec=replace(call.spec, **fields), window=fields.get("window", call.window))


Lengths = tuple[tuple[int, ...], tuple[int, ...]]
"""The lengths of query documents and of key documents."""


def make_call(
    seed: int = 0,
    lengths: Lengths | None = None,
    *,
    tail: tuple[int, int] = (0, 0),
    hiding: bool = False,
    large: float | None = None,
    **fields: Any,
) -> Call:
    """A call from the fields of a spec and of Call; ``lengths`` are those of its query and key documents.

    tail: the numbers of tokens of q and of k behind the last document.
    hiding: whether a quarter of the bias is -inf.
    large: the bias of every third row, at its keys that are not hidden.
    """
    passing = {name: fields.pop(name) for name in ("layout", "one_row", "low_rank", "extras_dtype") if name in fields}
    window = fields.pop("window", None)
    if lengths is not None:
        longest = {"max_len_q": max(lengths[0]), "max_len_k": max(lengths[1])}
        tokens = {"q_len": sum(lengths[0]) + tail[0], "kv_len": sum(lengths[1]) + tail[1]}
        fields = {**longest, **fields, **tokens, "batch": 1, "documents": len(lengths[0])}
    extras = passing.setdefault("extras_dtype", fields["dtype"])
    if fields.get("bias_shape") is not None and extras != fields["dtype"]:
        fields["bias_dtype"] = extras
    pair = (window - 1, 0) if isinstance(window, int) else window or (None, None)
    spec = AttentionSpec(**fields, window=pair)
    case = fill(spec, seed, *(lengths or ()))
    inputs = case.inputs
    if hiding and inputs.bias is not None:
        hidden = np.random.default_rng(seed + 1).random(inputs.bias.shape) < 0.25
        inputs = inputs._replace(bias=np.where(hidden, -np.inf, inputs.bias))
    if large is not None and inputs.bias is not None:
        some = (np.arange(inputs.bias.shape[2]) % 3 == 0)[:, None] & np.isfinite(inputs.bias)
        inputs = inputs._replace(bias=np.where(some, large, inputs.bias))
    if passing.get("layout") == "one_head_expanded":
        alike = {name: getattr(inputs, name)[..., :1, :] for name in ("q", "k", "v")}
        inputs = inputs._replace(**{n: np.broadcast_to(a, getattr(inputs, n).shape).copy() for n, a in alike.items()})
        case = case._replace(dout=np.broadcast_to(case.dout[..., :1, :], case.dout.shape).copy())
    return Call(spec, inputs._replace(rng=None), case.dout, case.dlse, window, seed=seed, **passing)


def _without_leading_ones(array: np.ndarray) -> np.ndarray:
    while array.ndim > 1 and array.shape[0] == 1:
        array = array[0]
    return array


def _sizes(*numbers: int) -> dict[str, int]:
    names = ("batch", "q_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "value_dim")
    return dict(zip(names, numbers, strict=True))


DENSE_SIZES = (
    _sizes(2, 5, 7, 6, 3, 11, 11),
    _sizes(3, 7, 5, 2, 2, 13, 13),
    _sizes(2, 11, 11, 5, 1, 3, 3),
    _sizes(2, 1, 17, 6, 2, 5, 5),
    _sizes(2, 5, 3, 3, 1, 7, 2),
    _sizes(1, 131, 137, 2, 1, 19, 19),  # more than one block of queries, and of the flash kernel's own
    _sizes(1, 3, 0, 2, 1, 5, 5),
    _sizes(2, 0, 3, 2, 1, 5, 5),
)
PACKED_SIZES = (  # tokens are drawn with the documents
    _sizes(1, 0, 0, 6, 3, 11, 11),
    _sizes(1, 0, 0, 2, 2, 7, 7),
    _sizes(1, 0, 0, 3, 1, 5, 13),
)
# several tiles of a kernel in each direction, the compiled widths of kernels, and some widths between them
GPU_SIZES = (
    _sizes(2, 131, 389, 4, 2, 64, 64),
    _sizes(1, 257, 257, 6, 2, 128, 128),
    _sizes(3, 1, 523, 8, 2, 128, 128),
    _sizes(1, 197, 127, 4, 1, 80, 80),
    _sizes(2, 67, 193, 2, 2, 256, 256),
)
GPU_PACKED_SIZES = (_sizes(1, 0, 0, 4, 2, 64, 64), _sizes(1, 0, 0, 6, 2, 128, 128))
WINDOWS = ((2, 1), (0, 0), (None, 1), (3, None), (1, 4))
FEATURES = (
    "causal",
    "window",
    "softcap",
    "mask",
    "key_ranges",
    "mask_mod",
    "bias",
    "alibi",
    "sinks",
    "dropout",
    "scale",
)

TAILS = st.sampled_from(((0, 0), (0, 0), (3, 2), (0, 4), (5, 0), (11, 11)))
"""The numbers of tokens of q and of k behind the last document."""


@st.composite
def document_lengths(
    draw: Any,
    documents: int | None = None,
    tokens: tuple[int, int] | None = None,
    sizes: tuple[int, ...] = (3, 1, 0, 5, 2, 7),
) -> Lengths:
    """Lengths of query and of key documents, some of them 0; at most ``tokens`` in total if that is given."""
    count = documents or draw(st.integers(1, 5), label="documents")
    if tokens is not None:
        cuts = [draw(st.lists(st.integers(0, n), min_size=count - 1, max_size=count - 1)) for n in tokens]
        ends = [draw(st.one_of(st.just(n), st.integers(max(cut, default=0), n))) for cut, n in zip(cuts, tokens)]
        queries, keys = (tuple(np.diff([0, *sorted(c), end]).tolist()) for c, end in zip(cuts, ends, strict=True))
        return queries, keys
    one_side = st.lists(st.sampled_from(sizes), min_size=count, max_size=count).map(tuple)
    queries = draw(one_side)
    return queries, draw(st.one_of(st.just(queries), one_side))


@st.composite
def calls(
    draw: Any,
    claims: Support | None = None,
    *,
    without: tuple[str, ...] = (),
    on_gpu: bool | None = None,
    squares: tuple[int, ...] = (),
) -> Call:
    """Any call with gradients; mostly within a backend's claims if they are given.

    on_gpu: whether the sizes of GPU kernels are drawn as well; by default, if the claims have GPU devices.
    squares: equal lengths of queries and keys, which half of the dense calls within the claims then have.
    """
    within = claims if claims is not None and draw(st.integers(0, 3)) else None
    packed = draw(st.booleans()) if within is None or within.packed else False
    if on_gpu is None:
        on_gpu = claims is not None and not claims.runs_on("cpu")
    longer = (131, 1, 0, 67, 2, 197) if on_gpu else (3, 1, 0, 5, 2, 7)
    lengths = draw(document_lengths(sizes=longer)) if packed else None
    tail = draw(TAILS) if packed else (0, 0)
    offered_sizes = PACKED_SIZES if packed else DENSE_SIZES
    if on_gpu and draw(st.booleans()):
        widest = (claims and claims.max_head_dim) or 256
        fitting = GPU_PACKED_SIZES if packed else GPU_SIZES
        offered_sizes = tuple(size for size in fitting if size["head_dim"] <= widest)
    if within is not None and not within.value_dim:
        offered_sizes = tuple(sizes for sizes in offered_sizes if sizes["value_dim"] == sizes["head_dim"])
    fields: dict[str, Any] = dict(draw(st.sampled_from(offered_sizes)))
    if within is not None and not within.grouped_heads:
        fields["num_kv_heads"] = fields["num_heads"]
    if packed and lengths is not None:
        fields |= {"batch": 1, "q_len": sum(lengths[0]) + tail[0], "kv_len": sum(lengths[1]) + tail[1]}
    elif within is not None and squares and draw(st.booleans()):
        fields["q_len"] = fields["kv_len"] = draw(st.sampled_from(squares))
    offered = [name for name in FEATURES if name not in without and (within is None or getattr(within, name, True))]
    for feature in sorted(draw(st.sets(st.sampled_from(offered), max_size=4))):
        fields |= draw(_feature(feature, fields))
    if isinstance(fields.get("window"), int):
        fields["causal"] = True
    fields["dtype"] = draw(st.sampled_from(("float32", *DTYPES) if within is None else within.dtypes))
    alignments = ("bottom_right", "top_left") if within is None or not within.alignments else within.alignments
    extras = draw(st.sampled_from((fields["dtype"], fields["dtype"] if fields["dtype"] == "float64" else "float32")))
    gradient_of_bias = "bias_shape" in fields and (within is None or within.bias_gradient) and draw(st.booleans())
    lse = draw(st.booleans()) and (within is None or within.lse_gradient)
    if fields.get("score_mod") is not None and (within is None or within.aux_gradients) and draw(st.booleans()):
        floats = [n for n in aux_numbers(fields["score_mod"]) if fields["aux"][n].dtype.startswith("float")]
        fields["aux_gradients"] = tuple(floats)
    if packed and draw(st.booleans()):  # an upper bound is as good as the longest document
        fields |= {"max_len_q": max(fields["q_len"], 1), "max_len_k": max(fields["kv_len"], 1) + 3}
    exact = claims is None or claims.kernel in EXACT
    return make_call(
        draw(st.integers(0, 2**16), label="seed"),
        lengths,
        tail=tail,
        hiding=draw(st.booleans()),
        large=draw(st.sampled_from((None, None, None, *LARGE[extras]))) if exact else None,
        layout=draw(st.sampled_from(LAYOUTS)),
        one_row=packed and draw(st.booleans()),
        low_rank=draw(st.booleans()),
        extras_dtype=extras,
        alignment=draw(st.sampled_from(alignments)),
        deterministic=draw(st.booleans()) and (within is None or within.deterministic),
        needs_backward=True,
        bias_gradient=gradient_of_bias,
        return_lse=lse,
        **fields,
    )


def corners(claims: Support) -> dict[str, Call]:
    """The calls that every backend must compute correctly, as far as it claims their features, by name; with gradients.

    Draws are few and meet these calls only by chance. A call returns the log-sum-exp if the backend has its gradient.
    """
    width = 8 if claims.runs_on("cpu") else 64
    kind = "float32" if "float32" in claims.dtypes else claims.dtypes[0]
    fixed = {
        **{"batch": 2, "num_heads": 4, "num_kv_heads": 2 if claims.grouped_heads else 4, "head_dim": width},
        **{"value_dim": width, "dtype": kind, "return_lse": claims.lse_gradient, "needs_backward": True},
        "alignment": (*claims.alignments, "bottom_right")[0],
    }
    square = {**fixed, "q_len": 11, "kv_len": 11}
    tall = {**fixed, "q_len": 7, "kv_len": 5}
    some_documents = ((3, 0, 2, 4, 1), (2, 4, 0, 3, 1))
    actual: dict[str, Call] = {
        "one query": make_call(**fixed, q_len=1, kv_len=7, causal=claims.causal and bool(claims.alignments)),
        "one key": make_call(**fixed, q_len=7, kv_len=1),
        "one query, one key": make_call(**fixed, q_len=1, kv_len=1, causal=claims.causal),
    }
    if claims.causal and "bottom_right" in claims.alignments:
        actual["rows without keys"] = make_call(**tall, causal=True)
        if claims.sinks:
            actual["rows without keys, with sinks"] = make_call(**tall, causal=True, sinks=True)
    if claims.window and claims.alignments:
        actual["a window beside the keys"] = make_call(**fixed, q_len=11, kv_len=4, window=(1, 0))
    if claims.softcap:  # logits near 0 below a large cap, where an absolute error of the tanh would show
        actual["few keys below a large cap"] = make_call(**fixed, q_len=2, kv_len=2, softcap=50.0)
    if claims.mask:
        actual["a mask row all False"] = _hidden(make_call(**tall, mask_shape=(2, 1, 7, 5)), np.s_[:, :, 3])
    if claims.mask and claims.window:  # row 5 sees only keys 4 to 6
        masked = make_call(**square, window=(1, 1), mask_shape=(2, 4, 11, 11))
        actual["a window with a hole"] = _hidden(masked, np.s_[:, :, :, 4:7])
    if claims.bias and claims.kernel in EXACT:
        biased = {**square, "bias_shape": (2, 4, 11, 11), "bias_gradient": claims.bias_gradient}
        for large in LARGE[kind]:
            actual[f"rows of bias {large:.3g}"] = make_call(**biased, large=large, hiding=True)
        actual["half a row of the lowest float"] = make_call(
            **{**biased, "bias_shape": (1, 1, 1, 11)}, hiding=True, large=LARGE[kind][-2]
        )
        half = {**biased, "dtype": "bfloat16"}
        actual["the lowest bfloat16"] = make_call(**half, large=LARGE["bfloat16"][-2], causal=claims.causal)
        if claims.softcap:
            actual["the lowest float beside a softcap"] = make_call(**biased, large=LARGE[kind][-2], softcap=5.0)
    if claims.packed:
        causal = claims.causal and bool(claims.alignments)
        actual["empty documents"] = make_call(0, some_documents, **fixed, causal=causal)
        if claims.window and claims.alignments:
            actual["empty documents in a window"] = make_call(0, some_documents, **fixed, window=(1, 0))
    return actual


def _hidden(call: Call, places: Any) -> Call:
    """The call with a mask that is False in some places."""
    mask = call.inputs.mask.copy()
    mask[places] = False
    return replace(call, inputs=call.inputs._replace(mask=mask))


CUDNN_SIZES = (
    _sizes(2, 66, 66, 4, 2, 64, 64),
    _sizes(1, 130, 130, 6, 2, 128, 128),
    _sizes(3, 34, 66, 4, 1, 16, 16),
    _sizes(2, 130, 34, 2, 2, 72, 72),
)


@st.composite
def cudnn_calls(draw: Any) -> Call:
    """Calls with gradients of the kind that cuDNN through jax.nn takes, and many that it accepts: even lengths."""
    fields: dict[str, Any] = dict(draw(st.sampled_from(CUDNN_SIZES)))
    fields |= draw(st.sampled_from(({}, {"causal": True}, {"causal": True, "window": 9}, {"window": (20, 0)})))
    if draw(st.integers(0, 3)) == 0:
        full = (fields["batch"], fields["num_heads"], fields["q_len"], fields["kv_len"])
        fields["mask_shape"] = (full[0], draw(st.sampled_from((1, full[1]))), *full[2:])
    fields["dtype"] = draw(st.sampled_from(("bfloat16", "float16")))
    fields["scale"] = draw(st.sampled_from((None, 0.31)))
    fields["alignment"] = draw(st.sampled_from(("bottom_right", "top_left")))
    return make_call(draw(st.integers(0, 2**16), label="seed"), needs_backward=True, **fields)


def _functions(fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields that give a call a mask function, a score function, or both."""
    sizes = tuple(fields[name] for name in ("batch", "num_heads", "q_len", "kv_len"))
    masks, scores = (st.sampled_from((None, *families)) for families in (MASKS, SCORES))
    return st.tuples(masks, scores).filter(any).map(lambda names: fields_of(*names, sizes))


def _feature(name: str, fields: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The fields that switch a feature on, for the sizes in ``fields``."""
    batch, heads = fields["batch"], fields["num_heads"]
    full = (batch, heads, fields["q_len"], fields["kv_len"])
    some_axes = st.tuples(*(st.sampled_from((size, 1)) for size in full))
    few_axes = (st.sampled_from(sizes) for sizes in ((batch, 1), (fields["num_kv_heads"], 1), full[3:], (1, 2), (2,)))
    return {
        "causal": st.just({"causal": True}),
        "window": st.sampled_from((*WINDOWS, 1, 3)).map(lambda window: {"window": window}),
        "softcap": st.sampled_from((0.7, 30.0)).map(lambda softcap: {"softcap": softcap}),
        "scale": st.sampled_from((0.31, 1.7)).map(lambda scale: {"scale": scale}),
        "mask": some_axes.map(lambda shape: {"mask_shape": shape}),
        "key_ranges": st.tuples(*few_axes).map(lambda shape: {"key_ranges_shape": shape}),
        "mask_mod": _functions(fields),
        "bias": some_axes.map(lambda shape: {"bias_shape": shape}),
        "alibi": st.sampled_from(((heads,), (batch, heads))).map(lambda shape: {"alibi_shape": shape}),
        "sinks": st.just({"sinks": True}),
        "dropout": st.sampled_from((0.1, 0.5)).map(lambda dropout: {"dropout": dropout}),
    }[name]


_PACKED_TOKENS = (13, 17)
_IN_DOCUMENTS = {**_sizes(1, *_PACKED_TOKENS, 6, 2, 7, 7), "documents": 4, "max_len_q": 13, "max_len_k": 17}


def few_numbers(call: Call) -> Call:
    """The call with one scale, one softcap and few windows, for compilers that compile numbers into their code."""
    spec, (left, right) = call.spec, call.spec.window
    window = tuple(None if side is None else min(side, most) for side, most in ((left, 2), (right, 1)))
    softcap = None if spec.softcap is None else 1.5
    return replace(call, spec=replace(spec, scale=None, window=window, softcap=softcap), window=window)


SIGNATURES: tuple[dict[str, Any], ...] = (
    {**DENSE_SIZES[0], "dtype": "float32"},
    {**DENSE_SIZES[2], "dtype": "float32", "causal": True, "return_lse": True},
    {**DENSE_SIZES[1], "dtype": "float32", "causal": True, "sinks": True},  # rows that see no key
    {**DENSE_SIZES[2], "dtype": "bfloat16", "window": (2, 1)},
    {**DENSE_SIZES[0], "dtype": "float16", "softcap": 0.7, "mask_shape": (2, 6, 5, 7), "value_dim": 5},
    {**DENSE_SIZES[0], "dtype": "float64", "bias_shape": (1, 6, 1, 7), "bias_gradient": True, "return_lse": True},
    {**DENSE_SIZES[3], "dtype": "bfloat16", "causal": True, "alibi_shape": (2, 6)},
    {**DENSE_SIZES[0], "dtype": "float32", "dropout": 0.3, "window": 3, "causal": True, "alignment": "top_left"},
    {**_IN_DOCUMENTS, "dtype": "float32", "causal": True},
    {**_IN_DOCUMENTS, "dtype": "float32", "window": (2, 1), "alignment": "top_left", "sinks": True, "return_lse": True},
    {
        **_IN_DOCUMENTS,
        **{"dtype": "float32", "causal": True, "softcap": 1.5, "mask_shape": (1, 1, 13, 17), "alibi_shape": (6,)},
        **{"bias_shape": (1, 6, 13, 17), "bias_gradient": True, "sinks": True, "return_lse": True},
    },
    {**_sizes(1, 263, 269, 2, 1, 5, 3), "dtype": "float32", "window": (150, 3)},  # more than one block of either
    {**DENSE_SIZES[0], "dtype": "float32", "key_ranges_shape": (2, 3, 7, 2, 2), "sinks": True, "return_lse": True},
)


@st.composite
def compiled_calls(draw: Any, claims: Support | None = None) -> Call:
    """A call of one of SIGNATURES, in the dtypes, widths and alignments that a backend claims if it does not claim
    all."""
    fields = dict(draw(st.sampled_from(SIGNATURES)))
    if claims is not None and fields["dtype"] not in claims.dtypes:
        fields["dtype"] = claims.dtypes[0]
    if claims is not None and fields.get("alignment", "bottom_right") not in claims.alignments:
        fields["alignment"] = (*claims.alignments, "bottom_right")[0]
    if claims is not None and fields["head_dim"] % claims.head_dim_multiple:
        fields["head_dim"] = fields["value_dim"] = -(-fields["head_dim"] // 8) * 8
    if claims is not None and not claims.portable_dropout:
        fields.pop("dropout", None)
    lengths = draw(document_lengths(fields["documents"], _PACKED_TOKENS)) if "documents" in fields else None
    tail = tuple(n - sum(side) for n, side in zip(_PACKED_TOKENS, lengths)) if lengths else (0, 0)
    seed = draw(st.integers(0, 2**16), label="seed")
    large = None
    if "bias_shape" in fields and (claims is None or claims.kernel in EXACT):
        large = draw(st.sampled_from((None, *LARGE[fields["dtype"]])))
    hiding = draw(st.booleans())
    return make_call(seed, lengths, tail=tail, hiding=hiding, large=large, needs_backward=True, **fields)


# Score functions that read arrays which have gradients, and calls with them

LEARNED_SIZES = {"batch": 2, "q_len": 7, "kv_len": 7, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5, "value_dim": 5}
LEARNED_SIZES |= {"dtype": "float64", "needs_backward": True, "return_lse": True}
LEARNED: dict[str, tuple[Any, tuple[tuple[int, ...], ...]]] = {
    "relative bias": (lambda s, b, h, q, k, t: s + t[h, q - k + 6], ((4, 13),)),
    "beyond the array": (lambda s, b, h, q, k, t: s + t[h, q - k - 1], ((4, 3),)),
    "learned slopes": (lambda s, b, h, q, k, m: s - m[h] * to_float(abs(q - k)), ((4,),)),
    "a temperature": (lambda s, b, h, q, k, t: s / t[0], ((1,),)),
    "one number": (lambda s, b, h, q, k, t: s * exp(-t * t), ((),)),
    "a learned cap": (lambda s, b, h, q, k, c: c[h] * tanh(s / c[h]), ((4,),)),
    "two arrays": (lambda s, b, h, q, k, w, t: s * w[b, k] + t[q] * w[b, q], ((2, 7), (7,))),
    "a kink": (lambda s, b, h, q, k, t: maximum(s, t[k]), ((7,),)),
    "hides": (lambda s, b, h, q, k, t: where((k + h) % 3 == 0, -float("inf"), s + t[k]), ((7,),)),
    "not read": (lambda s, b, h, q, k, t: s + 0.0 * to_float(q), ((3,),)),
}


def learned_call(name: str, seed: int = 3, **fields: Any) -> Call:
    """A call with a function of LEARNED, and gradients of all its arrays."""
    function, shapes = LEARNED[name]
    aux = tuple(Aux(shape, fields.pop("aux_dtype", "float64")) for shape in shapes)
    tree = trace_score(function, aux).tree
    numbers = tuple(sorted({row.value for row in tree.rows if row.op == "lookup"}))
    return make_call(seed, **{**LEARNED_SIZES, **fields}, score_mod=tree, aux=aux, aux_gradients=numbers)
