"""Tests that NaN and Inf stay in their document, batch row or query, and that all other results keep their bits."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
from both_frontends import FRAMEWORKS, Results, claimed, judge, judged, module_on, only, run, same_bits, target
from spec_strategies import Call, make_call

from attn_core import explain

pytestmark = pytest.mark.sampled

HEADS = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8, "dtype": "float32"}
LENGTHS = ((5, 0, 7, 3, 131), (4, 3, 9, 2, 137))  # the last document is longer than a block of queries
DOCUMENTS = {**HEADS, "lengths": LENGTHS}
ROWS = {**HEADS, "batch": 3, "q_len": 13, "kv_len": 17}
CASES: dict[str, dict[str, Any]] = {
    "documents": DOCUMENTS,
    "documents, causal": {**DOCUMENTS, "causal": True},
    "documents, window": {**DOCUMENTS, "window": (2, 1), "alignment": "top_left"},
    "documents, everything": {
        **{**DOCUMENTS, "causal": True, "softcap": 2.0, "mask_shape": (1, 1, 146, 155), "bias_shape": (1, 6, 146, 155)},
        **{"alibi_shape": (6,), "sinks": True, "bias_gradient": True},
    },
    "documents, bfloat16": {**DOCUMENTS, "causal": True, "dtype": "bfloat16"},
    "rows": ROWS,
    "rows, causal": {**ROWS, "causal": True},
    "rows, window": {**ROWS, "window": (2, 1)},
    "rows, mask and bias": {**ROWS, "mask_shape": (3, 1, 13, 17), "bias_shape": (3, 6, 1, 17)},
    "rows, everything": {
        **{**ROWS, "causal": True, "window": (9, 0), "softcap": 2.0, "alibi_shape": (3, 6), "sinks": True},
        **{"mask_shape": (3, 6, 13, 17), "bias_shape": (3, 1, 13, 17), "bias_gradient": True},
    },
    "rows, bfloat16": {**ROWS, "causal": True, "dtype": "bfloat16"},
}
LARGEST_SCORE = {"jax_xla": 1e8}
"""XLA may compute one score twice with different roundings; beyond this size the difference is too large for exp."""
POISONS = (np.nan, np.inf)


def case_or_skip(framework: str, backend: str, device: str, **fields: Any) -> Call:
    """The case with gradients if the backend has them, else without; skips the test if it refuses both."""
    claims = module_on(backend, device).forward_claims
    if missing := judged(framework, backend, device):
        pytest.skip(missing)
    if claims.approximate:
        pytest.skip(f"{backend} is approximate: an Inf spoils what it is quantised with")
    if fields["dtype"] not in claims.dtypes:
        fields["dtype"] = claims.dtypes[0]
    if not claims.grouped_heads:
        fields["num_kv_heads"] = fields["num_heads"]
    call = make_call(1, **fields, needs_backward=True, deterministic=needs_deterministic(backend, device))
    where = target(framework, device)
    for attempt in (call, call.inference):
        if explain(attempt.spec, where, backend).backend is not None:
            return attempt
    pytest.skip(
        f"{backend} in {framework} on {where.device}: " + "; ".join(explain(call.spec, where, backend).reasons(backend))
    )


def needs_deterministic(backend: str, device: str) -> bool:
    """Whether to request a deterministic call: on a GPU only that promises equal bits."""
    claims = module_on(backend, device)
    return device == "cuda" and (claims.backward_claims or claims.forward_claims).deterministic


def changed(backend: str, device: str, one: Results, other: Results) -> list[str]:
    """The names of results that differ in any bit; gradients that a kernel adds in any order may differ a little."""
    kept = device == "cpu" or needs_deterministic(backend, device)
    loose = [] if kept else [name for name in one if name.startswith("d")]
    wrong = [name for name in loose if not np.allclose(*(x[name].astype(np.float64) for x in (one, other)), atol=0.03)]
    return wrong + [name for name in same_bits(one, other) if name not in loose]


def poisoned(call: Call, value: float, names: tuple[str, ...], rows: slice, keys: slice) -> Call:
    """The call with ``value`` in all channels of some query rows (of q, dout) and keys (of k, v) of the leading
    axis."""
    changed = {name: getattr(call.inputs, name).copy() for name in names if name != "dout"}
    for name, array in changed.items():
        array[rows if name == "q" else keys] = value
    dout = call.dout.copy()
    if "dout" in names:
        dout[rows] = value
    return replace(call, inputs=call.inputs._replace(**changed), dout=dout)


def untouched(call: Call, results: Results) -> Results:
    """The results of the documents after the first, or of the batch rows after the first.

    Sums over documents or rows (dsinks, and a shared dbias) belong to none of them and are left out.
    """
    spec = call.spec
    rows, keys = (LENGTHS[0][0], LENGTHS[1][0]) if spec.packed else (1, 1)
    parts = {"out": np.s_[rows:], "lse": np.s_[:, rows:] if spec.packed else np.s_[1:]}
    parts |= {"dq": np.s_[rows:], "dk": np.s_[keys:], "dv": np.s_[keys:]}
    parts["dbias"] = np.s_[:, :, rows:] if spec.packed else np.s_[1:]
    return {name: np.ascontiguousarray(array[parts[name]]) for name, array in results.items() if name in parts}


@pytest.mark.on_gpus(only=lambda case, **_: case not in ("rows", "documents", "rows, bfloat16"))  # others have more
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_nan_stays_in_its_document_or_batch_row(backend: str, case: str, framework: str, device: str) -> None:
    only(("documents, everything", "rows, everything"), case, backend, device)
    call = case_or_skip(framework, backend, device, **CASES[case])
    first_q, first_k = (LENGTHS[0][0], LENGTHS[1][0]) if call.spec.packed else (1, 1)
    clean = run(framework, call, backend, device)
    assert all(np.isfinite(array.astype(np.float64)).all() for name, array in clean.items() if name != "lse")
    for value in POISONS:
        broken = poisoned(call, value, ("q", "k", "v", "dout"), slice(first_q), slice(first_k))
        results = run(framework, broken, backend, device)
        assert changed(backend, device, untouched(call, clean), untouched(call, results)) == []
        shown = not np.isfinite(results["out"][:first_q].astype(np.float64)).all()
        assert shown, "the poison must show where it is seen"


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_nan_in_the_last_document_leaves_the_others_unchanged(backend: str, device: str, framework: str) -> None:
    """The last tile of a document may hold the first tokens of the next, with weight 0, and NaN * 0 is NaN."""
    call = case_or_skip(framework, backend, device, **CASES["documents, causal"])
    last_q, last_k = (slice(sum(lengths[:-1]), None) for lengths in LENGTHS)
    broken = poisoned(call, np.nan, ("q", "k", "v", "dout"), last_q, last_k)
    clean, results = run(framework, call, backend, device), run(framework, broken, backend, device)
    reached = []
    for name in ("out", "dq", "dk", "dv"):
        if name in clean:
            before = slice(None, (last_k if name in ("dk", "dv") else last_q).start)
            reached += changed(backend, device, *({name: array[name][before]} for array in (clean, results)))
    if module_on(backend, device).reaches_next_document:
        assert reached, f"{backend} keeps documents apart after all: say so in docs/reference/semantics.md"
        pytest.xfail(f"{backend}: the last tile of a document holds the next one's first tokens: {', '.join(reached)}")
    assert reached == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", ["documents, causal", "rows, causal"])
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_nan_in_a_single_tensor_stays_in_its_document(backend: str, device: str, case: str, framework: str) -> None:
    """NaN in q, k, v or dout alone, where a sum with weight 0 could carry it further."""
    only(("documents, causal",), case, backend, device)
    call = case_or_skip(framework, backend, device, **CASES[case])
    first_q, first_k = (LENGTHS[0][0], LENGTHS[1][0]) if call.spec.packed else (1, 1)
    clean = run(framework, call, backend, device)
    for name in ("q", "k", "v", "dout"):
        broken = run(framework, poisoned(call, np.nan, (name,), slice(first_q), slice(first_k)), backend, device)
        assert changed(backend, device, untouched(call, clean), untouched(call, broken)) == [], name


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", ["rows", "rows, causal", "rows, everything", "documents, causal"])
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_nan_in_a_query_stays_in_its_row(backend: str, case: str, framework: str, device: str) -> None:
    """out and dq of every other query keep their bits, and so do all results of other documents and rows."""
    only(("documents, causal",), case, backend, device)
    call = case_or_skip(framework, backend, device, **CASES[case])
    clean = run(framework, call, backend, device)
    at = 2 if call.spec.packed else (0, 9)  # packed: in the first document
    for value in POISONS:
        q = call.inputs.q.copy()
        q[at] = value
        broken = run(framework, replace(call, inputs=call.inputs._replace(q=q)), backend, device)
        for name in ("out", "dq"):
            if name in clean:
                others = np.ones(clean[name].shape[: 1 if call.spec.packed else 2], bool)
                others[at] = False
                parts = ({name: array[name][others]} for array in (clean, broken))
                assert changed(backend, device, *parts) == []
        assert not np.isfinite(broken["out"][at].astype(np.float64)).all()
        assert changed(backend, device, untouched(call, clean), untouched(call, broken)) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed())
def test_finite_inputs_give_no_nan(backend: str, device: str, framework: str) -> None:
    """With rows that see no key, with logits in the hundreds, and with both."""
    call = case_or_skip(framework, backend, device, **{**ROWS, "q_len": 19}, causal=True, scale=60.0)
    for name, array in run(framework, call, backend, device).items():
        assert np.isfinite(array.astype(np.float64)).all(), name
    empty = 19 - 17
    assert not run(framework, call, backend, device)["out"][:, :empty].any()


HIDES: dict[str, dict[str, Any]] = {
    "mask": {"mask_shape": (3, 1, 1, 17)},
    "mask, causal": {"mask_shape": (3, 1, 1, 17), "causal": True},
    "mask of heads": {"mask_shape": (3, 6, 13, 17), "window": (9, 4)},
    "bias": {"bias_shape": (3, 1, 1, 17)},
    "window": {"window": (2, 1), "kv_len": 40},
    "documents": {"lengths": ((5, 6), (7, 9)), "mask_shape": (1, 1, 1, 16), "batch": 1},
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("case", HIDES)
def test_a_hidden_key_changes_nothing_on_the_automatic_choice_on_a_cpu(case: str, framework: str) -> None:
    """Whatever a key holds that no query sees, the results equal those of the call without it."""
    fields = {**ROWS, **HIDES[case], "needs_backward": True}
    lengths = fields.pop("lengths", None)
    call = make_call(5, lengths, **({**fields, "q_len": 11, "kv_len": 16} if lengths else fields))
    unseen = 1 if not call.spec.packed else 0
    inputs = call.inputs
    if inputs.mask is not None:
        inputs.mask[..., 3] = inputs.mask[..., 8:11] = False
    if inputs.bias is not None:
        inputs.bias[..., 3] = -np.inf
    at = {"window": np.s_[unseen, :9]}.get(case, np.s_[3] if call.spec.packed else np.s_[unseen, 3])
    for names, value in product(("kv", "k", "v"), POISONS):
        arrays = {name: getattr(inputs, name).copy() for name in names}
        for array in arrays.values():
            array[at] = value
        results = run(framework, replace(call, inputs=inputs._replace(**arrays)))
        verdict = judge(framework, call, results)
        assert verdict.ok, f"{value} in {names}, {explain(call.spec, target(framework)).backend}: {verdict}"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_in_a_key_reaches_only_rows_that_see_it_on_the_automatic_choice_on_a_cpu(framework: str) -> None:
    call = make_call(5, **ROWS, mask_shape=(3, 1, 13, 17), needs_backward=True)
    seen = call.inputs.mask[1, 0, :, 3]
    assert seen.any() and not seen.all()
    k = call.inputs.k.copy()
    k[1, 3] = np.nan
    clean, broken = run(framework, call), run(framework, replace(call, inputs=call.inputs._replace(k=k)))
    for name in ("out", "dq"):
        assert np.isnan(broken[name][1, seen]).all()
        np.testing.assert_allclose(broken[name][1, ~seen], clean[name][1, ~seen], rtol=1e-4, atol=1e-5)
        assert same_bits({name: clean[name][[0, 2]]}, {name: broken[name][[0, 2]]}) == []


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("backend", "device"), claimed(None, "cpu"))
@pytest.mark.parametrize("case", ["rows", "rows, causal", "rows, window", "documents, causal"])
def test_scores_close_to_the_end_of_float32_give_no_nan(case: str, backend: str, device: str, framework: str) -> None:
    """The bound of docs/reference/semantics.md: the terms of a score sum up to at most 1e38 in magnitude, or to 1e8."""
    call = case_or_skip(framework, backend, device, **CASES[case])
    size = (LARGEST_SCORE.get(backend, 1e38) / call.spec.head_dim) ** 0.5
    q, k = (np.float32(size * np.sign(array)) for array in call.inputs[:2])
    q[..., :1] = k[..., :1] = size  # one channel is equal everywhere, so that not all sums cancel
    broken = replace(call, inputs=call.inputs._replace(q=np.float64(q), k=np.float64(k)))
    for name, array in run(framework, broken, backend, device).items():
        assert not np.isnan(array.astype(np.float64)).any(), name
