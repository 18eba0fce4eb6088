"""Tests that each row of known_bad.json is complete, keeps to the vocabulary, and refuses what it means; the watch
list; and the page with both."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from attn_core import AttentionSpec, Target, backends
from attn_core.backends import xformers
from attn_core.backends.shared import known_bad
from attn_core.backends.shared.known_bad import EVERY_CALL, QUANTITIES, RELATIONS, Row, refusals, versioned_package
from attn_core.backends.support import Build
from attn_core.selection import choice
from benchmarks.fit.calls import random_call
from tools.pages import known_bad as known_bad_page

ROOT = Path(__file__).parents[2]
ROWS = known_bad.rows()
RAW = json.loads(known_bad.DATA.read_text(encoding="utf-8"))
TESTS = {
    node.name
    for node in ast.walk(ast.parse((ROOT / "tests/backends/test_known_bad.py").read_text(encoding="utf-8")))
    if isinstance(node, ast.FunctionDef)
}


CHAT = AttentionSpec(
    **{"batch": 2, "q_len": 2048, "kv_len": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128},
    **{"value_dim": 128, "dtype": "bfloat16", "causal": True, "needs_backward": True},
)
"""A plain call of a chat model in training."""
CALLS = [
    CHAT,
    replace(CHAT, q_len=1),
    replace(CHAT, q_len=64, kv_len=192, causal=False),
    replace(CHAT, kv_len=65, causal=False),
    replace(CHAT, q_len=2050, window=(3, 2), causal=False),
    replace(CHAT, q_len=2050, window=(3, None), causal=False),
    replace(CHAT, q_len=64, window=(31, 0)),
    replace(CHAT, batch=8300, q_len=1, kv_len=1),
    replace(CHAT, batch=1, q_len=2**17, kv_len=2**17, bias_shape=(1, 1, 2**17, 2**17)),
]
"""Calls of which each row of ``known_bad.json`` that refuses any refuses at least one; a test checks it."""


def refused_calls() -> list[tuple[known_bad.Row, str, str, AttentionSpec]]:
    """A call for each refusing row and each of its backends and devices: (row, backend, device, spec)."""
    found = []
    for row in (row for row in known_bad.rows() if row.handling == "refused"):
        specs = [spec for spec in CALLS if all(known_bad.holds(one, spec) for one in row.conditions)]
        devices = [{"cuda": "sm90", "rocm": "gfx942"}.get(each, each.partition("-")[0]) for each in row.devices]
        found += [(row, name, device, specs[0]) for name in row.backends for device in devices if specs]
    return found


def faulty_version(row: known_bad.Row) -> known_bad.Version:
    """A version that a row calls faulty; one that no comparison excludes."""
    numbers = [known_bad.numbers_of(part.lstrip("<>=!")) for part in row.versions.split(",") if part]
    below = [(*number[:-1], number[-1] - 1) if number[-1] else (number[0] - 1, 99) for number in numbers]
    return next(version for version in [*numbers, *below, (1,)] if known_bad.includes(row.versions, version))


def not_refused(row: known_bad.Row, name: str, device: str, spec: AttentionSpec) -> str | None:
    """What is wrong, or None: selection must refuse the call, or a backend of several operators run it by another."""
    backend, _, operator = name.partition(":")
    if operator:
        runs = backends.load(backend).lower(spec)["operator"]
        return f"{row.name}: {backend} runs {spec} by {operator}" if runs == operator else None
    build = Build(row.package, version=faulty_version(row))
    target = Target(backends.load(name, backends.kind_of(device)).framework, device, builds=((name, build),))
    if not any(row.link in why and row.symptom in why for why in choice.refusals(name, spec, target)):
        return f"{row.name}: {name} on {device} does not refuse {spec}"
    return f"{row.name}: automatic choice takes {name}" if choice.explain(spec, target).backend == name else None


WHOLE_KERNELS = {"sage-fp8-sm90"}
"""The rows that refuse every call of a kernel, on purpose."""


WATCHED = known_bad_page.watched()


def name_of(row: Row) -> str:
    return row.name


def devices_of(row: Row) -> list[str]:
    """A device for each entry of a row's devices."""
    kinds = {"cuda": "sm90", "rocm": "gfx942"}
    return [kinds.get(named, named.partition("-")[0]) for named in row.devices]


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row_is_complete(row: Row) -> None:
    assert row.symptom and row.package and row.backends and row.devices
    for name in row.backends:
        backend, _, operator = name.partition(":")
        assert backend in backends.names()
        assert not operator or (backend == "xformers" and operator in xformers.OPERATORS)
    assert row.direction in ("forward", "backward")
    assert (row.handling, bool(row.how)) in (("refused", False), ("avoided", True))
    assert row.link.startswith("https://") and " " not in row.link
    assert date.fromisoformat(row.found) <= date.today()
    assert row.test in TESTS and row.test.startswith("test_")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_row_has_the_vocabulary(row: Row) -> None:
    SpecifierSet(row.versions)
    for device in devices_of(row):
        assert known_bad.concerns(row, device, ())
        named = [backends.load(name.partition(":")[0], backends.kind_of(device)) for name in row.backends]
        assert any(backend.forward_claims.runs_on(device) for backend in named)
    assert row.when == EVERY_CALL or (isinstance(row.when, tuple) and row.when)
    for condition in row.conditions:
        assert condition.quantity in QUANTITIES and condition.relation in RELATIONS
        value = QUANTITIES[condition.quantity].value(CHAT)
        assert type(condition.value) is type(value), "a comparison of unlike things is always false"


