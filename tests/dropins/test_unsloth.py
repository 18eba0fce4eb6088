"""Tests Unsloth's run_attention: one meaning for every backend word, in both frontends, against the float64
reference."""

from __future__ import annotations

import re
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from frameworks import EVERYWHERE, JAX, JAX_ON_GPU, TORCH, TORCH_ON_GPU, Framework, as_numpy, spied
from reference_calls import reference_call

from attn_core import AttentionSpec, DTypeError, SeqInfo, ShapeError, SpecError, Target, explain
from attn_core.call.tensors import Inputs
from attn_core.correctness import accuracy, reference
from attn_core.dropins import unsloth as arguments

pytestmark = pytest.mark.words

FLASH_WORDS = (arguments.FLASH_VARLEN, arguments.FLASH_DENSE)
WORDS = (*FLASH_WORDS, arguments.XFORMERS, arguments.SDPA)
BSZ, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM = 2, 5, 7, 6, 3, 11
LENGTHS = (3, 4, 1, 6)  # documents over two rows of 7 tokens, one of them across the border
Arrays = dict[str, np.ndarray]


class LowerTriangularMask:
    """Stands for xformers' class of this name."""


def numbers(
    q_len: int = Q_LEN, kv_len: int = KV_LEN, value_dim: int = HEAD_DIM, bsz: int = BSZ, head_dim: int = HEAD_DIM
) -> Arrays:
    """Q, K, V in the host's layout: ``[bsz, heads, len, head_dim]``."""
    random = np.random.default_rng(0)
    shapes = {
        "Q": (bsz, HEADS, q_len, head_dim),
        "K": (bsz, KV_HEADS, kv_len, head_dim),
        "V": (bsz, KV_HEADS, kv_len, value_dim),
    }
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def config(framework: Framework, word: str = arguments.SDPA, **bags: Any) -> Any:
    return framework.frontend.unsloth.AttentionConfig(word, KV_HEADS, HEADS // KV_HEADS, **bags)


def context(framework: Framework, arrays: Arrays, **what: Any) -> Any:
    bsz, heads, q_len, head_dim = arrays["Q"].shape
    return framework.frontend.unsloth.AttentionContext(bsz, q_len, arrays["K"].shape[2], heads, head_dim, **what)


def passed(
    framework: Framework,
    arrays: Arrays,
    word: str = arguments.SDPA,
    bags: Any = None,
    dtype: Any = None,
    **what: Any,
) -> dict[str, Any]:
    """The arguments of one call. numpy arrays in the options and the context become the framework's, and a function
    there gets the framework. dtype: of Q, K and V, or of each."""

    def own(value: Any) -> Any:
        if isinstance(value, FunctionType):
            return value(framework)
        return framework.array(value) if isinstance(value, np.ndarray) else value

    given = {bag: {key: own(value) for key, value in entries.items()} for bag, entries in (bags or {}).items()}
    dtypes = dtype if isinstance(dtype, dict) else dict.fromkeys(arrays, dtype)
    return {
        "config": config(framework, word, **given),
        "context": context(framework, arrays, **{name: own(value) for name, value in what.items()}),
        **{name: framework.array(array, dtypes[name]) for name, array in arrays.items()},
    }


def run(framework: Framework, arrays: Arrays, *given: Any, **what: Any) -> np.ndarray:
    """The output of one call, which ``passed`` describes."""
    out = framework.frontend.run_attention(**passed(framework, arrays, *given, **what))
    assert tuple(out.shape) == (arrays["Q"].shape[0], arrays["Q"].shape[2], HEADS, arrays["V"].shape[3])
    return as_numpy(out)


def reference_of(arrays: Arrays, **call: Any) -> tuple[AttentionSpec, Inputs]:
    """The reference's call, causal unless ``call`` says otherwise."""
    return reference_call(*(array.swapaxes(1, 2) for array in arrays.values()), **{"causal": True, **call})


def expected(arrays: Arrays, **call: Any) -> np.ndarray:
    """The reference's output in the host's layout."""
    out, _ = reference.forward(*reference_of(arrays, **call))
    bsz, _, rows, _ = arrays["Q"].shape
    return out.reshape(bsz, rows, HEADS, -1)


def close(actual: np.ndarray, right: np.ndarray, what: str = "") -> None:
    np.testing.assert_allclose(actual, right, atol=2e-5, rtol=0, err_msg=what)


def documents(lengths: Any = LENGTHS, kind: str = "arrays") -> Any:
    """The documents as a SeqInfo of host or framework arrays, or as the host's triple; of a framework to come."""

    def made(framework: Framework) -> Any:
        if kind == "host":
            return SeqInfo.from_lengths(lengths)
        if kind == "arrays":
            return SeqInfo.from_lengths(lengths, array=framework.array)
        cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
        return framework.array(np.array(lengths, np.int32)), framework.array(cu_seqlens), max(lengths)

    return made


class Starts(NamedTuple):
    """Stands for xformers' class that holds the offsets of queries or keys."""

    seqstart: Any
    seqstart_py: list[int]
    max_seqlen: int


def xformers_mask(
    name: str, lengths: Any, lengths_k: Any = None, window: int | None = None, on_device: bool = False
) -> Any:
    """Stands for xformers' mask of that name, of a framework to come; its offsets may be on the device alone."""

    def made(framework: Framework) -> Any:
        mask = type(name, (), {} if window is None else {"_window_size": window})()
        for side, sizes in (("q_seqinfo", lengths), ("k_seqinfo", lengths_k or lengths)):
            starts = np.cumsum([0, *sizes]).astype(np.int32)
            held = (framework.array(starts), []) if on_device else (None, starts.tolist())
            setattr(mask, side, Starts(*held, max(sizes)))
        return mask

    return made


both = pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
in_torch, in_jax = (
    pytest.mark.parametrize("framework", [first, pytest.param(second, marks=pytest.mark.cuda)], ids=str)
    for first, second in ((TORCH, TORCH_ON_GPU), (JAX, JAX_ON_GPU))
)
KEEP = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]], np.int32)
RANDOM = np.random.default_rng(1)
FULL_MASK = RANDOM.random((BSZ, 1, Q_LEN, KV_LEN)) < 0.6
FULL_BIAS = np.where(FULL_MASK, RANDOM.normal(size=(BSZ, 1, Q_LEN, KV_LEN)), -np.inf).astype(np.float32)


