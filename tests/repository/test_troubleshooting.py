"""Tests that the headings of docs/get_started/troubleshooting.md are the words of the errors that we raise."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")


import jax_frontend
from attn_core import AttentionSpec, Target, select
from attn_core.context_parallel.choose import choose
from jax_frontend.bridge.targets import call_of
from torch_frontend import PagedKVCache, SeqInfo, attention

PAGE = Path(__file__).resolve().parents[2] / "docs/get_started/troubleshooting.md"
q = torch.randn(2, 12, 8, 64)
row = q[:1]
x = jax.numpy.ones((1, 4, 2, 8))
"""Tensors of a call in torch, of one with packed documents, and of one in JAX."""


def _stale_step() -> None:
    cache = PagedKVCache(num_layers=1, num_pages=9, page_size=4, kv_heads=2, head_dim=8)
    cache.add("a")
    step = cache.step(["a"], [3])
    cache.step(["a"])
    cache.attend(0, torch.randn(3, 2, 8), step)


def _full_pool() -> None:
    cache = PagedKVCache(num_layers=1, num_pages=2, page_size=4, kv_heads=2, head_dim=8)
    cache.add("a")
    cache.step(["a"], [20])


def _no_strategy() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "value_dim": 8}
    spec = AttentionSpec(batch=1, q_len=64, kv_len=64, dtype="bfloat16", **sizes)
    choose(spec, None, "contiguous", (4,), memory=1.0)


def _no_backend() -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "value_dim": 8}
    gone = (("math", "not available: ModuleNotFoundError: No module named 'torch' (needs torch>=2.11)"),)
    select(AttentionSpec(batch=1, q_len=4, kv_len=4, dtype="float16", **sizes), Target("torch", "mps", gone))


def _second_derivative_in_jax() -> None:
    inner = jax.grad(lambda a: jax_frontend.attention(a, a, a, backend="jax_xla").sum())
    jax.grad(lambda a: inner(a).sum())(x)


def _second_derivative_in_torch() -> None:
    leaf = torch.randn(1, 5, 2, 8, requires_grad=True)
    (first,) = torch.autograd.grad(attention(leaf, leaf, leaf, causal=True).square().sum(), leaf, create_graph=True)
    first.sum().backward()


def _packed(seq_info: Any, tensor: Any = row) -> Callable[[], Any]:
    return lambda: attention(tensor, tensor, tensor, seq_info=seq_info)


def _offsets(*numbers: int, dtype: Any = torch.int32) -> SeqInfo:
    return SeqInfo(torch.tensor(numbers, dtype=dtype), torch.tensor(numbers, dtype=dtype), 12, 12)


square = torch.randn(12, 12, 2, 8)
MASK = torch.ones(12, 12, dtype=torch.bool)
CAUSES: dict[str, Callable[[], Any]] = {
    "no backend can run this call": _no_backend,
    "backend=… cannot run this call": lambda: attention(q, q, q, backend="flash2"),
    "unknown backend; did you mean …": lambda: attention(q, q, q, backend="fa3"),
    "got an unexpected keyword argument …": lambda: attention(q, q, q, no_such_keyword=True),
    "expected kv heads that divide the … query heads, got …": lambda: attention(q, q[:, :, :3], q[:, :, :3]),
    "expected [batch, seq, heads, head_dim], got …": lambda: attention(q[0], q[0], q[0]),
    "mask: expected dtype bool (True = visible), got …": lambda: attention(q, q, q, mask=MASK.float()),
    "mask: expected a shape broadcastable to [batch, heads, q, kv] = …": lambda: attention(q, q, q, mask=MASK[:2]),
    "mask: expected four axes, got …": lambda: attention(*[torch.randn(12, 12, 2, 8)] * 3, mask=MASK),
    "expected causal=True with an int": lambda: attention(q, q, q, window=4),
    "expected a left distance of 0 or more, got -1": lambda: attention(q, q, q, window=(-1, -1)),
    "seq_info: expected a SeqInfo …, got …": _packed([3, 4]),
    "expected to end at the token count … or before it, got …": _packed(SeqInfo.from_lengths([0, 3, 7, 12])),
    "expected non-decreasing offsets, got …": _packed(_offsets(0, 7, 3, 12)),
    "expected one row of packed documents [1, tokens, heads, head_dim], got …": _packed(SeqInfo.from_lengths([12]), q),
    "expected dtype int32, got int64; cast it to int32": _packed(_offsets(0, 12, dtype=torch.int64)),
    "k: expected the dtype of q, got …": lambda: attention(q.half(), q, q),
    "k: expected the device of q (…), got …": lambda: attention(q, q.to("meta"), q),
    "q: expected a torch.Tensor, got numpy.ndarray": lambda: attention(q.numpy(), q, q),
    "q: expected a jax.Array, got numpy.ndarray": lambda: jax_frontend.attention(np.ones((1, 4, 2, 8)), x, x),
    "q: expected a plain torch.Tensor, got …": lambda: attention(torch.nested.nested_tensor([q[0], q[1]]), q, q),
    "expected dropout_rng, a PRNG key such as jax.random.key(0)": lambda: jax_frontend.attention(x, x, x, dropout=0.1),
    "expected a number known on the host": lambda: jax_frontend.attention(x, x, x, softcap=jax.numpy.sqrt(64)),
    "expected True or False": lambda: jax.jit(jax_frontend.attention)(x, x, x, causal=True),
    "expected reverse mode …, got forward mode …": lambda: torch.func.jvp(
        lambda y: attention(y, y, y, backend="sdpa_flash"), (q,), (q,)
    ),
    "expected second derivatives in forward over reverse mode": _second_derivative_in_jax,
    "this step needs … more pages of … tokens, but only …": _full_pool,
    "was stepped again after this step was taken": _stale_step,
    "no strategy can share this call": _no_strategy,
    "a compiled program from another process was run before": lambda: call_of("unknown"),
}
"""What raises, or warns with, the words of each heading under "Messages of attn-core"."""
ELSEWHERE = {
    "in the call …": "tests/faults/test_failing_kernels.py",
    "this process was forked after JAX had started": "tests/faults/test_forks.py",
    "needs …, which is not installed; pip install 'attn-core[…]'": "tests/repository/test_missing_packages.py",
    "ignored, because …; run `attn tune`, or delete the file": "tests/selection",
}
"""Headings whose causes are tested in other folders."""


def _headings() -> list[str]:
    ours = PAGE.read_text(encoding="utf-8").partition("\n## Messages of attn-core\n")[2].partition("\n## ")[0]
    return re.findall(r"^### (.+)$", ours, re.MULTILINE)


def _words(heading: str) -> list[str]:
    return [words.strip() for words in heading.split("…") if words.strip()]


def test_every_heading_is_raised_by_a_test() -> None:
    assert set(_headings()) == set(CAUSES) | set(ELSEWHERE)


@pytest.mark.parametrize("heading", CAUSES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_heading_has_the_words_of_the_message(heading: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            CAUSES[heading]()
            message = "\n".join(str(warning.message) for warning in caught if issubclass(warning.category, UserWarning))
        except Exception as error:
            message = str(error)
    for words in _words(heading):
        assert words in message


@pytest.mark.parametrize("heading", ELSEWHERE)
def test_the_heading_has_the_words_of_the_source(heading: str) -> None:
    root = PAGE.parents[2]
    paths = (path for package in ("attn_core", "jax_frontend") for path in (root / package).rglob("*.py"))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    sources = re.sub(r"\{\w+\}", "", sources)
    for words in _words(heading):
        assert words in sources


def test_the_message_of_torch_about_second_derivatives_is_still_its_own() -> None:
    with pytest.raises(RuntimeError) as raised:
        _second_derivative_in_torch()
    page = PAGE.read_text(encoding="utf-8")
    assert f"### {str(raised.value).splitlines()[0]}\n" in page


@pytest.mark.filterwarnings("ignore")
def test_heads_first_tensors_may_give_zeros_without_an_error() -> None:
    heads_first, few = torch.randn(2, 32, 12, 64), torch.randn(2, 8, 12, 64)
    out = attention(heads_first, few, few, causal=True)
    assert out[:, : 32 - 8].eq(0).all()
