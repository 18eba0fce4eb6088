"""Tests ``attn_core.checks``: what an eager call warns of in either frontend."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import jax
import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework

import jax_frontend
from attn_core import CheckWarning, SeqInfo, checks
from attn_core.errors import LayoutWarning
from torch_frontend.module import Attention

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)
BATCH, LENGTH, HEADS = 2, 5, 3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with checks(False):
        yield


def findings_of(framework: Framework, on: bool = True, **arguments: Any) -> list[str]:
    """The findings of a call of zeros with these arguments; numpy arrays become the framework's."""
    call: dict[str, Any] = {name: np.zeros((BATCH, LENGTH, HEADS, 8), np.float32) for name in "qkv"}
    call |= {"layout": "bshd"} | arguments
    given = {name: framework.array(each) if isinstance(each, np.ndarray) else each for name, each in call.items()}
    with warnings.catch_warnings(record=True) as record, checks(on):
        warnings.simplefilter("always", CheckWarning)
        framework.frontend.attention(**given)
    return [str(each.message) for each in record if each.category is CheckWarning]


def keys(*lengths: int, left: bool = False) -> np.ndarray:
    """A padding mask ``[batch, 1, 1, kv]``, True for tokens."""
    places = np.arange(LENGTH)[::-1] if left else np.arange(LENGTH)
    return (places < np.array(lengths)[:, None])[:, None, None, :]


def with_value(value: float, *shape: int) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    array.reshape(-1)[-1] = value
    return array


ROWS = {"kv_lengths": np.array([4, 3], np.int32)}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "rows of a cache": ({"k": with_value(np.nan, 2, 5, 3, 8)[:, ::-1].copy(), **ROWS}, "k: 1 of 240 values are not"),
    "rows of a cache, causal": ({"q": with_value(np.inf, 2, 2, 3, 8), "causal": True, **ROWS}, "q: 1 of 96 values"),
    "rows without keys": ({"mask": np.eye(LENGTH, k=1, dtype=bool)[None, None]}, "mask: 1 of 5 rows see no key"),
    "causal with few keys": (
        {
            "causal": True,
            "k": np.zeros((BATCH, 3, HEADS, 8), np.float32),
            "v": np.zeros((BATCH, 3, HEADS, 8), np.float32),
        },
        "causal: 2 of 5 rows see no key, .* query 0 of head 0 in batch row 0",
    ),
    "a bias of -inf": ({"bias": np.full((1, 1, 1, LENGTH), -np.inf, np.float32)}, "bias: 5 of 5 rows see no key"),
    "inverted padding": ({"mask": ~keys(5, 3)}, "mask: .* shows 2 of 10 keys and no whole row, .*pass ~mask"),
    "inverted padding at the left": ({"mask": ~keys(5, 4, left=True)}, "mask: .* looks inverted"),
    "triu": ({"mask": np.triu(np.ones((LENGTH, LENGTH), bool), 1)}, "mask: .*upper triangle.*pass ~mask, or causal"),
    "triu with the diagonal": ({"mask": np.triu(np.ones((LENGTH, LENGTH), bool))}, "mask: .*upper triangle"),
    "nan in q": ({"q": with_value(np.nan, 2, 5, 3, 8)}, r"q: 1 of 240 values are not finite, .*q\[1, 4, 2, 7\]"),
    "inf in v": ({"v": with_value(np.inf, 2, 5, 3, 8)}, "v: 1 of 240 values are not finite"),
    "inf in a bias": ({"bias": with_value(np.inf, 1, 1, 5, 5)}, "bias: 1 of 25 values are not finite"),
    "nan in sinks": ({"sinks": with_value(np.nan, 3)}, "sinks: 1 of 3 values"),
}
RIGHT: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "padding": {"mask": keys(5, 3)},
    "padding at the left": {"mask": keys(5, 1, left=True)},
    "tril": {"mask": np.tril(np.ones((LENGTH, LENGTH), bool))},
    "behind the rows of a cache": {"k": with_value(np.nan, 2, 5, 3, 8), **ROWS},
    "-inf in a bias": {"bias": with_value(-np.inf, 1, 1, 5, 5)},
    "-inf in sinks": {"sinks": with_value(-np.inf, 3)},
}