class Call(NamedTuple):
    """A call of the host, and what it means."""

    what: dict[str, Any]
    """Of the context."""
    bags: dict[str, dict[str, Any]]
    """The options."""
    sizes: dict[str, int]
    """As ``numbers`` takes them."""
    fields: dict[str, Any]
    """As ``reference_call`` takes them."""

    def means(self, **fields: Any) -> Call:
        return self._replace(fields=fields)


def call(sizes: dict[str, int] | None = None, **given: Any) -> Call:
    """A call that means plain causal attention; options have the name of their bag without ``_kwargs``."""
    bags = {f"{word}_kwargs": given.pop(word) for word in WORDS if word in given}
    return Call(given, bags, sizes or {}, {})


KEPT = {"mask": KEEP[:, None, None, :] != 0}
SHOWN, ADDED = {"mask": FULL_MASK, "causal": False}, {"bias": FULL_BIAS, "causal": False}
SLOPES = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)
SQUARE = {"q_len": 7, "kv_len": 7}
KEEP_14 = np.random.default_rng(2).random(14) < 0.6


def rows_of_14(bsz: int) -> dict[str, int]:
    return {"q_len": 14 // bsz, "kv_len": 14 // bsz, "bsz": bsz}


def gemma2(length: int, slides: bool, packed: bool) -> Call:
    """A layer of Gemma 2. All of them pass the config's window; the bool tells which of them slide."""
    lengths = (2 * length - 1, 1) if packed else None
    distances = (3, 3) if slides and length > 3 else (-1, -1)
    flash = {"causal": True, "softcap": 50.0, "softmax_scale": 0.25, "window_size": distances}
    return call(
        {"q_len": length, "kv_len": length},
        **{"causal_mask": slides, "sliding_window": 3, "seq_info": documents(lengths) if packed else None},
        **{"flash_dense": flash, "flash_varlen": {"dropout_p": 0.0, **flash}},
    ).means(window=(2, 0) if slides else (None, None), softcap=50.0, scale=0.25, lengths=lengths)


def mistral(mask: str, packed: bool) -> Call:
    """Mistral beyond its window, which it passes three times: in flash's options, in the context, and in a mask."""
    lengths, bsz = ((5, 2), 1) if packed else (None, BSZ)
    masks = {
        "blocks": xformers_mask("BlockDiagonalCausalLocalAttentionMask", [7] * bsz, window=3),  # the rows
        "rows": type("LowerTriangularFromBottomRightLocalAttentionMask", (), {"_window_size": 3})(),
    }
    return call(
        {**SQUARE, "bsz": bsz},
        **{"causal_mask": masks[mask], "sliding_window": 3, "seq_info": documents(lengths) if packed else None},
        flash_dense={"causal": True, "window_size": (3, 3)},
        flash_varlen={"dropout_p": 0.0, "causal": True, "softmax_scale": None},
    ).means(window=(2, 0), lengths=lengths)


CALLS: dict[str, Call] = {
    # the context
    "plain": call(),
    "keep mask": call(attention_mask=KEEP).means(**KEPT),
    "bool keep mask": call(attention_mask=KEEP != 0).means(**KEPT),
    "float keep mask": call(attention_mask=KEEP.astype(np.float32)).means(**KEPT),
    "3-D mask": call(attention_mask=FULL_MASK[:, 0]).means(**SHOWN),
    "3-D additive mask": call(attention_mask=FULL_BIAS[:, 0]).means(**ADDED),
    "4-D mask": call(attention_mask=FULL_MASK).means(**SHOWN),
    "4-D mask of one row": call(attention_mask=FULL_MASK[:, :, :1]).means(mask=FULL_MASK[:, :, :1], causal=False),
    "4-D additive mask": call(attention_mask=FULL_BIAS).means(**ADDED),
    "causal_mask": call(causal_mask=FULL_MASK).means(**SHOWN),
    "2-D causal_mask": call(causal_mask=FULL_MASK[0, 0]).means(mask=FULL_MASK[:1], causal=False),
    "triangle": call(causal_mask=LowerTriangularMask()),
    "triangle and keep mask": call(causal_mask=LowerTriangularMask(), attention_mask=KEEP).means(**KEPT),
    "sliding window": call(sliding_window=3).means(window=(2, 0)),
    "sliding window of one key": call(sliding_window=1).means(window=(0, 0)),
    "sliding window over all": call(sliding_window=99),
    "sliding window 0": call(sliding_window=0),
    "sliding window -1": call(sliding_window=-1),
    "sliding window and keep mask": call(sliding_window=3, attention_mask=KEEP).means(window=(2, 0), **KEPT),
    "not causal": call(is_causal=False).means(causal=False),
    "not causal and keep mask": call(is_causal=False, attention_mask=KEEP).means(causal=False, **KEPT),
    "not causal and 4-D mask": call(is_causal=False, attention_mask=FULL_MASK).means(**SHOWN),
    "not causal twice": call(is_causal=False, sdpa={"is_causal": False}).means(causal=False),
    "training": call(training=True, sliding_window=3).means(window=(2, 0)),
    # a bool decides whether a layer slides
    "slides": call(sliding_window=3, causal_mask=True).means(window=(2, 0)),
    "does not slide": call(sliding_window=3, causal_mask=False),
    "slides, keep mask": call(sliding_window=3, causal_mask=True, attention_mask=KEEP).means(window=(2, 0), **KEPT),
    "does not slide, keep mask": call(sliding_window=3, causal_mask=False, attention_mask=KEEP).means(**KEPT),
    # a complete mask contains the window, as the host builds masks; a window in the options still applies
    "sliding window and complete mask": call(sliding_window=3, attention_mask=FULL_MASK).means(**SHOWN),
    "sliding window, complete mask, causal": call(
        sliding_window=3, attention_mask=FULL_MASK, flash_dense={"causal": True}
    ).means(mask=FULL_MASK, causal=True),
    "sliding window, complete mask, causal, window": call(
        sliding_window=3, attention_mask=FULL_MASK, flash_dense={"causal": True, "window_size": (4, 4)}
    ).means(mask=FULL_MASK, causal=True, window=(4, 0)),
    "sliding window, complete mask, not causal": call(
        sliding_window=3, attention_mask=FULL_MASK, sdpa={"is_causal": False}
    ).means(**SHOWN),
    # an option in any of its places
    "causal=False": call(flash_dense={"causal": False}).means(causal=False),
    "is_causal=False": call(sdpa={"is_causal": False}).means(causal=False),
    "scale for flash": call(flash_varlen={"softmax_scale": 0.7}).means(scale=0.7),
    "scale for sdpa": call(sdpa={"scale": 0.7, "enable_gqa": True}).means(scale=0.7),
    "scale for xformers": call(xformers={"scale": 0.7}).means(scale=0.7),
    "softcap for flash": call(flash_dense={"softcap": 1.5}).means(softcap=1.5),
    "softcap for xformers": call(xformers={"softcap": 1.5}).means(softcap=1.5),
    "no softcap": call(flash_dense={"softcap": 0.0}),
    "window": call(flash_varlen={"window_size": (2, 0)}).means(window=(2, 0)),
    "window in a list": call(flash_varlen={"window_size": [2, -1]}).means(window=(2, None)),
    **{
        f"two-sided window for {bag}": call(**{bag: {"window_size": (2, 1), "causal": False}}).means(
            window=(2, 1), causal=False
        )
        for bag in FLASH_WORDS
    },
    "no window": call(flash_varlen={"window_size": (-1, -1)}),
    "slopes": call(flash_dense={"alibi_slopes": SLOPES}).means(slopes=SLOPES),
    "mask for sdpa": call(sdpa={"attn_mask": FULL_MASK}).means(**SHOWN),
    "2-D mask for sdpa": call(sdpa={"attn_mask": FULL_MASK[1, 0]}).means(mask=FULL_MASK[1:], causal=False),
    "2-D bias for sdpa": call(sdpa={"attn_mask": FULL_BIAS[1, 0]}).means(bias=FULL_BIAS[1:], causal=False),
    "bias for xformers": call(xformers={"attn_bias": FULL_BIAS}).means(**ADDED),
    "triangle for xformers": call(xformers={"attn_bias": LowerTriangularMask()}),
    "complete mask and window": call(sdpa={"attn_mask": FULL_MASK}, flash_dense={"window_size": (2, 1)}).means(
        **SHOWN, window=(2, 1)
    ),
    "complete mask and causal": call(sdpa={"attn_mask": FULL_MASK, "is_causal": True}).means(
        mask=FULL_MASK, causal=True
    ),
    "nothing said": call(flash_dense={"softmax_scale": None, "alibi_slopes": None, "dropout_p": 0.0}),
    "the same twice": call(
        flash_dense={"causal": True, "softmax_scale": 0.7}, sdpa={"is_causal": True, "scale": 0.7}
    ).means(scale=0.7),
    # flash's distances with a sliding window are that many keys
    **{
        f"sliding window, distances {pair} for {bag}": call(
            sliding_window=3, **{bag: {"window_size": pair, "causal": True}}
        ).means(window=(2, 0))
        for bag in FLASH_WORDS
        for pair in ((3, 3), (2, 0), (2, 2), (3, 0), (3, -1))
    },
    # new queries are at the end of the keys: decoding, chunked prefill, prefill, and rows before the first key
    **{
        f"{q_len} queries, {kv_len} keys, sliding window {window}": call(
            {"q_len": q_len, "kv_len": kv_len}, sliding_window=window
        ).means(window=(None, None) if window is None else (window - 1, 0))
        for q_len, kv_len in ((1, 7), (3, 7), (7, 7), (7, 3))
        for window in (None, 2)
    },
    "values of another head_dim": call({"value_dim": 5}),
    # documents may continue in the next row
    **{
        f"documents as {kind}, {bsz} rows": call(rows_of_14(bsz), seq_info=documents(kind=kind)).means(lengths=LENGTHS)
        for kind in ("host", "arrays", "triple")
        for bsz in (1, 2, 7)
    },
    **{
        f"documents, keep mask of {dtype.__name__}, {bsz} rows": call(
            rows_of_14(bsz), seq_info=documents(), attention_mask=KEEP_14.reshape(bsz, -1).astype(dtype)
        ).means(lengths=LENGTHS, mask=KEEP_14[None, None, None])
        for dtype in (np.bool_, np.int64, np.int32)
        for bsz in (1, 2)
    },
    **{
        f"documents, complete mask {mask.shape}": call(rows_of_14(1), seq_info=documents(), attention_mask=mask).means(
            lengths=LENGTHS, mask=mask, causal=False
        )
        for rows in (1, 14)
        for heads in (1, HEADS)
        for mask in [np.random.default_rng(3).random((1, heads, rows, 14)) < 0.6]
    },
    **{
        f"gemma2, {length} tokens, slides={slides}, packed={packed}": gemma2(length, slides, packed)
        for length, slides, packed in product((7, 2), (False, True), (False, True))
    },
    **{
        f"mistral, mask of {mask}, packed={packed}": mistral(mask, packed)
        for mask, packed in product(("blocks", "rows"), (False, True))
    },
    "documents and sliding window": call(SQUARE, seq_info=documents(), sliding_window=3).means(
        lengths=LENGTHS, window=(2, 0)
    ),
    "documents and every option": call(
        SQUARE,
        seq_info=documents(kind="triple"),
        sliding_window=3,
        flash_varlen={"causal": True, "softcap": 1.5, "softmax_scale": 0.7, "window_size": (3, 3)},
    ).means(lengths=LENGTHS, softcap=1.5, scale=0.7, window=(2, 0)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CALLS)
@both
def test_every_word_means_the_same(framework: Framework, name: str) -> None:
    call = CALLS[name]
    right = expected(numbers(**call.sizes), **call.fields)
    for word in WORDS:
        close(run(framework, numbers(**call.sizes), word, call.bags, **call.what), right, word)


@pytest.mark.parametrize("pair", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("bag", FLASH_WORDS)
@pytest.mark.parametrize("masked", [False, True])
@both
def test_unbounded_flash_distances_mean_all_keys_if_flash_runs(
    framework: Framework, masked: bool, bag: str, pair: Any
) -> None:
    """The host's flash branches follow their distances, its other branches follow the sliding window."""
    what = {"attention_mask": KEEP} if masked else {}  # makes the host choose SDPA
    for word in WORDS:
        actual = run(framework, numbers(), word, {f"{bag}_kwargs": {"window_size": pair}}, sliding_window=3, **what)
        window = (None, None) if word in FLASH_WORDS and not masked else (2, 0)
        close(actual, expected(numbers(), window=window, **KEPT if masked else {}), word)


def granite(dropout: float) -> dict[str, dict[str, Any]]:
    """Granite's options: packed rows never drop."""
    return {
        "flash_dense_kwargs": {"causal": True, "softmax_scale": 0.5, "dropout_p": dropout, "window_size": (14, 14)},
        "flash_varlen_kwargs": {"causal": True, "softmax_scale": 0.5, "dropout_p": 0.0},
        "sdpa_kwargs": {"scale": 0.5, "dropout_p": dropout},
        "xformers_kwargs": {"scale": 0.5, "p": dropout},
    }


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("word", WORDS)
@in_torch
def test_granites_dropout_comes_from_the_options_of_the_hosts_branch(
    framework: Framework, word: str, packed: bool, masked: bool
) -> None:
    arrays = numbers(7, 7)
    what = {"seq_info": documents()} if packed else {}
    what |= {"attention_mask": np.ones((BSZ, 7), np.int32)} if masked else {}
    actual = run(framework, arrays, word, granite(0.1), **what)
    kept = expected(arrays, scale=0.5, lengths=LENGTHS if packed else None)
    if word == arguments.FLASH_VARLEN and packed and not masked:
        close(actual, kept)
    else:
        assert np.abs(actual - kept).max() > 0.01
    none = {name: {"dropout_p" if name != "xformers_kwargs" else "p": 0.0} for name in granite(0.1)}
    others = none | {f"{arguments.SDPA}_kwargs": {"dropout_p": 0.5}}
    if word != arguments.SDPA and not masked:  # these options do not apply
        close(run(framework, arrays, word, others), expected(arrays))


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["rows", "packed", "masked"])
@both
def test_dropout_of_another_branch_drops_nothing(framework: Framework, kind: str, word: str) -> None:
    """The function of the host's branch gets its own bag, and without dropout there it drops nothing."""
    what: dict[str, Any] = {"seq_info": documents()} if kind == "packed" else {}
    what |= {"attention_mask": np.ones((BSZ, 7), np.int32)} if kind == "masked" else {}
    dense = word == arguments.FLASH_VARLEN and kind != "packed"
    branch = arguments.SDPA if kind == "masked" else arguments.FLASH_DENSE if dense else word
    own = "scale" if branch in (arguments.SDPA, arguments.XFORMERS) else "softmax_scale"
    arrays = numbers(7, 7)
    right = expected(arrays, scale=0.4, lengths=LENGTHS if kind == "packed" else None)
    for bag in (each for each in WORDS if each != branch):  # the branch's own: Granite's test
        dropout = {"p" if bag == arguments.XFORMERS else "dropout_p": 0.5}
        bags = {f"{bag}_kwargs": dropout, f"{branch}_kwargs": {own: 0.4}}
        close(run(framework, arrays, word, bags, **what), right, bag)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("letters", ["Q", "K", "QK", "KV"])
@both
def test_float32_with_one_half_dtype_is_computed_in_the_half_dtype(
    framework: Framework, letters: str, half: str
) -> None:
    """Some of Q, K and V are float32 because adapters returned float32."""
    mixed = {name: "float32" if name in letters else half for name in "QKV"}
    given = passed(framework, numbers(), dtype=mixed)
    out = framework.frontend.run_attention(**given)
    assert out.dtype == given["Q"].dtype
    np.testing.assert_array_equal(as_numpy(out), run(framework, numbers(), dtype=half))


# xformers' masks


BLOCKS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "all": ("BlockDiagonalMask", None, {"causal": False}),
    "causal": ("BlockDiagonalCausalMask", None, {}),
    "causal from the end": ("BlockDiagonalCausalFromBottomRightMask", None, {}),
    "window": ("BlockDiagonalCausalLocalAttentionMask", 3, {"window": (2, 0)}),
    "window from the end": ("BlockDiagonalCausalLocalAttentionFromBottomRightMask", 3, {"window": (2, 0)}),
}


@pytest.mark.sampled
@pytest.mark.on_gpus(
    only=lambda framework, word, name, bsz, on_device: (
        (bsz, on_device) == (2, True)
        and (name == "all" or (word == arguments.FLASH_VARLEN and (framework.name == "torch" or name == "window")))
    )
)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bsz", [1, 2])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("word", WORDS)
@both
def test_blocks_of_an_xformers_mask_are_documents(
    framework: Framework, word: str, name: str, bsz: int, on_device: bool
) -> None:
    kind, window, fields = BLOCKS[name]
    arrays = numbers(**rows_of_14(bsz))
    mask = xformers_mask(kind, LENGTHS, window=window, on_device=on_device)
    right = expected(arrays, lengths=LENGTHS, **fields)
    close(run(framework, arrays, word, causal_mask=mask), right)
    close(run(framework, arrays, word, {"xformers_kwargs": {"attn_bias": mask}}), right)
    if fields.get("causal", True):
        actual = run(framework, arrays, word, causal_mask=mask, attention_mask=KEEP_14.reshape(bsz, -1))
        close(actual, expected(arrays, lengths=LENGTHS, mask=KEEP_14[None, None, None], **fields))


@both
def test_new_queries_are_at_the_end_of_the_keys_of_their_block(framework: Framework) -> None:
    mask = xformers_mask("BlockDiagonalCausalLocalAttentionFromBottomRightMask", (2, 3), (4, 3), window=2)
    arrays = {name: array[:1] for name, array in numbers(5, 7).items()}
    actual = run(framework, arrays, causal_mask=mask)
    for rows, keys in (slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7)):
        part = {name: array[:, :, rows if name == "Q" else keys] for name, array in arrays.items()}
        close(actual[:, rows], expected(part, window=(1, 0)))


