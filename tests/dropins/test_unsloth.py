"""Tests Unsloth's run_attention: one meaning for every backend word, in both frontends, against the float64
reference."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
import torch
from frameworks import EVERYWHERE, JAX, JAX_ON_GPU, TORCH, TORCH_ON_GPU, Framework, as_numpy, spied

from attn_core import AttentionSpec, DTypeError, SeqInfo, ShapeError, SpecError, Target, explain
from attn_core.call.tensors import Inputs
from attn_core.correctness import accuracy, reference
from attn_core.dropins import unsloth as arguments

pytestmark = pytest.mark.words

WORDS = (arguments.FLASH_VARLEN, arguments.FLASH_DENSE, arguments.XFORMERS, arguments.SDPA)
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


def run(
    framework: Framework,
    arrays: Arrays,
    word: str = arguments.SDPA,
    bags: Any = None,
    dtype: str | None = None,
    **what: Any,
) -> np.ndarray:
    """The output of one call. numpy arrays in the options and the context become the framework's. dtype: of Q, K and
    V."""

    def own(value: Any) -> Any:
        return framework.array(value) if isinstance(value, np.ndarray) else value

    given = {bag: {key: own(value) for key, value in entries.items()} for bag, entries in (bags or {}).items()}
    out = framework.frontend.run_attention(
        config=config(framework, word, **given),
        context=context(framework, arrays, **{name: own(value) for name, value in what.items()}),
        **{name: framework.array(array, dtype) for name, array in arrays.items()},
    )
    assert tuple(out.shape) == (arrays["Q"].shape[0], arrays["Q"].shape[2], HEADS, arrays["V"].shape[3])
    return as_numpy(out)


def reference_call(
    arrays: Arrays,
    *,
    mask: Any = None,
    bias: Any = None,
    slopes: Any = None,
    lengths: Any = None,
    **fields: Any,
) -> tuple[AttentionSpec, Inputs]:
    """A call for the reference; ``lengths`` of documents over the rows laid end to end."""
    q, k, v = (array.swapaxes(1, 2) for array in arrays.values())  # [bsz, len, heads, head_dim]
    offsets = None
    if lengths is not None:
        q, k, v = (array.reshape(-1, *array.shape[2:]) for array in (q, k, v))
        offsets = SeqInfo.from_lengths(lengths).cu_seqlens_q
        fields |= {"documents": len(lengths), "max_len_q": max(lengths), "max_len_k": max(lengths)}
    batch, q_len, kv_len = (1, len(q), len(k)) if lengths else (len(q), q.shape[1], k.shape[1])
    spec = AttentionSpec(
        **{"batch": batch, "q_len": q_len, "kv_len": kv_len, "num_heads": HEADS, "num_kv_heads": KV_HEADS},
        **{"head_dim": HEAD_DIM, "value_dim": v.shape[-1], "dtype": "float32", "causal": True, **fields},
        mask_shape=None if mask is None else mask.shape,
        bias_shape=None if bias is None else bias.shape,
        alibi_shape=None if slopes is None else slopes.shape,
    )
    return spec, Inputs(q, k, v, mask, bias, slopes, cu_seqlens_q=offsets, cu_seqlens_k=offsets)


def expected(arrays: Arrays, **call: Any) -> np.ndarray:
    """The reference's output in the host's layout; ``call`` as ``reference_call`` takes it."""
    out, _ = reference.forward(*reference_call(arrays, **call))
    bsz, _, rows, _ = arrays["Q"].shape
    return out.reshape(bsz, rows, HEADS, -1)


def expected_with_bound(arrays: Arrays, **call: Any) -> accuracy.Expected:
    """The reference's output, and the bound for a kernel in bfloat16; ``call`` as ``reference_call`` takes it."""
    return accuracy.expect(*reference_call(arrays, **call, dtype="bfloat16"))


def close(actual: np.ndarray, right: np.ndarray) -> None:
    np.testing.assert_allclose(actual, right, atol=2e-5, rtol=0)


def seq_info(framework: Framework, kind: str, lengths: Any = LENGTHS) -> Any:
    """The documents as a SeqInfo of host or framework arrays, or as the host's triple."""
    cu_seqlens = np.cumsum([0, *lengths]).astype(np.int32)
    if kind == "host":
        return SeqInfo.from_lengths(lengths)
    if kind == "arrays":
        return SeqInfo.from_lengths(lengths, array=lambda array: framework.array(array))
    return framework.array(np.array(lengths, np.int32)), framework.array(cu_seqlens), max(lengths)


both = pytest.mark.parametrize("framework", EVERYWHERE, ids=str)
in_torch, in_jax = (
    pytest.mark.parametrize("framework", [first, pytest.param(second, marks=pytest.mark.cuda)], ids=str)
    for first, second in ((TORCH, TORCH_ON_GPU), (JAX, JAX_ON_GPU))
)
KEEP = np.array([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 1]], np.int32)
RANDOM = np.random.default_rng(1)
FULL_MASK = RANDOM.random((BSZ, 1, Q_LEN, KV_LEN)) < 0.6
FULL_BIAS = np.where(FULL_MASK, RANDOM.normal(size=(BSZ, 1, Q_LEN, KV_LEN)), -np.inf).astype(np.float32)


