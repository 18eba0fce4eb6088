"""Tests the orders from figures that others published: what each row changes, what it leaves, and that a table wins."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import date
from pathlib import Path

import pytest
from cost_tables import made_up_table, tables_in_force

import attn_core
from attn_core import AttentionSpec, Target, backends, explain
from attn_core.call.spec import PagedKV
from attn_core.selection import new_plans, preference, tables

FULL = AttentionSpec(
    **{"batch": 2, "q_len": 4096, "kv_len": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16"},
)
CAUSAL, TRAINED = replace(FULL, causal=True), replace(FULL, needs_backward=True)
SPECS = {"full": FULL, "causal": CAUSAL, "trained": TRAINED, "causal, trained": replace(CAUSAL, needs_backward=True)}
FLASH, CUDNN = ("flash2", "sdpa_flash"), ("sdpa_cudnn",)
FIRST = {**{("sm80", name): FLASH for name in SPECS}, ("sm100", "full"): CUDNN}
"""By device and call, what comes first by the rows, as literals: a row that moves a backend shows here."""
AHEAD_OF = {"sm80": "sdpa_cudnn", "sm100": "flash4"}
UNDECIDED = ("sm86", "sm120")
UNCHANGED = ("sm70", "sm75", *UNDECIDED, "sm89", "sm90", "sm103", "cpu", "tpu", "gfx942")


@pytest.fixture(autouse=True)
def without_tables() -> Iterator[None]:
    with tables_in_force({}):
        yield


def usual(framework: str, device: str) -> tuple[str, ...]:
    return backends.usual_order(framework, backends.kind_of(device))


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("device", ["sm80", "sm100"])
@pytest.mark.parametrize("name", SPECS)
def test_what_comes_first_on_each_card(framework: str, device: str, name: str) -> None:
    first, names = FIRST.get((device, name), ()), usual(framework, device)
    place = names.index(AHEAD_OF[device])
    expected = (*names[:place], *first, *(each for each in names[place:] if each not in first))
    assert preference.order(SPECS[name], framework, device) == expected
    target = Target(framework, device)
    assert explain(SPECS[name], target).backend == (first or ("flash4",))[0]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("device", UNCHANGED)
def test_all_other_devices_keep_the_usual_order(framework: str, device: str) -> None:
    for spec in SPECS.values():
        assert preference.order(spec, framework, device) == usual(framework, device)
        assert explain(spec, Target(framework, device)).published is None


def test_every_row_names_its_sources_and_what_there_is() -> None:
    names, options = set(usual("torch", "sm80")), {field.name for field in fields(AttentionSpec)}
    for row in tables.published():
        assert names.issuperset(row.first) and options.issuperset(row.calls) and row.figures, row
        for link, day in row.sources.items():
            assert link.startswith("https://github.com/") and date.fromisoformat(day).isoformat() == day
    assert {row.device for row in tables.published() if row.first} == {device for device, _ in FIRST}
    assert tuple(row.device for row in tables.published() if not row.first) == UNDECIDED
    assert all(row.sources for row in tables.published())


def test_a_row_moves_no_backend_that_it_did_not_compare() -> None:
    """Such as a plug-in's, which is first."""
    (row,) = (row for row in tables.published() if row.device == "sm80")
    assert row.ordered(("plug_in", "sdpa_cudnn", "flash2", "math")) == ("plug_in", "flash2", "sdpa_cudnn", "math")
    assert row.ordered(("flash2", "plug_in", "sdpa_cudnn")) == ("flash2", "plug_in", "sdpa_cudnn")
    assert row.ordered(("plug_in", "flash2")) == ("plug_in", "flash2")


# A measured table


def test_a_measured_table_decides_instead() -> None:
    for fastest, other in (("sdpa_cudnn", "flash2"), ("flash2", "sdpa_cudnn")):
        with tables_in_force({("torch", "sm80"): made_up_table({fastest: 10.0, other: 90.0})}):
            for framework in ("torch", "jax"):
                selection = explain(FULL, Target(framework, "sm80"))
                assert selection.published is None and "made-up calls" in str(selection)
                assert "published" not in str(selection)
            assert explain(FULL, Target("torch", "sm80")).backend == fastest


def test_the_table_of_attn_tune_decides_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(tables, "device_name", lambda device: "an A100")
    shipped = Path(tables.__file__).with_name("measured") / "torch-sm90.json"
    content = json.loads(shipped.read_text("utf-8")) | {"device_name": "an A100", "versions": tables.versions()}
    for direction in content["models"].values():  # the host's time of every call but cuDNN's is long
        for name, model in direction.items():
            model["rates"]["host"] = 0.0 if name == "sdpa_cudnn" else 20.0
    path = tables.user_path("torch", "sm80")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    table = tables.user_table("torch", "sm80")
    assert table is not None
    with tables_in_force({("torch", "sm80"): table}):
        selection = explain(FULL, Target("torch", "sm80"))
        assert selection.backend == "sdpa_cudnn" and str(path) in str(selection).replace("\n    ", " ")
        assert "published" not in str(selection)