# Packed documents


@both
def test_documents_that_equal_the_rows_run_as_a_batch(framework: Framework) -> None:
    arrays = numbers(7, 7)
    packed = run(framework, arrays, seq_info=documents((7, 7), "triple"))
    close(packed, run(framework, arrays))


# Sizes


@pytest.mark.parametrize(
    "arrays", [numbers(0, 7), numbers(5, 0), numbers(5, 7, bsz=0)], ids=["no queries", "no keys", "no rows"]
)
@both
def test_calls_without_keys_give_zeros(framework: Framework, arrays: Arrays) -> None:
    assert not run(framework, arrays).any()


@both
def test_documents_without_rows(framework: Framework) -> None:
    keep = np.ones((0, 7), np.int32)
    out = run(framework, numbers(7, 7, bsz=0), seq_info=documents((0, 0)), attention_mask=keep)
    assert out.shape == (0, 7, HEADS, HEAD_DIM)


@both
def test_rows_without_visible_keys_are_zeros(framework: Framework) -> None:
    """The first query of row 0 sees only keys that the mask drops."""
    out = run(framework, numbers(7, 7), attention_mask=KEEP)
    assert not out[0, :2].any()
    assert np.isfinite(out).all()


# Gradients and tracing


@pytest.mark.parametrize("packed", [False, True])
@both
def test_gradients_match_the_reference(framework: Framework, packed: bool) -> None:
    arrays = numbers(7, 7)
    what = {"seq_info": documents()} if packed else {"sliding_window": 3}
    fields: dict[str, Any] = {"lengths": LENGTHS} if packed else {"window": (2, 0)}
    spec, inputs = reference_of(arrays, needs_backward=True, **fields)
    out, lse = reference.forward(spec, inputs)
    right = reference.backward(spec, inputs, out, lse, out)[:3]

    def gradients(word: str) -> list[np.ndarray]:
        given = passed(framework, arrays, word, requires_grad=True, **what)
        call = partial(framework.frontend.run_attention, config=given["config"], context=given["context"])
        return framework.gradients(jax.jit(call) if framework.name == "jax" else call, arrays)[1:]

    first, *others = map(gradients, WORDS)
    for actual, expected in zip(first, right, strict=True):
        np.testing.assert_allclose(actual.swapaxes(1, 2).reshape(expected.shape), expected, rtol=0, atol=1e-4)
    apart = 0.0 if framework.device == "cpu" else 1e-4  # every word has its own kernels there
    assert all(np.abs(one - actual).max() <= apart for other in others for one, actual in zip(other, first))


