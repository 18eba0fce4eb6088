"""Tests every backend that claims ``partial`` on keys cut in two: the merged parts and summed gradients equal the
row's.

The forward of a part gives the log-sum-exp of the part. Its backward receives the output and the log-sum-exp of whole
rows, as in context parallelism. Both are judged against the float64 reference, beside the same kernel on whole rows:
the mean error may be at most 1.5 times as large, the largest at most 3 times.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both_frontends import COMPILED_ON_GPUS, FRAMEWORKS, _numpy, backends_of, claimed, judged, module_on, target
from oracle_cases import rounded

from attn_core import AttentionSpec, SeqInfo, Target, explain
from attn_core.call.tensors import Gradients, Inputs
from attn_core.correctness import reference
from jax_frontend.dispatch import ops
from jax_frontend.dispatch.plan import Plan

NAMES = ("out", "lse", "dq", "dk", "dv")
SLACK = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-5, "float16": 1e-5}
Q_LEN, KV_LEN, CUT = 7, 29, 11
LENGTHS_Q, LENGTHS_K, CUTS = (5, 2), (17, 12), (6, 5)
LATER = {"causal": True}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # the fields of the whole row, of the first part (seen from the part's last key), and of the second part
    "full": ({}, {}, {}),
    "causal": (LATER, {}, LATER),
    "window": (
        {"causal": True, "window": (24, None)},
        {"window": (24 - (KV_LEN - CUT), KV_LEN - CUT)},
        {"causal": True, "window": (24, None)},
    ),
    "softcap": ({"softcap": 0.8}, {"softcap": 0.8}, {"softcap": 0.8}),
    "packed": (LATER, {}, LATER),
}


class Part(NamedTuple):
    """One call: its spec and the indices of its keys."""

    spec: AttentionSpec
    keys: np.ndarray
    cu_q: np.ndarray | None
    cu_k: np.ndarray | None


def parts(feature: str, dtype: str, dim: int, dlse: bool, training: bool = True) -> list[Part]:
    """The whole row, and its two parts."""
    packed = feature == "packed"
    results = []
    for at, fields in enumerate(FEATURES[feature]):
        keys, lengths_k, cu_q, cu_k = np.arange(KV_LEN), LENGTHS_K, None, None
        if packed:
            ends = np.cumsum(LENGTHS_K)
            starts = ends - LENGTHS_K
            middle = starts + CUTS
            ranges = [zip(starts, ends), zip(starts, middle), zip(middle, ends)][at]
            keys = np.concatenate([np.arange(start, stop) for start, stop in ranges])
            lengths_k = [LENGTHS_K, CUTS, tuple(np.subtract(LENGTHS_K, CUTS).tolist())][at]
            info = SeqInfo.from_lengths(LENGTHS_Q, lengths_k)
            cu_q, cu_k = info.cu_seqlens_q, info.cu_seqlens_k
        elif at:
            keys = [keys[:CUT], keys[CUT:]][at - 1]
        documents = {"documents": 2, "max_len_q": max(LENGTHS_Q), "max_len_k": max(lengths_k)} if packed else {}
        spec = AttentionSpec(
            **{"batch": 1 if packed else 2, "q_len": Q_LEN, "kv_len": len(keys), "num_heads": 4, "num_kv_heads": 2},
            **{"head_dim": dim, "value_dim": dim, "dtype": dtype, "needs_backward": training, "return_lse": dlse},
            **{"partial": at > 0, **documents, **fields},
        )
        results.append(Part(spec, keys, cu_q, cu_k))
    return results


class Values(NamedTuple):
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray | None


def values(spec: AttentionSpec) -> Values:
    random = np.random.default_rng(3)
    rows = () if spec.packed else (spec.batch,)

    def normal(length: int, heads: int) -> np.ndarray:
        return rounded(random.normal(size=(*rows, length, heads, spec.head_dim)), spec.dtype)

    q, k, v, dout = (normal(*size) for size in ((Q_LEN, 4), (KV_LEN, 2), (KV_LEN, 2), (Q_LEN, 4)))
    return Values(q, k, v, dout, random.normal(size=spec.lse_shape) if spec.return_lse else None)


class Torch:
    """A backend's two halves on numpy arrays, by torch."""

    def __init__(self, name: str, device: str) -> None:
        self.module, self.device = module_on(name, device), device

    def tensor(self, array: Any, dtype: str) -> Any:
        return None if array is None else torch.from_numpy(np.array(array)).to(self.device, getattr(torch, dtype))

    def inputs(self, part: Part, given: Values) -> Inputs:
        at = part.keys
        q, k, v = given.q, given.k[..., at, :, :], given.v[..., at, :, :]
        cu = [self.tensor(each, "int32") for each in (part.cu_q, part.cu_k)]
        q, k, v = (self.tensor(each, part.spec.dtype) for each in (q, k, v))
        return Inputs(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])

    def forward(self, part: Part, given: Values) -> list[np.ndarray]:
        return [as_float64(_numpy(each)) for each in self.module.forward(part.spec, self.inputs(part, given))[:2]]

    def backward(self, part: Part, given: Values, out: np.ndarray, lse: np.ndarray) -> list[np.ndarray]:
        spec = part.spec
        saved = self.tensor(out, spec.dtype), self.tensor(lse, spec.lse_dtype), self.tensor(given.dout, spec.dtype)
        dlse = self.tensor(given.dlse, spec.lse_dtype)
        actual = self.module.backward(spec, self.inputs(part, given), *saved, dlse)
        return [as_float64(_numpy(each)) for each in actual[:3]]


