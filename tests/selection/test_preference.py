"""Tests the order of automatic choice: by predicted times, the properties of calls that the predictions depend on, and
the random calls that are measured."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cost_tables import made_up_model, made_up_table, tables_in_force
from hypothesis import given
from hypothesis import strategies as st
from quick_calls import QUICK

from attn_core import backends
from attn_core.call import masks
from attn_core.call.arithmetic import pairs
from attn_core.call.spec import AttentionSpec
from attn_core.selection import preference
from attn_core.selection.cost_model import Model, kind_of_call, sizes_of_call
from attn_core.selection.preference import HOST, order, predicted, ranking
from attn_core.selection.tables import shipped_table
from benchmarks.fit.calls import LIMITS, flops, random_call, random_calls
from benchmarks.fit.records import plain_fields, spec_of

ROOT = Path(__file__).resolve().parents[2]
SPEC = AttentionSpec(
    batch=4,
    q_len=4096,
    kv_len=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    value_dim=128,
    dtype="bfloat16",
    causal=True,
)
STATIC = backends.usual_order
USUAL = ("flash3", "flash4", "sdpa_cudnn", "flash2", "flex", "math")


def made_up_order(patch: pytest.MonkeyPatch, orders: dict[tuple[str, str], tuple[str, ...]]) -> None:
    """Lets these be the static orders, and all others be empty."""
    patch.setattr(backends, "usual_order", lambda framework, kind, **_: orders.get((framework, kind), ()))


@pytest.fixture(autouse=True)
def usual_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A static order that does not change with the project's."""
    in_jax = (*USUAL[:-1], "jax_cudnn", "jax_xla", "math")
    made_up_order(monkeypatch, {("torch", "cuda"): USUAL, ("jax", "cuda"): in_jax})
    with tables_in_force({}):
        yield


def measured(models: dict[str, float | Model], training: dict[str, float | Model] | None = None) -> Any:
    """Makes a table with these models decide for sm90 in a block."""
    return tables_in_force({("torch", "sm90"): made_up_table(models, training)})


# The order of a call


def test_the_fastest_by_prediction_comes_first() -> None:
    models: dict[str, float | Model] = {
        "flash3": made_up_model(40.0, work=1.0),
        "sdpa_cudnn": made_up_model(20.0, work=2.0),
        "flash2": made_up_model(30.0, work=1.5),
        "math": made_up_model(50.0, work=9.0),
    }
    with measured(models, {"sdpa_cudnn": 350.0, "flash4": 380.0}):
        assert order(SPEC, "torch", "sm90")[:3] == ("flash3", "flash2", "sdpa_cudnn")
        short = replace(SPEC, q_len=128, kv_len=128, batch=1)
        assert order(short, "torch", "sm90")[:3] == ("sdpa_cudnn", "flash2", "flash3")
        assert order(replace(SPEC, needs_backward=True), "torch", "sm90")[:2] == ("sdpa_cudnn", "flash4")
        times = predicted(short, "torch", "sm90")
        assert times["sdpa_cudnn"] == pytest.approx(20.0 * HOST) and "flash4" not in times


def test_an_effect_changes_the_order_of_calls_with_the_property() -> None:
    slow_cap = made_up_model(1.0, effects={"softcap": 3.0}, work=1.0)
    with measured({"flash3": slow_cap, "flash2": made_up_model(1.0, work=2.0)}):
        assert order(SPEC, "torch", "sm90")[0] == "flash3"
        assert order(replace(SPEC, softcap=50.0), "torch", "sm90")[0] == "flash2"
        before, after = (predicted(spec, "torch", "sm90")["flash3"] for spec in (SPEC, replace(SPEC, softcap=50.0)))
        assert after / before == pytest.approx(3.0)


def test_decoding_avoids_a_plan_for_every_number_of_keys() -> None:
    """Only in torch, where the keys of a decoding loop grow; a mask is that of a static cache, whose keys do not."""
    step = replace(SPEC, q_len=1, causal=True)
    masked = replace(step, mask_shape=(step.batch, 1, 1, step.kv_len))
    with measured({"sdpa_cudnn": 20.0, "flash2": 30.0}):
        assert order(step, "torch", "sm90")[0] == "flash2"
        assert predicted(step, "torch", "sm90")["sdpa_cudnn"] > 900
        for spec in (masked, replace(step, q_len=512)):
            assert order(spec, "torch", "sm90")[0] == "sdpa_cudnn"
        assert predicted(step, "jax", "sm90")["sdpa_cudnn"] < 900