some_calls = pytest.mark.parametrize("name", ["plain", "sliding window", "keep mask"])


@some_calls
@in_jax
def test_jit_traces_every_array(framework: Framework, name: str) -> None:
    what = CALLS[name].what

    @jax.jit
    def program(own: Any, masks: Any) -> Any:
        given = {"config": config(framework), "context": context(framework, numbers(), **{**what, **masks})}
        return framework.frontend.run_attention(**given, **own)

    own = {name: framework.array(array) for name, array in numbers().items()}
    masks = {name: framework.array(value) for name, value in what.items() if isinstance(value, np.ndarray)}
    np.testing.assert_array_equal(as_numpy(program(own, masks)), run(framework, numbers(), **what))


@some_calls
@in_torch
def test_both_frameworks_give_the_same_bits(framework: Framework, name: str) -> None:
    """From the same memory: torch reads views in place, and the last bit of its products depends on strides."""
    what = CALLS[name].what
    seen_by_jax = run(framework.other, numbers(), **what)  # XLA lays them out as [bsz, len, heads, head_dim]
    given = passed(framework, numbers(), **what)
    alike = {letter: given[letter].transpose(1, 2).contiguous().transpose(1, 2) for letter in "QKV"}
    out = framework.frontend.run_attention(**given | alike)
    np.testing.assert_array_equal(as_numpy(out), seen_by_jax)
    close(run(framework, numbers(), **what), seen_by_jax)


