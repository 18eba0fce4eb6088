"""Tests the acceptance rule and the mask probe: honest kernels pass, planted faults fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracle_cases import FEATURES, PACKED, Case, altered, fill, honest, make, result_of, rounded

from attn_core import AttentionSpec, SeqInfo, ShapeError, SpecError
from attn_core.call.functions import aux_of
from attn_core.call.tensors import Gradients
from attn_core.correctness import accuracy, reference

DTYPES = ("float64", "float32", "bfloat16", "float16")
LOW = DTYPES[1:]


def judge(truth: Case, computed: Case) -> accuracy.Accuracy:
    """The verdict if the reference's results for one case are offered, rounded, as another's."""
    spec, inputs = computed.spec, computed.inputs
    out, lse = reference.forward(spec, inputs)
    gradients = reference.backward(spec, inputs, out, lse, computed.dout, computed.dlse)
    return accuracy.expect(truth.spec, truth.inputs, dout=truth.dout, dlse=truth.dlse).judge(
        out=result_of(spec, out), lse=lse.astype(truth.spec.lse_dtype), gradients=result_of(spec, gradients)
    )


# Honest results pass


@pytest.mark.parametrize("name", FEATURES)
def test_the_rounded_reference_passes(name):
    for dtype in DTYPES:
        case = make(FEATURES[name], dtype)
        result = judge(case, case)
        assert result.ok, f"{dtype}: {result}"
        names = ["out", "lse", "dq", "dk", "dv"]
        names += ["dbias"] * case.spec.bias_gradient + ["dsinks"] * case.spec.sinks
        assert [quantity.name for quantity in result.quantities] == names


def honest_verdict(case: Case, key_block: int = 5) -> accuracy.Accuracy:
    """The verdict on an honest kernel."""
    out, lse, gradients = honest(case, key_block=key_block)
    return accuracy.check(
        *(case.spec, case.inputs), out=out, lse=lse, gradients=gradients, dout=case.dout, dlse=case.dlse
    )


@pytest.mark.parametrize("name", FEATURES)
def test_an_honest_kernel_passes(name):
    for dtype in LOW:
        result = honest_verdict(make(FEATURES[name], dtype, seed=3))
        assert result.ok, f"{dtype}: {result}"


@settings(max_examples=40, deadline=None)
@given(
    *(st.sampled_from([1, 2, 17, 67, 131]), st.sampled_from([1, 2, 31, 127, 257]), st.sampled_from([1, 8, 61])),
    *(st.sampled_from(LOW), st.sampled_from([None, 2.0]), st.sampled_from([0.1, 1.0, 3.0]), st.integers(0, 99)),
)
@example(131, 257, 61, "float32", None, 3.0, 0)
@example(131, 1, 8, "float32", None, 1.0, 0)
def test_an_honest_kernel_passes_at_any_size_and_magnitude(q_len, kv_len, head_dim, dtype, softcap, size, seed):
    spec = AttentionSpec(
        **{"batch": 1, "q_len": q_len, "kv_len": kv_len, "num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim},
        **{"value_dim": head_dim, "dtype": dtype, "softcap": softcap, "causal": True, "sinks": seed % 2 == 0},
        scale=size / head_dim**0.5,
    )
    result = honest_verdict(fill(spec, seed), key_block=64)
    assert result.ok, str(result)


@pytest.mark.parametrize("features", [{"bias_shape": (1, 9, 5, 7), "bias_gradient": True}, {"alibi_shape": (9,)}])
def test_the_rounding_of_float32_beside_a_large_bias_or_slope_is_allowed(features):
    case = make({**features, "sinks": True}, "float32")
    inputs = case.inputs._replace(sinks=case.inputs.sinks + 3000)
    if inputs.bias is not None:
        inputs = inputs._replace(bias=rounded(inputs.bias + 3000, "float32"))
    if inputs.alibi_slopes is not None:  # negative: farther keys weigh more
        inputs = inputs._replace(alibi_slopes=rounded(-600 - inputs.alibi_slopes, "float32"))
    inputs = inputs._replace(sinks=rounded(inputs.sinks, "float32"))
    result = honest_verdict(case._replace(inputs=inputs))
    assert result.ok, str(result)
    assert result["lse"].error > 2e-5


# Planted faults fail

LONG = {"batch": 1, "q_len": 61, "kv_len": 67, "num_heads": 6, "num_kv_heads": 2, "head_dim": 31, "value_dim": 29}
DOCUMENTS = {**LONG, "q_len": 59, "kv_len": 73, "documents": 3, "causal": True}


def offsets(*lengths: int) -> np.ndarray:
    return SeqInfo.from_lengths(lengths).cu_seqlens_q


def reading(case: Case, **inputs: np.ndarray) -> Case:
    """The case with other inputs."""
    return case._replace(inputs=case.inputs._replace(**inputs))


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Case], Case]]] = {
    "window too wide": ({**LONG, "causal": True, "window": (12, 0)}, partial(altered, window=(13, 0))),
    "window too narrow": ({**LONG, "window": (12, 5)}, partial(altered, window=(12, 4))),
    "flipped alignment": ({**LONG, "causal": True}, partial(altered, alignment="top_left")),
    "larger scale": ({**LONG, "scale": 0.25}, partial(altered, scale=0.2525)),
    "forgotten softcap": ({**LONG, "softcap": 5.0}, partial(altered, softcap=None)),
    "alibi from the wrong end": ({**LONG, "alibi_shape": (6,)}, partial(altered, alignment="top_left")),
    "forgotten sinks": ({**LONG, "sinks": True}, partial(reading, sinks=np.full(6, -np.inf))),
    "boundary off by one": (DOCUMENTS, partial(reading, cu_seqlens_q=offsets(17, 20, 22))),
    "key boundary off by one": (DOCUMENTS, partial(reading, cu_seqlens_k=offsets(19, 24, 30))),
}
"""A call's features, and the call that a faulty kernel computes."""