@pytest.mark.parametrize(("kv_len", "ragged"), [(8, False), (9, True), (97, True), (1023, True), (11162, True)])
def test_a_call_of_round_lengths_is_of_the_same_kind(kv_len: int, ragged: bool) -> None:
    spec = replace(SPEC, q_len=1, kv_len=kv_len, mask_shape=(4, 1, 1, kv_len))
    rounded = preference._of_round_lengths(spec)
    assert kind_of_call(rounded) == kind_of_call(spec) and kind_of_call(spec).ragged is ragged
    assert kv_len <= rounded.kv_len <= kv_len * 17 / 16 and rounded.mask_shape == (4, 1, 1, rounded.kv_len)


def test_equal_predictions_keep_the_usual_order() -> None:
    with measured({name: 7.0 for name in reversed(USUAL)}):
        assert order(SPEC, "torch", "sm90") == USUAL


def test_the_host_of_a_shipped_table_counts_more_than_once_in_torch_on_a_gpu() -> None:
    # flash2's device takes longer than either host, and less than flash3's host on a slower machine.
    models: dict[str, float | Model] = {"flash3": 20.0, "flash2": made_up_model(10.0, constant=25.0)}
    with measured(models):
        assert predicted(SPEC, "torch", "sm90") == pytest.approx({"flash3": 20.0 * HOST, "flash2": 25.0})
        assert order(SPEC, "torch", "sm90")[0] == "flash2"
        assert order(replace(SPEC, needs_backward=True), "torch", "sm90")[0] == "flash2"
    measured_here = replace(made_up_table(models), of_this_host=True)
    with tables_in_force({("torch", "sm90"): measured_here}):
        assert predicted(SPEC, "torch", "sm90") == pytest.approx({"flash3": 20.0, "flash2": 25.0})
    with tables_in_force({("torch", "cpu"): made_up_table({"math": 20.0})}), pytest.MonkeyPatch.context() as patch:
        made_up_order(patch, {("torch", "cpu"): ("math",)})
        assert predicted(SPEC, "torch", "cpu") == pytest.approx({"math": 20.0})


def test_a_doubtful_model_loses_a_near_tie() -> None:
    with measured({"flash3": made_up_model(10.0, error=0.4), "flash2": made_up_model(10.5)}):
        assert order(SPEC, "torch", "sm90")[0] == "flash2"
        assert predicted(SPEC, "torch", "sm90")["flash3"] == pytest.approx(10.0 * HOST)


def test_backends_without_a_model_come_between_fast_and_slow() -> None:
    assert ranking({"flash2": 10.0, "sdpa_cudnn": 39.0, "flex": 45.0, "math": 50.0}, USUAL) == (
        *("flash2", "sdpa_cudnn", "flash3", "flash4", "flex", "math"),
    )
    jax = backends.usual_order("jax", "cuda")
    ranked = ranking({"flash2": 10.0, "flex": 45.0, "math": 50.0}, jax)
    assert ranked == ("flash2", "flash3", "flash4", "sdpa_cudnn", "jax_cudnn", "flex", "jax_xla", "math")
    assert ranking({"flash2": 1.0}, jax)[-2:] == ("jax_xla", "math")
    assert ranking({}, USUAL) == USUAL
    assert ranking({"math": 5.0, "flash2": 6.0}, USUAL)[-1] == "flash2"  # math may be all that can run, but is slow
    assert ranking({"math": 5.0}, USUAL)[-1] == "math" and ranking({"math": 5.0}, ("math", "flex"))[0] == "math"


@given(data=st.data())
def test_every_candidate_is_in_every_order(data: st.DataObject) -> None:
    usual = backends.usual_order(data.draw(st.sampled_from(["torch", "jax"])), "cuda")
    times = data.draw(st.dictionaries(st.sampled_from(usual), st.floats(1.0, 1e6)))
    ranked = ranking(times, usual)
    assert sorted(ranked) == sorted(usual)
    assert [name for name in ranked if name in times] == sorted(
        times, key=lambda name: (times[name], usual.index(name))
    )