@in_torch
def test_dropout_is_drawn_in_torch_and_refused_without_a_key_in_jax(framework: Framework) -> None:
    bags = {"sdpa_kwargs": {"dropout_p": 0.5}}
    torch.manual_seed(0)
    first = run(framework, numbers(), bags=bags)
    torch.manual_seed(0)
    np.testing.assert_array_equal(run(framework, numbers(), bags=bags), first)
    assert np.abs(first - run(framework, numbers())).max() > 0.1
    with pytest.raises(SpecError, match=r"^dropout_p=0.5: expected 0, .*jax_frontend.attention with dropout_rng="):
        run(framework.other, numbers(), bags=bags)


def first_runnable_backend(framework: Framework, word: str, arrays: Arrays, dtype: str, **options: Any) -> str:
    """The backend that a word chooses for a causal call: the first of its preferences that can run it."""
    q, k, v = (framework.array(array, dtype).swapaxes(1, 2) for array in arrays.values())
    names = arguments.preference(config(framework, word), framework.name, framework.device_name)
    return framework.frontend.explain(q, k, v, causal=True, backend=names, **options).backend


@both
def test_a_word_is_a_preference_and_use_backend_is_binding(
    framework: Framework,
) -> None:
    plain = [first_runnable_backend(framework, word, numbers(), "float32") for word in WORDS]
    softcap = first_runnable_backend(framework, arguments.SDPA, numbers(), "float32", softcap=2.0)
    if framework.device == "cpu":
        assert ({*plain}, softcap) == ({"sdpa_flash"}, "math")
    with spied() as ran:
        for word, name in zip(WORDS, plain, strict=True):
            ran.clear()
            run(framework, numbers(), word)
            assert set(ran) == {name}
        ran.clear()
        run(framework, numbers(), bags={"flash_dense_kwargs": {"softcap": 2.0}})
        assert set(ran) == {softcap}  # a call that the word's kernels cannot run
        ran.clear()
        with framework.frontend.use_backend("math"):
            run(framework, numbers())
        assert set(ran) == {"math"}