@everywhere
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_reported(framework: Framework, name: str) -> None:
    arguments, says = WRONG[name]
    messages = findings_of(framework, **arguments)
    assert any(re.match(says, message) for message in messages), messages
    assert findings_of(framework, on=False, **arguments) == []


@everywhere
@pytest.mark.parametrize("number", [2**31, -(2**31) - 1, 2**31 - 1])
def test_ints_beyond_32_bits_are_reported(framework: Framework, number: int) -> None:
    """Those of an array of the framework, of which the low 32 bits count; numpy's are refused."""
    ids = np.array([0, 0, 1, 1, number])
    with jax.enable_x64(True):
        mask: dict[str, Any] = {"mask_mod": lambda b, h, q, k, ids: ids[q] == ids[k], "aux": (framework.array(ids),)}
        messages = findings_of(framework, **mask)
    says = f"aux[0]: expected ints of 32 bits, got values from {min(0, number)} to {max(1, number)}"
    assert messages == ([says] if number != 2**31 - 1 else [])


@everywhere
@pytest.mark.parametrize("name", RIGHT)
def test_a_usual_call_is_not_reported(framework: Framework, name: str) -> None:
    assert findings_of(framework, **RIGHT[name]) == []


@everywhere
@pytest.mark.parametrize("kv_heads", [1, HEADS])
def test_a_layout_that_is_not_written_is_reported_if_both_fit(framework: Framework, kv_heads: int) -> None:
    """Heads-first tensors of up to 128 tokens have such shapes: the default would read heads as positions."""
    shapes = {"q": (BATCH, HEADS, LENGTH, 8), "k": (BATCH, kv_heads, LENGTH, 8), "v": (BATCH, kv_heads, LENGTH, 8)}
    call = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    (message,) = findings_of(framework, **call, layout=None) if kv_heads > 1 else [_of_layouts(framework, call)]
    assert message.startswith("layout=None: expected 'bshd' or 'bhsd'")
    assert str(list(shapes["q"])) in message and str(list(shapes["k"])) in message
    for layout in ("bhsd", "bshd"):
        assert not [each for each in findings_of(framework, **call, layout=layout) if "layout" in each]
    assert findings_of(framework, on=False, **call, layout=None) == []


def _of_layouts(framework: Framework, call: dict[str, Any]) -> str:
    """The finding about the layout of a call that has another one about shapes, too."""
    return next(each for each in findings_of(framework, **call, layout=None) if each.startswith("layout"))


@everywhere
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"),
    [
        (129, 129, 3, 3),  # models have no more than 128 heads
        (5, 5, 4, 2),  # fewer keys than queries, if the first axis were heads
        (5, 7, 3, 3),  # 7 kv heads do not divide 5
        (1, 6, 3, 3),  # decoding
    ],
)
def test_a_layout_that_alone_fits_need_not_be_written(
    framework: Framework, q_len: int, kv_len: int, heads: int, kv_heads: int
) -> None:
    shapes = {"q": (1, q_len, heads, 8), "k": (1, kv_len, kv_heads, 8), "v": (1, kv_len, kv_heads, 8)}
    call = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    assert findings_of(framework, **call, layout=None) == []