def test_without_a_table_the_usual_order_applies() -> None:
    with measured({"flash2": 1.0}):
        assert order(SPEC, "torch", "sm89") == USUAL
        assert order(SPEC, "jax", "sm100") == backends.usual_order("jax", "cuda")
        assert order(SPEC, "torch", "cpu") == order(SPEC, "torch", "mps") == ()  # the made-up order has neither
        assert preference.source("torch", "sm80") is None and preference.source("jax", "sm90") == "made-up calls"
        assert predicted(SPEC, "torch", "sm80") == {}
    assert shipped_table("torch", "sm80") is None


# JAX on a GPU has torch's models and its own host times


def test_both_frameworks_choose_the_same_for_long_calls() -> None:
    models: dict[str, float | Model] = {
        "flash2": made_up_model(10.0, work=9.0),
        "flash3": made_up_model(90.0, work=3.0),
        "sdpa_cudnn": made_up_model(10.0, work=5.0),
    }
    with measured(models):
        for spec in (SPEC, replace(SPEC, softcap=30.0), replace(SPEC, needs_backward=True)):
            torch, jax = order(spec, "torch", "sm90"), order(spec, "jax", "sm90")
            assert tuple(name for name in jax if not name.startswith("jax_")) == torch
            # The kernel of jax_cudnn is cuDNN's, too, so on equal times the usual order decides.
            assert jax.index("jax_cudnn") == jax.index("sdpa_cudnn") + 1


def test_short_calls_in_jax_prefer_backends_without_python() -> None:
    short = replace(SPEC, q_len=128, kv_len=128, batch=1)
    with measured({"flash2": 17.0, "flash4": 83.0, "sdpa_cudnn": 28.0, "math": 90.0}):
        assert order(short, "torch", "sm90")[:2] == ("flash2", "sdpa_cudnn")
        assert order(short, "jax", "sm90")[:2] == ("flash4", "jax_cudnn")
        times = predicted(short, "jax", "sm90")
        assert times["flash4"] < times["jax_cudnn"] < times["flash2"] < times["sdpa_cudnn"]
        trained = predicted(replace(short, needs_backward=True), "jax", "sm90")
        assert all(trained[name] > times[name] for name in times)
    with measured({"flash2": 17.0, "sdpa_cudnn": 28.0, "math": 90.0}):  # both of torch's kernels need a callback
        assert order(short, "jax", "sm90")[0] == "jax_cudnn"


def test_small_calls_in_jax_run_in_xla_if_the_other_kernels_need_python() -> None:
    small = replace(SPEC, q_len=64, kv_len=64, batch=6, dtype="float32", bias_shape=(1, 32, 64, 64))
    times = {"flash2": 17.0, "sdpa_efficient": 28.0, "math": 90.0}
    with pytest.MonkeyPatch.context() as patched:
        made_up_order(patched, {("jax", "cuda"): ("sdpa_efficient", "jax_cudnn", "jax_xla", "math")})
        with measured(times):
            assert order(small, "jax", "sm90")[0] == "jax_xla"
            assert order(replace(small, needs_backward=True), "jax", "sm90")[0] == "jax_xla"
            # All its pairs take XLA longer than a callback.
            larger = replace(small, q_len=1024, kv_len=1024, bias_shape=(1, 32, 1024, 1024))
            assert order(larger, "jax", "sm90")[0] == "sdpa_efficient"
            assert predicted(larger, "jax", "sm90")["jax_xla"] > 3e3


def test_a_mask_costs_more_in_a_callback() -> None:
    short = replace(SPEC, q_len=128, kv_len=128, batch=1)
    masked = replace(short, mask_shape=(1, 1, 128, 128))
    with measured({"flash2": 17.0, "sdpa_cudnn": 28.0, "math": 90.0}):
        plain, with_mask = (predicted(spec, "jax", "sm90") for spec in (short, masked))
        assert with_mask["sdpa_cudnn"] > plain["sdpa_cudnn"] + 100
        assert with_mask["jax_cudnn"] <= plain["jax_cudnn"]