# Options


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "keep mask": ({"attention_mask": KEEP}, {"mask": KEEP[:, None, None, :] != 0}),
    "bool keep mask": ({"attention_mask": KEEP != 0}, {"mask": KEEP[:, None, None, :] != 0}),
    "float keep mask": ({"attention_mask": KEEP.astype(np.float32)}, {"mask": KEEP[:, None, None, :] != 0}),
    "3-D mask": ({"attention_mask": FULL_MASK[:, 0]}, {"mask": FULL_MASK, "causal": False}),
    "3-D additive mask": ({"attention_mask": FULL_BIAS[:, 0]}, {"bias": FULL_BIAS, "causal": False}),
    "4-D mask": ({"attention_mask": FULL_MASK}, {"mask": FULL_MASK, "causal": False}),
    "4-D mask of one row": ({"attention_mask": FULL_MASK[:, :, :1]}, {"mask": FULL_MASK[:, :, :1], "causal": False}),
    "4-D additive mask": ({"attention_mask": FULL_BIAS}, {"bias": FULL_BIAS, "causal": False}),
    "causal_mask": ({"causal_mask": FULL_MASK}, {"mask": FULL_MASK, "causal": False}),
    "2-D causal_mask": ({"causal_mask": FULL_MASK[0, 0]}, {"mask": FULL_MASK[:1], "causal": False}),
    "triangle": ({"causal_mask": LowerTriangularMask()}, {}),
    "triangle and keep mask": (
        {"causal_mask": LowerTriangularMask(), "attention_mask": KEEP},
        {"mask": KEEP[:, None, None, :] != 0},
    ),
    "sliding window": ({"sliding_window": 3}, {"window": (2, 0)}),
    "sliding window of one key": ({"sliding_window": 1}, {"window": (0, 0)}),
    "sliding window over all": ({"sliding_window": 99}, {}),
    "sliding window 0": ({"sliding_window": 0}, {}),
    "sliding window -1": ({"sliding_window": -1}, {}),
    "sliding window and keep mask": (
        {"sliding_window": 3, "attention_mask": KEEP},
        {"window": (2, 0), "mask": KEEP[:, None, None, :] != 0},
    ),
    "not causal": ({"is_causal": False}, {"causal": False}),
    "not causal and keep mask": (
        {"is_causal": False, "attention_mask": KEEP},
        {"mask": KEEP[:, None, None, :] != 0, "causal": False},
    ),
    "not causal and 4-D mask": (
        {"is_causal": False, "attention_mask": FULL_MASK},
        {"mask": FULL_MASK, "causal": False},
    ),
    "not causal twice": ({"is_causal": False, "bags": {"sdpa_kwargs": {"is_causal": False}}}, {"causal": False}),
    "training": ({"training": True, "sliding_window": 3}, {"window": (2, 0)}),
    "sliding window and complete mask": (
        {"sliding_window": 3, "attention_mask": FULL_MASK},
        {"mask": FULL_MASK, "causal": False},
    ),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", CALLS)
@both
def test_every_word_means_the_same(framework: Framework, name: str, word: str) -> None:
    what, fields = CALLS[name]
    close(run(framework, numbers(), word, **what), expected(numbers(), **fields))


SLOPES = np.geomspace(0.5, 0.01, HEADS).astype(np.float32)
FLASH_BAGS = ("flash_dense_kwargs", "flash_varlen_kwargs")
BAGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "not causal": ({"flash_dense_kwargs": {"causal": False}}, {"causal": False}),
    "is_causal": ({"sdpa_kwargs": {"is_causal": False}}, {"causal": False}),
    "scale for flash": ({"flash_varlen_kwargs": {"softmax_scale": 0.7}}, {"scale": 0.7}),
    "scale for sdpa": ({"sdpa_kwargs": {"scale": 0.7, "enable_gqa": True}}, {"scale": 0.7}),
    "scale for xformers": ({"xformers_kwargs": {"scale": 0.7}}, {"scale": 0.7}),
    "softcap for flash": ({"flash_dense_kwargs": {"softcap": 1.5}}, {"softcap": 1.5}),
    "softcap for xformers": ({"xformers_kwargs": {"softcap": 1.5}}, {"softcap": 1.5}),
    "no softcap": ({"flash_dense_kwargs": {"softcap": 0.0}}, {}),
    "window": ({"flash_varlen_kwargs": {"window_size": (2, 0)}}, {"window": (2, 0)}),
    "window in a list": ({"flash_varlen_kwargs": {"window_size": [2, -1]}}, {"window": (2, None)}),
    "two-sided window": (
        {"flash_varlen_kwargs": {"window_size": (2, 1), "causal": False}},
        {"window": (2, 1), "causal": False},
    ),
    "no window": ({"flash_varlen_kwargs": {"window_size": (-1, -1)}}, {}),
    "slopes": ({"flash_dense_kwargs": {"alibi_slopes": SLOPES}}, {"slopes": SLOPES}),
    "mask for sdpa": ({"sdpa_kwargs": {"attn_mask": FULL_MASK}}, {"mask": FULL_MASK, "causal": False}),
    "2-D mask for sdpa": ({"sdpa_kwargs": {"attn_mask": FULL_MASK[1, 0]}}, {"mask": FULL_MASK[1:], "causal": False}),
    "2-D bias for sdpa": ({"sdpa_kwargs": {"attn_mask": FULL_BIAS[1, 0]}}, {"bias": FULL_BIAS[1:], "causal": False}),
    "bias for xformers": ({"xformers_kwargs": {"attn_bias": FULL_BIAS}}, {"bias": FULL_BIAS, "causal": False}),
    "triangle for xformers": ({"xformers_kwargs": {"attn_bias": LowerTriangularMask()}}, {}),
    "complete mask and window": (
        {"sdpa_kwargs": {"attn_mask": FULL_MASK}, "flash_dense_kwargs": {"window_size": (2, 1)}},
        {"mask": FULL_MASK, "causal": False, "window": (2, 1)},
    ),
    "complete mask and causal": (
        {"sdpa_kwargs": {"attn_mask": FULL_MASK, "is_causal": True}},
        {"mask": FULL_MASK, "causal": True},
    ),
    "nothing said": ({"flash_dense_kwargs": {"softmax_scale": None, "alibi_slopes": None, "dropout_p": 0.0}}, {}),
    "the same twice": (
        {
            "flash_dense_kwargs": {"causal": True, "softmax_scale": 0.7},
            "sdpa_kwargs": {"is_causal": True, "scale": 0.7},
        },
        {"scale": 0.7},
    ),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", BAGS)
