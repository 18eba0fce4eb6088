"""Context parallelism in JAX on four devices: which collectives a program has, how many, and where."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from functools import partial

import jax
import pytest
from context_jax_cases import (
    CALLED,
    CASES,
    CAUSAL,
    COLLECTIVES,
    Case,
    check,
    equations,
    forward_call,
    operations,
    program,
    sharded_arrays,
)

from jax_frontend import attention, context_parallel_attention

pytestmark = [pytest.mark.usefixtures("four_devices", "x64"), pytest.mark.sampled]


def compiled_collectives(case: Case, *, forward_alone: bool = False) -> Counter[str]:
    given = sharded_arrays(case, case.arrays())
    if not forward_alone:
        return Counter(COLLECTIVES.findall(program(case).lower(given).compile().as_text()))
    options = {"strategy": case.strategy, "layout": case.layout, "length": 24, "mesh": case.mesh, **case.options}
    run = jax.jit(partial(context_parallel_attention, axis_name=case.axis_name, **options))
    return Counter(COLLECTIVES.findall(run.lower(*(given[name] for name in "qkv")).compile().as_text()))


def test_a_ring_sends_one_time_less_than_it_has_parts_and_skips_blocks_that_no_query_sees():
    ring = Case("ring", (4,), lengths=(24, 24), **CAUSAL)
    assert compiled_collectives(ring, forward_alone=True) == {"collective-permute": 3}
    # Both halves send keys and values; their gradients begin at the second step, and go home. On CPUs JAX 0.10's XLA
    # drops barriers before it looks for what is the same, and sends them once.
    assert compiled_collectives(ring) == {"collective-permute": (3 if jax.__version_info__ < (0, 11) else 6) + 3}
    halo = Case("ring", (4,), "contiguous", (24, 24), options={"causal": True, "window": 5})
    assert compiled_collectives(halo, forward_alone=True) == {"collective-permute": 1}
    apart = Case("ring", (4,), "contiguous", (24, 24), dims=(5, 3))  # k and v do not fit into one array
    assert compiled_collectives(apart, forward_alone=True) == {"collective-permute": 6}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("window", "places"), [((5, 0), [5]), ((5, 3), [5, 3])])
def test_a_window_sends_its_border_alone(window, places, training):
    """A rank sends the last 5 keys of its shard of 16 to the next rank, and the first 3 to the one before.

    The keys are kept for a backward, in which their gradients travel back.
    """
    case = Case("ring", (4,), "contiguous", (64, 64), heads=(4, 2), dims=(8, 8), options={"window": window})
    given = sharded_arrays(case, case.arrays())
    run = program(case) if training else jax.jit(lambda arrays: forward_call(case)(*(arrays[name] for name in "qkv")))
    text = run.lower(given).compile().as_text()
    sent = sorted(re.findall(r" = (f64\[[\d,]+\])\S* collective-permute(?:-start)?\(", text))
    times = 2 if training else 1
    # k and v of one key side by side: [2, batch, places, kv_heads, head_dim]
    assert sent == sorted(f"f64[2,2,{count},2,8]" for count in places for _ in range(times))
    pairs = set(re.findall(r"source_target_pairs=\{(\{.*?\})\}", text))
    ahead, behind = "{0,1},{1,2},{2,3},{3,0}", "{0,3},{1,0},{2,1},{3,2}"
    assert pairs == ({ahead} if len(places) == 1 and not training else {ahead, behind})
    assert "all-gather" not in text


def traced_collectives(case: Case) -> Counter[str]:
    """Returns the number of each collective in a traced program, before XLA removes duplicates."""
    jaxpr = jax.make_jaxpr(program(case))(sharded_arrays(case, case.arrays())).jaxpr
    names = [name for name, _ in operations(jaxpr)]
    return Counter(name for name in names if name in ("all_gather", "ppermute", "all_to_all"))


def test_the_backward_uses_gathered_keys_again_if_they_are_few_and_sends_others_again():
    many = Case("all_gather", (4,), lengths=(24, 24), dims=(5, 5), **CAUSAL)
    assert traced_collectives(many) == {"all_gather": 2, "all_to_all": 1}
    few = replace(many, heads=(8, 1))
    assert traced_collectives(few) == {"all_gather": 1, "all_to_all": 1}
    check(few)
    ring = Case("ring", (4,), lengths=(24, 24), **CAUSAL)
    assert traced_collectives(ring)["ppermute"] == 3 + 3 + 3
    names = [name for name, _ in operations(jax.make_jaxpr(program(ring))(sharded_arrays(ring, ring.arrays())).jaxpr)]
    hops = [at for at, name in enumerate(names) if name == "ppermute"]
    assert "optimization_barrier" in names[hops[2] : hops[3]]  # or XLA would keep every block until the backward


def test_the_other_strategies_exchange_once_each_way():
    gathered = compiled_collectives(Case("all_gather", (4,), lengths=(24, 24), **CAUSAL))
    assert gathered.keys() == {"all-gather", "all-to-all"} and max(gathered.values()) <= 2, gathered
    heads = compiled_collectives(Case("ulysses", (2,), lengths=(24, 24), **CAUSAL), forward_alone=True)
    assert heads.keys() == {"all-to-all"} and heads["all-to-all"] <= 4, heads  # q, k, v and the output


def test_kernels_beside_an_exchange_give_it_a_head_start():
    """In a ring all kernels except the last step's overlap an exchange. A call on one device overlaps none."""

    def of(call, given):
        return [
            getattr(each.params["call"], "call", each.params["call"]).overlaps_exchange
            for each, _ in equations(jax.make_jaxpr(call)(*(given[name] for name in "qkv")).jaxpr)
            if each.primitive.name in ("attn_forward", "attn_step")
        ]

    case = CALLED["ring-zigzag-4-wide"]
    options = {"strategy": "ring", "layout": "zigzag", "length": 32, "mesh": case.mesh, "axis_name": case.axis_name}
    ring = partial(context_parallel_attention, causal=True, backend="math", **options)
    assert of(ring, sharded_arrays(case, case.arrays())) == [True, True, True, False]
    assert of(partial(attention, backend="math"), case.arrays()) == [False]


def test_the_next_block_is_sent_before_this_one_computes():
    case = Case("ring", (4,), "contiguous", (16, 24), dims=(5, 3))
    given = sharded_arrays(case, case.arrays())
    call = partial(
        context_parallel_attention, mesh=case.mesh, strategy="ring", layout="contiguous", length=case.lengths
    )
    traced = jax.make_jaxpr(partial(call, backend="math"))(*(given[name] for name in "qkv")).jaxpr
    wanted = ("ppermute", "attn_forward", "attn_step")
    found = [name for name, _ in operations(traced) if name in wanted]
    hops = ["ppermute", "ppermute"]
    assert found == [*hops, "attn_forward", *hops, "attn_step", *hops, "attn_step", "attn_step"]


@pytest.mark.parametrize("case", ["ring-3-causal", "ring-2x2-causal", "all_gather-2x2-zigzag-rows"])
def test_no_collective_is_in_a_branch(case):
    case = CASES[case]
    traced = jax.make_jaxpr(program(case))(sharded_arrays(case, case.arrays())).jaxpr
    found = list(operations(traced))
    names = ("ppermute", "all_to_all", "all_gather", "reduce_scatter", "psum", "psum_invariant")
    assert ("attn_backward", True) in found or ("attn_forward", True) in found, "ranks take branches"
    assert any(name in names for name, _ in found) and not [name for name, inside in found if inside and name in names]