def test_the_shipped_table_of_the_h200_decides_whatever_the_rows_say(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tables.Figures(
        "sm90", {}, ("math",), usual("torch", "sm90")[0], "made up", {"https://github.com/a/b": "2026-01-01"}
    )
    shipped = tables.shipped_table("torch", "sm90")
    assert shipped is not None
    with tables_in_force({("torch", "sm90"): shipped}):
        before = preference.order(FULL, "torch", "sm90")
    monkeypatch.setattr(tables, "published", lambda: (row,))
    assert preference.order(FULL, "torch", "sm90")[0] == "math"
    with tables_in_force({("torch", "sm90"): shipped}):
        assert preference.order(FULL, "torch", "sm90") == before != usual("torch", "sm90")


# What explain says


def test_explain_names_the_figures_and_their_sources() -> None:
    assert str(explain(TRAINED, Target("torch", "sm80"))).splitlines()[:8] == [
        "selected: flash2",
        "  because: the first that can run the call; order from published figures, not",
        "    ours: cuDNN had 0.82 of flash's speed on an A100, elsewhere by median rates",
        "    0.99 forward, 0.88 in training, by median times 1.05, 1.01:",
        "    https://github.com/huggingface/transformers/pull/48163 (2026-08-20),",
        "    https://github.com/pytorch/pytorch/pull/192799 (2026-08-10); `attn tune`",
        "    measures yours",
        "  call: attention in torch on sm80: bfloat16, batch 2, q_len 4096, kv_len 4096,",
    ]
    assert str(explain(FULL, Target("jax", "sm100"))).splitlines()[:5] == [
        "selected: sdpa_cudnn, callback lane",
        "  because: the first that can run the call; order from published figures, not",
        "    ours: cuDNN had 1.24 to 1.98 of FlashAttention 4's speed on a B200, in",
        "    diffusion models: https://github.com/sgl-project/sglang/pull/33655",
        "    (2026-08-05); `attn tune` measures yours",
    ]


def test_a_backend_that_cannot_run_the_call_is_skipped() -> None:
    missing = Target("torch", "sm80", (("flash2", "not installed"),))
    assert explain(FULL, missing).backend == "sdpa_flash"
    assert explain(FULL, missing).published is not None
    masked = explain(replace(FULL, mask_shape=(2, 1, 4096, 4096)), Target("torch", "sm80"))
    assert (masked.backend, masked.published) == ("sdpa_cudnn", None)
    assert "because: the first in the usual order that can run the call" in str(masked)
    without = Target("torch", "sm100", (("sdpa_cudnn", "not installed"),))
    assert (explain(FULL, without).backend, explain(FULL, without).published) == ("flash4", None)
    wide = replace(FULL, head_dim=256, value_dim=256)
    assert explain(wide, Target("torch", "sm100")).backend == "flash2"


def test_a_choice_by_anything_else_names_no_figures() -> None:
    target = Target("torch", "sm80")
    assert explain(FULL, target, "flash2").published is None
    invariant = explain(replace(FULL, invariant="batch"), target)
    assert invariant.backend == "flash2" and invariant.published is None
    pool = PagedKV(num_pages=9, page_size=256, width=4)
    sizes = {"batch": 1, "q_len": 1024, "kv_len": 1024, "documents": 2, "max_len_q": 512, "max_len_k": 1024}
    paged = explain(replace(FULL, **sizes, paged=pool), target)
    assert paged.backend == "flash2" and paged.published is None
    assert paged.automatic == backends.usual_order("torch", "cuda", paged=True)


def test_figures_that_change_nothing_are_not_named() -> None:
    """The usual order has the same answer, because it refuses what the figures compare."""
    for spec, device, backend in (
        (replace(CAUSAL, window=(100, 0)), "sm80", "flash2"),
        (replace(FULL, bias_shape=(1, 1, 4096, 4096)), "sm100", "sdpa_cudnn"),
    ):
        selection = explain(spec, Target("torch", device))
        assert (selection.backend, selection.published) == (backend, None)


def test_the_record_of_a_plan_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with attn_core.log(True):
        for device in ("sm80", "sm89"):
            new_plans.selected(explain(FULL, Target("torch", device)))
    records = [each.attn for each in caplog.records if each.message.startswith("plan: ")]  # type: ignore[attr-defined]
    assert [(each["backend"], each["chosen_by"]) for each in records] == [
        ("flash2", "published figures"),
        ("sdpa_cudnn", "static order"),
    ]