HALF = ("plain", "sliding window", "softcap for flash", "slopes", "keep mask", "4-D additive mask")
HALF += ("documents as arrays, 2 rows", "documents and sliding window")


@pytest.mark.parametrize("name", HALF)
@both
def test_every_word_means_the_same_in_bfloat16(framework: Framework, name: str) -> None:
    """On a GPU each word runs its own kernels; every result is within the bound of the dtype."""
    call = CALLS[name]
    arrays = {letter: as_numpy(framework.array(array, "bfloat16")) for letter, array in numbers(**call.sizes).items()}
    right = accuracy.expect(*reference_of(arrays, **call.fields, dtype="bfloat16"))
    for word in WORDS:
        actual = run(framework, arrays, word, call.bags, dtype="bfloat16", **call.what)
        verdict = right.judge(out=actual.reshape(right.truth["out"].shape))
        assert verdict.ok, (word, verdict)


@pytest.mark.cuda
@pytest.mark.parametrize("word", WORDS)
def test_on_a_gpu_each_word_runs_its_own_kernels(word: str) -> None:
    """If they are installed, in the dtype that all of them take."""
    name = first_runnable_backend(TORCH_ON_GPU, word, numbers(), "bfloat16")
    available = {each for each, entry in TORCH.frontend.available_backends().items() if entry.reason is None}
    assert name in arguments.FAMILIES[word] or not available & set(arguments.FAMILIES[word])
    with spied() as ran:
        run(TORCH_ON_GPU, numbers(), word, dtype="bfloat16")
    assert ran == [name]


@pytest.mark.cuda
def test_the_word_of_this_machine() -> None:
    for framework in (TORCH_ON_GPU, JAX_ON_GPU):
        entries = framework.frontend.available_backends().items()
        available = tuple(name for name, entry in entries if entry.reason is None)
        for use_varlen in (False, True):
            actual = framework.frontend.unsloth.select_attention_backend(use_varlen=use_varlen)
            assert actual == arguments.choose_word(available, use_varlen)


def test_the_word_of_a_machine() -> None:
    assert (
        TORCH.frontend.unsloth.select_attention_backend() == JAX.frontend.unsloth.select_attention_backend() == "sdpa"
    )
    assert TORCH.frontend.unsloth.select_attention_backend(use_varlen=True) == "sdpa"
    for available, words in (
        (("flash3", "xformers", "sdpa_flash"), ("flash_dense", "flash_varlen")),
        (("flash4",), ("flash_dense", "flash_varlen")),
        (("xformers",), ("xformers", "xformers")),
        (("xformers", "sdpa_flash"), ("xformers", "sdpa")),  # torch's own kernel is as fast for packed rows
        (("sdpa_cudnn",), ("sdpa", "sdpa")),
    ):
        assert tuple(arguments.choose_word(available, use_varlen) for use_varlen in (False, True)) == words
    assert arguments.choose_word(("xformers", "sdpa_flash"), True, dropout=0.1) == "xformers"
    for frontend in (TORCH.frontend, JAX.frontend):
        assert frontend.unsloth.select_attention_backend(use_varlen=True, dropout_p=0.1) == "sdpa"


def test_preferences_end_with_automatic_choice() -> None:
    for word in WORDS:
        names = arguments.preference(config(TORCH, word), "torch", "sm90")
        assert names[0] == arguments.FAMILIES[word][0]
        assert "math" in names
        assert len(names) == len(set(names))


# What is refused


