"""The Triton kernels that append, rotate and quantise, in Triton's interpreter: slots and int64 tables, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton.runtime.interpreter")
from append_cases import Append, appends, make_append
from direct_launches import launch_by_address
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_appends import Kind, assert_written, expected, pools_of, tensors_of
from quantised_cases import KINDS

import torch_frontend
from torch_frontend.paged.append import Places, append_on_gpu, repeated_on_gpu
from torch_frontend.paged.rotary import repeated_on_gpu as repeated_rotation
from torch_frontend.paged.rotary import rotate_on_gpu

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("interpreter")]


def tensor(array: np.ndarray | None, kind: str = "int32") -> Any:
    return None if array is None else torch.tensor(array.astype(kind))


def places_of(call: Append, rotates: bool, by_slots: bool, kind: str = "int32") -> Places:
    """What the kernel gets of a call."""
    tables = [None] * 3 if by_slots else [tensor(each, kind) for each in call.tables.values()]
    angles = (call.cos, call.sin) if rotates else (None, None)
    positions = tensor(call.positions, kind) if rotates and by_slots else None
    return Places(*tables, tensor(call.slots, kind) if by_slots else None, *angles, positions, call.interleaved)


def appended(call: Append, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    pools = call.k_pages.clone(), call.v_pages.clone()
    append_on_gpu(*pools, call.k, call.v, *places)
    return pools


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(appends(), st.none() | st.sampled_from(KINDS), st.booleans(), st.booleans(), st.sampled_from(("int32", "int64")))
def test_any_append(call: Append, kind: Kind, rotates: bool, by_slots: bool, tables: str) -> None:
    """One launch writes the bits of torch's operations. It rotates in float32 what it quantises, as numpy does."""
    pools = pools_of(call, kind)
    pages, scales = (tensors_of(call, pools)[at : at + 2] for at in (0, 2))
    places = places_of(call, rotates, by_slots, tables)
    append_on_gpu(*pages, call.k, call.v, *places, **({"scales": tuple(scales)} if scales else {}))
    assert_written([*pages, *scales], expected(call, pools, rotates), str(kind))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dtype", "table"), [("float16", "float32"), ("bfloat16", "bfloat16"), ("float64", "float64")])
def test_strides(dtype: str, table: str, interleaved: bool) -> None:
    """Heads outside, and angles that are a part of a wider table."""
    call = make_append([9, 30, 4], [4, 7, 0], rotary_dim=8, dtype=dtype, table=table, interleaved=interleaved)
    k = call.k.transpose(0, 1).contiguous().transpose(0, 1)
    cos, sin = (torch.cat([each, each], 1)[:, :4] for each in (call.cos, call.sin))
    assert not k.is_contiguous() and not cos.is_contiguous()
    strided = Append(**{**vars(call), "k": k, "cos": cos, "sin": sin})
    assert all(map(torch.equal, appended(strided, places_of(strided, True, False)), call.expected(True)))


@settings(max_examples=25, deadline=None)
@given(appends(("float32", "bfloat16", "float16", "float64")), st.sampled_from(("int32", "int64")))
def test_any_rotation(call: Append, kind: str) -> None:
    positions = tensor(np.maximum(call.positions, 0), kind)
    actual = rotate_on_gpu(call.k, call.cos, call.sin, positions, call.interleaved)
    options = {"positions": positions, "interleaved": call.interleaved}
    assert torch.equal(actual, torch_frontend.apply_rotary(call.k, call.cos, call.sin, **options))


