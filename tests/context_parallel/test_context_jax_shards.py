"""``shard_sequence``, ``unshard_sequence`` and ``shard_lengths`` in JAX on four devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from context_jax_cases import DOCUMENTS, Case
from jax.sharding import PartitionSpec as P

from attn_core import SeqInfo
from attn_core.context_parallel.layout import LAYOUTS
from attn_core.errors import ShapeError, SpecError
from jax_frontend import shard_lengths, shard_sequence, unshard_sequence

pytestmark = pytest.mark.usefixtures("four_devices", "x64")


def test_shards_of_other_documents_or_another_axis_are_refused():
    x, mesh = jnp.ones((1, 23)), Case("ring", (2,)).mesh
    with pytest.raises(ShapeError, match=r"seq_info: expected offsets that rise from 0 to the row's 23 positions"):
        shard_sequence(x, mesh, layout="striped", seq_info=SeqInfo.from_lengths((5,)))
    with pytest.raises(ShapeError, match="dim=2: expected one of the 2 axes of x"):
        shard_sequence(x, mesh, dim=2)
    with pytest.raises(SpecError, match=r"length=23\.0: expected the positions of the whole row"):
        unshard_sequence(x, mesh, length=23.0)
    without = r"^layout='documents': expected seq_info with the row's packed documents, got None$"
    with pytest.raises(SpecError, match=without):
        shard_sequence(x, mesh, layout="documents")
    with pytest.raises(SpecError, match=without):
        unshard_sequence(jnp.ones((1, 24)), mesh, layout="documents")
    with pytest.raises(ShapeError, match=r"^seq_info: expected at least 2 tokens, one for each rank .*, got 1$"):
        shard_sequence(x[:, :1], mesh, layout="documents", seq_info=SeqInfo.from_lengths((1,)))


def test_lengths_of_other_rows_are_refused():
    mesh = Case("ring", (2,)).mesh
    with pytest.raises(ShapeError, match=r"seq_info: expected offsets that rise from 0 to the row's 23 positions"):
        shard_lengths(mesh, length=23, seq_info=SeqInfo.from_lengths((5,)))
    with pytest.raises(SpecError, match=r"length=9223372036854775808: expected the positions of the whole row"):
        shard_lengths(mesh, length=2**63)
    with pytest.raises(SpecError, match=r"^layout='documents': expected seq_info with the row's packed documents"):
        shard_lengths(mesh, length=23, layout="documents")
    with pytest.raises(SpecError, match=r"^layout='zebra': expected one of"):
        shard_lengths(mesh, length=23, layout="zebra")
    with pytest.raises(SpecError, match=r"^mesh='cp': expected a jax.sharding.Mesh"):
        shard_lengths("cp", length=23)
    with pytest.raises(SpecError, match=r"^axis_name='rows': expected axes of the mesh"):
        shard_lengths(mesh, length=23, axis_name="rows")


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 2)])
@pytest.mark.parametrize("layout", (*LAYOUTS, "window:9"))
def test_shards_hold_what_the_layout_says_and_go_back(layout, sizes):
    case = Case("ring", sizes, layout, documents=DOCUMENTS if layout == "documents" else None)
    tokens = jnp.arange(1, 24)[None]
    options = {"axis_name": case.axis_name, "layout": layout, "seq_info": case.info}
    cut_up = shard_sequence(tokens, case.mesh, **options)
    np.testing.assert_array_equal(np.asarray(cut_up)[0], np.where(case.table(0) < 23, case.table(0) + 1, 0))
    assert cut_up.sharding.shard_shape(cut_up.shape)[1] == len(case.table(0)) // int(np.prod(sizes))
    np.testing.assert_array_equal(unshard_sequence(cut_up, case.mesh, length=23, **options), tokens)
    lengths, devices = shard_lengths(case.mesh, length=23, **options), int(np.prod(sizes))
    # The places without a position are 0, and the last ones of a shard.
    held = np.asarray(cut_up).reshape(devices, -1) > 0
    np.testing.assert_array_equal(held, np.arange(held.shape[1]) < np.array(lengths)[:, None])
    assert sum(lengths) == 23 and all(type(each) is int for each in lengths)

    def inside(tokens: Any) -> Any:
        mine = shard_sequence(tokens, **options)
        assert shard_lengths(length=23, **options) == lengths
        return mine, unshard_sequence(mine, length=23, **options)[None]

    row = P(None, tuple(case.mesh.axis_names))
    mapped = jax.shard_map(inside, mesh=case.mesh, in_specs=P(), out_specs=(row, P(row[1])))
    mine, whole = jax.jit(mapped)(tokens)
    np.testing.assert_array_equal(mine, cut_up)
    assert (np.asarray(whole) == np.asarray(tokens)).all() and len(whole) == devices