REFUSED: dict[type[Exception], dict[str, Call]] = {
    SpecError: {
        "^config.backend='flash': expected one of flash_varlen, flash_dense, xformers, sdpa": call(word="flash"),
        r"^config.flash_dense_kwargs\['windowsize'\]: unknown; expected one of causal,": call(
            flash_dense={"windowsize": 3}
        ),
        r"^config.sdpa_kwargs\['softcap'\]: unknown": call(sdpa={"softcap": 3.0}),
        r"^config.sdpa_kwargs\['scale'\]=0.25 contradicts config.flash_dense_kwargs\['softmax_scale'\]=0.5; pass": call(
            flash_dense={"softmax_scale": 0.5}, sdpa={"scale": 0.25}
        ),
        r"^context.is_causal=False contradicts config.flash_dense_kwargs\['causal'\]=True; pass causal once": call(
            is_causal=False, flash_dense={"causal": True}
        ),
        "^context.sliding_window=3: expected a causal call": call(is_causal=False, sliding_window=3),
        "^context.causal_mask is LowerTriangularMask, causal=True contradicts context.is_causal=False": call(
            is_causal=False, causal_mask=LowerTriangularMask()
        ),
        "^context.is_causal=1: expected True or False": call(is_causal=1),
        "contradicts .*; pass causal once": call(flash_varlen={"causal": True}, sdpa={"is_causal": False}),
        "contradicts .*; pass softcap once": call(flash_varlen={"softcap": 0.0}, xformers={"softcap": 30.0}),
        r"^context.causal_mask=\S+ of shape \[2, 1, 5, 7\] contradicts context.attention_mask=\S+ of shape": call(
            attention_mask=KEEP, causal_mask=FULL_MASK
        ),
        r"^context.causal_mask is LowerTriangularMask, causal=True contradicts config.flash_dense_kwargs": call(
            causal_mask=LowerTriangularMask(), flash_dense={"causal": False}
        ),
        "^context.causal_mask is BlockDiagonalCausalMask: expected one block for the whole row, because": call(
            causal_mask=xformers_mask("BlockDiagonalCausalMask", (Q_LEN, KV_LEN)),
            seq_info=SeqInfo.from_lengths([Q_LEN] * BSZ, [KV_LEN] * BSZ),
        ),
        "^context.sliding_window=3 contradicts the mask of xformers, whose window is 4": call(
            causal_mask=xformers_mask("BlockDiagonalCausalLocalAttentionMask", (3, 7), window=4), sliding_window=3
        ),
        r"^context.causal_mask is BlockDiagonalCausalMask, causal=True contradicts config.flash_dense_kwargs": call(
            causal_mask=xformers_mask("BlockDiagonalCausalMask", (3, 7)), flash_dense={"causal": False}
        ),
        r"^config.flash_dense_kwargs.*=\(4, 4\) contradicts context.sliding_window=3, which is 3 keys": call(
            sliding_window=3, flash_dense={"window_size": (4, 4)}
        ),
        r"^context.sliding_window=3: expected a causal call.*pass window_size=\(left, right\) instead": call(
            sliding_window=3, flash_dense={"window_size": (2, 2), "causal": False}
        ),
        "window_size.* contradicts .*window_size": call(
            flash_dense={"window_size": (2, 0)}, flash_varlen={"window_size": (3, 0)}
        ),
        r"^config.flash_dense_kwargs\['window_size'\]=3: expected two distances": call(flash_dense={"window_size": 3}),
        r"=\(1, 2, 3\): expected two distances": call(flash_dense={"window_size": (1, 2, 3)}),
        r"=\(1.0, 0\): expected two distances": call(flash_dense={"window_size": (1.0, 0)}),
        "^context.sliding_window=3.0: expected the number of keys": call(sliding_window=3.0),
        "^context.sliding_window=True: ": call(sliding_window=True),
        "^softcap=-1.0: ": call(flash_dense={"softcap": -1.0}),
        "^scale=0.0: ": call(sdpa={"scale": 0.0}),
        "^dropout=1.5: ": call(sdpa={"dropout_p": 1.5}),
        "^context.causal_mask is BlockDiagonalCausalMask: expected as many keys as": call(
            causal_mask=xformers_mask("BlockDiagonalCausalMask", (4, 6), (8, 6))
        ),
        "^seq_info: expected a SeqInfo, got": call(seq_info=[3, 4]),
        "^seq_info.cu": call(seq_info=SeqInfo.from_lengths([3, 8], [3, 11])),
        "invariant='both': expected one of batch, prefix, or None": call(sdpa={"invariant": "both"}),
        "invariant='prefix': expected no keys behind a query": call(sdpa={"invariant": "prefix", "is_causal": False}),
    },
    TypeError: {
        "^context.causal_mask: expected a .*BlockDiagonalPaddedKeysMask": call(
            causal_mask=xformers_mask("BlockDiagonalPaddedKeysMask", (3, 7))
        ),
        "^context.attention_mask: expected a .*, got builtins.list": call(attention_mask=KEEP.tolist()),
        "^context.causal_mask: expected a .*, got builtins.object": call(causal_mask=object()),
    },
    DTypeError: {
        r"^context.attention_mask: expected bool .*got .*int32 of shape \[2, 1, 5, 7\]; .*mask != 0": call(
            attention_mask=FULL_MASK.astype(np.int32)
        ),
        "^context.attention_mask: expected bool": call(attention_mask=FULL_MASK[:, 0].astype(np.int32)),
        r"^config.sdpa_kwargs\['attn_mask'\]: expected bool": call(
            sdpa={"attn_mask": FULL_MASK[0, 0].astype(np.int32)}
        ),
        "^k: expected the dtype of q, got q float32, k bfloat16, v float16": call(
            dtype={"Q": "float32", "K": "bfloat16", "V": "float16"}
        ),
    },
    ShapeError: {
        r"^context.attention_mask: .*\[bsz, kv_len\] = \[2, 7\], got \[2, 5\]": call(
            attention_mask=np.ones((BSZ, Q_LEN), np.int32)
        ),
        r"got \[1, 7\]": call(attention_mask=KEEP[:1]),
        r"^context.attention_mask: expected 2, 3 or 4 axes, got \[7\]": call(attention_mask=KEEP[0] != 0),
        "expected 2, 3 or 4 axes": call(attention_mask=FULL_MASK[None]),
        r"^mask: .* = \[2, 6, 5, 7\], got \[2, 1, 5, 5\]": call(attention_mask=FULL_MASK[..., :5]),
    },
}