@both
def test_an_option_may_be_in_any_of_its_places(framework: Framework, name: str, word: str) -> None:
    bags, fields = BAGS[name]
    close(run(framework, numbers(), word, bags), expected(numbers(), **fields))


@pytest.mark.parametrize("bag", FLASH_BAGS)
@pytest.mark.parametrize("pair", [(3, 3), (2, 0), (2, 2), (3, 0), (3, -1)])
@both
def test_flash_distances_with_a_sliding_window_are_that_many_keys(framework: Framework, bag: str, pair: Any) -> None:
    actual = run(framework, numbers(), bags={bag: {"window_size": pair, "causal": True}}, sliding_window=3)
    close(actual, expected(numbers(), window=(2, 0)))


FLASH_WORDS = (arguments.FLASH_VARLEN, arguments.FLASH_DENSE)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kv_len", [7, 2])
@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("word", WORDS)
@both
def test_every_second_layer_of_gemma2_attends_to_all_keys(
    framework: Framework, word: str, slides: bool, kv_len: int, packed: bool
) -> None:
    """All its layers pass the config's window; the bool tells which of them slide."""
    arrays = numbers(kv_len, kv_len)
    lengths = (2 * kv_len - 1, 1) if packed else None
    pair = (3, 3) if slides and kv_len > 3 else (-1, -1)
    bags = {"causal": True, "softcap": 50.0, "softmax_scale": 0.25, "window_size": pair}
    actual = run(
        framework,
        arrays,
        word,
        {"flash_dense_kwargs": bags, "flash_varlen_kwargs": {"dropout_p": 0.0, **bags}},
        causal_mask=slides,
        sliding_window=3,
        seq_info=seq_info(framework, "arrays", lengths) if lengths else None,
    )
    window = (2, 0) if slides else (None, None)
    close(actual, expected(arrays, window=window, softcap=50.0, scale=0.25, lengths=lengths))


@pytest.mark.parametrize("pair", [(-1, -1), (-1, 0)])
@pytest.mark.parametrize("bag", FLASH_BAGS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("word", WORDS)
@both
def test_unbounded_flash_distances_mean_all_keys_if_flash_runs(
    framework: Framework, word: str, masked: bool, bag: str, pair: Any
) -> None:
    """The host's flash branches follow their distances, its other branches follow the sliding window."""
    passed = {"attention_mask": KEEP} if masked else {}  # makes the host choose SDPA
    actual = run(framework, numbers(), word, {bag: {"window_size": pair}}, sliding_window=3, **passed)
    window = (None, None) if word in FLASH_WORDS and not masked else (2, 0)
    close(actual, expected(numbers(), window=window, mask=KEEP[:, None, None, :] != 0 if masked else None))


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("word", WORDS)
@both
def test_a_bool_decides_whether_a_layer_slides(framework: Framework, word: str, slides: bool) -> None:
    for what, fields in ({}, {}), ({"attention_mask": KEEP}, {"mask": KEEP[:, None, None, :] != 0}):
        actual = run(framework, numbers(), word, causal_mask=slides, sliding_window=3, **what)
        close(actual, expected(numbers(), window=(2, 0) if slides else (None, None), **fields))


@pytest.mark.parametrize("word", WORDS)
@both
def test_a_sliding_window_is_not_added_to_a_complete_mask_with_causal(framework: Framework, word: str) -> None:
    """The mask already contains the window, as the host builds masks. A window in the options still applies."""
    for bags, fields in (
        ({"flash_dense_kwargs": {"causal": True}}, {"causal": True}),
        ({"flash_dense_kwargs": {"causal": True, "window_size": (4, 4)}}, {"causal": True, "window": (4, 0)}),
        ({"sdpa_kwargs": {"is_causal": False}}, {"causal": False}),
    ):
        actual = run(framework, numbers(), word, bags, attention_mask=FULL_MASK, sliding_window=3)
        close(actual, expected(numbers(), mask=FULL_MASK, **fields))


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
    what = {"seq_info": seq_info(framework, "arrays")} if packed else {}
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


@pytest.mark.parametrize("bag", ["flash_dense_kwargs", "flash_varlen_kwargs", "sdpa_kwargs", "xformers_kwargs"])
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["rows", "packed", "masked"])
@both
def test_dropout_of_another_branch_drops_nothing(framework: Framework, kind: str, word: str, bag: str) -> None:
    """The function of the host's branch gets its own bag, and without dropout there it drops nothing."""
    what: dict[str, Any] = {"seq_info": seq_info(framework, "arrays")} if kind == "packed" else {}
    what |= {"attention_mask": np.ones((BSZ, 7), np.int32)} if kind == "masked" else {}
    dense = word == arguments.FLASH_VARLEN and kind != "packed"
    branch = arguments.SDPA if kind == "masked" else arguments.FLASH_DENSE if dense else word
    if bag == f"{branch}_kwargs":
        return  # Granite's test
    own = "scale" if branch in (arguments.SDPA, arguments.XFORMERS) else "softmax_scale"
    bags = {bag: {"p" if bag == "xformers_kwargs" else "dropout_p": 0.5}, f"{branch}_kwargs": {own: 0.4}}
    arrays, lengths = numbers(7, 7), LENGTHS if kind == "packed" else None
    close(run(framework, arrays, word, bags, **what), expected(arrays, scale=0.4, lengths=lengths))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("letters", ["Q", "K", "QK", "KV"])
