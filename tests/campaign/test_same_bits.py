"""Tests the pairs of a campaign: a call as a program gives the bits of the eager call, and a planted difference is
found."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, backends
from tests.campaign import coverage, jax_entries, judge, torch_entries
from tests.campaign.case import Case, case_of
from tests.campaign.judge import verdict_of
from tests.campaign.loop import BLOCK, Campaign, merged
from tests.campaign.same_bits import HOLDS, PAIRS, Equal, differences, must_agree, pair_of

jax = pytest.importorskip("jax")
pytest.importorskip("jax.export")
torch = pytest.importorskip("torch")

import jax_frontend
from torch_frontend.dispatch import ops

pytestmark = pytest.mark.sampled

SPEC = AttentionSpec(
    batch=2,
    q_len=5,
    kv_len=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    value_dim=8,
    dtype="float32",
    causal=True,
    return_lse=True,
)
TRAINED = replace(SPEC, needs_backward=True)
COMPILED, EXPORTED, JITTED, JAX_EXPORTED = PAIRS
VISIBLE, HIDDEN = 1 + 2.0**-10, 1 + 2.0**-22
"""A factor that leaves the bounds of float32, and one that stays within them."""


@pytest.fixture(autouse=True)
def no_programs() -> Iterator[None]:
    """Programs of other tests do not run here, nor those with a fault elsewhere."""
    for kept in (torch_entries._compiled, jax_entries._programs):
        kept.clear()
    yield
    for kept in (torch_entries._compiled, jax_entries._programs):
        kept.clear()


def case(pair: str, spec: AttentionSpec = SPEC, backend: str | None = "math", relation: str | None = "") -> Case:
    return Case(PAIRS[pair].program, spec, backend, 3, None, pair if relation == "" else relation)


CALLS = [
    (COMPILED, "math", TRAINED),
    (COMPILED, "sdpa_flash", TRAINED),
    (EXPORTED, "math", SPEC),
    (EXPORTED, "sdpa_flash", SPEC),
    (JITTED, "math", TRAINED),
    (JITTED, "sdpa_flash", TRAINED),
    (JAX_EXPORTED, "math", SPEC),
    (JAX_EXPORTED, "sdpa_flash", SPEC),
    (EXPORTED, "flex", SPEC),
]


@pytest.mark.parametrize(("pair", "backend", "spec"), CALLS, ids=[f"{row[0]}, {row[1]}" for row in CALLS])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_gives_the_bits_of_the_eager_call(pair: str, backend: str, spec: AttentionSpec, dtype: str) -> None:
    spec = replace(spec, dtype=dtype)
    if backend == "sdpa_flash":
        spec = replace(spec, return_lse=False)  # it has no gradient of one
    assert must_agree(backend, spec, pair.split()[-1], "cpu")
    verdict = verdict_of(case(pair, spec, backend), "cpu")
    assert (verdict.skipped, verdict.fault, verdict.differing) == (None, None, ())


# planted differences


def scaled(function: Callable[..., Any], factor: float, when: Callable[..., bool] = lambda *_: True) -> Any:
    """A function whose first result is multiplied by a factor."""

    def run(*arguments: Any, **named: Any) -> Any:
        results = function(*arguments, **named)
        if not when(*arguments, *named.values()):
            return results
        if not isinstance(results, tuple):
            return results * factor
        first = results[0] * factor
        return results._replace(dq=first) if hasattr(results, "_fields") else (first, *results[1:])

    return run


def plant(patch: pytest.MonkeyPatch, framework: str, factor: float, direction: str = "forward") -> None:
    """Multiplies what programs return, and nothing that eager calls do. Eager calls of torch run no op."""
    if framework == "torch":
        name = f"run_{direction}"
        patch.setattr(ops, name, scaled(getattr(ops, name), factor))
        return

    def traced(*arrays: Any) -> bool:
        return any(isinstance(array, jax.core.Tracer) for array in arrays)

    patch.setattr(jax_frontend, "attention", scaled(jax_frontend.attention, factor, traced))


@pytest.mark.parametrize("factor", [VISIBLE, HIDDEN])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_program_that_scales_its_result_is_found(monkeypatch: pytest.MonkeyPatch, pair: str, factor: float) -> None:
    plant(monkeypatch, pair.split()[-1], factor)
    alone = verdict_of(case(pair, relation=None), "cpu")
    assert (alone.fault is not None) == (factor == VISIBLE), alone
    verdict = verdict_of(case(pair), "cpu")
    assert verdict.fault is not None and verdict.differing == ("out",)
    assert factor == VISIBLE or verdict.fault.startswith("other bits than in an eager call: out by ")


def test_a_program_that_scales_a_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "torch", HIDDEN, "backward")
    assert verdict_of(case(COMPILED, TRAINED, relation=None), "cpu").fault is None
    verdict = verdict_of(case(COMPILED, TRAINED), "cpu")
    assert verdict.fault is not None and verdict.differing == ("dq",)


def test_a_campaign_finds_and_shrinks_such_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "torch", HIDDEN)
    run = Campaign(5, {"torch": "cpu"}, ("torch attention, compiled",))
    given = case(COMPILED, replace(SPEC, softcap=5.0, window=(3, 0)))
    run._count(given, verdict_of(given, "cpu"))
    (fault,) = run.state["faults"]
    small = case_of(fault["shrunk"])
    assert small.relation == COMPILED and (small.spec.softcap, small.spec.window) == (None, (None, None))
    row = {"calls": 1, "other results": 1, "with gradients": 0, "other gradients": 0}
    assert run.state["both ways"] == {f"{COMPILED}, math": row}


def test_bits_of_a_backend_that_was_not_measured_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, "torch", HIDDEN)
    monkeypatch.setitem(HOLDS["cpu"], "torch", Equal())
    verdict = verdict_of(case(COMPILED), "cpu")
    assert verdict.fault is None and verdict.differing == ("out",) and verdict.use > 0
    counts: coverage.Counts = {}
    for differing in (verdict.differing, (), ("dq", "dk")):
        coverage.add_bits(counts, "a", TRAINED, differing)
    assert coverage.table_of_bits(counts).splitlines()[-1] == "| a | 3 | 1 | 3 | 1 |"


def test_an_eager_call_that_is_wrong_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a claim about bits, both ways are judged by the bounds."""
    known = judge.entry_of
    eager = known(PAIRS[COMPILED].eager)

    def wrong(*arguments: Any) -> Any:
        return {name: 1.1 * array for name, array in eager.run(*arguments).items()}

    monkeypatch.setitem(HOLDS["cpu"], "torch", Equal())
    monkeypatch.setattr(
        judge, "entry_of", lambda name: eager._replace(run=wrong) if name == eager.name else known(name)
    )
    verdict = verdict_of(case(COMPILED), "cpu")
    assert verdict.fault is not None and "WRONG" in verdict.fault


