"""Tests select, which is pure, so one machine can test all: default deny, every reason, one explanation everywhere."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import psutil
import pytest
import torch
from cost_tables import made_up_table, tables_in_force
from hypothesis import assume, given
from hypothesis import strategies as st
from spec_strategies import Call, calls

from attn_core import AttentionSpec, NoBackendError, SpecError, Target, backends, explain, select, selection
from attn_core.backends.shared.claims import CHECKS, unmet_claims
from attn_core.backends.support import Build, Support
from attn_core.call.options import FLAGS
from attn_core.call.spec import DTYPES, PagedKV
from attn_core.selection import choice, preference
from benchmarks.fit.calls import random_call
from tests.campaign.functions import fields_of
from torch_frontend.dispatch import eager_calls, plan, prepared

pytestmark = pytest.mark.sampled

SPEC = AttentionSpec(
    batch=2, q_len=5, kv_len=7, num_heads=6, num_kv_heads=3, head_dim=11, value_dim=11, dtype="float32"
)
CPU = Target("torch", "cpu")
TARGETS = [Target(framework, device) for framework in ("torch", "jax") for device in ("cpu", "sm80", "sm90", "sm100")]
ASKS: dict[str, dict[str, Any]] = {
    "head_dim": {"head_dim": 13, "value_dim": 13},
    "value_dim": {"value_dim": 5},
    "num_kv_heads": {"num_kv_heads": 3},
    "dtype": {"dtype": "bfloat16"},
    **{name: {name: True} for name in FLAGS},
    "alignment": {"causal": True, "alignment": "top_left"},
    "window": {"window": (3, 2)},
    "softcap": {"softcap": 50.0},
    "mask_shape": {"mask_shape": (2, 1, 1, 7)},
    "key_ranges_shape": {"key_ranges_shape": (2, 1, 7, 1, 2)},
    "mask_mod": fields_of("nothing", None, (2, 6, 5, 7)),
    "score_mod": fields_of(None, "slopes", (2, 6, 5, 7)),
    "aux_gradients": fields_of(None, "slopes", (2, 6, 5, 7)) | {"needs_backward": True, "aux_gradients": (0,)},
    "bias_shape": {"bias_shape": (1, 6, 5, 7)},
    "bias_gradient": {"bias_shape": (1, 6, 5, 7), "bias_gradient": True},
    "alibi_shape": {"alibi_shape": (6,)},
    "sinks": {"sinks": True},
    "documents": {"batch": 1, "documents": 3, "max_len_q": 5, "max_len_k": 7},
    "dropout": {"dropout": 0.1},
    "partial": {"partial": True},
    "invariant": {"invariant": "batch"},
    "paged": {
        **{"batch": 1, "kv_len": 12, "documents": 3, "max_len_q": 5, "max_len_k": 12},
        "paged": PagedKV(num_pages=9, page_size=4, width=3),
    },
}
"""The features that a spec requests by each of its fields. Every backend accepts the other fields."""
FREE = {
    "batch",
    "q_len",
    "kv_len",
    "num_heads",
    "scale",
    "max_len_q",
    "max_len_k",
    "needs_backward",
    "bias_dtype",
    "aux",
}

NOTHING = Support(kernel="the empty kernel", devices=("cpu",), dtypes=("float32",))
EVERYTHING = Support(
    kernel="the full kernel",
    devices=("cpu", "cuda"),
    dtypes=DTYPES,
    alignments=("bottom_right", "top_left"),
    invariant=("batch", "prefix"),
    **{field.name: True for field in fields(Support) if field.default is False},
)


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    """Selections are cached; tests that patch their inputs must neither read nor leave cached ones."""
    caches = choice._explained, preference._keeper
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


# Claims of a backend


def test_every_field_of_the_spec_has_a_check() -> None:
    names = {field.name for field in fields(AttentionSpec)}
    assert set(CHECKS) == names
    assert set(ASKS) | FREE == names


@pytest.mark.parametrize("field", ASKS)
def test_nothing_is_allowed_unless_claimed(field: str) -> None:
    spec = replace(replace(SPEC, num_kv_heads=6), **ASKS[field])
    limited = replace(NOTHING, max_head_dim=11) if field == "head_dim" else NOTHING
    assert unmet_claims(limited, spec, "cpu"), f"{field} was let through"
    assert unmet_claims(EVERYTHING, spec, "cpu") == ()
    assert all("the empty kernel" in reason for reason in unmet_claims(limited, spec, "cpu"))


def test_a_plain_call_asks_for_nothing() -> None:
    assert unmet_claims(NOTHING, replace(SPEC, num_kv_heads=6), "cpu") == ()


@pytest.mark.parametrize(
    "field", [name for name in ASKS if name not in ("head_dim", "value_dim", "num_kv_heads", "dtype")]
)
def test_a_field_without_a_check_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CHECKS, field)
    spec = replace(SPEC, **ASKS[field])
    expected = f"{field}={getattr(spec, field)!r}: no backend has claimed it"
    assert expected in unmet_claims(EVERYTHING, spec, "cpu")
    assert unmet_claims(EVERYTHING, replace(SPEC), "cpu") == ()
    refused = explain(spec, CPU)
    assert refused.backend is None
    assert all(expected in refused.reasons(name) for name in backends.names())


def test_a_new_field_is_refused_until_somebody_checks_it() -> None:
    @dataclass(frozen=True, kw_only=True)
    class TomorrowsSpec(AttentionSpec):
        rotary: str | None = None
        __hash__ = AttentionSpec.__hash__

    values = {field.name: getattr(SPEC, field.name) for field in fields(AttentionSpec)}
    assert unmet_claims(EVERYTHING, TomorrowsSpec(**values), "cpu") == ()
    asked = TomorrowsSpec(**values, rotary="half")
    assert unmet_claims(EVERYTHING, asked, "cpu") == ("rotary='half': no backend has claimed it",)
    assert explain(asked, CPU).backend is None


def test_reasons_name_the_value_the_kernel_and_the_limit() -> None:
    spec = replace(SPEC, dtype="float64", head_dim=16, value_dim=5, softcap=50.0, window=(3, None), return_lse=True)
    claims = Support(
        kernel="the small kernel",
        devices=("sm90", "sm100"),
        dtypes=("bfloat16", "float16"),
        max_head_dim=8,
        alignments=("top_left",),
    )
    assert unmet_claims(claims, spec, "cpu") == (
        "device cpu: the small kernel needs sm90 or sm100",
        "num_kv_heads=3: the small kernel needs as many kv heads as heads (6)",
        "head_dim=16: the small kernel stops at 8",
        "value_dim=5: the small kernel needs value_dim == head_dim (16)",
        "dtype float64: the small kernel takes bfloat16, float16",
        "alignment=bottom_right with q_len 5 and kv_len 7: the small kernel has top_left",
        "window=(3, None): the small kernel has none",
        "softcap=50.0: the small kernel has none",
        "return_lse: the small kernel has no log-sum-exp output",
    )
    eights = replace(EVERYTHING, head_dim_multiple=8)
    assert unmet_claims(eights, replace(SPEC, head_dim=16), "cpu") == (
        "head_dim=11: the full kernel takes multiples of 8",
    )


def test_alignment_counts_only_where_it_changes_the_result() -> None:
    claims = replace(EVERYTHING, alignments=("top_left",))
    assert unmet_claims(claims, SPEC, "cpu") == ()  # no band
    assert unmet_claims(claims, replace(SPEC, causal=True, q_len=7), "cpu") == ()  # equal lengths
    assert unmet_claims(claims, replace(SPEC, causal=True), "cpu") != ()
    # equal lengths in total, but not in each document
    packed = replace(SPEC, causal=True, q_len=7, **ASKS["documents"])
    assert unmet_claims(claims, packed, "cpu") != ()


def test_a_gradient_of_the_log_sum_exp_is_a_claim_of_its_own() -> None:
    claims = replace(EVERYTHING, lse_gradient=False)
    assert unmet_claims(claims, replace(SPEC, return_lse=True), "cpu") == ()
    assert unmet_claims(claims, replace(SPEC, needs_backward=True), "cpu") == ()
    reasons = unmet_claims(claims, replace(SPEC, return_lse=True, needs_backward=True), "cpu")
    assert reasons == ("return_lse with gradients: the full kernel takes no gradient of the log-sum-exp",)


@pytest.mark.parametrize(
    ("devices", "runs"),
    [(("cpu",), {"cpu"}), (("cuda",), {"sm80", "sm90", "sm100"}), (("sm90", "cpu"), {"cpu", "sm90"})],
)
def test_which_devices_a_claim_covers(devices: tuple[str, ...], runs: set[str]) -> None:
    claims = replace(NOTHING, devices=devices)
    assert {device for device in ("cpu", "sm80", "sm90", "sm100", "meta") if claims.runs_on(device)} == runs


# The choice


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.framework}-{target.device}")
@pytest.mark.parametrize("asked", [{}, *ASKS.values(), {"needs_backward": True}], ids=["plain", *ASKS, "training"])
def test_the_first_in_order_that_can_is_chosen(target: Target, asked: dict[str, Any]) -> None:
    spec = replace(SPEC, **asked)
    actual = explain(spec, target)
    order = preference.candidates(spec, target)
    able = [name for name in order if not selection.refusals(name, spec, target)]
    assert actual.backend == (able[0] if able else None)
    assert actual.considered[: len(order)] == order
    assert sorted(actual.considered) == sorted(backends.names())
    assert dict(actual.refusals) == {
        name: why for name in backends.names() if (why := selection.refusals(name, spec, target))
    }
    assert actual.requested is None
    assert (actual.spec, actual.target) == (spec, target)


def eager_choice(spec: AttentionSpec, target: Target, order: tuple[str, ...]) -> str | None:
    """Returns the first backend without reasons, after collecting every reason of every backend."""
    reasons = {name: selection.refusals(name, spec, target) for name in backends.names()}
    return next((name for name in order if not reasons[name]), None)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.framework}-{target.device}")
@given(call=calls(), data=st.data())
def test_choosing_early_equals_choosing_after_every_reason(target: Target, call: Call, data: st.DataObject) -> None:
    missing = data.draw(st.sets(st.sampled_from(backends.names())), label="not installed")
    there = replace(target, unavailable=tuple((name, "not installed") for name in sorted(missing)))
    spec = replace(call.spec, dtype=data.draw(st.sampled_from(DTYPES), label="dtype"))
    order = preference.order(spec, there.framework, there.device)
    assert explain(spec, there).backend == eager_choice(spec, there, order)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.framework}-{target.device}")
@given(call=calls(), data=st.data())
def test_calls_of_other_lengths_share_claims_but_not_rules(target: Target, call: Call, data: st.DataObject) -> None:
    assume(call.spec.documents is None and call.spec.alibi_shape is None and call.spec.key_ranges_shape is None)
    spec = replace(call.spec, dtype=data.draw(st.sampled_from(DTYPES), label="dtype"))
    names = st.lists(st.sampled_from(backends.names()), min_size=1, unique=True).map(tuple)
    requested = data.draw(st.none() | names, label="requested")
    claimed: dict[str, bool] = {}
    sizes = st.integers(1, 70) | st.sampled_from([128, 192, 4096, 65_600])
    for q_len, kv_len in [(spec.q_len, spec.kv_len), *data.draw(st.lists(st.tuples(sizes, sizes), max_size=4))]:
        if (q_len == kv_len) != (spec.q_len == spec.kv_len):
            continue
        tables = (
            None if shape is None else (*shape[:2], *(1 if n == 1 else m for n, m in zip(shape[2:], (q_len, kv_len))))
            for shape in (spec.mask_shape, spec.bias_shape)
        )
        other = spec.with_lengths(spec.batch, q_len, kv_len, *tables)
        selection = explain(other, target, requested)
        candidates = requested or selection.automatic
        expected = None if selection.backend is None else (selection.backend, candidates)
        assert choice.choose(other, target, requested, claimed) == expected


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_choosing_early_equals_choosing_after_every_reason_for_measured_calls(framework: str, training: bool) -> None:
    target = Target(framework, "sm90", builds=(("flash2", Build("a wheel", head_dims=(64, 128), version=(2, 8, 3))),))
    for case in (random_call(0, number, "cuda") for number in range(200)):
        spec = replace(case.spec, needs_backward=training)
        order = preference.order(spec, framework, "sm90")
        assert explain(spec, target).backend == eager_choice(spec, target, order), case.name


def test_the_way_to_a_kernel_explains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    considered: list[str] = []

    def watched(name: str, spec: AttentionSpec, target: Target) -> Iterator[str]:
        considered.append(name)
        return reasons(name, spec, target)

    reasons = choice.reasons_of
    monkeypatch.setattr(choice, "reasons_of", watched)
    monkeypatch.setattr(choice, "refusals", None)
    chosen = select(SPEC, Target("torch", "sm80"), ("flash3", "math", "flex"))
    assert (chosen.backend, considered) == ("math", ["flash3", "math"])


@pytest.mark.slow
def test_fifty_thousand_shapes_do_not_grow_memory() -> None:
    def plan_shapes(lengths: range) -> int:
        """Plans a call of each length, and returns the bytes of memory in use after them."""
        dtype, device = torch.float32, torch.device("cpu")
        for length in lengths:
            shape = torch.Size((2, length, 6, 16))
            options = (True, "bottom_right", None, None, None, 0.0, False, False, None, "bshd")
            key = (*(shape,) * 3, *(dtype,) * 3, *(device,) * 3, (), 0, False, None)
            prepared._prepared(eager_calls.prepare, *key, *options)
        return int(psutil.Process().memory_info().rss)

    full = plan_shapes(range(1, 6_001))  # more than any cache holds
    assert plan_shapes(range(6_001, 50_001)) - full < 8 * 2**20
    plan.plan.cache_clear()
    prepared._prepared.cache_clear()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.framework}-{target.device}")
def test_plain_calls_run_everywhere_that_the_order_knows(target: Target) -> None:
    chosen = select(SPEC, target)
    if target.device == "cpu":
        assert chosen.backend == ("jax_xla" if target.framework == "jax" else backends.usual_order("torch", "cpu")[0])
    assert (chosen.reasons("jax_xla") == ("runs in JAX only",)) is (target.framework == "torch")


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("device", ["cpu", "sm90"])
def test_approximate_backends_are_never_chosen_automatically(framework: str, device: str) -> None:
    kind = backends.kind_of(device)
    rough = [name for name in backends.names() if backends.load(name, kind).forward_claims.approximate]
    assert not set(rough) & set(backends.usual_order(framework, kind))
    half = replace(SPEC, dtype="bfloat16", head_dim=64, value_dim=64, kv_len=64, q_len=64)
    everything_else_missing = tuple((name, "gone") for name in backends.names() if name not in rough)
    assert explain(half, Target(framework, device, everything_else_missing)).backend is None


_NEVER_RUN = {
    "sage_fp16_cuda",
    "sage_fp16_triton",
    "sage_fp8_cuda",
    "sage_fp8_cuda_sm90",
}
UNPROVEN = {"cuda": _NEVER_RUN, "rocm": {"flash2", "sdpa_flash"}}


@pytest.mark.parametrize("kind", ["cpu", "cuda", "rocm", "tpu", "mps"])
def test_no_unproven_backend_is_in_any_preference(kind: str) -> None:
    modules = {name: backends.load(name, kind).forward_claims for name in backends.names()}
    kinds = {name: {*map(backends.kind_of, claims.devices)} for name, claims in modules.items()}
    unproven = {name for name, claims in modules.items() if claims.unproven and kind in kinds[name]}
    assert unproven == UNPROVEN.get(kind, set())
    for framework in ("torch", "jax"):
        for paged in (False, True):
            assert unproven.isdisjoint(backends.usual_order(framework, kind, paged=paged))


NARROW = Build("a small build", without=("softcap", "backward"), head_dims=(8,))


def test_an_installed_build_narrows_the_claims() -> None:
    narrow = Target("torch", "cpu", builds=(("math", NARROW),))
    assert select(replace(SPEC, head_dim=8, value_dim=8), narrow, "math").backend == "math"
    with pytest.raises(NoBackendError) as caught:
        select(replace(SPEC, softcap=3.0, needs_backward=True), narrow, "math")
    assert caught.value.selection.reasons("math") == (
        "head_dim=11: the torch math kernel (a small build) stops at 8",
        "softcap=3.0: the torch math kernel (a small build) has none",
        "backward: the torch math kernel (a small build) has no gradient",
    )
    assert select(replace(SPEC, softcap=3.0), CPU, "math").backend == "math"


def test_both_frameworks_choose_the_same_kernel_of_torch_on_a_cpu() -> None:
    for asked in ({}, *(changes for name, changes in ASKS.items() if name != "dropout")):
        spec = replace(SPEC, **asked)
        only_torch = Target("jax", "cpu", (("jax_xla", "gone"),))
        assert select(spec, CPU).backend == select(spec, only_torch).backend


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_backend_that_is_not_installed_is_skipped_with_the_reason(framework: str) -> None:
    reason = "not available: ImportError: No module named 'torch' (needs torch>=2.11)"
    broken = Target(framework, "cpu", (("sdpa_flash", reason), ("math", reason)))
    actual = explain(SPEC, broken)
    assert actual.backend == ("flex" if framework == "torch" else "jax_xla")
    assert actual.reasons("sdpa_flash") == actual.reasons("math") == (reason,)
    nothing = Target(framework, "cpu", tuple((name, reason) for name in backends.names()))
    with pytest.raises(NoBackendError, match=r"^no backend can run this call\n") as caught:
        select(replace(SPEC, softcap=50.0), nothing)
    assert caught.value.selection.reasons("sdpa_flash") == (reason, "softcap=50.0: the aten CPU flash kernel has none")


def test_an_explicit_backend_never_falls_back() -> None:
    spec = replace(SPEC, softcap=50.0, dropout=0.1)
    assert select(spec, CPU).backend == "math"
    with pytest.raises(NoBackendError) as caught:
        select(spec, CPU, "sdpa_flash")
    actual = caught.value.selection
    assert (actual.backend, actual.requested) == (None, ("sdpa_flash",))
    assert actual.reasons("sdpa_flash") == tuple(
        f"{what}: the aten CPU flash kernel has none" for what in ("softcap=50.0", "dropout=0.1")
    )
    assert actual.reasons("math") == ()
    assert "never falls back" in str(caught.value)
    assert str(actual) in str(caught.value)
    assert isinstance(caught.value, NotImplementedError)


def test_several_names_are_tried_in_order_and_nothing_else() -> None:
    assert select(SPEC, CPU, ("flex", "math")).backend == "flex"
    assert select(SPEC, CPU, ("jax_xla", "math")).backend == "math"
    actual = select(replace(SPEC, needs_backward=True), CPU, ("flex", "math"))
    assert (actual.backend, actual.requested) == ("math", ("flex", "math"))
    assert actual.reasons("flex") == ("backward: FlexAttention on CPU has no gradient",)
    assert actual.considered[:2] == ("flex", "math")
    with pytest.raises(NoBackendError, match=r"^backend='flex, jax_xla' cannot run this call"):
        select(replace(SPEC, needs_backward=True), CPU, ("flex", "jax_xla"))


def test_backward_reasons_add_only_new_reasons() -> None:
    spec = replace(SPEC, bias_shape=(1, 6, 5, 7), bias_gradient=True, needs_backward=True, return_lse=True)
    reasons = explain(spec, CPU).reasons("sdpa_flash")
    assert len(reasons) == len(set(reasons)) == 2
    assert any("gradient of the bias" in reason for reason in reasons)
    assert any("return_lse with gradients" in reason for reason in reasons)


def test_in_jax_only_the_xla_path_has_dropout() -> None:
    actual = explain(replace(SPEC, dropout=0.1), Target("jax", "cpu"))
    assert actual.backend == "jax_xla"
    assert "dropout=0.1: in JAX only the XLA path has dropout" in actual.reasons("math")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sdpa_flsh", "^backend='sdpa_flsh': unknown backend; did you mean sdpa_flash"),
        ("Math", "did you mean math"),
        ("qqq", "expected one of ffpa, flash2, "),
        (("math", "flash5"), "^backend='flash5': unknown backend; did you mean"),
    ],
)
def test_unknown_names_are_refused(name: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        select(SPEC, CPU, name)
    with pytest.raises(SpecError, match=says):
        explain(SPEC, CPU, name)


def test_selections_compare_hash_and_pickle_by_value() -> None:
    first, second = explain(SPEC, CPU), explain(SPEC, CPU)
    assert first is second
    assert pickle.loads(pickle.dumps(first)) == first
    assert hash(first) == hash(pickle.loads(pickle.dumps(first)))
    with pytest.raises(NoBackendError) as caught:
        select(SPEC, CPU, "jax_xla")
    again = pickle.loads(pickle.dumps(caught.value))  # the error must be able to leave a worker process
    assert (again.selection, str(again)) == (caught.value.selection, str(caught.value))


# The explanation


@pytest.fixture
def few_backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A version with four backends, so that new backends do not change the text."""
    monkeypatch.setattr(backends, "names", lambda: ("sdpa_flash", "flex", "math", "jax_xla"))
    orders = {"cpu": ("sdpa_flash", "math"), "cuda": ("math",)}
    monkeypatch.setattr(backends, "usual_order", lambda framework, kind, **_: orders[kind])
    with tables_in_force({}):
        yield


