"""Tests that ``explain`` answers as ``attention`` does: it raises where that raises, and names what runs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
import jax
from frameworks import BOTH, JAX, TORCH, Framework, as_numpy, empty_plan_caches, spied

from attn_core import NoBackendError, masks
from attn_core.expressions import lookup, where

DTYPES = ("float32", "bfloat16", "float16", "float64")
BACKENDS = (None, None, "math", "sdpa_flash", "flex", "jax_xla", ("sdpa_flash", "math"), "sdpa_efficient")


def drawn(seed: int, framework: Framework) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a small call: q, k and v, and keywords. Many of them exclude each other."""
    some, numbers = random.Random(seed), np.random.default_rng(seed)
    batch, length, kv_len = some.choice((1, 1, 2, 2, 0)), some.choice((5, 7, 1)), some.choice((5, 7, 5, 7, 0))
    kv_len = length if some.random() < 0.5 else kv_len
    dtype = some.choice(DTYPES if framework.name == "torch" else DTYPES[:3])

    def array(*shape: int, of: str = dtype) -> Any:
        return framework.array(numbers.standard_normal(shape).astype(np.float32), of)

    def ints(*shape: int, most: int) -> Any:
        values = numbers.integers(0, most + 1, shape, np.int32) * some.choice((0, 1, 1))
        return values if some.random() < 0.3 else framework.array(values)

    def ranges() -> Any:
        rows = some.choice((1, batch))
        starts = numbers.integers(0, length + 1, (rows, 1, kv_len, 1), np.int32)
        stops = numbers.integers(starts, length + 1, dtype=np.int32)
        kind = some.choice(("any", "none", "all"))
        starts, stops = (starts * 0, stops * 0 + length * (kind == "all")) if kind != "any" else (starts, stops)
        both = np.stack((starts, stops), -1)
        return both if some.random() < 0.6 else framework.array(both)

    ids = ints(batch, max(length, kv_len), most=1)
    offered: dict[str, Any] = {
        "causal": lambda: True,
        "window": lambda: (some.choice((None, 0, 2)), some.choice((None, 1))),
        "softcap": lambda: 3.0,
        "mask": lambda: framework.array(numbers.random((some.choice((1, batch)), 1, length, kv_len)) < 0.5),
        "bias": lambda: array(some.choice((1, batch)), some.choice((1, 4)), length, kv_len, of=some.choice(DTYPES[:3])),
        "alibi_slopes": lambda: array(4, of="float32"),
        "sinks": lambda: array(4, of=some.choice((dtype, "float32"))),
        "key_ranges": ranges,
        "q_segment_ids": lambda: ints(batch, length, most=1),
        "kv_segment_ids": lambda: ints(batch, kv_len, most=1),
        "mask_mod": lambda: lambda b, h, q, k, *aux: (k <= q) | (aux[0][b, k] == 0 if aux else h == 1),
        "score_mod": lambda: lambda s, b, h, q, k, *aux: s * 0.5,
        "aux": lambda: (ids,),
        "kv_lengths": lambda: ints(batch, most=kv_len),
        "kv_starts": lambda: ints(batch, most=2),
        "cache_index": lambda: ints(batch, most=batch - 1),
        "deterministic": lambda: True,
        "invariant": lambda: some.choice(("batch", "prefix")),
        "return_lse": lambda: True,
        "return_max_logit": lambda: True,
        "dropout": lambda: 0.25,
        "layout": lambda: "bhsd",
        "alignment": lambda: "top_left",
    }
    names = some.sample(sorted(offered), some.choice((1, 2, 2, 3, 4)))
    keywords = {name: offered[name]() for name in names}
    heads_first = keywords.get("layout") == "bhsd"
    sizes = [(batch, length, 4, 8), *[(batch, kv_len, some.choice((2, 4)), 8)] * 2]
    qkv = [array(*((b, h, n, d) if heads_first else (b, n, h, d))) for b, n, h, d in sizes]
    if framework.name == "jax" and "dropout" in keywords:
        keywords["dropout_rng"] = jax.random.key(0)
    if framework.name == "torch" and some.random() < 0.4:
        for tensor in [*qkv, *([keywords["bias"]] if "bias" in keywords else [])]:
            tensor.requires_grad_()
    return qkv, keywords | {"backend": some.choice(BACKENDS)}