# draws and counts


def test_a_pair_needs_its_entry_and_a_backend_by_name() -> None:
    for other in (case(COMPILED, backend=None), replace(case(COMPILED), entry="torch attention")):
        verdict = verdict_of(other, "cpu")
        assert verdict.skipped == f"{COMPILED}: expected 'torch attention, compiled' and a backend by name"


@pytest.mark.parametrize("pair", PAIRS)
def test_few_cases_of_a_block_run_both_ways(pair: str) -> None:
    program, cases = PAIRS[pair].program, PAIRS[pair].cases
    turns = [[pair_of(program, block, index) for index in range(BLOCK)] for block in range(4)]
    assert turns[0] == turns[2] == [None] * BLOCK
    assert turns[1] == turns[3] == [pair] * cases + [None] * (BLOCK - cases)
    assert cases <= BLOCK // 4
    assert pair_of("torch attention, strided", 1, 0) is None


def test_bits_are_compared_not_values() -> None:
    zero, none = np.zeros(3), np.full(3, np.nan)
    assert differences({"out": zero, "lse": none}, {"out": zero.copy(), "lse": none.copy()}) == {}
    assert differences({"out": zero}, {"out": -zero}) == {"out": 0.0}
    assert differences({"out": zero, "dq": zero}, {"out": zero, "dq": zero + 2}) == {"dq": 2.0}


def test_processes_add_up_what_ran_both_ways() -> None:
    states = [Campaign(5, {"torch": "cpu"}).state for _ in range(2)]
    for state in states:
        coverage.add_bits(state["both ways"], "a", TRAINED, ("out",))
    assert merged(states)["both ways"] == {"a": dict(zip(coverage.BITS, (2, 2, 2, 0)))}
    assert json.loads(json.dumps(states[0])) == states[0]


def test_a_trained_call_of_jax_xla_may_have_other_bits_under_jit() -> None:
    """XLA compiles its forward and backward as one program. Only dq and dk of this call differed where it was found;
    with the flags of the tests the output does, too."""
    found = replace(SPEC, q_len=64, kv_len=64, num_heads=1, num_kv_heads=1, alibi_shape=(2, 1), alignment="top_left")
    found = replace(found, needs_backward=True, deterministic=True)
    verdict = verdict_of(Case(PAIRS[JITTED].program, found, "jax_xla", 16, None, JITTED), "cpu")
    assert verdict.skipped is verdict.fault is None and verdict.differing is not None
    assert not must_agree("jax_xla", found, "jax", "cpu")


def test_backends_with_equal_bits_exist() -> None:
    for kind, by_framework in HOLDS.items():
        for framework, names in by_framework.items():
            assert framework in ("torch", "jax") and kind in ("cpu", "cuda")
            assert set(names.untrained) | set(names.trained) <= set(backends.names())


def test_an_exported_program_of_jax_is_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """With flatbuffers. Elsewhere a program in its place stands for the text."""
    passed = []
    if find_spec("flatbuffers") is None:
        monkeypatch.setattr(jax_entries, "find_spec", lambda name: name)
        monkeypatch.setattr(jax.export.Exported, "serialize", lambda program: program)
        monkeypatch.setattr(jax.export, "deserialize", lambda text: text)
    read = jax.export.deserialize
    monkeypatch.setattr(jax.export, "deserialize", lambda text: passed.append(text) or read(text))
    verdict = verdict_of(case(JAX_EXPORTED), "cpu")
    assert (verdict.skipped, verdict.fault, len(passed)) == (None, None, 1)