def test_a_seen_rotation_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at an address that is no multiple of 16, and of queries whose heads are outside."""
    direct = launch_by_address(monkeypatch)
    rotates = repeated_rotation()
    calls = [make_append([5, 70, 1], None, dtype="float16", seed=seed) for seed in (1, 2, 3)]
    keys = [call.k for call in calls]
    moved = torch.cat([keys[0].flatten()[:1], keys[0].flatten()])[1:].view(keys[0].shape)
    outside = keys[0].transpose(0, 1).contiguous().transpose(0, 1)
    tables = calls[0].cos[:70], calls[0].sin[:70], tensor(calls[0].positions)
    for at, x in enumerate((*keys, moved, outside, keys[0])):
        before = len(direct)
        actual = rotates(x, *tables, False)
        assert torch.equal(actual, torch_frontend.apply_rotary(x, *tables[:2], positions=tables[2]))
        assert len(direct) - before == (at in (1, 2, 5))


@pytest.mark.sampled
def test_a_rotation_of_batches() -> None:
    """Rows of a batch, heads outside of them, and positions that are no position: they are clamped."""
    call = make_append([20, 20], [20, 20], dtype="float16")
    x = call.k.view(2, 20, 2, 10).transpose(1, 2).contiguous().transpose(1, 2)
    positions = torch.arange(40).view(2, 20) * 3 - 20
    safe = positions.clamp(0, len(call.cos) - 1)
    assert (safe != positions).any()
    actual = rotate_on_gpu(x, call.cos, call.sin, positions, False)
    assert torch.equal(actual, torch_frontend.apply_rotary(x, call.cos, call.sin, positions=safe))


def test_wrong_slots_are_not_written() -> None:
    """Pools between pages of NaN; a key at no position takes the angles of the nearest."""
    call = make_append([5, 3, 9], [5, 3, 9], dtype="float16")
    pages, size = call.k_pages.shape[:2]
    for wrong in (pages * size, -2, -(2**31), 2**31 - 1, 2**62, -(2**62)):
        slots = call.slots
        slots[[1, 7]] = wrong
        pools = []
        for pool in (call.k_pages, call.v_pages):
            wide = torch.full((3 * pages, *pool.shape[1:]), torch.nan, dtype=pool.dtype)
            wide[pages : 2 * pages] = pool
            pools.append(wide[pages : 2 * pages])
        usual = places_of(call, True, True, "int64")
        append_on_gpu(*pools, call.k, call.v, *usual._replace(slot_mapping=torch.tensor(slots)))
        places = [None if at in (1, 7) else place for at, place in enumerate(call.places)]
        expected = Append(**{**vars(call), "places": places}).expected(True)
        for pool, right in zip(pools, expected, strict=True):
            assert torch.equal(pool, right)
            assert pool._base[:pages].isnan().all() and pool._base[2 * pages :].isnan().all()
    far = places_of(call, True, True)._replace(positions=torch.full((17,), 2**31 - 1, dtype=torch.int32))
    last = [(*place[:2], len(call.cos) - 1) for place in call.places if place is not None]
    assert all(map(torch.equal, appended(call, far), Append(**{**vars(call), "places": last}).expected(True)))


@pytest.mark.parametrize("added", [1, 3])
def test_lengths_that_do_not_count_the_new_tokens(added: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, and the lengths with them, also of sequences whose tokens have no place."""
    direct = launch_by_address(monkeypatch)
    new = None if added == 1 else [added] * 4
    names = ("block_table", "seq_lens", *(() if added == 1 else ("cu_seqlens_q",)), "cos", "sin")
    write = repeated_on_gpu(False, names, added)
    for seed in (1, 2, 3):
        call = make_append([5, 70, 3, 9], new, dtype="float16", seed=seed)
        where = places_of(call, True, False)._replace(cos=call.cos[:70], sin=call.sin[:70])
        far = 0 if seed < 3 else 2**20
        before = where.seq_lens - added + torch.tensor([0, 0, far, -far], dtype=torch.int32)
        tensors = where._replace(seq_lens=before)._asdict()
        pools, grown = (call.k_pages.clone(), call.v_pages.clone()), torch.full((6,), -7, dtype=torch.int32)
        at = len(direct)
        assert write(*pools, call.k, call.v, *[tensors[name] for name in names], grown)
        assert len(direct) - at == (seed > 1)
        assert grown.tolist() == [*(before + added).tolist(), -7, -7]
        usual = call.k_pages.clone(), call.v_pages.clone()
        append_on_gpu(*usual, call.k, call.v, *where._replace(seq_lens=before + added))
        assert all(map(torch.equal, pools, usual))


def test_planted_faults_are_found() -> None:
    call = make_append([5, 9, 7], [5, 2, 7], interleaved=True)
    right = call.expected(True)
    for change in (
        {"places": [(*place[:2], place[2] + 1) for place in call.places if place is not None]},
        {"places": [(place[0], (place[1] + 1) % 4, place[2]) for place in call.places if place is not None]},
        {"interleaved": False},
        {"sin": -call.sin},
    ):
        wrong = Append(**{**vars(call), **change})
        assert not torch.equal(appended(wrong, places_of(wrong, True, True))[0], right[0])


@pytest.mark.parametrize(
    ("new", "by_slots", "interleaved"),
    [(None, False, False), (None, False, True), ([2, 7, 0], False, True), ([2, 7, 0], True, False)],
)
def test_a_seen_append_rotates_what_a_new_one_rotates(
    new: list[int] | None, by_slots: bool, interleaved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token for each sequence, several by offsets, and tokens by slots."""
    direct = launch_by_address(monkeypatch)
    options = {"dtype": "float16", "interleaved": interleaved}
    calls = [make_append([5, 70, 1], new, **options, seed=seed) for seed in (1, 2, 3)]
    calls = [Append(**{**vars(call), "cos": call.cos[:70], "sin": call.sin[:70]}) for call in calls]
    where = places_of(calls[0], True, by_slots)._asdict()
    names = tuple(name for name in Places._fields[:7] if where[name] is not None)
    write = repeated_on_gpu(interleaved, names)
    for at, call in enumerate((*calls, calls[0])):
        before, pools = len(direct), (call.k_pages.clone(), call.v_pages.clone())
        where = places_of(call, True, by_slots)._asdict()
        assert write(*pools, call.k, call.v, *[where[name] for name in names])
        assert all(map(torch.equal, pools, call.expected(True)))
        assert len(direct) - before == (at > 0)
