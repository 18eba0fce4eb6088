"""Tests the limit on the shapes that automatic choice gives to cuDNN, on a described H100 without other packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from attn_core import AttentionSpec, Target, backends
from attn_core.backends.contract import KeptPlans
from attn_core.backends.support import Build
from attn_core.call.tensors import Inputs
from torch_frontend.dispatch import eager_calls, plan
from torch_frontend.dispatch.plan import Plan

OTHERS = [name for name in backends.names() if not name.startswith(("sdpa", "math", "flex"))]
H100 = Target(
    "torch",
    "sm90",
    tuple((name, "not installed here") for name in OTHERS),
    (("sdpa_cudnn", Build("cuDNN", version=(9, 26, 0))),),
)
CACHES = (plan.plan, eager_calls._family)
OPTIONS = eager_calls.checked_options(False, "bottom_right", None, None, None, 0.0, False, False, None)
PLACE = torch.device("cpu")  # the plans are those of an H100, and none of them runs


@pytest.fixture(autouse=True)
def on_a_described_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def forget() -> None:
        for cache in CACHES:
            cache.cache_clear()

    def unrunnable(name: str, spec: AttentionSpec, *_: Any) -> Plan:
        return Plan(spec, name, plan.empty_forward, plan._empty_backward, False)

    monkeypatch.setattr(plan, "plan_on", unrunnable)
    monkeypatch.setattr(Target, "here", classmethod(lambda cls, framework, device: H100))
    limit = KeptPlans(most=5, by="cuDNN")
    monkeypatch.setattr(plan, "_limit_of", lambda name, kind: limit if name == "sdpa_cudnn" else None)
    monkeypatch.setattr(plan, "_planned_shapes", {})
    forget()
    yield
    forget()


def planned(q_len: int, requested: str | None = None, *, sinks: bool = False, training: bool = False) -> Plan:
    """The plan of a call with a mask; with sinks it takes the general path."""
    q, mask = (torch.Size((2, q_len, 16, 64)), torch.bfloat16, PLACE), (torch.Size((2, 1, 1, q_len)), torch.bool, PLACE)
    if sinks:
        metadata = Inputs(q, q, q, mask, sinks=(torch.Size((16,)), torch.float32, PLACE))
        return plan.plan(metadata, OPTIONS, training, False, requested)
    return eager_calls.plan_by_family(Inputs(q, q, q, mask), OPTIONS, training, False, requested)


@pytest.mark.parametrize("more", [{}, {"training": True}, {"sinks": True}], ids=["family", "training", "general path"])
def test_new_shapes_beyond_the_limit_take_another_kernel(more: dict[str, Any]) -> None:
    first = [planned(1000 + step, **more).backend for step in range(5)]
    assert first == ["sdpa_cudnn"] * 5
    later = {planned(1000 + step, **more).backend for step in range(5, 20)}
    assert later and "sdpa_cudnn" not in later
    for cache in CACHES:  # a plan that was dropped from our caches is still cuDNN's
        cache.cache_clear()
    assert [planned(1000 + step, **more).backend for step in range(5)] == first
    assert len(plan._planned_shapes["sdpa_cudnn"]) == 5


def test_a_call_that_names_cudnn_has_no_limit() -> None:
    assert {planned(1000 + step, "sdpa_cudnn").backend for step in range(20)} == {"sdpa_cudnn"}
    assert not plan._planned_shapes
    assert planned(2000).backend == "sdpa_cudnn"


def test_explain_says_why() -> None:
    for step in range(5):
        planned(1000 + step)
    q, mask = (torch.Size((2, 77, 16, 64)), torch.bfloat16, PLACE), (torch.Size((2, 1, 1, 77)), torch.bool, PLACE)
    selection = plan.explanation(Inputs(q, q, q, mask), OPTIONS, False, False, None)
    assert selection.reasons("sdpa_cudnn") == (
        "5 shapes of this process have a plan in cuDNN, which it never frees; automatic choice makes no more. Pad "
        "lengths to a few sizes, or name it: backend='sdpa_cudnn'",
    )
    assert "never frees" in str(selection.text(everything=True))


def test_cudnn_keeps_plans_and_no_other_kernel_does() -> None:
    kept = {name: backends.load(name, "cuda").kept_plans for name in backends.names()}
    assert {name: (each.most, each.by) for name, each in kept.items() if each} == {"sdpa_cudnn": (64, "cuDNN")}


def test_other_calls_are_not_limited() -> None:
    """The limit is about shapes that cuDNN would run."""
    target = plan.without_more_plans(
        H100,
        AttentionSpec(
            **{"batch": 1, "q_len": 8, "kv_len": 8, "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64},
            dtype="bfloat16",
        ),
    )
    assert target is H100
