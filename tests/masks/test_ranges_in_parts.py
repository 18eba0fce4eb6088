"""Tests key ranges that kernels without key ranges compute in parts: the parts, both frontends, and explain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cpu_meshes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both_frontends import FRAMEWORKS, Results, judge, reachable, run, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from spec_strategies import Call, make_call
from torch.utils.checkpoint import checkpoint

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, ShapeError, SpecError, masks
from attn_core.call.key_ranges import contains, visible_blocks
from attn_core.call.spec import AttentionSpec
from attn_core.context_parallel import one_device, ranges
from attn_core.context_parallel.bands import Segment
from attn_core.context_parallel.on_torch import one_device as parts
from attn_core.context_parallel.tiles import Tile
from attn_core.selection import Target, explain
from jax_frontend.context_parallel import one_device as of_jax
from torch_frontend.dispatch import in_parts as torch_parts

pytestmark = pytest.mark.sampled

TREE = [-1, 0, 1, 2, 1, 4, 4, 0, 7, 7, 9, 9]
"""The parent of each token, in depth-first order."""
GALLERY = {
    "prefix-LM": masks.prefix_lm(5, 12),
    "shared prefix": masks.shared_prefix(4, [4, 3, 1]),
    "two groups": masks.shared_prefix([3, 1], [[2, 2], [4]]),
    "tree": masks.tree(TREE),
    "image blocks": masks.blocks([0, 3, 6, 9], [False, True, False, True], 12),
    "block-causal": masks.blocks([0, 3, 6, 9], True, 12),
    "block diffusion": masks.block_diffusion(6, 2),
    "global and window": masks.global_and_window(2, (2, 1), 12),
    "sinks of StreamingLLM": masks.global_and_window(2, 3, 12, causal=True),
    "documents": masks.documents([4, 1, 0, 7]),
}
"""Ranges for 12 queries."""
CALLS = {
    **{"prefix-LM": (2, 2), "shared prefix": (2, 2), "two groups": (2, 2), "tree": (5, None), "image blocks": (2, 5)},
    **{"block-causal": (2, 4), "block diffusion": (3, 3), "global and window": (4, None)},
    **{"sinks of StreamingLLM": (2, None), "documents": (1, 1)},
}
"""How many kernel calls compute each, by kernels with windows and without; None if they cannot."""


def counted(tiles: tuple[Tile, ...], q_len: int, kv_len: int) -> np.ndarray:
    """How many tiles compute each pair, int ``[q_len, kv_len]``."""
    counts = np.zeros((q_len, kv_len), np.int64)
    for tile in tiles:
        for segment in tile.segments:
            q, k = np.mgrid[segment.q_start : segment.q_stop, segment.k_start : segment.k_stop]
            apart = k - q - segment.offset
            seen = (apart >= (-q_len - kv_len if tile.left is None else -tile.left)) & (
                apart <= (q_len + kv_len if tile.right is None else tile.right)
            )
            counts[q, k] += seen
    return counts


def bands_of(
    key_ranges: np.ndarray, q_len: int, edges: tuple[int | None, int | None] = (None, None), **how: bool
) -> Any:
    return ranges.bands_of(np.ascontiguousarray(key_ranges).tobytes(), key_ranges.shape[-2], q_len, edges, **how)


def within(q_len: int, kv_len: int, edges: tuple[int | None, int | None]) -> np.ndarray:
    """The pairs of a band ``low <= key - query <= high``."""
    q, k = np.mgrid[:q_len, :kv_len]
    low, high = edges
    return (k - q >= (-q_len if low is None else low)) & (k - q <= (kv_len if high is None else high))


# The parts


@pytest.mark.parametrize("windows", [True, False])
@pytest.mark.parametrize("name", GALLERY)
def test_the_parts_of_a_mask_are_its_pairs(name: str, windows: bool) -> None:
    key_ranges, calls = GALLERY[name], CALLS[name][not windows]
    bands = bands_of(key_ranges, 12, windows=windows)
    if calls is None:
        assert bands is None
        return
    tiles = ranges.tiles_on_one_device(bands, 12, key_ranges.shape[2])
    assert (counted(tiles, 12, key_ranges.shape[2]) == contains(key_ranges[0, 0], np.arange(12))).all()
    assert len(tiles) == calls
    if not windows:
        assert all(tile.left is None and tile.right in (None, 0) for tile in tiles)


@st.composite
def drawn_ranges(draw: Any) -> tuple[np.ndarray, int, tuple[int | None, int | None]]:
    """Any ranges: noise, or runs of keys with ends that stay or move; the number of queries, and a band."""
    q_len, kv_len, count = draw(st.integers(1, 24)), draw(st.integers(1, 24)), draw(st.integers(1, 2))
    whole = []
    for _ in range(count):
        ends = np.zeros((kv_len, 2), np.int64)
        key = 0
        while key < kv_len:
            length = draw(st.integers(1, 8))
            first, second = sorted((draw(st.integers(0, q_len)), draw(st.integers(0, q_len))))
            moves = np.arange(length)[:, None] * np.array(draw(st.sampled_from([(0, 0), (1, 0), (0, 1), (1, 1)])))
            ends[key : key + length] = ([first, second] + moves)[: kv_len - key]
            key += length
        ends = np.minimum(ends, q_len)
        whole.append(np.where(ends[:, :1] <= ends[:, 1:], ends, 0))
    edge = st.none() | st.integers(-8, 8)
    return np.stack(whole, 1).astype(np.int32), q_len, (draw(edge), draw(edge))


@settings(max_examples=200, deadline=None)
@given(drawn_ranges(), st.booleans())
def test_every_visible_pair_is_in_one_part(drawn: Any, windows: bool) -> None:
    key_ranges, q_len, edges = drawn
    bands = bands_of(key_ranges, q_len, edges, windows=windows)
    if bands is None:
        return
    kv_len = len(key_ranges)
    expected = contains(key_ranges, np.arange(q_len)) & within(q_len, kv_len, edges)
    assert (counted(ranges.tiles_on_one_device(bands, q_len, kv_len), q_len, kv_len) == expected).all()


def test_most_drawn_ranges_have_few_parts() -> None:
    """So that the test above is not empty."""
    rng, few = np.random.default_rng(0), 0
    for _ in range(50):
        starts = np.repeat(rng.integers(0, 20, 4), 5)
        few += bands_of(np.stack([starts, starts + 4], -1)[:, None].astype(np.int32), 24) is not None
    assert few > 45


def test_ranges_without_a_form_have_no_parts() -> None:
    rng = np.random.default_rng(0)
    noise = np.sort(rng.integers(0, 4097, (4096, 1, 2)), -1).astype(np.int32)
    assert bands_of(noise, 4096) is None
    assert bands_of(noise, 4096, windows=False) is None


def test_a_long_row_is_few_parts() -> None:
    """Of real lengths, in a moment: block diffusion of 4096 tokens in blocks of 32 is five kernel calls."""
    key_ranges = masks.block_diffusion(4096, 32)
    assert len(ranges.tiles_on_one_device(bands_of(key_ranges, 8192), 8192, 8192)) == 5


@settings(max_examples=100, deadline=None)
@given(drawn_ranges(), st.integers(1, 5))
def test_the_number_of_visible_blocks(drawn: Any, size: int) -> None:
    key_ranges, q_len, edges = drawn
    seen = contains(key_ranges, np.arange(q_len)) & within(q_len, len(key_ranges), edges)
    blocks = [
        seen[q : q + size, k : k + size].any() for q in range(0, q_len, size) for k in range(0, len(key_ranges), size)
    ]
    assert visible_blocks(key_ranges[None, None], q_len, edges, size) == (sum(blocks), len(blocks))


# Both frontends


@pytest.fixture
def math_has_no_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ``math`` a kernel without key ranges: it has windows, softcaps and all dtypes on a CPU."""
    monkeypatch.setattr(one_device, "refusals", lambda *_: ("no key ranges, says the test",))
    one_device._chosen.cache_clear()
    one_device._tiled.cache_clear()
    yield
    one_device._chosen.cache_clear()
    one_device._tiled.cache_clear()