@pytest.mark.sampled
@pytest.mark.parametrize(("error", "says"), [(error, says) for error, calls in REFUSED.items() for says in calls])
@both
def test_refused_by_name_before_anything_runs(framework: Framework, error: type[Exception], says: str) -> None:
    call = REFUSED[error][says]
    with spied() as ran, pytest.raises(error, match=says) as caught:
        run(framework, numbers(), bags=call.bags, **call.what)
    assert type(caught.value) is error
    assert ran == []


SIZES = {
    "Q": (("Q", (2, 6, 4, 11)), r"^Q: expected \[2, 6, 5, 11\] from config and context, got \[2, 6, 4, 11\]"),
    "K": (("K", (2, 3, 8, 11)), r"^K: expected \[2, 3, 7, 11\] from config and context, got \[2, 3, 8, 11\]"),
    "kv heads": (("K", (2, 6, 7, 11)), r"^K: expected \[2, 3, 7, 11\]"),
    "V": (("V", (2, 3, 8, 11)), r"^V: expected \[2, 3, 7, 11\] from config and context, got \[2, 3, 8, 11\]"),
    "V laid out otherwise": (("V", (1, 3, 14, 11)), r"^V: expected \[2, 3, 7, 11\]"),
    "rank of Q": (("Q", (6, 5, 11)), r"^Q: expected \[2, 6, 5, 11\] from config and context, got \[6, 5, 11\]"),
    "rank of V": (("V", (3, 7, 11)), r"^V: expected \[2, 3, 7, 11\]"),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("packed", [False, True])
@both
def test_sizes_must_match_the_context(framework: Framework, packed: bool, name: str) -> None:
    (which, size), says = SIZES[name]
    given = passed(framework, numbers(), **{"seq_info": documents()} if packed else {})
    with pytest.raises(ShapeError, match=says):
        framework.frontend.run_attention(**given | {which: framework.zeros(*size)})


@pytest.mark.parametrize("kind", ["arrays", "triple"])
@both
def test_one_list_of_lengths_needs_as_many_keys_as_queries(framework: Framework, kind: str) -> None:
    """With a cache it would describe only the first keys."""
    with pytest.raises(SpecError, match=r"^seq_info: expected separate lengths for queries and keys.*q_len=5 "):
        run(framework, numbers(), seq_info=documents((4, 6), kind))


@both
def test_groups_and_tensors_must_fit(framework: Framework) -> None:
    given = passed(framework, numbers())
    wrong = framework.frontend.unsloth.AttentionConfig(arguments.SDPA, KV_HEADS, 3)
    with pytest.raises(ShapeError, match=r"^config.n_groups=3: expected n_heads // n_kv_heads = 6 // 3"):
        framework.frontend.run_attention(**given | {"config": wrong})
    with pytest.raises(TypeError, match=f"^K: expected a .*; use {re.escape(framework.other.name)}_frontend"):
        framework.frontend.run_attention(**given | {"K": framework.other.zeros(2, 3, 7, 11)})


@both
def test_distances_may_be_a_list_or_a_tuple(framework: Framework) -> None:
    actual, right = (
        run(
            framework,
            numbers(),
            bags={"flash_dense_kwargs": {"window_size": pair}, "flash_varlen_kwargs": {"window_size": (3, 3)}},
            sliding_window=3,
        )
        for pair in ([3, 3], (3, 3))
    )
    np.testing.assert_array_equal(actual, right)


@in_torch
def test_autocast_computes_in_its_dtype_and_returns_float32(framework: Framework) -> None:
    arrays = numbers()
    half = run(framework, arrays, dtype="bfloat16")
    with torch.autocast(framework.device, torch.bfloat16):
        np.testing.assert_array_equal(run(framework, arrays), half)
        given = passed(framework, arrays)
        tensors = [given[name].requires_grad_() for name in arrays]
        out = framework.frontend.run_attention(**given)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(as_numpy(out), run(framework, arrays), rtol=0.05, atol=0.05)
    assert not np.array_equal(half, run(framework, arrays))
    out.sum().backward()
    assert {tensor.grad.dtype for tensor in tensors} == {torch.float32}


@pytest.mark.parametrize("bag", ["flash_dense_kwargs", "flash_varlen_kwargs", "sdpa_kwargs", "xformers_kwargs"])
@both
def test_a_chunk_has_the_bits_of_its_prompt_if_a_bag_promises_it(framework: Framework, bag: str) -> None:
    arrays = numbers(q_len=150, kv_len=150, head_dim=16, value_dim=16)
    promise = {"bags": {bag: {"invariant": "prefix"}}}
    if framework.device == "cuda":  # there the kernel that keeps the promise takes half precision alone
        promise["dtype"] = "bfloat16"
    chunk = {**arrays, "Q": arrays["Q"][:, :, -9:]}
    whole = run(framework, arrays, **promise)
    np.testing.assert_array_equal(run(framework, chunk, **promise), whole[:, -9:])


@pytest.mark.parametrize("word", WORDS)
@both
def test_a_promise_leaves_the_choice_to_one_backend_for_all_calls(framework: Framework, word: str) -> None:
    """Also on a GPU, whose kernel of one order of sums is in no word's family."""
    assert arguments.preference(config(framework, word), framework.name, "sm90", "prefix") is None
    sizes = {"batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 16, "value_dim": 16, "dtype": "bfloat16"}
    for q_len in (9, 150):
        spec = AttentionSpec(**sizes, q_len=q_len, kv_len=150, causal=True, invariant="prefix")
        assert explain(spec, Target(framework.name, "sm90")).backend == "triton_ordered"