@both
def test_float32_with_one_half_dtype_is_computed_in_the_half_dtype(
    framework: Framework, letters: str, half: str
) -> None:
    """Some of Q, K and V are float32 because adapters returned float32."""
    arrays = numbers()
    own = {name: framework.array(array, None if name in letters else half) for name, array in arrays.items()}
    passed = {"config": config(framework), "context": context(framework, arrays)}
    out = framework.frontend.run_attention(**passed, **own)
    assert out.dtype == own["Q"].dtype
    np.testing.assert_array_equal(as_numpy(out), run(framework, arrays, dtype=half))


@both
def test_float32_with_two_half_dtypes_is_refused(framework: Framework) -> None:
    arrays = numbers()
    dtypes = {"Q": "float32", "K": "bfloat16", "V": "float16"}
    own = {name: framework.array(array, dtypes[name]) for name, array in arrays.items()}
    with pytest.raises(DTypeError):
        framework.frontend.run_attention(config=config(framework), context=context(framework, arrays), **own)


@both
def test_flash_distances_count_around_the_query(framework: Framework) -> None:
    actual = run(framework, numbers(), bags={"flash_dense_kwargs": {"window_size": (2, 1), "causal": False}})
    close(actual, expected(numbers(), window=(2, 1), causal=False))


# xformers' masks


class Starts(NamedTuple):
    """Stands for xformers' class that holds the offsets of queries or keys."""

    seqstart: Any
    seqstart_py: list[int]
    max_seqlen: int


def xformers_mask(name: str, lengths: Any, lengths_k: Any = None, window: int | None = None, array: Any = None) -> Any:
    """Stands for xformers' mask of that name; with ``array`` its offsets are only on the device."""
    mask = type(name, (), {} if window is None else {"_window_size": window})()
    for side, sizes in (("q_seqinfo", lengths), ("k_seqinfo", lengths_k or lengths)):
        starts = np.cumsum([0, *sizes]).astype(np.int32)
        held = Starts(None, starts.tolist(), max(sizes)) if array is None else Starts(array(starts), [], max(sizes))
        setattr(mask, side, held)
    return mask