SIZES = {"batch": 1, "q_len": 12, "kv_len": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "value_dim": 8}
SIZES |= {"dtype": "float32", "needs_backward": True}


def call_with(key_ranges: np.ndarray, **fields: Any) -> Call:
    call = make_call(7, **{**SIZES, **fields}, key_ranges_shape=key_ranges.shape)
    return replace(call, inputs=call.inputs._replace(key_ranges=key_ranges))


def in_parts(framework: str, call: Call, backend: str, device: str = "cpu") -> Results:
    """The results of the call in parts; fails if it ran as a whole."""
    seen: list[Any] = []
    original = one_device.choose

    def choose(*arguments: Any) -> Any:
        seen.append(original(*arguments))
        return seen[-1]

    module: Any = one_device if framework == "torch" else of_jax
    if framework == "torch":
        torch_parts._plan_in_parts.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", choose)
        results = run(framework, call, backend, device, ranges_on_host=True)
    assert isinstance(seen[0], one_device.Tiled), seen  # in JAX the second is that of training
    return results


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"return_lse": True},
    "softcap": {"softcap": 0.9, "return_lse": True},
    "sinks": {"sinks": True, "return_lse": True},
    "causal": {"causal": True, "return_lse": True},
    "window": {"window": (3, 2), "scale": 0.4},
    "wide values": {"value_dim": 11, "return_lse": True},
    "float64": {"dtype": "float64", "return_lse": True},
    "bfloat16": {"dtype": "bfloat16"},
    "batch": {"batch": 2, "return_lse": True},
    "batch, sinks, causal": {"batch": 3, "sinks": True, "causal": True},
}


