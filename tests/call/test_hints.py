"""Tests that a keyword of another library is refused with our word for it, by every public function."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
from frameworks import BOTH, Framework, as_numpy

from attn_core.call.hints import KEYWORDS, meaning

FUNCTIONS = (
    *("attention", "explain", "attention_qkvpacked", "paged_attention", "explain_paged", "append_kv"),
    *("context_parallel_attention", "explain_context_parallel", "PagedKVCache.attend"),
)
everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)
every_function = pytest.mark.parametrize("function", FUNCTIONS)


def public(framework: Framework, function: str) -> Any:
    return attrgetter(function)(framework.frontend)


def called(framework: Framework, function: str, **keywords: Any) -> str:
    """The message of a call with wrong keywords. Other arguments do not matter, because nothing looks at them."""
    call = public(framework, function)
    parameters = inspect.signature(call).parameters.values()
    required = {each.name: None for each in parameters if each.default is inspect.Parameter.empty}
    with pytest.raises(TypeError) as caught:
        call(**required, **keywords)
    return str(caught.value)


@pytest.mark.sampled
@everywhere
@every_function
@pytest.mark.parametrize("word", KEYWORDS)
def test_a_foreign_keyword_names_ours(framework: Framework, function: str, word: str) -> None:
    parameters = inspect.signature(public(framework, function)).parameters
    if word in parameters:
        pytest.skip(f"{function} has {word}")
    message = called(framework, function, **{word: 1})
    assert message.startswith(f"{word}: ")
    known = meaning(word, list(parameters))
    named = [name for name in ({} if isinstance(known, str) else known) if name in parameters]
    if named:
        assert message == f"{word}: expected {named[0]}=; {known[named[0]]}"  # type: ignore[index]
    else:
        assert f"{function.split('.')[-1]}() has no " in message


@everywhere
def test_each_of_our_words_is_a_parameter_of_some_function(framework: Framework) -> None:
    ours = {name for f in FUNCTIONS for name in inspect.signature(public(framework, f)).parameters}
    assert {name for known in KEYWORDS.values() if isinstance(known, dict) for name in known} <= ours


@everywhere
@every_function
def test_an_unknown_keyword_gets_a_close_match(framework: Framework, function: str) -> None:
    parameter = list(inspect.signature(public(framework, function)).parameters)[-1]
    message = called(framework, function, **{parameter + "s": 1})
    name = function.split(".")[-1]
    assert re.fullmatch(rf"{name}\(\) got an unexpected .* '{parameter}s'; did you mean {parameter}=\?", message)
    assert "; expected one of " in called(framework, function, zzzzzzzz=1)


@everywhere
def test_every_wrong_keyword_is_named(framework: Framework) -> None:
    lines = called(framework, "attention", is_causal=True, softmax_scale=1.0).split("\n")
    assert [line.partition(":")[0] for line in lines] == ["is_causal", "softmax_scale"]


@everywhere
def test_an_int_of_jax_nn_is_not_passed_on_as_a_number_of_keys(framework: Framework) -> None:
    """``local_window_size=3`` is a distance to both sides; ``window=3`` is 3 keys."""
    assert "(n, n) for an int n" in called(framework, "attention", local_window_size=3)


@everywhere
@every_function
def test_the_signature_shows_no_catch_all(framework: Framework, function: str) -> None:
    kinds = {each.kind for each in inspect.signature(public(framework, function)).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds


@everywhere
def test_position_ids_lead_to_segment_ids_that_separate_documents(framework: Framework) -> None:
    assert called(framework, "attention", position_ids=1).startswith(
        "position_ids: expected q_segment_ids=; (position_ids == 0).cumsum(-1) in int32"
    )
    random = np.random.default_rng(0)
    q, k, v = (framework.array(random.standard_normal((1, 7, 2, 8)), "float32") for _ in range(3))
    ids = (np.array([[0, 1, 2, 0, 1, 2, 3]]) == 0).cumsum(-1)
    found = framework.frontend.attention(q, k, v, causal=True, q_segment_ids=framework.array(ids, "int32"))
    info = framework.frontend.SeqInfo.from_lengths([3, 4])
    right = framework.frontend.attention(q, k, v, causal=True, seq_info=info)
    np.testing.assert_allclose(as_numpy(found), as_numpy(right), rtol=0, atol=1e-5)


@everywhere
def test_a_fourth_positional_argument_is_refused_with_the_keyword_of_a_mask(framework: Framework) -> None:
    """torch's ``scaled_dot_product_attention`` has its mask there."""
    message = r"attention\(\) takes 3 positional arguments but 4 were given; pass options by keyword, a mask as mask="
    for fourth in (None, 1):
        with pytest.raises(TypeError, match=message):
            framework.frontend.attention(None, None, None, fourth)
    signature = inspect.signature(framework.frontend.attention)
    assert signature.parameters["causal"].kind is inspect.Parameter.KEYWORD_ONLY
    assert inspect.Parameter.VAR_POSITIONAL not in {each.kind for each in signature.parameters.values()}