BLOCKS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "all": ("BlockDiagonalMask", None, {"causal": False}),
    "causal": ("BlockDiagonalCausalMask", None, {}),
    "causal from the end": ("BlockDiagonalCausalFromBottomRightMask", None, {}),
    "window": ("BlockDiagonalCausalLocalAttentionMask", 3, {"window": (2, 0)}),
    "window from the end": ("BlockDiagonalCausalLocalAttentionFromBottomRightMask", 3, {"window": (2, 0)}),
}


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
    arrays = numbers(14 // bsz, 14 // bsz, bsz=bsz)
    mask = xformers_mask(kind, LENGTHS, window=window, array=framework.array if on_device else None)
    right = expected(arrays, lengths=LENGTHS, **fields)
    close(run(framework, arrays, word, causal_mask=mask), right)
    close(run(framework, arrays, word, {"xformers_kwargs": {"attn_bias": mask}}), right)
    keep = np.random.default_rng(2).random((bsz, 14 // bsz)) < 0.6
    if fields.get("causal", True):
        actual = run(framework, arrays, word, causal_mask=mask, attention_mask=keep)
        close(actual, expected(arrays, lengths=LENGTHS, mask=keep.reshape(1, 1, 1, -1), **fields))


@both
def test_new_queries_are_at_the_end_of_the_keys_of_their_block(framework: Framework) -> None:
    mask = xformers_mask("BlockDiagonalCausalLocalAttentionFromBottomRightMask", (2, 3), (4, 3), window=2)
    arrays = {name: array[:1] for name, array in numbers(5, 7).items()}
    actual = run(framework, arrays, causal_mask=mask)
    for rows, keys in (slice(0, 2), slice(0, 4)), (slice(2, 5), slice(4, 7)):
        part = {name: array[:, :, rows if name == "Q" else keys] for name, array in arrays.items()}
        close(actual[:, rows], expected(part, window=(1, 0)))
    with pytest.raises(SpecError, match=r"^context.causal_mask is BlockDiagonalCausalMask: expected as many keys as"):
        run(framework, arrays, causal_mask=xformers_mask("BlockDiagonalCausalMask", (2, 3), (4, 3)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("word", WORDS)
@both
def test_mistral_beyond_its_window(framework: Framework, word: str, packed: bool) -> None:
    """It passes its window three times: in flash's options, in the context, and in a mask whose blocks are the rows."""
    arrays = numbers(7, 7, bsz=1 if packed else BSZ)
    mask = xformers_mask("BlockDiagonalCausalLocalAttentionMask", [7] * len(arrays["Q"]), window=3)
    passed = {"causal_mask": mask, "sliding_window": 3}
    lengths = (5, 2) if packed else None
    passed |= {"seq_info": seq_info(framework, "arrays", lengths)} if packed else {}
    bags = {"flash_dense_kwargs": {"causal": True, "window_size": (3, 3)}}
    bags |= {"flash_varlen_kwargs": {"dropout_p": 0.0, "causal": True, "softmax_scale": None}}
    close(run(framework, arrays, word, bags, **passed), expected(arrays, window=(2, 0), lengths=lengths))
    rows = type("LowerTriangularFromBottomRightLocalAttentionMask", (), {"_window_size": 3})()
    passed |= {"causal_mask": rows}
    close(run(framework, arrays, word, bags, **passed), expected(arrays, window=(2, 0), lengths=lengths))


# Packed documents


@pytest.mark.parametrize("kind", ["host", "arrays", "triple"])
@pytest.mark.parametrize(("bsz", "length"), [(1, 14), (2, 7), (7, 2)])
@both
def test_documents_may_continue_in_the_next_row(framework: Framework, kind: str, bsz: int, length: int) -> None:
    arrays = numbers(length, length, bsz=bsz)
    for word in WORDS:
        close(run(framework, arrays, word, seq_info=seq_info(framework, kind)), expected(arrays, lengths=LENGTHS))


@both
def test_documents_that_equal_the_rows_run_as_a_batch(framework: Framework) -> None:
    arrays = numbers(7, 7)
    packed = run(framework, arrays, seq_info=seq_info(framework, "triple", (7, 7)))
    close(packed, run(framework, arrays))


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.int32])
@pytest.mark.parametrize("bsz", [1, 2])
@both
def test_documents_and_a_keep_mask_apply_together(framework: Framework, bsz: int, dtype: Any) -> None:
    length = 14 // bsz
    arrays = numbers(length, length, bsz=bsz)
    keep = np.random.default_rng(2).random((bsz, length)) < 0.6
    actual = run(framework, arrays, seq_info=seq_info(framework, "arrays"), attention_mask=keep.astype(dtype))
    close(actual, expected(arrays, lengths=LENGTHS, mask=keep.reshape(1, 1, 1, -1)))


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("rows", [1, 14])
@both
def test_documents_and_a_complete_mask_of_one_row(framework: Framework, rows: int, heads: int) -> None:
    arrays = numbers(14, 14, bsz=1)
    mask = np.random.default_rng(3).random((1, heads, rows, 14)) < 0.6
    actual = run(framework, arrays, seq_info=seq_info(framework, "arrays"), attention_mask=mask)
    close(actual, expected(arrays, lengths=LENGTHS, mask=mask, causal=False))


@both
def test_documents_with_every_option(framework: Framework) -> None:
    arrays = numbers(7, 7)
    bags = {"flash_varlen_kwargs": {"causal": True, "softcap": 1.5, "softmax_scale": 0.7, "window_size": (3, 3)}}
    actual = run(framework, arrays, bags=bags, seq_info=seq_info(framework, "triple"), sliding_window=3)
    close(actual, expected(arrays, lengths=LENGTHS, softcap=1.5, scale=0.7, window=(2, 0)))


# Sizes


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 7), (3, 7), (7, 7), (7, 3)])
@pytest.mark.parametrize("window", [None, 2])
@both
def test_new_queries_are_at_the_end_of_the_keys(framework: Framework, q_len: int, kv_len: int, window: Any) -> None:
    """Decoding, chunked prefill, prefill, and rows before the first key, which see nothing."""
    arrays = numbers(q_len, kv_len)
    for word in WORDS:
        actual = run(framework, arrays, word, sliding_window=window)
        close(actual, expected(arrays, window=(None, None) if window is None else (window - 1, 0)))


@both
def test_values_may_have_another_head_dim(framework: Framework) -> None:
    arrays = numbers(value_dim=5)
    close(run(framework, arrays), expected(arrays))


@pytest.mark.parametrize(
    "arrays", [numbers(0, 7), numbers(5, 0), numbers(5, 7, bsz=0)], ids=["no queries", "no keys", "no rows"]
)
@both
def test_calls_without_keys_give_zeros(framework: Framework, arrays: Arrays) -> None:
    assert not run(framework, arrays).any()


@both
def test_documents_without_rows(framework: Framework) -> None:
    empty = seq_info(framework, "arrays", (0, 0))
    keep = np.ones((0, 7), np.int32)
    assert run(framework, numbers(7, 7, bsz=0), seq_info=empty, attention_mask=keep).shape == (0, 7, HEADS, HEAD_DIM)


@both
def test_rows_without_visible_keys_are_zeros(framework: Framework) -> None:
    """The first query of row 0 sees only keys that the mask drops."""
    out = run(framework, numbers(7, 7), attention_mask=KEEP)
    assert not out[0, :2].any()
    assert np.isfinite(out).all()


# Gradients and tracing


def loss_gradients(framework: Framework, arrays: Arrays, word: str, what: dict[str, Any]) -> Arrays:
    settings = {"config": config(framework, word), "context": context(framework, arrays, requires_grad=True, **what)}
    own = {name: framework.array(array) for name, array in arrays.items()}
    if framework.name == "torch":
        leaves = {name: tensor.requires_grad_() for name, tensor in own.items()}
        framework.frontend.run_attention(**settings, **leaves).square().sum().backward()
        return {name: as_numpy(leaf.grad) for name, leaf in leaves.items()}

    def loss(own: Any) -> Any:
        return (framework.frontend.run_attention(**settings, **own) ** 2).sum()

    return {name: as_numpy(gradient) for name, gradient in jax.jit(jax.grad(loss))(own).items()}


