"""Tests repeated context-parallel calls on gloo ranks: no planning, and nothing overlooked that may change."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("torch was built without torch.distributed", allow_module_level=True)

from context_torch_worker import World

SCENES = "context_repeated_scenes"
KINDS = [
    (strategy, *kind)
    for strategy, kind in product(
        ("ring", "all_gather", "ulysses"),
        (("zigzag", None, False), ("contiguous", 5, False), ("zigzag", None, True), ("documents", 3, True)),
    )
]
NAMES = [f"{strategy} {layout} window {window} packed {packed}" for strategy, layout, window, packed in KINDS]
WORLDS = [
    World(
        "two",
        2,
        {
            "changed": (SCENES, "changed", ()),
            **{name: (SCENES, "repeated", kind) for name, kind in zip(NAMES, KINDS, strict=True)},
        },
    )
]
ALLOWED = {
    "attn_core.call.options:is_plain_window",
    *(f"attn_core.context_parallel.{name}" for name in ("plan:own", "plan:moves", "plan:prefetch", "borders:size")),
    "torch_frontend.context_parallel.mesh:group_names",
}
"""Functions of modules that plan which only read plain data."""
PLANNING = (
    *(f"attn_core.call.{name}" for name in ("options:", "arguments:", "seq_info:check_cu_seqlens", "masks:")),
    "attn_core.selection.",
    *(f"attn_core.context_parallel.{name}" for name in ("plan:", "tiles:", "layout:", "dealing:", "request:", "call:")),
    *(f"attn_core.context_parallel.{name}" for name in ("bands:", "ranges:", "borders:", "index_arrays:", "cost:")),
    *(f"torch_frontend.context_parallel.{name}:" for name in ("prepare", "mesh", "shards")),
    "torch_frontend.dispatch.plan:",
)
"""How the names of functions begin that check, choose or plan."""


def test_the_modules_that_plan_are_there() -> None:
    assert all(find_spec(name.partition(":")[0].removesuffix(".")) for name in (*PLANNING, *ALLOWED))


@pytest.mark.parametrize("found", [("two", name) for name in NAMES], indirect=True, ids=NAMES)
def test_a_repeated_call_plans_and_checks_nothing_again(found: Any) -> None:
    for forward, trained in found:
        for entered in (forward, trained):
            planned = [each for each in entered if each.startswith(PLANNING) and each not in ALLOWED]
            assert not [each for each in planned if not each.endswith(("<genexpr>", "<listcomp>"))], planned
            assert entered["torch_frontend.context_parallel.repeated_calls:find"] == 1
        assert not [each for each in forward if each.partition(":")[2].startswith(("check_", "_check"))]
        kernels = [each for each in forward if each.endswith(":attend")]
        assert kernels, "no kernel ran"


after_changes = pytest.mark.parametrize("found", [("two", "changed")], indirect=True, ids=["changed"])


@after_changes
@pytest.mark.parametrize("name", ["causal", "window", "pair", "dropout", "mask", "length"])
def test_a_repeated_call_refuses_an_invalid_argument(found: Any, name: str) -> None:
    for results in found:
        assert results[name].startswith(f"SpecError: {'window' if name == 'pair' else name}"), results[name]


@after_changes
def test_a_repeated_call_follows_what_has_changed(found: Any) -> None:
    for results in found:
        assert results["documents"] < 1e-12
        assert results["longest"].startswith("SpecError: seq_info.max_len_q=30")
        assert results["gradients"] == [True] * 3
        assert results["use_backend"] < 1e-12
        assert results["absent"].startswith("NoBackendError: backend='flash3'")
        assert results["autocast"] == "torch.bfloat16"
        assert results["freed"].startswith("SpecError: q: expected a tensor with its memory")
        assert results["afterwards"] < 1e-12
