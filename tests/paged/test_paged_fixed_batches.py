"""Tests batches of a fixed size: slots without tokens or without queries, and queries behind the last offset."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from frameworks import BOTH, Framework, as_numpy
from paged_cases import make_paged

from attn_core.backends.shared.in_jax import safe_offsets
from attn_core.call.tensors import PagedInputs
from attn_core.correctness import reference
from torch_frontend.dispatch import offsets

pytestmark = pytest.mark.sampled

BACKENDS = {"torch": ("math",), "jax": ("math", "jax_xla")}
WAYS = [(f, backend, way) for f in BOTH for backend in BACKENDS[f.name] for way in ("eager", "compiled")]
# (tokens of each sequence, queries of each, queries behind the last offset)
BATCHES = {
    "a slot without tokens": ((5, 0, 3), None, 0),
    "no slot with tokens": ((0, 0), None, 0),
    "a slot without tokens, with a query": ((5, 0, 3), (2, 1, 1), 0),
    "a slot without tokens or queries": ((5, 0, 3), (2, 0, 1), 0),
    "more queries than keys": ((2, 9), (5, 3), 0),
    "queries behind the last": ((5, 3), (2, 1), 4),
    "as many queries as slots, some behind the last": ((5, 4, 0, 3), (1, 0, 0, 1), 2),
    "all at once": ((5, 0, 2, 0), (2, 1, 4, 0), 3),
    "no queries but those behind": ((5, 3), (0, 0), 3),
}


def inputs_of(batch: str, **fields: Any) -> tuple[Any, PagedInputs]:
    lengths, new, behind = BATCHES[batch]
    made = make_paged(lengths, new, window=fields.pop("window", None), **fields)
    inputs = made.inputs
    if behind:
        rest = np.full((behind, *inputs.q.shape[1:]), np.nan)
        inputs = inputs._replace(q=np.concatenate((inputs.q, rest)))
    return made.spec, inputs


def run(f: Framework, inputs: PagedInputs, backend: str, way: str, tables: str, options: dict[str, Any]) -> Any:
    def own(array: Any) -> Any:
        return None if array is None else array if tables == "numpy" else f.array(array)

    q, k, v = (f.array(np.asarray(array), "float32") for array in inputs[:3])

    def call(q: Any, table: Any, lengths: Any, cu: Any) -> Any:
        return f.frontend.paged_attention(
            *(q, k, v),
            block_table=table,
            seq_lens=lengths,
            cu_seqlens_q=cu,
            return_lse=True,
            backend=backend,
            **options,
        )

    given = (q, own(inputs.block_table), own(inputs.seq_lens), own(inputs.cu_seqlens_q))
    if way == "compiled":
        torch._dynamo.reset()
        call = jax.jit(call) if f.name == "jax" else torch.compile(call, fullgraph=True, backend="aot_eager")
    return [as_numpy(array) for array in call(*given)]


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": 2}, {"max_len_q": 5}], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("framework", "backend", "way"), WAYS, ids=str)
def test_a_batch_of_fixed_size(
    framework: Framework, backend: str, way: str, batch: str, options: dict[str, Any]
) -> None:
    """Correct for each query that exists; 0 and -inf for queries that see nothing and for queries behind the last
    offset."""
    fields = {name: value for name, value in options.items() if name != "max_len_q"}
    spec, inputs = inputs_of(batch, **fields)
    queries = spec.q_len
    own = inputs._replace(q=inputs.q[:queries])
    expected = reference.forward(spec, own) if queries else (np.zeros((0, 4, 8)), np.zeros((4, 0)))
    for tables in ("arrays", "numpy") if way == "eager" else ("arrays",):
        out, lse = run(framework, inputs, backend, way, tables, options)
        np.testing.assert_allclose(out[:queries], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[:, :queries], expected[1], atol=2e-6)
        assert not out[queries:].any() and (lse[:, queries:] == -np.inf).all()


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_new_tokens_behind_the_last_offset_are_not_written(framework: Framework, traced: bool) -> None:
    made = make_paged((5, 3), (2, 1))
    pools = [np.zeros(pool.shape, np.float32) for pool in (made.inputs.k, made.inputs.v)]
    new = np.random.default_rng(0).standard_normal((7, *pools[0].shape[2:])).astype(np.float32)
    tables = {name: framework.array(array) for name, array in made.tables.items()}

    def append(k: Any, tables: Any) -> Any:
        return framework.frontend.append_kv(*map(framework.array, pools), k, k, **tables)

    if traced:
        torch._dynamo.reset()
        append = jax.jit(append) if framework.name == "jax" else torch.compile(append, backend="aot_eager")
    long, right = (append(framework.array(new[:count]), tables) for count in (7, 3))
    for one, other in zip(long, right, strict=True):
        np.testing.assert_array_equal(as_numpy(one), as_numpy(other))


def test_rows_that_kernels_leave_unwritten_are_cleared() -> None:
    out, lse = torch.full((5, 2, 3), torch.nan), torch.full((2, 5), torch.nan)
    actual, found_lse = offsets.clear_tail(out, lse, torch.tensor([0, 1, 3], dtype=torch.int32))
    assert actual is out and found_lse is lse
    assert out[:3].isnan().all() and not out[3:].any()
    assert lse[:, :3].isnan().all() and (lse[:, 3:] == -torch.inf).all()


@pytest.mark.parametrize("given", [[0, 2, 3], [0, 5, 5], [4, 2, 9], [-3, 7, 1], [0, 0, 0]])
def test_unchecked_offsets_stay_within_the_tokens(given: list[int]) -> None:
    made = offsets.clamp(torch.tensor(given, dtype=torch.int32), 5).tolist()
    assert made == safe_offsets(jnp.array(given), 5, whole=False).tolist()
    assert made[0] == 0 and sorted(made) == made and made[-1] <= 5
    if given[0] == 0 and sorted(given) == given and given[-1] <= 5:
        assert made == given