@pytest.mark.usefixtures("math_has_no_ranges")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, framework: str) -> None:
    """Forward and gradients against the float64 reference, with every mask of the gallery for one feature."""
    names = GALLERY if feature == "plain" else ("shared prefix", "image blocks")
    for name in names:
        call = call_with(GALLERY[name], **FEATURES[feature])
        assert judge(framework, call, in_parts(framework, call, "math")).ok, name


@pytest.mark.usefixtures("math_has_no_ranges")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("q_len", "alignment"), [(7, "bottom_right"), (15, "bottom_right"), (7, "top_left")])
def test_other_lengths_of_queries(q_len: int, alignment: str, framework: str) -> None:
    key_ranges = np.zeros((1, 1, 12, 1, 2), np.int32)
    key_ranges[..., :5, :, 1] = q_len
    key_ranges[..., 5:, :, :] = (2, q_len - 1)
    causal = {"causal": True, "alignment": alignment, "return_lse": True}
    call = call_with(key_ranges, q_len=q_len, **causal)
    assert judge(framework, call, in_parts(framework, call, "math")).ok


@pytest.mark.usefixtures("math_has_no_ranges")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_rows_with_ranges_of_their_own(framework: str) -> None:
    key_ranges = np.concatenate([GALLERY["shared prefix"], masks.documents([5, 7])])
    call = call_with(key_ranges, batch=2, return_lse=True)
    assert judge(framework, call, in_parts(framework, call, "math")).ok


@pytest.mark.usefixtures("math_has_no_ranges")
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_queries_that_see_nothing(framework: str) -> None:
    """With a sink, the sink is such a row's log-sum-exp."""
    key_ranges = np.zeros((1, 1, 12, 1, 2), np.int32)
    key_ranges[..., 3:6, :, 1] = 9
    for fields in ({}, {"sinks": True}):
        call = call_with(key_ranges, return_lse=True, **fields)
        results = in_parts(framework, call, "math")
        assert judge(framework, call, results).ok
        assert (results["out"][:, 9:] == 0).all()
    nothing = call_with(np.zeros_like(key_ranges), return_lse=True)
    assert (in_parts(framework, nothing, "math")["lse"] == -np.inf).all()