def test_jax_on_a_cpu_has_its_own_table() -> None:
    with pytest.MonkeyPatch.context() as patched:
        made_up_order(patched, {("jax", "cpu"): ("math", "jax_xla"), ("torch", "cpu"): ("math",)})
        with tables_in_force({("jax", "cpu"): made_up_table({"jax_xla": 5.0, "math": 6.0})}):
            assert order(SPEC, "jax", "cpu") == ("jax_xla", "math")
            assert order(SPEC, "torch", "cpu") == ("math",)


# The properties of a call


def test_the_kind_of_a_call() -> None:
    def changed(**changes: Any) -> dict[str, Any]:
        before, after = kind_of_call(SPEC)._asdict(), kind_of_call(replace(SPEC, **changes))._asdict()
        return {name: value for name, value in after.items() if value != before[name]}

    assert changed() == changed(softcap=None, batch=2) == {}
    assert changed(dtype="float32") == {"dtype": "float32"}
    assert changed(q_len=1) == {
        "decode": True,
        "one_query": True,
        "band": "full",
    }  # the single last query sees all keys
    assert changed(q_len=7) == {"decode": True}
    assert changed(q_len=17) == changed(q_len=64) == {"short": True} and changed(q_len=65) == {}
    assert changed(causal=False) == {"band": "full"}
    assert changed(window=(100, 0)) == changed(causal=False, window=(3, 4)) == {"band": "window"}
    assert changed(causal=False, window=(5000, 5000)) == {"band": "full"}
    assert changed(num_kv_heads=32) == {"grouped": False}
    assert changed(head_dim=80, value_dim=72) == {"width": 96, "padded": True, "narrow_values": True}
    assert changed(head_dim=192, value_dim=192) == {"width": 192}
    assert changed(head_dim=512, value_dim=512) == {"width": 512}
    assert changed(mask_shape=(4, 1, 1, 4096)) == {"mask": "keys"}
    assert changed(bias_shape=(1, 1, 4096, 4096)) == {"bias": "scores"}
    assert changed(kv_len=4097) == {} and changed(kv_len=4097, mask_shape=(4, 1, 1, 4097))["ragged"]
    packed = {"batch": 1, "documents": 3, "max_len_q": 2048, "max_len_k": 2048}
    assert changed(**packed) == {"packed": True}
    assert kind_of_call(replace(SPEC, q_len=64, kv_len=9000, **packed | {"max_len_q": 1})).decode


def test_the_sizes_of_a_call() -> None:
    sizes = sizes_of_call(replace(SPEC, causal=False), 128, 132)
    assert sizes.work == pytest.approx(4 * 32 * 4096**2 * 256 * 1e-9) == pytest.approx(sizes.rectangle)
    assert sizes.work <= sizes.waves <= 1.04 * sizes.work
    assert sizes.memory == pytest.approx(2 * 4 * 4096 * 256 * 40 * 1e-8)
    assert sizes.mask_memory == sizes.dense_scores == 0
    causal = sizes_of_call(SPEC, 128, 132)
    assert 0.5 < causal.work / sizes.work < 0.53 and causal.rectangle == sizes.rectangle
    dense = sizes_of_call(replace(SPEC, mask_shape=(1, 1, 4096, 4096)), 128, 132)
    assert dense.mask_memory == pytest.approx(4096**2 * 1e-7)
    decode = sizes_of_call(replace(SPEC, q_len=1), 128, 132)
    assert decode.work == pytest.approx(4 * decode.grouped_work)  # four query heads share a tile
    assert sizes.query_memory == pytest.approx(sizes.memory * 32 / 40)
    assert sizes.blocks == pytest.approx(3.2) and sizes.across == 0
    assert sizes.key_tiles == sizes.tiles == pytest.approx(4 * 32 * 32 * 1e-4)
    packed = replace(SPEC, batch=1, documents=4, max_len_q=2048, max_len_k=1024)
    sizes = sizes_of_call(packed, 128, 132)
    assert sizes.across == pytest.approx(32 * 4096**2 * 1e-8)
    assert sizes.tiles == 2 * sizes.key_tiles == pytest.approx(32 * 4 * 16 * 1e-4)