def planted(fault: str, dtype: str) -> tuple[Case, Case]:
    """A call, and the call that a kernel with a fault computes."""
    features, wrong = FAULTS[fault]
    lengths = ([17, 19, 23], [19, 23, 31]) if features is DOCUMENTS else ()
    case = fill(AttentionSpec(**features, dtype=dtype), 0, *lengths)
    return case, wrong(case)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_in_the_output_in_the_lse_and_in_the_gradients(fault, dtype):
    truth, faulty = planted(fault, dtype)
    assert judge(truth, truth).ok
    result = judge(truth, faulty)
    # A gradient in half precision may itself lose a few percent, so the output and the log-sum-exp are the judges
    # there.
    for name in ("out", "lse", "dq", "dk", "dv") if dtype == "float32" else ("out", "lse"):
        assert result[name].use > 1, f"{name} hides it:\n{result}"


@pytest.mark.parametrize("dtype", LOW)
def test_a_wrong_map_of_query_heads_to_kv_heads_fails(dtype):
    case = make(LONG, dtype)
    out, lse = forward_with_swapped_groups(case)
    result = accuracy.check(case.spec, case.inputs, out=result_of(case.spec, out), lse=lse)
    assert result["out"].use > 1 and result["lse"].use > 1


def forward_with_swapped_groups(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Query head h reads kv head h % kv_heads instead of h // group."""
    reads = np.arange(case.spec.num_heads) % case.spec.num_kv_heads
    spread = replace(case.spec, num_kv_heads=case.spec.num_heads)
    k, v = case.inputs.k[..., reads, :], case.inputs.v[..., reads, :]
    return reference.forward(spread, case.inputs._replace(k=k, v=v))


GRADIENT_FAULTS = {
    **{
        f"{name} scaled": lambda gradients, factor, name=name: gradients._replace(
            **{name: factor * getattr(gradients, name)}
        )
        for name in ("dq", "dk", "dv", "dbias", "dsinks")  # those of arrays: test_aux_gradients
    },
    "dk of one query head only": lambda gradients, _: gradients._replace(dk=gradients.dk / 3),
    "dsinks negated": lambda gradients, _: gradients._replace(dsinks=-gradients.dsinks),
    "dbias of one batch row only": lambda gradients, _: gradients._replace(dbias=gradients.dbias / 2),
    "dq with a NaN": lambda gradients, _: gradients._replace(dq=np.where(np.arange(11) == 4, np.nan, gradients.dq)),
}


@pytest.mark.parametrize(("dtype", "factor"), [("float32", 1.001), ("bfloat16", 1.3)])
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_a_wrong_gradient_fails_and_is_named(fault, dtype, factor):
    case = make({"bias_shape": (1, 9, 1, 7), "bias_gradient": True, "sinks": True}, dtype)
    expected = accuracy.expect(case.spec, case.inputs, dout=case.dout, dlse=case.dlse)
    out, lse = expected.truth["out"], expected.truth["lse"]
    gradients = Gradients(*(expected.truth[name] for name in Gradients._fields[:5]))
    assert expected.judge(out=out, lse=lse, gradients=gradients).worst == 0
    result = expected.judge(out=out, lse=lse, gradients=GRADIENT_FAULTS[fault](gradients, factor))
    name = fault.split()[0]
    assert [quantity.name for quantity in result.quantities if quantity.use > 1] == [name], str(result)
    assert not result.ok and f"{name}: " in str(result) and "WRONG" in str(result)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("large", [-1.75 * 2.0**127, 1.75 * 2.0**127])
def test_weights_of_a_backward_that_do_not_sum_to_1_fail(dtype, large):
    """The fault: exp(logit - lse) with an lse that float32 or float64 rounds to the logit."""
    case = make({"bias_shape": (1, 1, 5, 7), "bias_gradient": True}, dtype)
    case.inputs.bias[:, :, 2] = large
    assert judge(case, case).ok
    out, lse = reference.forward(case.spec, case.inputs)
    assert (lse[:, :, 2] == large).all()
    rest = out, lse, case.dout, case.dlse
    gradients = reference.backward(replace(case.spec, partial=True), case.inputs, *rest)
    expected = accuracy.expect(case.spec, case.inputs, dout=case.dout, dlse=case.dlse)
    result = expected.judge(out=out, lse=lse, gradients=gradients)
    for name in ("dq", "dk", "dv", "dbias"):
        assert result[name].use > 1, f"{name} hides it:\n{result}"
    nothing = np.where(np.arange(5)[:, None, None] == 2, 0.0, out)
    assert expected.judge(out=nothing, lse=lse)["out"].use > 1, "the row is no row that sees no key"


def test_a_missing_gradient_of_the_lse_fails():
    case = make({}, "bfloat16")
    out, lse = reference.forward(case.spec, case.inputs)
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout)
    result = accuracy.check(
        *(case.spec, case.inputs), out=out, lse=lse, gradients=gradients, dout=case.dout, dlse=case.dlse
    )
    assert result["dq"].use > 1 and result["dk"].use > 1 and result["dv"].use == 0