HEAD = "float32, batch 2, q_len 5, kv_len 7,\n    heads 6/3, head_dim 11"


@pytest.mark.usefixtures("few_backends")
def test_the_explanation_of_an_automatic_choice() -> None:
    assert str(
        explain(replace(SPEC, softcap=50.0, needs_backward=True, bias_shape=(1, 6, 5, 7), bias_gradient=True), CPU)
    ) == (
        "selected: math\n"
        "  because: the first in the usual order that can run the call\n"
        f"  call: attention in torch on cpu: {HEAD}, "
        "softcap=50.0, bias_shape=(1, 6, 5, 7),\n"
        "    needs_backward, bias_gradient\n"
        "3 others cannot run it on cpu; every reason: selection.text(everything=True)"
    )


@pytest.mark.usefixtures("few_backends")
def test_the_explanation_of_a_named_backend() -> None:
    assert str(explain(SPEC, CPU)) == (
        "selected: sdpa_flash\n"
        "  because: the first in the usual order that can run the call\n"
        f"  call: attention in torch on cpu: {HEAD}\n"
        "can run it too:\n"
        "  math\n"
        "  by name only: flex\n"
        "1 other cannot run it on cpu; every reason: selection.text(everything=True)"
    )


@pytest.mark.usefixtures("few_backends")
def test_the_explanation_names_the_predicted_times_and_their_source() -> None:
    table = made_up_table({"math": 12.0, "sdpa_flash": 1250.0, "flex": 1.0})
    with tables_in_force({("torch", "cpu"): table}):
        assert str(explain(SPEC, CPU)) == (
            "selected: math, about 12 µs\n"
            "  because: the first that can run the call in the order of predicted times, from\n"
            "    made-up calls\n"
            f"  call: attention in torch on cpu: {HEAD}\n"
            "can run it too:\n"
            "  sdpa_flash  about 1.25 ms\n"
            "  by name only: flex\n"
            "1 other cannot run it on cpu; every reason: selection.text(everything=True)"
        )
        named = str(explain(SPEC, CPU, "sdpa_flash"))
        assert named.startswith("selected: sdpa_flash, about 1.25 ms\n  because: requested by name\n")
        assert "can run it too:\n  math  about 12 µs\n" in named