def test_sizes_count_work_in_whole_tiles() -> None:
    sizes = sizes_of_call(replace(SPEC, causal=False, q_len=65, batch=1), 128, 132)
    assert sizes.work == pytest.approx(sizes.fine_work)  # one tile, or two of half its height
    assert sizes.waves == pytest.approx(sizes.work * 132 / 32) and sizes.steps == pytest.approx(4.096)
    assert sizes.coarse_waves == pytest.approx(1.5 * sizes.waves)
    assert sizes.grouped_waves == pytest.approx(sizes.waves)  # 8 heads of keys, with 3 tiles each: still one wave
    assert sizes.key_steps == pytest.approx(8 * 65e-3)  # 1024 tiles of keys are 8 waves
    assert sizes.key_chain == pytest.approx(128 * 65 * 256 * 1e-6)


def test_decoding_that_fills_the_device_is_not_split() -> None:
    def unsplit(**changes: Any) -> float:
        return sizes_of_call(replace(SPEC, **{"q_len": 1, "num_kv_heads": 32} | changes), 128, 132).unsplit

    assert unsplit(batch=6) == 0 < unsplit(batch=7)  # 192 and 224 tiles for 132 processors
    assert unsplit(batch=7, num_kv_heads=8) == 0 < unsplit(batch=27, num_kv_heads=8)  # a group shares a tile
    assert unsplit(batch=7, num_kv_heads=8, q_len=2) == pytest.approx(unsplit(batch=7, q_len=2))
    assert unsplit(batch=7, q_len=65) == 0


def test_sizes_are_defined_for_any_call() -> None:
    packed: dict[str, Any] = {"batch": 1, "documents": 0, "max_len_q": 0, "max_len_k": 0, "q_len": 0, "kv_len": 0}
    for changes in ({"q_len": 0}, {"kv_len": 0}, {"batch": 0}, packed, packed | {"documents": 2}):
        spec = replace(SPEC, **changes)
        assert all(math.isfinite(size) and size >= 0 for size in sizes_of_call(spec, 128, 132))
        kind_of_call(spec)


def test_backends_that_were_never_faster_rank_behind() -> None:
    usual = ("xformers", "flash2", "sdpa_efficient", "flex", "math")
    times = {"flex": 1.0, "math": 2.0, "sdpa_efficient": 30.0, "flash2": 40.0}
    assert ranking(times, usual) == ("math", "sdpa_efficient", "xformers", "flex", "flash2")
    assert ranking({"flex": 1.0, "math": 2.0}, usual)[0] == "flex"  # nothing says that it is slower


# The measured calls


DRAWN = {kind: list(islice(random_calls(0, kind), 200)) for kind in LIMITS}


@pytest.mark.parametrize("kind", LIMITS)
def test_the_random_calls_cover_real_calls(kind: str) -> None:
    cases = DRAWN[kind]
    assert len({case.name for case in (*cases, *QUICK)}) == len(cases) + len(QUICK)
    actual = [kind_of_call(case.spec) for case in cases]
    assert {one.band for one in actual} == {"full", "causal", "window"}
    assert {64, 96, 128, 192, 256} <= {one.width for one in actual}
    for name in ("padded", "decode", "softcap", "packed", "sinks", "grouped", "alibi"):
        assert {getattr(one, name) for one in actual} == {True, False}, name
    specs = [case.spec for case in cases]
    assert {spec.head_dim for spec in specs} >= {64, 72, 80, 96, 128, 160, 256}
    assert {one.mask for one in actual} == {"", "keys", "scores"} and {one.bias for one in actual} >= {"", "scores"}
    assert any(spec.q_len != spec.kv_len and spec.q_len > 16 for spec in specs)
    assert not any(spec.needs_backward for spec in specs)
    assert min(spec.q_len for spec in specs) == 1
    assert max(spec.q_len for spec in specs) > LIMITS[kind].length / 2
    decoding = [case for case in cases if " decode " in case.name]
    assert decoding and not any(case.training for case in decoding)