@pytest.mark.parametrize("packed", [False, True])
@both
def test_gradients_match_the_reference(framework: Framework, packed: bool) -> None:
    arrays = numbers(7, 7)
    what = {"seq_info": seq_info(framework, "arrays")} if packed else {"sliding_window": 3}
    fields: dict[str, Any] = {"lengths": LENGTHS} if packed else {"window": (2, 0)}
    actual = loss_gradients(framework, arrays, arguments.FLASH_VARLEN, what)
    direction = {name: np.random.default_rng(4).normal(size=array.shape) for name, array in arrays.items()}
    step = 1e-4

    def loss(size: float) -> float:
        return float(
            (expected({name: array + size * direction[name] for name, array in arrays.items()}, **fields) ** 2).sum()
        )

    slope = (loss(step) - loss(-step)) / (2 * step)
    assert sum((actual[name] * direction[name]).sum() for name in actual) == pytest.approx(slope, rel=1e-3)
    others = [loss_gradients(framework, arrays, word, what) for word in WORDS]
    apart = 0.0 if framework.device == "cpu" else 1e-4  # every word has its own kernels there
    assert all(np.abs(other[name] - actual[name]).max() <= apart for other in others for name in actual)


@pytest.mark.parametrize(
    "what", [{}, {"sliding_window": 3}, {"attention_mask": KEEP}], ids=["plain", "window", "keep mask"]
)
@in_jax
def test_jit_traces_every_array(framework: Framework, what: dict[str, Any]) -> None:
    arrays = numbers()

    @jax.jit
    def program(own: Any, given: Any) -> Any:
        passed = context(framework, arrays, **{**what, **given})
        return framework.frontend.run_attention(config=config(framework), context=passed, **own)

    own = {name: framework.array(array) for name, array in arrays.items()}
    masks = {name: framework.array(value) for name, value in what.items() if isinstance(value, np.ndarray)}
    np.testing.assert_array_equal(as_numpy(program(own, masks)), run(framework, arrays, **what))


@pytest.mark.parametrize(
    "what", [{}, {"sliding_window": 3}, {"attention_mask": KEEP}], ids=["plain", "window", "keep mask"]
)
@in_torch
def test_both_frameworks_give_the_same_bits(framework: Framework, what: dict[str, Any]) -> None:
    """From the same memory: torch reads views in place, and the last bit of its products depends on strides."""
    arrays = numbers()
    seen_by_jax = run(framework.other, arrays, **what)  # XLA lays them out as [bsz, len, heads, head_dim]
    alike = {
        name: framework.array(array).transpose(1, 2).contiguous().transpose(1, 2) for name, array in arrays.items()
    }
    given = {name: framework.array(value) if isinstance(value, np.ndarray) else value for name, value in what.items()}
    passed = context(framework, arrays, **given)
    out = framework.frontend.run_attention(config=config(framework), context=passed, **alike)
    np.testing.assert_array_equal(as_numpy(out), seen_by_jax)
    close(run(framework, arrays, **what), seen_by_jax)


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


HALF: dict[str, tuple[dict[str, Any], Any, dict[str, Any]]] = {
    # name: (the context, the options, the fields of the spec)
    "plain": ({}, None, {}),
    "sliding window": ({"sliding_window": 3}, None, {"window": (2, 0)}),
    "softcap": ({}, {"flash_dense_kwargs": {"softcap": 1.5}}, {"softcap": 1.5}),
    "slopes": ({}, {"flash_dense_kwargs": {"alibi_slopes": SLOPES}}, {"slopes": SLOPES}),
    "keep mask": ({"attention_mask": KEEP}, None, {"mask": KEEP[:, None, None, :] != 0}),
    "additive mask": ({"attention_mask": FULL_BIAS}, None, {"bias": FULL_BIAS, "causal": False}),
    "documents": ({}, None, {"lengths": LENGTHS}),
    "documents and sliding window": ({"sliding_window": 3}, None, {"lengths": LENGTHS, "window": (2, 0)}),
}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("name", HALF)
@both
def test_every_word_means_the_same_in_bfloat16(framework: Framework, name: str, word: str) -> None:
    """On a GPU each word runs its own kernels; every result is within the bound of the dtype."""
    what, bags, fields = HALF[name]
    packed = "lengths" in fields
    arrays = numbers(7, 7) if packed else numbers()
    arrays = {letter: as_numpy(framework.array(array, "bfloat16")) for letter, array in arrays.items()}
    passed = dict(what) | ({"seq_info": seq_info(framework, "arrays")} if packed else {})
    right = expected_with_bound(arrays, **fields)
    actual = run(framework, arrays, word, bags, dtype="bfloat16", **passed)
    verdict = right.judge(out=actual.reshape(right.truth["out"].shape))
    assert verdict.ok, verdict


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