@everywhere
def test_our_own_functions_and_layers_know_their_layout(framework: Framework) -> None:
    q = framework.zeros(BATCH, LENGTH, HEADS, 8)
    with warnings.catch_warnings(), checks(True):
        warnings.simplefilter("error", CheckWarning)
        import_module(f"{framework.frontend.__name__}.flash_attn").flash_attn_func(q, q, q)
        framework.frontend.attention_qkvpacked(framework.zeros(BATCH, LENGTH, 3, HEADS, 8))
        if framework.name == "torch":
            Attention(HEADS, 24)(framework.zeros(BATCH, LENGTH, 24))
        packed = [framework.zeros(1, LENGTH, HEADS, 8)] * 3
        framework.frontend.attention(*packed, seq_info=SeqInfo.from_lengths([2, 3]))


@everywhere
@pytest.mark.parametrize("jitted", [False, True])
def test_a_finding_and_a_layout_that_looks_wrong_name_the_users_line(framework: Framework, jitted: bool) -> None:
    if jitted and framework.name == "torch":
        pytest.skip("a compiled call of torch is not checked")
    few, many = framework.zeros(1, 2, 3, 8), framework.zeros(1, 2, 131 + jitted, 8)  # not planned before

    def call(q: Any) -> Any:
        return framework.frontend.attention(q, q, q)

    with warnings.catch_warnings(record=True) as record, checks(True):
        warnings.simplefilter("always")
        for q in (few, many):
            (jax.jit(call) if jitted else call)(q)
        framework.frontend.explain(many, many, many)
    here = call.__code__.co_firstlineno
    found = {(each.category, each.filename, each.lineno - here) for each in record}
    assert found == {(CheckWarning, __file__, 1), (LayoutWarning, __file__, 1), (LayoutWarning, __file__, 7)}


@everywhere
def test_padding_behind_the_documents_is_not_reported(framework: Framework) -> None:
    row = {name: np.zeros((LENGTH, HEADS, 8), np.float32) for name in "qkv"}
    assert findings_of(framework, **row, seq_info=SeqInfo.from_lengths([3, 1]), causal=True) == []
    messages = findings_of(framework, **row, seq_info=SeqInfo.from_lengths([2, 3], [1, 4]), causal=True)
    assert [message.partition(";")[0] for message in messages] == [
        "causal: 1 of 5 rows see no key, so their output is 0"
    ]


@everywhere
def test_bfloat16_is_read(framework: Framework) -> None:
    arrays = {name: framework.zeros(1, 2, 1, 8, dtype="bfloat16") for name in "kv"}
    q = framework.array(with_value(np.nan, 1, 2, 1, 8), "bfloat16")
    assert findings_of(framework, q=q, **arrays)[0].startswith("q: 1 of 16 values")


def test_traced_calls_are_not_checked() -> None:
    q = torch.full((1, 2, 1, 8), torch.nan)
    with warnings.catch_warnings(), checks(True):
        warnings.simplefilter("error", CheckWarning)
        torch.compile(BOTH[0].frontend.attention, backend="eager")(q, q, q)
        jax.jit(BOTH[1].frontend.attention)(*[q.numpy()] * 3)


@pytest.mark.parametrize("offsets", [[0, 4, 2, 5], [0, 5, 9, 9], [0, 1, 2, 5]], ids=["decreasing", "late", "long"])
def test_a_jitted_function_reports_wrong_offsets_when_it_runs(offsets: list[int]) -> None:
    q = jax.numpy.ones((1, LENGTH, HEADS, 8))

    def call(q: Any, offsets: Any) -> Any:
        return jax_frontend.attention(q, q, q, causal=True, seq_info=SeqInfo(offsets, offsets, 2, 2))

    right, wrong = (jax.numpy.asarray(each, np.int32) for each in ([0, 2, 3, 5], offsets))
    with checks(True):
        run = jax.jit(call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(q, right).block_until_ready()
            jax.effects_barrier()
    with pytest.warns(CheckWarning, match=r"seq_info\.(cu_seqlens|max_len)_[qk]"):
        run(q, wrong)
        jax.effects_barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(lambda *arrays: call(*arrays))(q, wrong).block_until_ready()  # traced without checks
        jax.effects_barrier()