def test_names_are_unique_and_fields_have_one_order() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert {tuple(fields) for fields in RAW} == {Row._fields}


def test_every_word_of_the_vocabulary_is_used() -> None:
    assert {condition.quantity for row in ROWS for condition in row.conditions} == set(QUANTITIES)
    shown = {field for quantity in QUANTITIES.values() for field in quantity.shown}
    assert all(hasattr(CHAT, field) for field in shown)


@pytest.mark.parametrize("row", [row for row in ROWS if row.handling == "refused"], ids=name_of)
def test_no_row_refuses_everything_by_accident(row: Row) -> None:
    assert (row.when == EVERY_CALL) == (row.name in WHOLE_KERNELS)
    for name in row.backends if row.name not in WHOLE_KERNELS else ():
        for device in devices_of(row):
            assert not [why for why in refusals(name, CHAT, device) if row.symptom in why]


def test_an_unknown_version_hides_no_backend_from_plans() -> None:
    for row in ROWS:
        for name in row.backends if row.name in WHOLE_KERNELS else ():
            assert all(refusals(name, CHAT, device) == () for device in devices_of(row))


@pytest.mark.parametrize("row", [row for row in ROWS if row.handling == "refused"], ids=name_of)
def test_a_refusing_row_refuses_some_call(row: Row) -> None:
    for name in row.backends:
        for device in devices_of(row):
            version = known_bad.numbers_of(row.versions.lstrip("<>=")) if row.name in WHOLE_KERNELS else ()
            assert any(row.symptom in why for spec in CALLS for why in refusals(name, spec, device, version))


def test_every_refusing_row_has_a_call_on_every_backend_and_device() -> None:
    expected = {(row.name, name) for row in ROWS if row.handling == "refused" for name in row.backends}
    assert {(row.name, name) for row, name, _, _ in refused_calls()} == expected
    for row, *_ in refused_calls():
        assert known_bad.includes(row.versions, faulty_version(row))


def test_selection_refuses_what_a_row_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name and automatically, on the row's device and in a faulty version."""
    calls = refused_calls()
    assert len(calls) >= 18 and [wrong for call in calls if (wrong := not_refused(*call))] == []
    monkeypatch.setattr(known_bad, "refusals", lambda *arguments: ())
    assert any("does not refuse" in (not_refused(*call) or "") for call in calls)


def test_a_range_of_versions_is_of_a_version_that_is_known() -> None:
    """``Build.version`` of a backend is the version of one package."""
    for row in ROWS:
        if row.handling == "refused" and row.versions:
            packages = {versioned_package(name) for name in row.backends}
            assert packages == {row.package}, row.name


def test_most_random_calls_meet_no_row() -> None:
    calls = [random_call(0, number, "cuda").spec for number in range(60)]
    for name in ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flash2"):
        met = sum(bool(refusals(name, spec, "sm90", (99,))) for spec in calls)
        assert met < len(calls) / 2, name


def test_the_pages_have_every_row() -> None:
    pages = {"refused": known_bad_page.render(), "avoided": known_bad_page.render_watched()}
    for row in ROWS:
        page = pages[row.handling]
        assert row.link in page and f"`{row.name}`" in page and row.symptom in page
    watched = pages["avoided"]
    assert all(entry.link in watched and entry.symptom in watched for entry in WATCHED)
    cells = {line.count(" | ") for line in watched.splitlines() if line.startswith("| [")}
    assert cells == {3}, "a bar in a text would split a cell"


def test_entries_of_the_watch_list_are_complete() -> None:
    names = {row.name for row in ROWS}
    for entry in WATCHED:
        link, why = entry.link, entry.because
        assert link.startswith("https://github.com/") and link.split("/")[-2] in ("issues", "pull"), link
        assert entry.package and entry.symptom.endswith(".") and why.endswith("."), link
        assert entry.affected in ("yes", "no", "not tested") and entry.state in ("open", "closed"), link
        assert date.fromisoformat(entry.seen) <= date.today(), link
        assert entry.reported[:4].isdigit() and entry.reported <= entry.seen, link
        named = [word for word in why.replace(".", " ").split() if word in names]
        assert "row" not in why.split() or named, f"{link} names a row that does not exist"


def test_the_watch_list_is_long_and_has_no_report_twice() -> None:
    links = [entry.link for entry in WATCHED]
    assert len(set(links)) == len(links) >= 25
    assert not set(links) & {row.link for row in ROWS}, "a row says more than the watch list"