def bags_of(**entries: Any) -> dict[str, Any]:
    return {"bags": entries}


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown word": (
        {"word": "flash"},
        SpecError,
        "^config.backend='flash': expected one of flash_varlen, flash_dense, xformers, sdpa",
    ),
    "unknown key": (
        bags_of(flash_dense_kwargs={"windowsize": 3}),
        SpecError,
        r"^config.flash_dense_kwargs\['windowsize'\]: unknown; expected one of causal,",
    ),
    "key of another bag": (
        bags_of(sdpa_kwargs={"softcap": 3.0}),
        SpecError,
        r"^config.sdpa_kwargs\['softcap'\]: unknown",
    ),
    "contradicting scales": (
        bags_of(flash_dense_kwargs={"softmax_scale": 0.5}, sdpa_kwargs={"scale": 0.25}),
        SpecError,
        r"^config.sdpa_kwargs\['scale'\]=0.25 contradicts config.flash_dense_kwargs\['softmax_scale'\]=0.5; pass",
    ),
    "not causal against a bag": (
        {"is_causal": False, **bags_of(flash_dense_kwargs={"causal": True})},
        SpecError,
        r"^context.is_causal=False contradicts config.flash_dense_kwargs\['causal'\]=True; pass causal once",
    ),
    "not causal with a window": (
        {"is_causal": False, "sliding_window": 3},
        SpecError,
        "^context.sliding_window=3: expected a causal call",
    ),
    "not causal with a triangle": (
        {"is_causal": False, "causal_mask": LowerTriangularMask()},
        SpecError,
        "^context.causal_mask is LowerTriangularMask, causal=True contradicts context.is_causal=False",
    ),
    "is_causal as a number": ({"is_causal": 1}, SpecError, "^context.is_causal=1: expected True or False"),
    "contradicting causal": (
        bags_of(flash_varlen_kwargs={"causal": True}, sdpa_kwargs={"is_causal": False}),
        SpecError,
        "contradicts .*; pass causal once",
    ),
    "contradicting softcaps": (
        bags_of(flash_varlen_kwargs={"softcap": 0.0}, xformers_kwargs={"softcap": 30.0}),
        SpecError,
        "contradicts .*; pass softcap once",
    ),
    "contradicting masks": (
        {"attention_mask": KEEP, "causal_mask": FULL_MASK},
        SpecError,
        r"^context.causal_mask=\S+ of shape \[2, 1, 5, 7\] contradicts context.attention_mask=\S+ of shape",
    ),
    "contradicting triangle": (
        {"causal_mask": LowerTriangularMask(), **bags_of(flash_dense_kwargs={"causal": False})},
        SpecError,
        r"^context.causal_mask is LowerTriangularMask, causal=True contradicts config.flash_dense_kwargs",
    ),
    "blocks beside documents": (
        {
            "causal_mask": xformers_mask("BlockDiagonalCausalMask", (Q_LEN, KV_LEN)),
            "seq_info": SeqInfo.from_lengths([Q_LEN] * BSZ, [KV_LEN] * BSZ),
        },
        SpecError,
        "^context.causal_mask is BlockDiagonalCausalMask: expected one block for the whole row, because",
    ),
    "blocks with another window": (
        {"causal_mask": xformers_mask("BlockDiagonalCausalLocalAttentionMask", (3, 7), window=4), "sliding_window": 3},
        SpecError,
        "^context.sliding_window=3 contradicts the mask of xformers, whose window is 4",
    ),
    "causal blocks": (
        {
            "causal_mask": xformers_mask("BlockDiagonalCausalMask", (3, 7)),
            **bags_of(flash_dense_kwargs={"causal": False}),
        },
        SpecError,
        r"^context.causal_mask is BlockDiagonalCausalMask, causal=True contradicts config.flash_dense_kwargs",
    ),
    "another mask of xformers": (
        {"causal_mask": xformers_mask("BlockDiagonalPaddedKeysMask", (3, 7))},
        TypeError,
        "^context.causal_mask: expected a .*BlockDiagonalPaddedKeysMask",
    ),
    "contradicting window": (
        {"sliding_window": 3, **bags_of(flash_dense_kwargs={"window_size": (4, 4)})},
        SpecError,
        r"^config.flash_dense_kwargs\['window_size'\]=\(4, 4\) contradicts context.sliding_window=3, which is 3 keys",
    ),
    "a sliding window without causal": (
        {"sliding_window": 3, **bags_of(flash_dense_kwargs={"window_size": (2, 2), "causal": False})},
        SpecError,
        r"^context.sliding_window=3: expected a causal call.*pass window_size=\(left, right\) instead",
    ),
    "contradicting windows": (
        bags_of(flash_dense_kwargs={"window_size": (2, 0)}, flash_varlen_kwargs={"window_size": (3, 0)}),
        SpecError,
        "contradicts",
    ),
    "window of one number": (
        bags_of(flash_dense_kwargs={"window_size": 3}),
        SpecError,
        r"^config.flash_dense_kwargs\['window_size'\]=3: expected two distances",
    ),
    "window of three": (bags_of(flash_dense_kwargs={"window_size": (1, 2, 3)}), SpecError, "expected two distances"),
    "window of floats": (bags_of(flash_dense_kwargs={"window_size": (1.0, 0)}), SpecError, "expected two distances"),
    "sliding window of a float": (
        {"sliding_window": 3.0},
        SpecError,
        "^context.sliding_window=3.0: expected the number of keys",
    ),
    "sliding window of a bool": ({"sliding_window": True}, SpecError, "^context.sliding_window=True: "),
    "softcap": (bags_of(flash_dense_kwargs={"softcap": -1.0}), SpecError, "^softcap=-1.0: "),
    "scale": (bags_of(sdpa_kwargs={"scale": 0.0}), SpecError, "^scale=0.0: "),
    "dropout": (bags_of(sdpa_kwargs={"dropout_p": 1.5}), SpecError, "^dropout=1.5: "),
    "int 4-D mask": (
        {"attention_mask": FULL_MASK.astype(np.int32)},
        DTypeError,
        r"^context.attention_mask: expected bool .*got .*int32 of shape \[2, 1, 5, 7\]; .*mask != 0",
    ),
    "int 3-D mask": (
        {"attention_mask": FULL_MASK[:, 0].astype(np.int32)},
        DTypeError,
        "^context.attention_mask: expected bool",
    ),
    "int attn_mask": (
        bags_of(sdpa_kwargs={"attn_mask": FULL_MASK[0, 0].astype(np.int32)}),
        DTypeError,
        r"^config.sdpa_kwargs\['attn_mask'\]: expected bool",
    ),
    "keep mask of queries": (
        {"attention_mask": np.ones((BSZ, Q_LEN), np.int32)},
        ShapeError,
        r"^context.attention_mask: .*\[bsz, kv_len\] = \[2, 7\], got \[2, 5\]",
    ),
    "keep mask of one row": ({"attention_mask": KEEP[:1]}, ShapeError, r"got \[1, 7\]"),
    "mask of one axis": (
        {"attention_mask": KEEP[0] != 0},
        ShapeError,
        r"^context.attention_mask: expected 2, 3 or 4 axes, got \[7\]",
    ),
    "mask of five axes": ({"attention_mask": FULL_MASK[None]}, ShapeError, "expected 2, 3 or 4 axes"),
    "mask of other sizes": (
        {"attention_mask": FULL_MASK[..., :5]},
        ShapeError,
        r"^mask: .* = \[2, 6, 5, 7\], got \[2, 1, 5, 5\]",
    ),
    "list as mask": (
        {"attention_mask": KEEP.tolist()},
        TypeError,
        "^context.attention_mask: expected a .*, got builtins.list",
    ),
    "xformers' other masks": (
        {"causal_mask": object()},
        TypeError,
        "^context.causal_mask: expected a .*, got builtins.object",
    ),
    "seq_info": ({"seq_info": [3, 4]}, SpecError, "^seq_info: expected a SeqInfo, got"),
    "documents that end behind the rows": (
        {"seq_info": SeqInfo.from_lengths([3, 8], [3, 11])},
        SpecError,
        "^seq_info.cu",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@both
def test_refused_by_name_before_anything_runs(framework: Framework, name: str) -> None:
    what, error, says = REFUSED[name]
    with spied() as ran, pytest.raises(error, match=says) as caught:
        run(framework, numbers(), **what)
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
    arrays = numbers()
    own = {letter: framework.array(array) for letter, array in arrays.items()} | {which: framework.zeros(*size)}
    what = {"seq_info": seq_info(framework, "arrays")} if packed else {}
    with pytest.raises(ShapeError, match=says):
        framework.frontend.run_attention(config=config(framework), context=context(framework, arrays, **what), **own)


@both
def test_one_list_of_lengths_needs_as_many_keys_as_queries(framework: Framework) -> None:
    """The host's triple; with a cache it would describe only the first keys."""
    arrays = numbers()
    own = {name: framework.array(array) for name, array in arrays.items()}
    info = SeqInfo.from_lengths([4, 6], array=framework.array)
    lengths = framework.array(np.array([4, 6], np.int32))
    for given in ((lengths, info.cu_seqlens_q, 6), info):
        with pytest.raises(SpecError, match=r"^seq_info: expected separate lengths for queries and keys.*q_len=5 "):
            what = context(framework, arrays, seq_info=given)
            framework.frontend.run_attention(config=config(framework), context=what, **own)


@both
def test_groups_must_match_the_heads(framework: Framework) -> None:
    arrays = numbers()
    own = {name: framework.array(array) for name, array in arrays.items()}
    wrong = framework.frontend.unsloth.AttentionConfig(arguments.SDPA, KV_HEADS, 3)
    with pytest.raises(ShapeError, match=r"^config.n_groups=3: expected n_heads // n_kv_heads = 6 // 3"):
        framework.frontend.run_attention(config=wrong, context=context(framework, arrays), **own)


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


@both
def test_tensors_of_the_other_framework_are_refused(framework: Framework) -> None:
    arrays = numbers()
    own = {name: framework.array(array) for name, array in arrays.items()} | {"K": framework.other.zeros(2, 3, 7, 11)}
    with pytest.raises(TypeError, match=f"^K: expected a .*; use {re.escape(framework.other.name)}_frontend"):
        framework.frontend.run_attention(config=config(framework), context=context(framework, arrays), **own)


@in_torch
def test_autocast_computes_in_its_dtype_and_returns_float32(framework: Framework) -> None:
    arrays = numbers()
    half = run(framework, arrays, dtype="bfloat16")
    with torch.autocast(framework.device, torch.bfloat16):
        np.testing.assert_array_equal(run(framework, arrays), half)
        tensors = {name: framework.array(array).requires_grad_() for name, array in arrays.items()}
        out = framework.frontend.run_attention(config=config(framework), context=context(framework, arrays), **tensors)
    assert out.dtype == torch.float32
    np.testing.assert_allclose(as_numpy(out), run(framework, arrays), rtol=0.05, atol=0.05)
    assert not np.array_equal(half, run(framework, arrays))
    out.sum().backward()
    assert {tensor.grad.dtype for tensor in tensors.values()} == {torch.float32}


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


@both
def test_a_promise_that_cannot_hold_is_an_error(framework: Framework) -> None:
    for options, says in (
        ({"invariant": "both"}, "invariant='both': expected one of batch, prefix, or None"),
        ({"invariant": "prefix", "is_causal": False}, "invariant='prefix': expected no keys behind a query"),
    ):
        with pytest.raises(SpecError, match=says):
            run(framework, numbers(), bags={"sdpa_kwargs": options})