@pytest.mark.parametrize("name", ["shared prefix", "tree", "documents", "prefix-LM"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_kernel_that_has_no_ranges(framework: str, name: str) -> None:
    """aten's flash kernel, which has neither windows nor a gradient of the log-sum-exp."""
    for fields in ({"batch": 2}, {"needs_backward": False, "return_lse": True}, {"dtype": "bfloat16"}):
        call = call_with(GALLERY[name], **fields)
        assert judge(framework, call, in_parts(framework, call, "sdpa_flash")).ok


@pytest.mark.parametrize("name", ["shared prefix", "tree", "documents"])
def test_torch_and_jax_give_the_same_bits(name: str) -> None:
    """Without sinks, which each framework adds by its own operations."""
    for fields in ({}, {"batch": 2}, {"dtype": "bfloat16", "causal": True}):
        call = call_with(GALLERY[name], **fields)
        assert same_bits(*(in_parts(framework, call, "sdpa_flash") for framework in FRAMEWORKS)) == []


LARGE = {
    "prefix-LM": masks.prefix_lm(200, 500),
    "shared prefix": masks.shared_prefix(200, [100, 60, 140]),
    "image blocks": masks.blocks([0, 130, 260, 300], [False, True, False, True], 500),
    "block diffusion": masks.block_diffusion(250, 10),
    "global and window": masks.global_and_window(5, (60, 20), 500),
}
FLASH = ("flash2", "flash3", "xformers", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")


@pytest.mark.cuda
@pytest.mark.on_gpus(only=lambda framework, name, **_: framework == "torch" or name in ("shared prefix", "prefix-LM"))
@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("backend", FLASH)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_kernels_of_a_gpu(framework: str, backend: str, name: str) -> None:
    why = reachable(framework, backend, "cuda")
    if why is not None:
        pytest.skip(why)
    fields = {"dtype": "bfloat16", "q_len": 500, "kv_len": 500, "head_dim": 64, "value_dim": 64}
    call = call_with(LARGE[name], **fields, batch=2)
    try:
        results = in_parts(framework, call, backend, "cuda")
    except NoBackendError as error:
        pytest.skip(str(error.selection.parts))
    assert judge(framework, call, results, "cuda").ok
    if framework == "jax":
        # Kernels add the parts of dq in any order.
        assert set(same_bits(results, in_parts("torch", call, backend, "cuda"))) <= {"dq"}


@pytest.mark.cuda
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_automatic_choice_on_a_gpu(framework: str) -> None:
    """A long row takes parts of the fastest kernel, whichever it is here."""
    call = call_with(
        masks.shared_prefix(2048, [256] * 8),
        **{"dtype": "bfloat16", "q_len": 4096, "kv_len": 4096, "head_dim": 64, "value_dim": 64},
        **{"num_heads": 2, "num_kv_heads": 1},
    )
    assert judge(framework, call, run(framework, call, None, "cuda", ranges_on_host=True), "cuda").ok


FAULTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "stop one too early": lambda array: np.maximum(array - np.array([0, 1], np.int32), array[..., :1]),
    "start one too late": lambda array: np.minimum(array + np.array([1, 0], np.int32), array[..., 1:]),
    "one key too far": lambda array: np.roll(array, 1, axis=2),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_wrong_part_fails(framework: str, fault: str) -> None:
    right = call_with(GALLERY["shared prefix"])
    wrong = call_with(np.ascontiguousarray(FAULTS[fault](GALLERY["shared prefix"])))
    assert judge(framework, right, in_parts(framework, right, "sdpa_flash")).ok
    assert not judge(framework, right, in_parts(framework, wrong, "sdpa_flash")).ok


def test_rows_of_the_batch_in_the_wrong_order_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    key_ranges = np.concatenate([GALLERY["shared prefix"], masks.documents([5, 7])])
    call = call_with(key_ranges, batch=2)
    original = ranges.of_rows
    monkeypatch.setattr(ranges, "of_rows", lambda bands, *sizes: original(bands[::-1], *sizes))
    one_device._tiled.cache_clear()
    one_device._chosen.cache_clear()
    assert not judge("torch", call, in_parts("torch", call, "sdpa_flash")).ok
    one_device._tiled.cache_clear()
    one_device._chosen.cache_clear()


# The choice


def spec_of(key_ranges: np.ndarray, **fields: Any) -> AttentionSpec:
    return call_with(key_ranges, **fields).spec


def arrays(tokens: int, batch: int = 1) -> tuple[Any, Any, Any]:
    q = torch.zeros(batch, tokens, 4, 8)
    return q, q[:, :, :2], q[:, :, :2]


def test_automatic_choice_takes_parts_of_long_rows_alone() -> None:
    short, long = masks.shared_prefix(32, [8] * 4), masks.shared_prefix(256, [32] * 8)
    assert torch_frontend.explain(*arrays(64), key_ranges=short).parts is None
    selection = torch_frontend.explain(*arrays(512), key_ranges=long)
    assert (selection.backend, selection.parts) == (
        "sdpa_flash",
        "2 kernel calls of sdpa_flash, merged by their log-sum-exps",
    )
    assert torch_frontend.explain(*arrays(512), key_ranges=long, backend="math").parts is None

    on_cpu = torch_frontend.explain(*arrays(512), key_ranges=torch.from_numpy(long))
    assert on_cpu.parts == selection.parts, "a tensor on the CPU is on the host, too"


def test_automatic_choice_takes_no_parts_where_a_kernel_skips_blocks_as_fast() -> None:
    """On a described H200: flash4 runs the ranges as a whole; without it flex does, which parts of flash3 beat."""
    key_ranges = masks.shared_prefix([4096], [[2048, 2048]])
    sizes = {"batch": 1, "q_len": 8192, "kv_len": 8192, "num_heads": 16, "num_kv_heads": 16, "head_dim": 128}
    spec = AttentionSpec(**sizes, value_dim=128, dtype="bfloat16", key_ranges_shape=key_ranges.shape)
    without = Target("torch", "sm90", (("flash4", "not installed here"),))
    assert explain(spec, Target("torch", "sm90")).backend == "flash4"
    assert one_device.choose(spec, key_ranges, Target("torch", "sm90"), None) is None
    assert explain(spec, without).backend == "flex"
    assert one_device.choose(spec, key_ranges, without, None).backends == ("flash3",)


def test_the_automatic_choice_computes_what_the_whole_computes() -> None:
    rng, key_ranges = np.random.default_rng(0), masks.shared_prefix(256, [32] * 8)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 512, heads, 8), np.float32)) for heads in (4, 2, 2))
    parts = torch_frontend.attention(q, k, v, key_ranges=key_ranges)
    whole = torch_frontend.attention(q, k, v, key_ranges=key_ranges, backend="math")
    torch.testing.assert_close(parts, whole)