class Jax(Torch):
    """The same in JAX, through its primitives, under ``jax.jit``."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, target("jax", device).device

    def tensor(self, array: Any, dtype: str) -> Any:
        return None if array is None else jnp.asarray(array, dtype)

    def _run(self, part: Part, half: Any, *given: Any) -> list[np.ndarray]:
        made = Plan(part.spec, self.name, self.device, one_row=False)
        actual = jax.jit(lambda *arrays: tuple(half(made, *arrays)))(*given)
        return [as_float64(np.asarray(each)) for each in actual[:3] if each is not None]

    def forward(self, part: Part, given: Values) -> list[np.ndarray]:
        return self._run(part, ops.forward, self.inputs(part, given))

    def backward(self, part: Part, given: Values, out: np.ndarray, lse: np.ndarray) -> list[np.ndarray]:
        spec = part.spec
        saved = self.tensor(out, spec.dtype), self.tensor(lse, spec.lse_dtype), self.tensor(given.dout, spec.dtype)
        dlse = self.tensor(given.dlse, spec.lse_dtype)
        return self._run(part, ops.backward, self.inputs(part, given), *saved, dlse)


def as_float64(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def merged(whole: AttentionSpec, one: list[np.ndarray], other: list[np.ndarray]) -> list[np.ndarray]:
    """(out, lse) of two parts: each has the weight of its share of the sum of exponentials."""
    (out, lse), (out2, lse2) = one, other
    assert np.isfinite(lse).all() and np.isfinite(lse2).all(), "every row sees some key of both parts"
    total = np.logaddexp(lse, lse2)
    weights = [np.exp(each - total) for each in (lse, lse2)]  # [batch, heads, rows]; packed [heads, rows]
    weights = [np.moveaxis(each, -2, -1)[..., None] for each in weights]
    return [rounded(weights[0] * out + weights[1] * out2, whole.dtype), total]


def in_two(runner: Any, calls: list[Part], given: Values) -> dict[str, np.ndarray]:
    whole, halves = calls[0], calls[1:]
    out, lse = merged(whole.spec, *(runner.forward(part, given) for part in halves))
    if not whole.spec.needs_backward:
        return {"out": out, "lse": lse}
    dq, dk, dv = 0.0, np.zeros(given.k.shape), np.zeros(given.v.shape)
    for part in halves:
        actual = runner.backward(part, given, out, lse)
        dq = dq + actual[0]
        dk[..., part.keys, :, :] += actual[1]
        dv[..., part.keys, :, :] += actual[2]
    return dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))


def in_one(runner: Any, whole: Part, given: Values) -> dict[str, np.ndarray]:
    out, lse = runner.forward(whole, given)
    gradients = runner.backward(whole, given, out, lse) if whole.spec.needs_backward else ()
    return dict(zip(NAMES, (out, lse, *gradients), strict=False))


def expected(whole: Part, given: Values) -> dict[str, np.ndarray]:
    inputs = Inputs(given.q, given.k, given.v, cu_seqlens_q=whole.cu_q, cu_seqlens_k=whole.cu_k)
    out, lse = reference.forward(whole.spec, inputs)
    actual: Gradients = reference.backward(whole.spec, inputs, out, lse, given.dout, given.dlse)
    return dict(zip(NAMES, (out, lse, actual.dq, actual.dk, actual.dv), strict=True))


def faults(actual: dict[str, np.ndarray], alone: dict[str, np.ndarray], exact: Any, dtype: str) -> list[str]:
    said = []
    assert actual.keys() == alone.keys()
    for name in actual:
        now, before = abs(actual[name] - exact[name]), abs(alone[name] - exact[name])
        if now.mean() > 1.5 * before.mean() + SLACK[dtype] or now.max() > 3 * before.max() + SLACK[dtype]:
            said.append(
                f"{name}: mean {now.mean():.1e} ({before.mean():.1e}), max {now.max():.1e} ({before.max():.1e})"
            )
    return said


def claiming(framework: str) -> list[Any]:
    """(backend, device) of every claim of ``partial`` that the framework can run."""
    own = backends_of(framework) if framework == "torch" else None
    return [
        param
        for param in claimed(own)
        if module_on(*param.values).forward_claims.partial and (framework == "jax" or param.values[0] != "jax_xla")
    ]


CASES = [
    pytest.param(framework, *param.values, marks=param.marks, id=f"{framework}-{param.id}")
    for framework in FRAMEWORKS
    for param in claiming(framework)
]


def runnable_parts(
    feature: str, dtype: str, name: str, where: Target, dim: int, *, training: bool
) -> list[Part] | None:
    """The calls of a feature, with a gradient of the log-sum-exp if the backend takes one; None if it refuses the
    feature.

    ``training``: with their backwards. A backend without a backward runs forwards alone.
    """
    for dlse in (True, False) if training else (False,):
        calls = parts(feature, dtype, dim, dlse, training)
        if not any(explain(part.spec, where, name).reasons(name) for part in calls):
            return calls
    return None


def has_backward(name: str, where: Target) -> bool:
    """Whether the installed build can train. A build that cannot refuses even the plainest call."""
    forward, both = (
        explain(parts("full", "bfloat16", 64, False, training)[0].spec, where, name).reasons(name)
        for training in (False, True)
    )
    lacking = set(both) - set(forward)
    assert all("backward" in reason for reason in lacking), lacking
    return not lacking


@pytest.mark.sampled
@pytest.mark.parametrize(("framework", "name", "device"), CASES)
def test_merged_parts_equal_the_whole_row(framework: str, name: str, device: str) -> None:
    where = target(framework, device)
    if reason := judged(framework, name, device):
        pytest.skip(reason)
    runner = (Torch if framework == "torch" else Jax)(name, device)
    module, tested = module_on(name, device), []
    training = has_backward(name, where)
    dtypes = module.forward_claims.dtypes
    dtypes = dtypes if framework == "torch" else [d for d in dtypes if d != "float64"][:1]
    if device == "cuda" and name in COMPILED_ON_GPUS:
        dtypes = dtypes[:1]
    for dtype in dtypes:
        for feature in FEATURES:
            calls = runnable_parts(feature, dtype, name, where, 16 if device == "cpu" else 64, training=training)
            if calls is None:
                continue
            given = values(calls[0].spec)
            actual, alone = in_two(runner, calls, given), in_one(runner, calls[0], given)
            assert not faults(actual, alone, expected(calls[0], given), dtype), (dtype, feature)
            tested.append(feature)
    assert "full" in tested
    if name in ("math", "jax_xla", "flash2", "flash4"):
        assert set(tested) == set(FEATURES)


@pytest.mark.parametrize("fault", ["own log-sum-exp", "own output", "merge weight"])
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward on the part's own results instead of the row's, and merge weights that are not the parts' shares."""
    runner = Torch("math", "cpu")
    calls = parts("causal", "float64", 16, True)
    given = values(calls[0].spec)
    exact, backward = expected(calls[0], given), runner.backward

    def wrong(part: Part, given: Values, out: np.ndarray, lse: np.ndarray) -> list[np.ndarray]:
        own_out, own_lse = runner.forward(part, given)
        return backward(part, given, *((out, own_lse) if fault == "own log-sum-exp" else (own_out, lse)))

    if fault == "merge weight":
        monkeypatch.setattr(np, "logaddexp", np.maximum)
    else:
        monkeypatch.setattr(runner, "backward", wrong)
    actual = in_two(runner, calls, given)
    monkeypatch.undo()
    assert faults(actual, in_one(runner, calls[0], given), exact, "float64")
