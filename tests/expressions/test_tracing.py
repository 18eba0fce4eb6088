"""Tests how functions become expressions, and what every refusal says."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attn_core import expressions
from attn_core.expressions import (
    Aux,
    ExpressionError,
    block_indices,
    evaluate_numpy,
    lookup,
    maximum,
    minimum,
    tanh,
    to_float,
    to_int,
    trace_mask,
    trace_score,
    where,
)
from attn_core.expressions.tree import ALLOWED

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy
IDS = Aux((2, 5), "int32")
CPU = torch.device("cpu")


def mask_text(function: Callable[..., Any], *aux: Any) -> str:
    return str(trace_mask(function, aux).tree)


def score_text(function: Callable[..., Any], *aux: Any) -> str:
    return str(trace_score(function, aux).tree)


def test_a_function_is_called_once() -> None:
    calls = []

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        calls.append((b, h, q, k))
        return q >= k

    trace_mask(mask)
    assert len(calls) == 1


def test_operators_on_both_sides() -> None:
    assert score_text(lambda s, b, h, q, k: 1 + s * 2 - q / 4) == "(1.0 + (score * 2.0)) - (to_float(q) / 4.0)"
    assert (
        score_text(lambda s, b, h, q, k: 2 / s - (1 - s) + -s + +s)
        == "(((2.0 / score) - (1.0 - score)) + (-score)) + score"
    )
    assert mask_text(lambda b, h, q, k: (7 // (q + 1) == k % 3) & True) == "(7 // (q + 1)) == (k % 3)"
    assert mask_text(lambda b, h, q, k: (q != k) ^ (h == 0)) == "~((~(q == k)) == (h == 0))"
    assert mask_text(lambda b, h, q, k: False | (abs(q - k) ** 2 < 9)) == "(abs((q - k)) * abs((q - k))) < 9"
    assert score_text(lambda s, b, h, q, k: (q > k) * s) == "to_float((k < q)) * score"
    assert score_text(lambda s, b, h, q, k: np.float32(0.5) * s + np.int64(2)) == "(0.5 * score) + 2.0"


def test_the_modules_own_functions() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return where(q > k, tanh(s), minimum(maximum(s, 0), 3)) + to_float(to_int(q > k))

    of_floats = [expressions.exp2, expressions.expm1, expressions.log, expressions.log1p, expressions.sigmoid]
    for function in of_floats:
        assert score_text(lambda s, *p, f=function: f(s)) == f"{function.__name__}(score)"
    assert score_text(score_mod) == "where((k < q), tanh(score), minimum(maximum(score, 0.0), 3.0)) + to_float((k < q))"
    with pytest.raises(ExpressionError, match="where: expected a symbolic value among the arguments"):
        where(True, 1, 2)


def test_a_function_of_torch_is_traced_by_its_own_names() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        near = torch.abs(q_idx - kv_idx).le(4)
        return torch.logical_and(torch.where(h > 0, near, q_idx.ge(kv_idx)), torch.logical_not(b == 1)) | near

    expected = "(where((0 < h), (abs((q - k)) <= 4), (k <= q)) & (~(b == 1))) | (abs((q - k)) <= 4)"
    assert mask_text(mask_mod) == expected
    assert score_text(lambda s, b, h, q, k: torch.tanh(s / 20) * 20) == "tanh((score / 20.0)) * 20.0"
    assert score_text(lambda s, *p: torch.clamp(torch.exp(s), min=0, max=9).to(torch.float32)) == (
        "minimum(maximum(exp(score), 0.0), 9.0)"
    )
    assert score_text(lambda s, b, h, q, k: torch.maximum(s, torch.minimum(s, s * 2))) == (
        "maximum(score, minimum(score, (score * 2.0)))"
    )
    assert score_text(lambda s, b, h, q, k: s.where(q > k, -1.0)) == "where((k < q), score, -1.0)"
    assert score_text(lambda s, b, h, q, k: (q - k).float() + torch.ge(q, k).float()) == (
        "to_float((q - k)) + to_float((k <= q))"
    )


def test_torchs_own_masks_are_functions_like_others() -> None:
    from torch.nn.attention.flex_attention import and_masks, noop_mask, or_masks

    causal: Any = lambda b, h, q, k: q >= k  # noqa: E731
    near: Any = lambda b, h, q, k: q - k < 4  # noqa: E731
    assert mask_text(and_masks(causal, near)) == "(k <= q) & ((q - k) < 4)"
    assert mask_text(or_masks(causal, and_masks(near, noop_mask))) == "(k <= q) | ((q - k) < 4)"
    assert [mask_text(mask) for mask in (and_masks(), or_masks(), noop_mask)] == ["True", "False", "True"]


def test_torchs_other_functions_and_methods() -> None:
    assert score_text(lambda s, *p: torch.sigmoid(s).log1p() + s.exp2() - torch.special.expm1(s) * torch.log(s)) == (
        "(log1p(sigmoid(score)) + exp2(score)) - (expm1(score) * log(score))"
    )
    assert score_text(lambda s, *p: torch.nn.functional.sigmoid(s) + torch.special.expit(s)) == (
        "sigmoid(score) + sigmoid(score)"
    )
    hidden = "where((q < k), -inf, score)"
    assert score_text(lambda s, b, h, q, k: s.masked_fill(q < k, float("-inf"))) == hidden
    assert score_text(lambda s, b, h, q, k: torch.masked_fill(s, mask=q < k, value=-float("inf"))) == hidden
    assert score_text(lambda s, b, h, q, k: torch.where(q < k, torch.full_like(s, -float("inf")), s)) == hidden
    assert score_text(lambda s, b, h, q, k: torch.where(q < k, s.new_full((), -float("inf")), s)) == hidden
    assert score_text(lambda s, b, h, q, k: s.masked_fill(q < k, 0)) == "where((q < k), 0.0, score)"
    assert score_text(lambda s, b, h, q, k: s + (q - k).to(s.dtype) + h.type_as(s) + b.to(dtype=torch.float32)) == (
        "((score + to_float((q - k))) + to_float(h)) + to_float(b)"
    )
    assert score_text(lambda s, *p: s * torch.ones_like(s) + s.new_zeros((), dtype=s.dtype, device=s.device)) == (
        "score + 0.0"
    )
    assert mask_text(
        lambda b, h, q, k: (q % 2).bool() | (k % 3).to(torch.bool) | b.new_tensor(False, dtype=torch.bool)
    ) == ("(~((q % 2) == 0)) | (~((k % 3) == 0))")
    assert mask_text(lambda b, h, q, k: torch.bitwise_right_shift(q, 3) == k >> 3) == "(q >> 3) == (k >> 3)"
    assert mask_text(lambda b, h, q, k: (1 << k % 8) + q.bitwise_left_shift(0) > 64 >> h % 8) == (
        "(64 >> (h % 8)) < ((1 << (k % 8)) + q)"
    )


def test_a_function_of_numpy_is_traced_by_its_own_names() -> None:
    function = lambda s, b, h, q, k: np.where(q > k, np.tanh(s), np.minimum(np.abs(s), 2.0))  # noqa: E731
    assert score_text(function) == "where((k < q), tanh(score), minimum(abs(score), 2.0))"
    assert score_text(lambda s, *p: np.exp2(s) + np.expm1(s) * np.log(s) - np.log1p(s)) == (
        "(exp2(score) + (expm1(score) * log(score))) - log1p(score)"
    )
    assert score_text(lambda s, b, h, q, k: (q - k).astype(np.float32) * s + h.astype(jnp.float32)) == (
        "(to_float((q - k)) * score) + to_float(h)"
    )
    assert mask_text(
        lambda b, h, q, k: np.logical_and(np.right_shift(q, 2) == np.left_shift(k, 1), np.logical_not(q > k))
    )
    assert mask_text(lambda b, h, q, k: np.logical_or(np.greater(q, k), np.not_equal(h, 0))) == "(k < q) | (~(h == 0))"


def test_captured_tensors_become_operands_each_once() -> None:
    ids, bias = torch.arange(5, device=CPU), torch.ones(3, 7, device=CPU)
    cap = torch.tensor(20.0, device=CPU)
    traced = trace_mask(lambda b, h, q, k, table: (ids[q] == ids[k]) & (table[b, q] > 0), [IDS])
    assert str(traced.tree) == "(aux1[q] == aux1[k]) & (0 < aux0[b, q])"
    assert len(traced.captured) == 1 and traced.captured[0] is ids
    scores = trace_score(lambda s, b, h, q, k: cap * s + bias[h][q - k + 3] + bias[h, 0])
    assert str(scores.tree) == "((aux0[] * score) + aux1[h, ((q - k) + 3)]) + aux1[h, 0]"
    assert [each is array for each, array in zip(scores.captured, (cap, bias), strict=True)] == [True, True]


def test_lookup_takes_arrays_of_every_framework() -> None:
    for array in (np.arange(5), jnp.arange(5), torch.arange(5, device=CPU)):
        traced = trace_mask(lambda b, h, q, k, array=array: lookup(array, q) == lookup(array, k))
        assert str(traced.tree) == "aux0[q] == aux0[k]" and traced.captured[0] is array
    assert mask_text(lambda b, h, q, k, ids: lookup(ids, b, q) > 0, IDS) == "0 < aux0[b, q]"


def test_arrays_of_jax_without_axes_become_operands() -> None:
    cap = jnp.float32(3.0)
    assert score_text(lambda s, b, h, q, k: cap * s) == "aux0[] * score"

    def inside_jit(x: Any) -> Any:
        traced = trace_score(lambda s, b, h, q, k: s * x)
        assert str(traced.tree) == "score * aux0[]" and traced.captured[0] is x
        return x

    jax.jit(inside_jit)(1.0)


def test_aux_arrays() -> None:
    assert mask_text(lambda b, h, q, k, ids: ids[b][q] == ids[b, k], IDS) == "aux0[b, q] == aux0[b, k]"
    assert mask_text(lambda b, h, q, k, n, ids: k < n, Aux((), "int64"), IDS) == "k < aux0[]"
    assert mask_text(lambda b, h, q, k, ids: ids[-1, q] < ids.shape[1], IDS) == "aux0[-1, q] < 5"
    assert mask_text(lambda b, h, q, k, seen: seen[q], Aux((5,), torch.bool)) == "aux0[q]"
    assert mask_text(lambda b, h, q, k, *aux: aux[1][0] > 0.5, IDS, Aux((5,), jnp.bfloat16.dtype)) == "0.5 < aux1[0]"
    assert mask_text(lambda b, h, q, k, ids: ids[b, to_int(q > k)] == 1, IDS) == "aux0[b, to_int((k < q))] == 1"


def test_python_numbers_are_results_too() -> None:
    assert mask_text(lambda *arguments: True) == "True"
    assert score_text(lambda *arguments: 0.5) == "0.5"


def test_a_constant_loop_and_helpers_are_plain_python() -> None:
    def helper(q: Any, k: Any, width: int) -> Any:
        return (q // width) == (k // width)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q < 0
        for width in (2, 3):
            result = result | helper(q, k, width)
        return result

    assert mask_text(mask) == "((q < 0) | ((q // 2) == (k // 2))) | ((q // 3) == (k // 3))"


def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
    if q > k:
        return h == 0
    return h > 0


REFUSED: list[tuple[Callable[..., Any], str]] = [
    (branches, "the truth value (if, while, and, or, not, in, or a chain"),
    (lambda b, h, q, k: q > k and h == 0, "the truth value"),
    (lambda b, h, q, k: q > k or h == 0, "the truth value"),
    (lambda b, h, q, k: not q > k, "the truth value"),
    (lambda b, h, q, k: 0 <= q < 5, "write & | ~ with brackets, and where(condition, a, b)"),
    (lambda b, h, q, k: q in (1, 2), "the truth value"),
    (lambda b, h, q, k: max(q, k) > 0, "the truth value"),
    (lambda b, h, q, k: [x for x in q], "a loop over it: a symbolic value has none"),
    (lambda b, h, q, k: any(k == i for i in range(q)), "a number: a symbolic value has none"),
    (lambda b, h, q, k: len(q) > 0, "a length"),
    (lambda b, h, q, k: int(q) > 0, "int(...): a symbolic value has none; write to_int(...)"),
    (lambda b, h, q, k: float(q) > 0, "float(...)"),
    (lambda b, h, q, k: {q: 1}[k], "unhashable type"),
    (lambda b, h, q, k: q[0] > 0, "an index into a symbolic value"),
    (lambda b, h, q, k: q(0) > 0, "a call"),
    (lambda b, h, q, k: q.shape[0] > 0, "the attribute shape: a symbolic value has none of that name"),
    (lambda b, h, q, k: q - k, "a result of kind int: it must return a bool"),
    (lambda b, h, q, k: q * 0.5, "a result of kind float: it must return a bool"),
    (lambda b, h, q, k: None, "a result of type NoneType: it must return a bool"),
    (lambda b, h, q, k: (q > k, True), "a result of type tuple"),
    (lambda b, h, q, k: (q > k) + (h > 0), "+ of bool and bool: write & | ~, to_int(...) or where(...)"),
    (lambda b, h, q, k: (q & 1) == 0, "& of int and int: it takes bools"),
    (lambda b, h, q, k: (q ^ k) == 0, "^ of ints: it takes bools"),
    (lambda b, h, q, k: ~q == 0, "~ of int: it takes bools"),
    (lambda b, h, q, k: (q > k) & q, "& of bool and int: it takes bools; write a comparison such as x != 0"),
    (lambda b, h, q, k: q & (q > k), "& of int and bool: it takes bools"),
    (lambda b, h, q, k: q << 32 == k, "<< by the constant 32: an int of 32 bits shifts by 0 to 31"),
    (lambda b, h, q, k: q >> -1 == k, ">> by the constant -1"),
    (lambda b, h, q, k: (q * 0.5) >> 1 == k, ">> of floats: it takes ints"),
    (lambda b, h, q, k: (q > k) << (h > 0) == k, "<< of bool and bool"),
    (lambda b, h, q, k: q * 0.5 // 2 == k, "// of floats: it takes ints"),
    (lambda b, h, q, k: q // 0 == k, "// by the constant 0"),
    (lambda b, h, q, k: q**k == 0, "** takes a constant int from 0 to 16"),
    (lambda b, h, q, k: q**-1 == 0, "** takes a constant int from 0 to 16"),
    (lambda b, h, q, k: 2**q == k, "a symbolic exponent"),
    (lambda b, h, q, k: q + 2**31 > k, "the int 2147483648: ints have 32 bits; write 2147483648.0"),
    (lambda b, h, q, k: q + "1" > k, "'1' (str) as a number"),
    (lambda b, h, q, k: to_int(q * 0.5) > k, "a float as an int: there is no rounding"),
    (lambda b, h, q, k: where(q, True, False), "where with a condition of kind int: it takes a bool"),
    (lambda b, h, q, k: torch.digamma(q) > 0, "digamma(...)"),
    (
        lambda b, h, q, k: q.new_ones(3) > 0,
        "new_ones(...) with such arguments: a symbolic value is one number, of size ()",
    ),
    (lambda b, h, q, k: torch.full_like(q, 0.5) > 0, "a float as an int: there is no rounding"),
    (lambda b, h, q, k: q.masked_fill(q > k, 0.5) > 0, "a float as an int: there is no rounding"),
    (lambda b, h, q, k: q.new_zeros((), dtype=torch.float16) == q, "a cast to float16: a cast takes float32"),
    (lambda b, h, q, k: q > 0 if q.dtype == torch.int64 else q > 1, "only the call knows the dtype"),
    (lambda b, h, q, k: q > torch.iinfo(q.dtype).max, "In the place of a dtype of the call write Python's own numbers"),
    (lambda b, h, q, k: torch.add(q, k, alpha=2) > 0, "add(...) with the option alpha"),
    (lambda b, h, q, k: torch.where(q > k) > 0, "where(...) with 1 arguments"),
    (lambda b, h, q, k: (q * 0.5).to(torch.bfloat16) > 0, "a cast to bfloat16: a cast takes float32"),
    (lambda b, h, q, k: q.add_(k) > 0, "the attribute add_"),
    (lambda b, h, q, k: np.cos(q) > 0, "cos(...)"),
    (lambda b, h, q, k: np.add.reduce(q) > 0, "add.reduce(...)"),
    (lambda b, h, q, k: jnp.where(q > k, True, False), "jax.numpy's functions take no symbols"),
    (lambda b, h, q, k: jnp.arange(5)[q] > 0, "pass the array in aux, or write lookup(array, q)"),
    (lambda b, h, q, k: np.arange(5)[q] > 0, "pass arrays in aux"),
    (lambda b, h, q, k: np.arange(5) * q > 0, "numpy.ndarray of shape [5] as a number: pass it in aux and index it"),
    (lambda b, h, q, k: torch.arange(5, device=CPU)[q:] > 0, "the index slice("),
    (lambda b, h, q, k: torch.ones(5, device=CPU)[None, q] > 0, "2 indices of aux[0] of shape [5]"),
    (lambda b, h, q, k: torch.ones(5, 5, device=CPU)[..., q] > 0, "the index Ellipsis of aux[0] of shape [5, 5]"),
    (lambda b, h, q, k: torch.ones(5, device=CPU)[q > k] > 0, "an index of kind bool of aux[0]"),
    (lambda b, h, q, k: torch.ones(5, 5, device=CPU)[q] > 0, "aux[0] of shape [5] as a number"),
    (lambda b, h, q, k: torch.ones(5, device=CPU, dtype=torch.complex64)[q] == 0, "an array of dtype torch.complex64"),
    (lambda b, h, q, k: missing_name, "NameError: name 'missing_name' is not defined"),  # noqa: F821
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_every_refusal_names_the_line_and_what_is_allowed(case: int) -> None:
    function, reason = REFUSED[case]
    with pytest.raises(ExpressionError) as raised:
        trace_mask(function)
    message = str(raised.value)
    assert message.startswith(f"mask_mod: {function.__qualname__!r} cannot become an expression, because of ")
    assert reason in message
    first = inspect.getsourcelines(function)[1] + (function is branches)
    assert f"{__file__}:{first}: " in message
    assert message.endswith(f"Allowed: {ALLOWED}")


def test_the_line_is_that_of_a_helper_that_fails() -> None:
    def helper(q: Any) -> Any:
        return 1 if q else 0  # this line

    with pytest.raises(ExpressionError, match="return 1 if q else 0  # this line"):
        trace_mask(lambda b, h, q, k: helper(q) == k)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda s, b, h, q, k: s > 0, "a result of kind bool: it must return a float"),
        (lambda s, b, h, q, k: q - k, "a result of kind int: it must return a float"),
        (lambda s, b, h, q, k: s if s > 0 else 0.0, "the truth value"),
        (lambda s, b, h, q, k: s**0.5, "** takes a constant int from 0 to 16"),
    ],
)
def test_refused_score_functions(function: Any, reason: str) -> None:
    with pytest.raises(ExpressionError, match=r"^score_mod: ") as raised:
        trace_score(function)
    assert reason in str(raised.value) and __file__ in str(raised.value)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (lambda ids, q: ids[2, q], "the index 2 of axis 0 of aux[0] of shape [2, 5]: it is outside"),
        (lambda ids, q: ids[-3, q], "the index -3 of axis 0"),
        (lambda ids, q: ids[q, 0, 0], "3 indices of aux[0] of shape [2, 5]"),
        (lambda ids, q: ids[:, q], "indices are ints or symbols, no slices"),
        (lambda ids, q: ids[q, q * 0.5], "an index of kind float"),
        (lambda ids, q: ids[[0, 1], q], "the index [0, 1]"),
        (lambda ids, q: ids * 2, "aux[0] of shape [2, 5] as a number: it needs an index for each axis"),
        (lambda ids, q: ids == q, "aux[0] of shape [2, 5] as a number"),
    ],
)
def test_refused_indices(index: Any, reason: str) -> None:
    with pytest.raises(ExpressionError) as raised:
        trace_mask(lambda b, h, q, k, ids: index(ids, q) > 0, [IDS])
    assert reason in str(raised.value)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ExpressionError, match=r"mask_mod: expected a function of \(b, h, q, k, \*aux\), got 5"):
        trace_mask(5)  # type: ignore[arg-type]
    with pytest.raises(
        ExpressionError, match=r"expected a function that takes \(b, h, q, k\) and 1 aux arrays"
    ) as raised:
        trace_mask(branches, [IDS])
    assert "branches" in str(raised.value) and __file__ in str(raised.value)
    with pytest.raises(ExpressionError, match=r"aux\[1\]: expected an array of bool, ints or floats, got 'x'"):
        trace_mask(lambda b, h, q, k, *aux: q > k, [IDS, "x"])
    with pytest.raises(ExpressionError, match=r"my_mask: "):
        trace_mask(branches, name="my_mask")


def test_callables_of_other_kinds_are_named() -> None:
    class Mask:
        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return q  # wrong

    with pytest.raises(ExpressionError, match="a result of kind int") as raised:
        trace_mask(Mask())
    assert "def __call__(self, b" in str(raised.value)
    with pytest.raises(ExpressionError, match="if q > k"):
        trace_mask(functools.partial(branches))
    with pytest.raises(ExpressionError, match="TypeError: dict expected at most 1 argument, got 4"):
        trace_mask(dict)


def test_symbols_do_not_leave_their_function() -> None:
    kept = []
    trace_mask(lambda b, h, q, k: kept.append(q) or q > k)
    with pytest.raises(ExpressionError, match="a symbolic value of another function"):
        trace_mask(lambda b, h, q, k: q > kept[0])


def test_a_function_may_not_grow_without_end() -> None:
    def endless(b: Any, h: Any, q: Any, k: Any) -> Any:
        while True:
            q = q + 1

    with pytest.raises(ExpressionError, match="more than 4096 operations"):
        trace_mask(endless)


def test_a_keyboard_interrupt_passes() -> None:
    def interrupted(b: Any, h: Any, q: Any, k: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_mask(interrupted)


def test_a_captured_value_is_read_at_each_trace() -> None:
    width = 2

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k >= q - width

    before = trace_mask(mask).tree
    width = 3
    after = trace_mask(mask).tree
    assert before != after
    assert evaluate_numpy(after, block_indices(1, 1, 4, 4))[0, 0, 3].tolist() == [True] * 4