@pytest.mark.usefixtures("few_backends")
def test_the_whole_explanation_has_every_reason() -> None:
    spec = replace(SPEC, softcap=50.0, needs_backward=True)
    assert explain(spec, CPU).text(everything=True) == (
        "selected: math\n"
        "  because: the first in the usual order that can run the call\n"
        "  forward mode: math\n"
        f"  call: attention in torch on cpu: {HEAD}, "
        "softcap=50.0, needs_backward\n"
        "  sdpa_flash  refused: softcap=50.0: the aten CPU flash kernel has none\n"
        "  math        selected\n"
        "  flex        refused: backward: FlexAttention on CPU has no gradient\n"
        "  jax_xla     refused: runs in JAX only"
    )


@pytest.mark.usefixtures("few_backends")
def test_a_candidate_that_one_change_admits_is_shown_with_its_reason() -> None:
    missing = "not available: ModuleNotFoundError: No module named 'torch' (needs torch>=2.11)"
    target = Target("torch", "cpu", (("sdpa_flash", missing),))
    assert str(explain(SPEC, target)).splitlines()[5:] == [
        "  by name only: flex",
        "one change away:",
        "  sdpa_flash  not available: ModuleNotFoundError: No module named 'torch';",
        "              pip install 'attn-core[torch]'",
        "1 other cannot run it on cpu; every reason: selection.text(everything=True)",
    ]
    # Two changes: a missing package, and an argument that the kernel does not take.
    assert "sdpa_flash" not in str(explain(replace(SPEC, softcap=50.0), target))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        (
            "not available: ModuleNotFoundError: No module named 'torch' (needs torch>=2.11 with CUDA)",
            "not available: ModuleNotFoundError: No module named 'torch'; pip install 'attn-core[torch]'",
        ),
        (
            "the bridge from JAX is not available: ModuleNotFoundError: x (needs jax-tvm-ffi>=0.1.3)",
            "the bridge from JAX is not available: ModuleNotFoundError: x; pip install 'attn-core[jax]'",
        ),
        (
            "not available: PackageNotFoundError: flash_attn (needs flash-attn>=2.6.2,<3)",
            "not available: PackageNotFoundError: flash_attn; pip install 'flash-attn>=2.6.2,<3' --no-build-isolation",
        ),
        # Not one pip command: several packages, a damaged installation, or no installation at all.
        *(
            (reason, reason)
            for reason in (
                "not available: ModuleNotFoundError: x (needs flash-attn-3, tokenspeed-fa3 or fa3-fwd)",
                "not available: OSError: libcudart.so.13 (needs torch>=2.11)",
                "softcap=50.0: the aten CPU flash kernel has none",
            )
        ),
    ],
)
def test_a_missing_package_is_a_reason_with_a_command(reason: str, remedy: str) -> None:
    assert choice.with_remedy(reason) == remedy


