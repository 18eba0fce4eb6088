"""Automatic choice with ``invariant``: another backend for another batch would round differently."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from attn_core import AttentionSpec
from attn_core.selection import explain
from attn_core.selection.target import Target

SPEC = AttentionSpec(
    **{"batch": 4, "q_len": 4096, "kv_len": 4096, "num_heads": 32, "num_kv_heads": 8},
    **{"head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "causal": True},
)


@pytest.mark.parametrize(
    ("framework", "device"), [("torch", "sm90"), ("jax", "sm90"), ("torch", "cpu"), ("jax", "cpu")]
)
@pytest.mark.parametrize("invariant", ["batch", "prefix"])
def test_the_choice_depends_on_no_shape(framework: str, device: str, invariant: str) -> None:
    target, chosen, free = Target(framework, device), set(), set()
    for batch, length, backward in product((1, 2, 32), (1, 16, 512, 4096), (False, True)):
        shape = {"batch": batch, "q_len": length, "kv_len": length, "needs_backward": backward}
        total = {"batch": 1, "q_len": batch * length, "kv_len": batch * length}
        packed = {"documents": batch, "max_len_q": length, "max_len_k": length}
        for fields in (shape, shape | total | packed):
            spec = replace(SPEC, **fields)
            free.add(explain(spec, target).backend)
            chosen.add(explain(replace(spec, invariant=invariant), target).backend)
    assert len(chosen) == 1 and None not in chosen
    assert (len(free) > 1) == ((framework, device) != ("torch", "cpu")), "without a promise shapes count"


def test_the_explanation_says_why() -> None:
    said = " ".join(str(explain(replace(SPEC, invariant="batch"), Target("torch", "sm90"))).split())
    assert "in the usual order that can run the call, because predicted times depend on the batch" in said