@pytest.mark.parametrize("kind", LIMITS)
def test_the_random_calls_stay_within_the_limits(kind: str) -> None:
    limits = LIMITS[kind]
    for case in DRAWN[kind]:
        spec = case.spec
        assert max(spec.q_len, spec.kv_len) <= limits.length or spec.packed
        assert spec.batch <= limits.batch and spec.num_heads <= limits.heads
        assert flops(spec, case.lengths) <= limits.work
        assert math.prod(spec.mask_shape or (0,)) + math.prod(spec.bias_shape or (0,)) <= limits.scores


def test_the_random_calls_are_the_same_everywhere() -> None:
    assert [random_call(0, number, "cuda") for number in range(9)] == DRAWN["cuda"][:9]
    assert random_call(1, 0, "cuda") != random_call(0, 0, "cuda") != random_call(0, 0, "cpu")
    assert DRAWN["cuda"][0].name == "#0 cross 30x512:226 h32/32 d32 fp16"


@pytest.mark.parametrize("case", (*DRAWN["cuda"][:120], *DRAWN["cpu"][:40], *QUICK), ids=lambda case: case.name)
def test_every_case_describes_its_call(case: Any) -> None:
    spec = case.spec
    assert spec_of(json.loads(json.dumps(plain_fields(spec)))) == spec
    assert (case.lengths is not None) is spec.packed
    if case.lengths is not None:
        assert (sum(case.lengths), len(case.lengths), max(case.lengths)) == (spec.q_len, spec.documents, spec.max_len_q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alignment", ["bottom_right", "top_left"])
@pytest.mark.parametrize("window", [(None, None), (3, None), (None, 2), (0, 0), (5, 40), (50, 1)])
def test_visible_pairs_are_counted_correctly(causal: bool, alignment: Any, window: Any) -> None:
    for q_len, kv_len in ((7, 7), (5, 13), (13, 5), (1, 11), (11, 1)):
        spec = replace(SPEC, q_len=q_len, kv_len=kv_len, causal=causal, alignment=alignment, window=window)
        assert pairs(spec) == masks.visible(spec).sum()
    lengths = (3, 0, 7, 2)
    packed = {"batch": 1, "q_len": 12, "kv_len": 12, "documents": 4, "max_len_q": 7, "max_len_k": 7}
    spec = replace(SPEC, causal=causal, alignment=alignment, window=window, **packed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    assert pairs(spec, lengths) == masks.visible(spec, None, offsets, offsets).sum()
    assert pairs(replace(spec, q_len=14, kv_len=14, documents=2)) == pairs(spec, (7, 7))


def test_flops_of_a_call() -> None:
    assert flops(replace(SPEC, causal=False)) == 4.0 * 4 * 32 * 4096**2 * 128
    assert flops(replace(SPEC, needs_backward=True)) == 3.5 * flops(SPEC)
    work = [flops(replace(SPEC, window=(keys, 0))) for keys in (10, 100, 5000)]
    assert all(one < other for one, other in pairwise(work))
    assert work[-1] == flops(SPEC)


# The shipped tables


TABLES = sorted((ROOT / "attn_core/selection/measured").glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_shipped_tables_hold_only_known_exact_backends(path: Path) -> None:
    framework, _, device = path.stem.partition("-")
    table = shipped_table(framework, device)
    assert table is not None and table.models[False] and table.models[True]
    for models in table.models.values():
        for name, model in models.items():
            backend = backends.load(name, backends.kind_of(device))
            assert not backend.forward_claims.approximate and not backend.forward_claims.unproven
            assert model.error < 1


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_shipped_tables_predict_a_finite_time_for_every_random_call(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework, _, device = path.stem.partition("-")
    table = shipped_table(framework, device)
    assert table is not None
    monkeypatch.setattr(backends, "usual_order", STATIC)
    with tables_in_force({(framework, device): table}):
        for case in DRAWN[backends.kind_of(device)]:
            for training in (False, True):
                times = predicted(replace(case.spec, needs_backward=training), framework, device)
                assert times and all(0 < time < 1e9 for time in times.values()), case.name


def test_the_order_needs_neither_framework() -> None:
    imports = "import sys; import attn_core.selection.preference"
    code = imports + "; sys.exit(bool({'torch', 'jax', 'typer'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