GEMMA = AttentionSpec(
    **{"batch": 1, "q_len": 2048, "kv_len": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "softcap": 50.0},
)


def test_another_device_is_no_change_that_a_caller_makes() -> None:
    refused = explain(replace(GEMMA, softcap=None, dtype="float16", invariant="batch"), Target("torch", "sm75"))
    reasons = dict(refused.refusals)
    assert reasons["math"] == ("device sm75 with invariant='batch': the torch math kernel has none",)
    assert "one change away:\n  sdpa_efficient" in str(refused) and "math" not in str(refused)


def test_the_explanation_on_a_gpu() -> None:
    with tables_in_force({}):
        assert str(explain(GEMMA, Target("torch", "sm90"))) == (
            "selected: flash3\n"
            "  because: the first in the usual order that can run the call\n"
            "  call: attention in torch on sm90: bfloat16, batch 1, q_len 2048, kv_len 2048,\n"
            "    heads 32/8, head_dim 128, causal, softcap=50.0\n"
            "can run it too:\n"
            "  flash4\n"
            "  flash2\n"
            "  flex\n"
            "  math\n"
            "  by name only: flash3_fp8, triton_jvp, triton_ordered\n"
            "one change away:\n"
            "  sdpa_cudnn      softcap=50.0: cuDNN attention has none\n"
            "  sdpa_flash      softcap=50.0: the aten CUDA flash kernel has none\n"
            "  xformers        softcap=50.0: xformers has none\n"
            "  sdpa_efficient  softcap=50.0: the aten memory-efficient kernel has none\n"
            "  ffpa            softcap=50.0: the FFPA kernel has none\n"
            "9 others cannot run it on sm90; every reason: selection.text(everything=True)"
        )


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sm75", "sm90", "sm120", "gfx942", "mps", "tpu"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_explanations_fit_80_columns_and_name_the_answer_first(framework: str, device: str, everything: bool) -> None:
    for spec in (
        GEMMA,
        replace(GEMMA, dtype="float32", softcap=None),
        replace(SPEC, dropout=0.1, needs_backward=True),
    ):
        for target in (Target(framework, device), Target.here(framework, device)):
            for names in (None, "flex", ("flash2", "sdpa_flash")):
                selection = explain(spec, target, names)
                lines = selection.text(everything).splitlines()
                # An address stays whole, so that a terminal can open it.
                assert all(len(line) <= 80 or line.lstrip().startswith("https://") for line in lines), selection
                assert lines[0].startswith(("selected: ", "no backend can run this call", "backend="))
                able = {name for name in backends.names() if not selection.reasons(name)}
                assert all(any(name in line for line in lines) for name in able)