def test_explain_says_how_many_blocks_are_computed() -> None:
    selection = torch_frontend.explain(*arrays(512), key_ranges=masks.shared_prefix(256, [32] * 8))
    assert selection.mask == "9 of 16 blocks of 128 queries and keys have a visible pair (56%)"
    assert "mask: 9 of 16 blocks" in str(selection)

    q, k, v = (jax.ShapeDtypeStruct(tuple(each.shape), np.float32) for each in arrays(512))
    assert jax_frontend.explain(q, k, v, key_ranges=masks.documents([256, 256])).mask is not None


def test_a_refusal_says_why_the_ranges_are_no_parts() -> None:
    rng = np.random.default_rng(0)
    noise = np.sort(rng.integers(0, 513, (1, 1, 512, 1, 2)), -1).astype(np.int32)
    with pytest.raises(NoBackendError, match=r"more\s+than 16 kernel calls"):
        torch_frontend.attention(*arrays(512), key_ranges=noise, backend="sdpa_flash")
    with pytest.raises(NoBackendError, match="parts: none, because flash3 cannot run a part"):
        torch_frontend.attention(*arrays(12), key_ranges=GALLERY["tree"], backend="flash3")
    per_head = np.repeat(GALLERY["tree"], 2, axis=1)
    with pytest.raises(NoBackendError, match="differ between kv heads"):
        torch_frontend.attention(*arrays(12), key_ranges=per_head, backend="sdpa_flash")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bad_ranges_on_the_host(framework: str) -> None:
    q, k, v = arrays(12)
    attention: Any = torch_frontend.attention
    if framework == "jax":
        q, k, v = (jnp.asarray(each.numpy()) for each in (q, k, v))
        attention = jax_frontend.attention
    key_ranges = GALLERY["tree"]
    with pytest.raises(SpecError, match=r"key_ranges: expected 0 <= start <= stop <= q_len \(12\), got start 0 and"):
        attention(q, k, v, key_ranges=key_ranges + np.array([0, 1], np.int32), backend="sdpa_flash")
    with pytest.raises(ShapeError, match="key_ranges: expected shape"):
        attention(q, k, v, key_ranges=key_ranges[:, :, 1:], backend="sdpa_flash")
    with pytest.raises(SpecError, match="key_ranges: expected dtype int32, got int64"):
        attention(q, k, v, key_ranges=key_ranges.astype(np.int64), backend="sdpa_flash")


def test_an_array_that_changes_between_two_calls() -> None:
    """Plans are kept by the ranges' values, not by the array."""
    key_ranges = masks.documents([6, 6])
    q, k, v = (each + torch.arange(12.0)[None, :, None, None] for each in arrays(12))
    first = torch_frontend.attention(q, k, v, key_ranges=key_ranges, backend="sdpa_flash")
    key_ranges[...] = masks.documents([3, 9])
    second = torch_frontend.attention(q, k, v, key_ranges=key_ranges, backend="sdpa_flash")
    assert not torch.equal(first, second)
    torch.testing.assert_close(second, torch_frontend.attention(q, k, v, key_ranges=key_ranges, backend="math"))


@pytest.mark.parametrize(
    ("key_ranges", "parts"),
    [
        (masks.shared_prefix(512, [128] * 12), "2 kernel calls of math, merged by their log-sum-exps"),
        (masks.blocks(np.arange(0, 2048, 128), np.arange(16) % 2 == 1, 2048), None),
        (masks.documents([1000, 1048]), "1 kernel call of math"),
    ],
    ids=["shared prefix", "images", "documents"],
)
def test_math_runs_in_parts_what_it_would_hide(key_ranges: np.ndarray, parts: str | None) -> None:
    """A softcap leaves math alone on a CPU. As a whole it computes the keys between the first and the last seen."""
    assert torch_frontend.explain(*arrays(2048), key_ranges=key_ranges, softcap=3.0).parts == parts