def answered(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """The result, or the error."""
    try:
        return jax.block_until_ready(function(*arguments, **keywords))
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("framework", "seeds"),
    [
        *((TORCH, range(first, first + 40)) for first in (100, 140, 360, 400)),
        (JAX, range(60, 75)),
        pytest.param(JAX, range(75, 90), marks=pytest.mark.slow),
    ],
    ids=lambda value: str(value) if isinstance(value, Framework) else str(value[0]),
)
def test_explain_answers_as_attention_does(framework: Framework, seeds: range) -> None:
    ran_at_all, refused = 0, 0
    with spied() as ran:
        for seed in seeds:
            qkv, keywords = drawn(seed, framework)
            empty_plan_caches(programs=False)
            said = answered(framework.frontend.explain, *qkv, **keywords)
            ran.clear()
            result, call = answered(framework.frontend.attention, *qkv, **keywords), f"seed {seed}: {keywords}"
            if isinstance(result, NoBackendError):
                assert not isinstance(said, Exception) and said.backend is None, f"{call}: {said!r}"
                refused += 1
            elif isinstance(result, Exception):
                assert (type(said), str(said)) == (type(result), str(result)), f"{call}: {said!r} beside {result!r}"
            else:
                assert not isinstance(said, Exception), f"{call}: {said!r}"
                runs_none = said.spec.empty or said.parts == "no kernel call: no key is visible"
                # The largest logits come from a function of a backend on which nobody spies.
                runs_none = runs_none or "return_max_logit" in keywords
                assert {*ran} == (
                    {said.backend} if ran or not (runs_none or "return_max_logit" in keywords) else set()
                ), call
                ran_at_all += bool(ran)
    assert ran_at_all > len(seeds) // 5 and refused


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_keys_that_nobody_sees_are_explained(framework: Framework) -> None:
    q, ranges = framework.zeros(1, 5, 4, 8), np.zeros((1, 1, 5, 1, 2), np.int32)
    lengths = framework.array(np.zeros(1, np.int32))
    for hidden in ({"key_ranges": ranges}, {"kv_lengths": lengths}, {"kv_lengths": lengths, "cache_index": lengths}):
        for backend in ("sdpa_flash", ("sdpa_flash", "math"), "math", None):
            found = framework.frontend.explain(q, q, q, **hidden, backend=backend)
            assert found.backend == ("sdpa_flash" if "sdpa_flash" in (backend or "") else found.backend) is not None
            assert not as_numpy(framework.frontend.attention(q, q, q, **hidden, backend=backend)).any()
    assert "parts: no kernel call: no key is visible" in str(
        framework.frontend.explain(q, q, q, key_ranges=ranges, backend="sdpa_flash")
    )
    pages, table = framework.zeros(2, 4, 2, 8), framework.array(np.zeros((3, 1), np.int32))
    empty = {"block_table": table, "seq_lens": framework.array(np.zeros(3, np.int32))}
    queries = framework.zeros(3, 4, 8)
    assert framework.frontend.explain_paged(queries, pages, pages, **empty).backend is not None
    assert not as_numpy(framework.frontend.paged_attention(queries, pages, pages, **empty)).any()


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_bias_of_another_dtype_beside_segments_is_explained(framework: Framework) -> None:
    q, ids = framework.zeros(1, 5, 4, 8, dtype="bfloat16"), framework.array(np.int32([[0, 0, 1, 1, 1]]))
    keywords: dict[str, Any] = {"q_segment_ids": ids, "bias": framework.zeros(5, 5)}
    framework.frontend.attention(q, q, q, **keywords)
    found = framework.frontend.explain(q, q, q, **keywords)
    assert found.backend is not None and found.spec.bias_dtype == "float32"


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_backend_without_functions_is_refused_by_their_name_beside_key_ranges(framework: Framework) -> None:
    q, ids = framework.zeros(1, 5, 4, 8), framework.array(np.int32([[0, 0, 1, 1, 1]]))
    captured: Any = lambda b, h, q, k: lookup(ids, b, q) == lookup(ids, b, k)  # noqa: E731
    for functions in (
        {"q_segment_ids": ids},
        {"mask_mod": lambda b, h, q, k, ids: ids[b, q] == ids[b, k], "aux": (ids,)},
        {"mask_mod": captured},
        {"score_mod": lambda s, b, h, q, k, ids: where(ids[b, q] == 0, s, -s), "aux": (ids,)},
    ):
        name = "score_mod" if "score_mod" in functions else "mask_mod"
        for ranges in (masks.prefix_lm(2, 5), framework.array(masks.prefix_lm(2, 5))):
            with pytest.raises(NoBackendError, match=f"{name}: the aten CPU flash kernel has none"):
                framework.frontend.attention(q, q, q, key_ranges=ranges, backend="sdpa_flash", **functions)
            found = framework.frontend.explain(q, q, q, key_ranges=ranges, backend="sdpa_flash", **functions)
            assert found.backend is None and name in str(found)
