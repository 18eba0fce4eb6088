"""Tests the entries of a campaign for drop-ins and for context parallelism: a fault in each of them must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest

from attn_core import AttentionSpec
from attn_core.errors import SpecError
from tests.campaign import coverage, entries, faulty_workers, jax_context, torch_context, workers
from tests.campaign.case import Case, same_documents, with_same_documents
from tests.campaign.draw import Place, structure
from tests.campaign.entries import Entry, entries_of, entry_of, left_out
from tests.campaign.judge import verdict_of

pytest.importorskip("torch")
pytest.importorskip("jax")

PLACES = [Place(3, number, number) for number in range(4000)]
Fault = Callable[[dict[str, Any]], None]


def drawn(name: str, has: Callable[[AttentionSpec], bool], most: int) -> Iterator[Case]:
    """Yields cases of an entry whose spec has a feature."""
    entry, count = entry_of(name), 0
    for place in PLACES:
        spec, lengths = structure(place, "cpu")
        if spec.dropout or entry.refuses(spec) is not None or not has(spec) or spec.empty:
            continue
        if lengths is not None and entry.same_documents:
            spec, lengths = with_same_documents(spec, lengths)
        yield Case(name, spec, None, place.number, lengths)
        count += 1
        if count == most:
            return


# planted faults: each changes the call that a drop-in makes


def widen(call: dict[str, Any]) -> None:
    left, right = call["window"]
    call["window"] = (None if left is None else left + 1, right)


def uncap(call: dict[str, Any]) -> None:
    call["softcap"] = None


def rotate_heads(call: dict[str, Any]) -> None:
    """Gives each group of query heads the kv head of another one."""
    call["k"] = call["k"].flip(-2) if hasattr(call["k"], "flip") else call["k"][..., ::-1, :]


def show_everything(call: dict[str, Any]) -> None:
    call["mask"] = None


def forget_sinks(call: dict[str, Any]) -> None:
    call["sinks"] = None


def _dense(spec: AttentionSpec) -> bool:
    return not spec.packed and spec.mask_shape is None and spec.bias_shape is None


def _windowed(spec: AttentionSpec) -> bool:
    return spec.causal and spec.window[0] in (0, 1, 3) and spec.q_len > 7 and _dense(spec)


def _grouped(spec: AttentionSpec) -> bool:
    return spec.num_kv_heads > 1 and spec.group_size > 1


def _masked(spec: AttentionSpec) -> bool:
    return spec.mask_shape is not None and spec.mask_shape[3] > 3 and not spec.causal


def _capped(spec: AttentionSpec) -> bool:
    return spec.softcap in (0.7, 5.0)


def _sunk(spec: AttentionSpec) -> bool:
    return spec.sinks


FAULTS: tuple[tuple[str, str, tuple[str, ...], Fault, Callable[[AttentionSpec], bool]], ...] = (
    ("torch transformers", "torch_frontend.huggingface.attention", ("attention",), widen, _windowed),
    ("torch transformers", "torch_frontend.huggingface.attention", ("attention",), forget_sinks, _sunk),
    ("torch unsloth", "torch_frontend.unsloth", ("attention_of_layer",), uncap, _capped),
    ("torch finetrainers", "torch_frontend.finetrainers", ("attention",), widen, _windowed),
    ("torch layer", "torch_frontend.module", ("attention",), rotate_heads, _grouped),
    ("jax unsloth", "jax_frontend.unsloth", ("attention",), widen, _windowed),
    ("jax linen layer", "jax_frontend.flax.hook", ("attention",), show_everything, _masked),
    ("jax nnx layer", "jax_frontend.flax.hook", ("attention",), rotate_heads, _grouped),
    ("jax flax attention_fn", "jax_frontend.flax.hook", ("attention",), uncap, _capped),
    ("jax equinox", "jax_frontend.equinox", ("attention",), forget_sinks, _sunk),
)


@pytest.mark.parametrize(
    ("name", "module", "functions", "fault", "has"), FAULTS, ids=[f"{row[0]}, {row[3].__name__}" for row in FAULTS]
)
def test_a_fault_in_a_drop_in_is_found(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    module: str,
    functions: tuple[str, ...],
    fault: Fault,
    has: Callable[[AttentionSpec], bool],
) -> None:
    if name not in entries_of(name.partition(" ")[0]):
        pytest.skip(left_out(name.partition(" ")[0])[name])
    case = next(case for case in drawn(name, has, 8) if (verdict := verdict_of(case, "cpu")).skipped is None)
    assert verdict.fault is None
    for function in functions:
        _plant(monkeypatch, module, function, fault)
    assert any("WRONG" in (verdict_of(each, "cpu").fault or "") for each in (case, *drawn(name, has, 8)))


def _plant(monkeypatch: pytest.MonkeyPatch, module: str, function: str, fault: Fault) -> None:
    from tests.campaign import jax_entries

    jax_entries._programs.clear()
    monkeypatch.setattr(jax_entries, "_programs", {})  # so that no faulty program outlives the test
    right = getattr(import_module(module), function)

    @wraps(right)
    def wrong(q: Any, k: Any, v: Any, **options: Any) -> Any:
        call = {"q": q, "k": k, "v": v, "window": (None, None)} | options
        call["window"] = call["window"] or (None, None)
        fault(call)
        return right(call.pop("q"), call.pop("k"), call.pop("v"), **call)

    monkeypatch.setattr(import_module(module), function, wrong)


def test_a_fault_in_the_drop_in_for_diffusers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch diffusers" not in entries_of("torch"):
        pytest.skip(left_out("torch")["torch diffusers"])
    from torch_frontend import diffusers

    right = diffusers.attention_dispatch

    def wrong(*arguments: Any, scale: float | None, **options: Any) -> Any:
        return right(*arguments, scale=None, **options)

    monkeypatch.setattr(diffusers, "attention_dispatch", wrong)
    cases = drawn("torch diffusers", lambda spec: spec.scale == 1.0 and spec.kv_len > 3, 4)
    assert all("WRONG" in (verdict_of(case, "cpu").fault or "") for case in cases)


@pytest.mark.parametrize(
    ("name", "module", "faulty"),
    [
        ("torch context_parallel_attention", torch_context, faulty_workers.torch_ranks),
        ("jax context_parallel_attention", jax_context, faulty_workers.jax_devices),
    ],
)
def test_a_fault_in_every_rank_is_found(monkeypatch: pytest.MonkeyPatch, name: str, module: Any, faulty: Any) -> None:
    monkeypatch.setattr(module, "work", faulty)
    try:
        cases = list(drawn(name, lambda spec: spec.causal and spec.q_len > 7 and not spec.packed, 2))
        assert cases and all("WRONG" in (verdict_of(case, "cpu").fault or "") for case in cases)
    finally:
        workers._groups.pop(faulty).stop()


# entries that cannot run here, and what entries can express


def test_an_entry_without_its_package_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Entry("torch nothing", lambda *_: {}, entries.without(), needs=("no_such_package",))
    assert find_spec("no_such_package") is None
    monkeypatch.setattr(entries, "_known", lambda framework: {lacking.name: lacking})
    entries_of.cache_clear()
    try:
        assert entries_of("torch") == {}
        assert left_out("torch") == {"torch nothing": "no_such_package is not installed"}
        with pytest.raises(SpecError, match="no_such_package is not installed"):
            entry_of("torch nothing")
    finally:
        entries_of.cache_clear()


def test_holes_of_entries_name_what_they_can_express() -> None:
    known = entries_of("torch")
    chosen = {name: known[name] for name in ("torch layer", "torch paged_attention", "torch unsloth")}
    counts: coverage.Counts = {}
    for feature in set(coverage.FEATURES) - {"softcap", "packed", "sinks"}:
        counts.setdefault("torch layer", {"calls": 1})[feature] = 1
    counts["torch paged_attention"] = {"calls": 1}
    layer, paged, unsloth = coverage.holes_of_entries(counts, chosen, "cpu")
    # "lse" is missing because the layer has none.
    assert layer == "torch layer: softcap, sinks, packed"
    assert paged.startswith("torch paged_attention: causal, window, softcap, sinks, packed, lse")
    assert unsloth == "torch unsloth: no call at all"
    assert "dropout" in coverage.expressible(known["torch layer"], "cpu")
    assert "dropout" not in coverage.expressible(known["torch layer"], "cuda")


def test_same_documents_are_documents_of_both_sides() -> None:
    spec, lengths = structure(PLACES[0], "cpu", packed=True)
    assert lengths is not None
    spec = replace(spec, mask_shape=None, bias_shape=None, bias_gradient=False, alibi_shape=None)
    both, sides = with_same_documents(spec, lengths)
    info = Case("torch attention", both, None, 0, sides).seq_info
    assert info is not None and same_documents(both, info)
    other = Case("torch attention", replace(both, kv_len=both.kv_len + 1), None, 0, sides).seq_info
    assert other is not None and not same_documents(replace(both, kv_len=both.kv_len + 1), other)