def test_the_keys_of_a_block_of_queries() -> None:
    tile = Tile((Segment(10, 30, 5, 40),), 4, 2)  # query i sees keys from i + 10 - 4 to i + 10 + 2
    assert tile.keys_of(tile.segments[0], 0, 128) == (16, 40)
    assert tile.keys_of(tile.segments[0], 12, 15) == (18, 27)
    assert Tile(tile.segments, None, None).keys_of(tile.segments[0], 12, 15) == (5, 40)


# Compilers and transforms of torch


def drawn(tokens: int = 12, batch: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(batch, tokens, heads, 8, generator=generator) for heads in (4, 2, 2)]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran in parts: "forward" and "backward"."""
    seen: list[str] = []
    for name in ("forward", "backward"):
        original = getattr(parts, name)
        monkeypatch.setattr(parts, name, lambda *call, n=name, run=original: seen.append(n) or run(*call))
    return seen


@pytest.mark.parametrize("given", ["numpy", "tensor"])
def test_a_compiled_call_runs_in_parts(given: str, ran: list[str]) -> None:
    key_ranges: Any = GALLERY["shared prefix"]
    key_ranges = torch.from_numpy(key_ranges) if given == "tensor" else key_ranges
    leaves = [each.requires_grad_() for each in drawn()]

    def attend(q: Any, k: Any, v: Any, ranges: Any) -> Any:
        return torch_frontend.attention(q, k, v, key_ranges=ranges, backend="sdpa_flash")

    expected = attend(*leaves, key_ranges)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    ran.clear()
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    out = compiled(*leaves, key_ranges)
    actual = torch.autograd.grad(out.square().sum(), leaves)
    assert torch.equal(out, expected) and all(map(torch.equal, actual, gradients))
    assert ran == ["forward", "backward"]


def test_other_ranges_of_the_same_shape_in_a_compiled_call() -> None:
    leaves = drawn()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, ranges: torch_frontend.attention(q, k, v, key_ranges=ranges, backend="sdpa_flash"),
        fullgraph=True,
        backend="aot_eager",
    )
    for name in ("prefix-LM", "documents", "tree"):
        expected = torch_frontend.attention(*leaves, key_ranges=GALLERY[name], backend="math")
        torch.testing.assert_close(compiled(*leaves, GALLERY[name]), expected)


def test_transforms_run_in_parts(ran: list[str]) -> None:
    q, k, v = drawn()
    key_ranges = GALLERY["shared prefix"]

    def loss(q: Any, k: Any, v: Any, backend: str = "sdpa_flash") -> Any:
        return torch_frontend.attention(q, k, v, key_ranges=key_ranges, backend=backend).square().sum()

    actual = torch.func.grad(loss, (0, 1, 2))(q, k, v)
    assert ran == ["forward", "backward"]
    torch.testing.assert_close(actual, torch.func.grad(loss, (0, 1, 2))(q, k, v, "math"))
    each = torch.func.vmap(torch.func.grad(lambda *row: loss(*(tensor[None] for tensor in row)), (0, 1, 2)))(q, k, v)
    torch.testing.assert_close(each, actual)


def test_the_backward_has_its_forwards_parts() -> None:
    """A compiled backward runs where the forward ran, also if use_backend names another backend by then."""
    leaves = [each.requires_grad_() for each in drawn()]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v: torch_frontend.attention(q, k, v, key_ranges=GALLERY["shared prefix"]),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch_frontend.use_backend("sdpa_flash"):
        out = compiled(*leaves)
    with torch_frontend.use_backend("math"):
        actual = torch.autograd.grad(out.square().sum(), leaves)
    expected = torch_frontend.attention(*leaves, key_ranges=GALLERY["shared prefix"], backend="math")
    torch.testing.assert_close(actual, torch.autograd.grad(expected.square().sum(), leaves))


def test_ranges_that_change_before_the_backward_change_nothing() -> None:
    for backend in ("sdpa_flash", "math"):
        key_ranges, leaves = GALLERY["shared prefix"].copy(), [each.requires_grad_() for each in drawn()]
        out = torch_frontend.attention(*leaves, key_ranges=key_ranges, backend=backend)
        expected = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
        key_ranges[...] = 0
        assert all(map(torch.equal, torch.autograd.grad(out.square().sum(), leaves), expected)), backend


def test_checkpointing_and_autocast(ran: list[str]) -> None:
    leaves = [each.requires_grad_() for each in drawn()]

    def attend(q: Any, k: Any, v: Any) -> Any:
        return torch_frontend.attention(q, k, v, key_ranges=GALLERY["tree"], backend=("sdpa_flash", "math"))

    expected = torch.autograd.grad(attend(*leaves).square().sum(), leaves)
    actual = torch.autograd.grad(checkpoint(attend, *leaves, use_reentrant=False).square().sum(), leaves)
    assert all(map(torch.equal, actual, expected))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(*leaves)
    assert out.dtype == torch.bfloat16
    torch.autograd.grad(out.float().square().sum(), leaves)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(torch.autograd.grad(attend(*leaves).sum(), leaves, create_graph=True)[0].sum(), leaves)


# Rows over ranks


def test_ranges_that_ranks_cannot_share_are_named() -> None:
    spec = replace(spec_of(GALLERY["tree"]), key_ranges_shape=None)
    noise = np.sort(np.random.default_rng(0).integers(0, 513, (1, 1, 512, 1, 2)), -1).astype(np.int32)
    packed = replace(spec, documents=2, max_len_q=6, max_len_k=6)
    for ranges_given, of_call, message in (
        (GALLERY["tree"].tolist(), spec, "expected a numpy array in context parallelism"),
        (GALLERY["tree"].astype(np.int64), spec, "expected dtype int32, got int64"),
        (GALLERY["tree"], packed, "expected None beside seq_info"),
        (np.repeat(GALLERY["tree"], 2, axis=0), spec, "key_ranges: expected shape"),
        (GALLERY["tree"] + np.array([0, 9], np.int32), spec, "expected 0 <= start <= stop <= q_len"),
        (noise, replace(spec, q_len=512, kv_len=512), "expected few bands"),
    ):
        with pytest.raises(SpecError, match=message):
            ranges.bands_of_row(ranges_given, of_call)
    assert ranges.bands_of_row(GALLERY["tree"], spec)


# Transformations of JAX


@pytest.mark.usefixtures("four_devices")
def test_transformations_of_jax() -> None:
    q, k, v = (jnp.asarray(each.numpy()) for each in drawn(batch=4))
    key_ranges = GALLERY["shared prefix"]

    def attend(*arrays: Any) -> Any:
        return jax_frontend.attention(*arrays, key_ranges=key_ranges, backend="sdpa_flash")

    def gradients(*arrays: Any) -> Any:
        return jax.grad(lambda *arrays: (attend(*arrays) ** 2).sum(), (0, 1, 2))(*arrays)

    def of_row(function: Any) -> Any:
        return lambda *row: jax.tree.map(lambda array: array[0], function(*(array[None] for array in row)))

    mesh = Mesh(np.array(cpu_meshes.devices(4)), ("data",))
    split = [jax.device_put(array, NamedSharding(mesh, P("data"))) for array in (q, k, v)]
    whole = jax_frontend.attention(q, k, v, key_ranges=jnp.asarray(key_ranges))
    right = jax.grad(
        lambda *arrays: (jax_frontend.attention(*arrays, key_ranges=jnp.asarray(key_ranges)) ** 2).sum(), (0, 1, 2)
    )(q, k, v)
    exported = jax.export.export(jax.jit(attend), disabled_checks=jax_frontend.export_checks())(q, k, v)
    mapped = {"mesh": mesh, "in_specs": (P("data"),) * 3, "out_specs": P("data")}
    for name, actual in {
        "jit": jax.jit(attend)(q, k, v),
        "vmap": jax.vmap(of_row(attend))(q, k, v),
        "scan": jax.lax.scan(lambda carry, row: (carry, of_row(attend)(*row)), 0, (q, k, v))[1],
        "arrays on several devices": attend(*split),
        "jit of arrays on several devices": jax.jit(attend)(*split),
        "shard_map": jax.jit(jax.shard_map(attend, **mapped))(q, k, v),
        "export": exported.call(q, k, v),
    }.items():
        np.testing.assert_allclose(actual, whole, atol=1e-5, err_msg=name)
    for name, of_name in {
        "jit": jax.jit(gradients)(q, k, v),
        "vmap": jax.vmap(of_row(gradients))(q, k, v),
        "checkpoint": jax.grad(lambda *arrays: (jax.checkpoint(attend)(*arrays) ** 2).sum(), (0, 1, 2))(q, k, v),
        "shard_map": jax.jit(jax.shard_map(gradients, **mapped))(q, k, v),
    }.items():
        for one, other in zip(of_name, right, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4, err_msg=name)


def test_jax_takes_parts_where_a_mesh_cannot_split_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_jax.rows_are_here(1)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert of_jax.rows_are_here(4)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert not of_jax.rows_are_here(4)


# How much of the scores is left


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({"mask_mod": lambda b, h, q, k: q >= k}, "10 of 16"),
        ({"mask_mod": lambda b, h, q, k: q >= k, "window": (127, 0)}, "7 of 16"),
        ({"mask_mod": lambda b, h, q, k: q >= k + 128 * h}, "20 of 64"),
        ({"mask_mod": lambda b, h, q, k, of: of[q] == of[k], "aux": (np.arange(512) // 128,)}, "4 of 16"),
        ({"mask_mod": lambda b, h, q, k: q >= k, "key_ranges": masks.documents([256, 256])}, "6 of 16"),
        ({"mask_mod": lambda b, h, q, k: q >= k, "bias": np.zeros((1, 4, 512, 512), np.float32)}, "10 of 16"),
        ({"mask_mod": lambda b, h, q, k: q >= k, "alibi_slopes": np.ones((1, 4), np.float32)}, "10 of 16"),
        ({"score_mod": lambda score, b, h, q, k: score * 2}, None),
        ({"causal": True}, None),
    ],
)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_explain_counts_the_blocks_of_a_function(framework: str, options: dict[str, Any], blocks: str | None) -> None:
    q, k, v = arrays(512)
    explain, of_numpy = torch_frontend.explain, torch.from_numpy
    if framework == "jax":
        explain, of_numpy = jax_frontend.explain, jnp.asarray
        q, k, v = (jax.ShapeDtypeStruct(tuple(each.shape), np.float32) for each in (q, k, v))
    options = {name: of_numpy(each) if name in ("bias", "alibi_slopes") else each for name, each in options.items()}
    said = explain(q, k, v, **options).mask
    assert (
        said is None if blocks is None else said.startswith(f"{blocks} blocks of 128 queries and keys have a visible")
    )


def test_arrays_of_any_layout() -> None:
    """Reversed, strided and read-only arrays of numpy, without a warning."""
    q, k, v = drawn()
    expected = torch_frontend.attention(q, k, v, key_ranges=GALLERY["tree"], backend="sdpa_flash")
    reversed_twice = np.ascontiguousarray(GALLERY["tree"][:, :, ::-1])[:, :, ::-1]
    strided = np.repeat(GALLERY["tree"], 2, axis=2)[:, :, ::2]
    read_only = GALLERY["tree"].copy()
    read_only.flags.writeable = False
    for array in (reversed_twice, strided, read_only):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for backend in ("sdpa_flash", "math"):
                out = torch_frontend.attention(q, k, v, key_ranges=array, backend=backend)
                np.testing.assert_allclose(out, expected, atol=1e-5)
    big_endian = GALLERY["tree"].astype(">i4")
    with pytest.raises(SpecError, match="key_ranges: expected dtype int32, got >i4"):
        torch_frontend.attention(q, k, v, key_ranges=big_endian)


@pytest.mark.cuda
def test_ranges_on_the_host_beside_tensors_on_a_gpu() -> None:
    """Eager, compiled and under a transform, with gradients, beside the same ranges on the GPU. One case for all of
    them, because the kernels compile once."""
    on_host = masks.shared_prefix(200, [100, 60, 140])
    on_cpu = torch.from_numpy(on_host)
    leaves = [each.cuda().requires_grad_() for each in drawn(500)]

    def loss(q: Any, k: Any, v: Any, ranges: Any, backend: Any = None) -> Any:
        return torch_frontend.attention(q, k, v, key_ranges=ranges, backend=backend).square().sum()

    expected = torch.autograd.grad(loss(*leaves, on_cpu.cuda(), "math"), leaves)
    several = ("xformers", "sdpa_efficient", "math")
    for where, key_ranges in {"numpy": on_host, "on the CPU": on_cpu, "on the GPU": on_cpu.cuda()}.items():
        torch._dynamo.reset()
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        detached = [each.detach() for each in leaves]
        for actual in (
            torch.autograd.grad(loss(*leaves, key_ranges), leaves),
            torch.autograd.grad(loss(*leaves, key_ranges, several), leaves),
            torch.autograd.grad(compiled(*leaves, key_ranges), leaves),
            torch.func.grad(loss, (0, 1, 2))(*detached, key_ranges),
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4, msg=lambda why, at=where: f"{at}: {why}")
        assert torch_frontend.explain(*leaves, key_ranges=key_ranges).backend is not None