def test_an_error_needs_no_explanation_until_somebody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop-ins catch the error and run the host's own function."""
    monkeypatch.setattr(choice, "text_of", lambda *arguments: pytest.fail("explained"))
    with pytest.raises(NoBackendError):
        select(SPEC, CPU, "jax_xla")


@pytest.mark.usefixtures("few_backends")
def test_the_explanation_of_a_refusal() -> None:
    target = Target("torch", "sm90", (("math", "not available: OSError: libcudart.so.13 (needs torch>=2.11)"),))
    with pytest.raises(NoBackendError) as caught:
        select(replace(SPEC, dropout=0.1), target, ("sdpa_flash", "math"))
    assert str(caught.value) == (
        "backend='sdpa_flash, math' cannot run this call:\n"
        "  sdpa_flash: dtype float32: the aten CUDA flash kernel takes bfloat16, float16\n"
        "  sdpa_flash: dropout=0.1: the aten CUDA flash kernel has none\n"
        "  math: not available: OSError: libcudart.so.13 (needs torch>=2.11)\n"
        f"  call: attention in torch on sm90: {HEAD}, "
        "dropout=0.1\n"
        "2 others cannot run it on sm90; every reason: selection.text(everything=True)"
    )


@pytest.mark.usefixtures("few_backends")
def test_the_error_names_the_package_that_is_all_that_is_missing() -> None:
    missing = "not available: ModuleNotFoundError: No module named 'torch' (needs torch>=2.11)"
    with pytest.raises(NoBackendError) as caught:
        select(SPEC, Target("jax", "cpu", (("math", missing),)), "math")
    assert str(caught.value).splitlines()[:3] == [
        "backend='math' cannot run this call:",
        "  not available: ModuleNotFoundError: No module named 'torch';",
        "    pip install 'attn-core[torch]'",
    ]


def test_without_any_candidate_the_closest_backends_are_shown() -> None:
    gone = Target("torch", "mps", (("math", "not available: gone"), ("math", "broken: gone, too")))
    lines = str(explain(SPEC, gone)).splitlines()
    assert lines[0] == "no backend can run this call"
    assert "  math     not available: gone; broken: gone, too" in lines
    assert len([line for line in lines if line.split()[0] in backends.names()]) == choice.MOST_CLOSEST


@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
def test_long_causal_documents_stay_with_the_flash_kernel(alignment):
    spec = AttentionSpec(
        batch=1,
        q_len=40_000,
        kv_len=40_000,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        value_dim=8,
        dtype="float32",
        causal=True,
        alignment=alignment,
        documents=2,
        max_len_q=20_000,
        max_len_k=20_000,
    )
    assert explain(spec, Target("torch", "cpu")).backend == "sdpa_flash"
    assert explain(replace(spec, window=(9, 0)), Target("torch", "cpu")).backend == "sdpa_flash"