# The verdict


def test_rows_that_see_no_key_must_be_exactly_empty():
    case = make({"causal": True, "q_len": 7, "kv_len": 5}, "float32")
    out, lse = reference.forward(case.spec, case.inputs)
    assert accuracy.check(case.spec, case.inputs, out=out, lse=lse).worst == 0
    for value in (0.0, np.nan, np.inf, -1e30):
        wrong = accuracy.check(case.spec, case.inputs, out=out, lse=np.where(np.isinf(lse), value, lse))
        assert wrong["lse"].use == np.inf
    assert not accuracy.check(case.spec, case.inputs, out=np.where(out == 0, 1e-30, out)).ok


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails(value):
    case = make({}, "float32")
    out, lse = reference.forward(case.spec, case.inputs)
    wrong = out.copy()
    wrong[1, 2, 3, 4] = value
    assert accuracy.check(case.spec, case.inputs, out=wrong, lse=lse).worst == np.inf
    wrong = lse.copy()
    wrong[1, 2, 3] = value
    assert accuracy.check(case.spec, case.inputs, out=out, lse=wrong).worst == np.inf


def test_elements_where_the_reference_is_nan_are_not_judged():
    case = make({}, "float32")
    q = case.inputs.q.copy()
    q[0, 0] = np.nan
    inputs = case.inputs._replace(q=q)
    out, lse = reference.forward(case.spec, inputs)
    assert np.isnan(out[0, 0]).all()
    assert accuracy.check(case.spec, inputs, out=np.nan_to_num(out), lse=np.nan_to_num(lse)).ok
    out[0, 1] = np.nan
    assert not accuracy.check(case.spec, inputs, out=out, lse=lse).ok


def test_missing_or_misshapen_results_are_named():
    case = make({"sinks": True}, "float32")
    out, lse = reference.forward(case.spec, case.inputs)
    gradients = reference.backward(case.spec, case.inputs, out, lse, case.dout, case.dlse)
    expected = accuracy.expect(case.spec, case.inputs, dout=case.dout, dlse=case.dlse)
    with pytest.raises(ShapeError, match="out: expected shape"):
        expected.judge(out=out[:1])
    with pytest.raises(ShapeError, match="dsinks: expected shape"):
        expected.judge(out=out, gradients=gradients._replace(dsinks=None))
    with pytest.raises(SpecError, match="dout"):
        accuracy.check(case.spec, case.inputs, out=out, gradients=gradients)


