"""Faults planted into the partitioning of attention: the checks of the sharding tests find them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import pytest
from jax.sharding import PartitionSpec as P
from sharded_calls import HEADS, check_shard_map, check_split, normal, qkv

from jax_frontend import attention
from jax_frontend.dispatch import local_call, partitioning, vmap


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    def forget() -> None:
        jax.clear_caches()
        partitioning.jit_partitionable.cache_clear()

    forget()
    yield monkeypatch
    forget()


def test_planted_a_partition_that_keeps_the_heads_whole_gathers(auto_mesh, planted):
    right = partitioning.split_of
    planted.setattr(partitioning, "split_of", lambda *known: right(*known)._replace(heads=(), kv_heads=()))
    with pytest.raises(AssertionError, match="all-gather"):
        check_split(auto_mesh, partial(attention, backend="math"), qkv(8, 8), (P(None, None, "model"),) * 3)


def test_planted_a_sum_over_devices_left_out(auto_mesh, planted):
    planted.setattr(partitioning, "_broadcast_axes", lambda *_: ())
    call = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks, backend="math")  # noqa: E731
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_split(auto_mesh, call, (*qkv(), normal(5, HEADS)), (*(P("data"),) * 3, P()))


def test_planted_the_kv_heads_of_another_device(auto_mesh, planted):
    own = partitioning._kv_heads_read
    planted.setattr(partitioning, "_kv_heads_read", lambda part: own(part)[::-1] * 0)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_split(auto_mesh, partial(attention, backend="math"), qkv(6, 3), (P(None, None, "model"), P(), P()))


def test_planted_a_gradient_of_rows_summed_over_other_rows(auto_mesh, planted):
    for module in (partitioning, vmap):  # vmap resizes the spec of a part
        planted.setattr(module, "by_row", lambda spec: None if spec.aux == () else ())
    weights = normal(5, *qkv()[1].shape[:2])

    def call(q, k, v, weights):
        score_mod = lambda s, b, h, i, j, weights: s * weights[b, j]  # noqa: E731
        return attention(q, k, v, score_mod=score_mod, aux=(weights,), backend="math")

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_split(auto_mesh, call, (*qkv(), weights), (P("data"),) * 4)


def test_planted_results_that_do_not_vary(auto_mesh, planted):
    types = local_call.result_types
    forgetful = lambda call, *arrays: tuple(jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types(call, *arrays))  # noqa: E731
    planted.setattr(local_call, "result_types", forgetful)
    with pytest.raises(Exception, match=r"(?i)vary|varying|cotangent|V:data"):
        check_shard_map(auto_mesh, "math", P("data"))