@pytest.mark.parametrize("zero", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}])
def test_zero_sizes_are_judged(zero):
    case = make({**zero, "causal": True}, "bfloat16")
    assert judge(case, case).worst == 0


def test_the_text_of_the_report():
    case = make({}, "float32")
    out, lse, _ = honest(case)
    lines = str(accuracy.check(case.spec, case.inputs, out=out, lse=lse)).splitlines()
    assert [line.split(":")[0] for line in lines] == ["out", "lse"]
    assert all("of the bound, error" in line for line in lines)


# The mask probe


def run(probe: accuracy.MaskProbe, forward=reference.forward) -> list[np.ndarray]:
    return [forward(probe.spec, inputs)[0] for inputs in probe.inputs()]


def probe_of(case: Case) -> accuracy.MaskProbe:
    inputs = case.inputs
    offsets = {"cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k}
    others = {"key_ranges": inputs.key_ranges, "aux": aux_of(inputs)}
    return accuracy.mask_probe(case.spec, mask=inputs.mask, rng=inputs.rng, **offsets, **others)


@pytest.mark.parametrize("name", FEATURES)
def test_the_probe_shows_the_visible_set_of_a_right_mask(name):
    case = make(FEATURES[name], "float32")
    probe = probe_of(case)
    assert probe.calls == -(-case.spec.kv_len * 3 // 13)
    assert probe.expected.any() and not probe.expected.all()
    assert probe.differences(run(probe)) == []
    assert np.array_equal(probe.visible_pairs(run(probe)), probe.expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probe_works_with_an_honest_kernel_of_any_dtype(dtype):
    case = make({**LONG, "causal": True, "window": (12, 0), "sinks": True}, dtype)
    probe = probe_of(case)
    outs = [honest(case._replace(inputs=inputs))[0] for inputs in probe.inputs()]
    assert probe.differences(outs) == []


@pytest.mark.parametrize("value_dim", [1, 5, 7, 21, 23])
def test_the_probe_needs_no_particular_value_dim(value_dim):
    case = make({"causal": True, "value_dim": value_dim}, "float32")
    probe = probe_of(case)
    assert probe.calls == -(-21 // value_dim)
    assert probe.differences(run(probe)) == []


@pytest.mark.parametrize("fault", [*list(FAULTS)[:3], "boundary off by one"])
def test_the_probe_lists_the_pairs_that_a_fault_shows_or_hides(fault):
    truth, faulty = planted(fault, "float32")
    right, wrong = probe_of(truth), probe_of(faulty)
    outs = [reference.forward(faulty.spec, inputs)[0] for inputs in wrong.inputs()]
    actual = right.differences(outs)
    assert len(actual) == (right.expected != wrong.expected).sum() > 0
    assert all(
        text.startswith("batch 0, head ") and text.endswith(("though hidden", "though visible")) for text in actual
    )


def test_the_probe_sees_one_extra_key_among_thousands_that_the_rule_misses():
    sizes = {"batch": 1, "q_len": 2, "kv_len": 1021, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "value_dim": 509}
    case = make({**sizes, "causal": True, "scale": 0.01}, "bfloat16")
    faulty = altered(case, causal=False, window=(1019, 1))
    out, _ = reference.forward(faulty.spec, faulty.inputs)
    assert accuracy.check(case.spec, case.inputs, out=result_of(case.spec, out))["out"].use < 1
    probe = probe_of(case)
    outs = [reference.forward(faulty.spec, inputs)[0] for inputs in probe.inputs()]
    assert probe.differences(outs) == [
        "batch 0, head 0, query 0: key 1020 of kv head 0 is seen though hidden",
        "batch 0, head 0, query 1: key 0 of kv head 0 is hidden though visible",
    ]


def test_the_probe_sees_a_wrong_map_of_heads():
    case = make(LONG, "float32")
    probe = probe_of(case)
    outs = [forward_with_swapped_groups(case._replace(inputs=inputs))[0] for inputs in probe.inputs()]
    assert any("of kv head 1 is seen though hidden" in text for text in probe.differences(outs))


def test_the_probe_needs_an_output_for_every_query():
    probe = probe_of(make(PACKED, "float32"))
    with pytest.raises(ShapeError, match=f"expected {probe.calls} outputs of shape"):
        probe.visible_pairs(run(probe)[1:])


def test_the_probe_without_keys_needs_no_call():
    probe = probe_of(make({"kv_len": 0}, "float32"))
    assert probe.calls == 0 and probe.differences([]) == []
