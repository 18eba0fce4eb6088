"""Caches with rings: every key is read exactly or from its page, as a model of each sequence says, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from frameworks import BOTH, Framework, as_numpy

from attn_core import PoolFullError, SpecError, bytes_per_token
from attn_core.paged.quantised import numbers as quantised

pytestmark = pytest.mark.sampled

RECENT, PAGE, RINGS = 5, 4, 4
SIZES = {"num_layers": 2, "kv_heads": 2, "head_dim": 16}
on_the_cpu = pytest.mark.parametrize("framework", BOTH, ids=str)


def rows_of(token: int, layer: int) -> np.ndarray:
    """The key and the value of a token, ``[2, kv_heads, head_dim]``."""
    return np.random.default_rng((token, layer)).standard_normal((2, 2, 16)).astype(np.float32)


def stored(rows: np.ndarray) -> np.ndarray:
    """What a page of int4 makes of rows ``[..., head_dim]``."""
    scales, factors = quantised.token_scales(rows, "int4")
    return quantised.stored_numbers(rows, factors, "int4") * scales[..., None]


class Model:
    """A cache and, for each sequence, its tokens and the first one that its ring is good for."""

    def __init__(self, framework: Framework, pages: int = 40, rings: int = RINGS) -> None:
        sizes = {**SIZES, "num_pages": pages, "page_size": PAGE, "kv_dtype": "int4", "recent": RECENT, "rings": rings}
        self.framework, self.cache = framework, framework.frontend.PagedKVCache(**sizes)
        self.texts: dict[str, list[int]] = {}
        self.first: dict[str, int] = {}
        self.next = 0

    def new(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))

    def step(self, *names: str, new: int = 1) -> None:
        """Writes new tokens, attends in every layer, and compares."""
        added = {name: self.new(new) for name in names}
        step = self.cache.step(names, new, width=8)
        for name in names:
            self.texts[name] = self.texts[name] + added[name]
        random = np.random.default_rng(self.next)
        for layer in range(2):
            q = random.standard_normal((len(names) * new, 4, 16)).astype(np.float32)
            k, v = np.stack([rows_of(token, layer) for name in names for token in added[name]], 1)
            self.cache.update(layer, self.framework.array(k), self.framework.array(v), step)
            out = as_numpy(self.cache.attend(layer, self.framework.array(q), step))
            for at, name in enumerate(names):
                part = slice(at * new, at * new + new)
                np.testing.assert_allclose(out[part], self.attention(name, layer, q[part]), atol=3e-5, err_msg=name)

    def attention(self, name: str, layer: int, q: np.ndarray) -> np.ndarray:
        tokens, count = self.texts[name], len(q)
        exact = np.array([rows_of(token, layer) for token in tokens])
        first = max(self.first[name], len(tokens) - RECENT)
        rows = np.concatenate([stored(exact.reshape(-1, 2, 16)).reshape(exact.shape)[:first], exact[first:]])
        k, v = (np.repeat(rows[:, side].astype(np.float64), 2, 1) for side in (0, 1))  # [tokens, heads, dim]
        scores = np.einsum("qhd,khd->hqk", q, k) / 4
        hidden = np.arange(len(tokens)) > np.arange(len(tokens) - count, len(tokens))[:, None]
        scores[:, hidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)

    def add(self, name: str, prompt: list[int] | None = None) -> int:
        found = self.cache.add(name, prompt or ())
        self.texts[name], self.first[name] = list(prompt or ())[:found], found
        return found

    def fork(self, parent: str, name: str, tokens: int | None = None) -> None:
        self.cache.fork(parent, name, tokens)
        count = len(self.texts[parent]) if tokens is None else tokens
        self.texts[name] = self.texts[parent][:count]
        self.first[name] = min(max(self.first[parent], len(self.texts[parent]) - RECENT), count)

    def free(self, *names: str) -> None:
        for name in names:
            self.cache.free(name)
            del self.texts[name], self.first[name]


@on_the_cpu
def test_drafts_that_are_taken_back(framework: Framework) -> None:
    """The slots that drafts overwrote are stale in a fork of fewer tokens, and it reads these keys from the pages."""
    model = Model(framework)
    model.add("a")
    model.step("a", new=9)  # longer than the ring
    model.fork("a", "drafts")
    model.step("drafts", new=4)
    model.fork("drafts", "two of them", 11)
    model.fork("drafts", "none of them", 8)
    assert model.first["two of them"] == 8 and model.first["none of them"] == 8
    model.free("drafts")
    for name in ("two of them", "none of them", "a"):
        model.step(name, new=2)
    model.step("a", "none of them", "two of them")
    for _ in range(4):
        model.step("two of them")


@on_the_cpu
def test_beams_that_are_reordered(framework: Framework) -> None:
    model = Model(framework)
    model.add("0")
    model.step("0", new=6)
    model.fork("0", "1")
    for number in range(3):
        model.step("0", "1")
        model.fork("01"[number % 2], "next")  # both beams continue one of them
        model.free("10"[number % 2])
        model.fork("next", "10"[number % 2])
        model.free("next")
    model.step("1", "0")


@on_the_cpu
def test_prefixes_swaps_and_names_that_are_used_again(framework: Framework) -> None:
    model = Model(framework)
    model.add("a")
    model.step("a", new=11)
    prompt = model.texts["a"]
    model.cache.record("a", prompt)
    assert model.add("b", [*prompt, 500]) == 8
    model.step("b", new=2)  # the ring has none of the prefix
    model.step("a", "b")
    model.free("b")
    model.cache.swap_out("a")
    model.add("b")
    model.step("b", new=3)
    model.add("c")
    model.step("c", new=7)  # in the ring that "a" had
    model.step("b", "c")
    model.cache.swap_in("a")
    model.step("a", "b", "c")
    # A name that is used again without the cache's knowledge.
    model.cache.allocator.free("c")
    assert model.add("c", [*prompt, 501]) == 8
    model.step("c", "a")


@on_the_cpu
def test_tokens_that_no_step_has_written_are_not_read_from_a_ring(framework: Framework) -> None:
    """Another program wrote them to the pages alone."""
    model = Model(framework)
    for name in "ab":
        model.add(name)
    model.step("a", new=4)
    model.step("b", new=5)
    written = model.cache.allocator.pages("b")
    model.cache.allocator.extend("a", 2)
    arrays = [each for lists in model.cache._pool_lists() for each in lists]
    source, target = written[0], model.cache.allocator.pages("a")[1]
    if framework.name == "torch":
        for each in arrays:
            each[target] = each[source]
    else:
        for lists in model.cache._pool_lists():
            for layer, each in enumerate(lists):
                lists[layer] = each.at[target].set(each[source])
    model.texts["a"] = model.texts["a"] + model.texts["b"][:2]
    model.first["a"] = 6
    model.step("a")
    model.step("a", new=3)


@on_the_cpu
def test_too_few_rings_change_nothing(framework: Framework) -> None:
    model = Model(framework, rings=2)
    for name in "abc":
        model.add(name)  # waits without a ring
    model.step("a", "b", new=3)
    with pytest.raises(PoolFullError, match=r"^rings: this step needs 1 more, but 0 of the cache's 2 are free; free a"):
        model.cache.step(["a", "c"])
    with pytest.raises(PoolFullError, match=r"^rings: a fork needs 1 more"):
        model.cache.fork("a", "d")
    assert "d" not in model.cache.allocator and model.cache.allocator.length("a") == 3
    with pytest.raises(SpecError, match=r"^tokens=7: expected at most the 3"):
        model.cache.fork("a", "d", 7)
    model.cache.swap_out("b")
    model.step("c", "a")
    with pytest.raises(PoolFullError, match=r"^rings: a sequence that is swapped in needs 1 more"):
        model.cache.swap_in("b")
    assert model.cache.allocator.swapped == ("b",)
    model.free("a")
    model.cache.swap_in("b")
    model.step("b", "c")
    with pytest.raises(PoolFullError, match="pages"):
        model.cache.step(["b"], 200)  # undoes its ring, too
    model.step("b", "c")


@on_the_cpu
def test_sizes_and_their_errors(framework: Framework) -> None:
    make = framework.frontend.PagedKVCache
    sizes = {**SIZES, "num_pages": 3, "page_size": PAGE}
    for options, says in (
        ({"recent": 4}, r"^recent=4: expected None without kv_dtype, because such pages are exact$"),
        ({"recent": 0, "kv_dtype": "int4"}, r"^recent=0: expected a number of 1 or more"),
        ({"recent": 4.0, "kv_dtype": "int4"}, r"^recent=4.0: expected a number of 1 or more"),
        ({"recent": 4, "rings": 0, "kv_dtype": "int4"}, r"^rings=0: expected a number of 1 or more"),
    ):
        with pytest.raises(SpecError, match=says):
            make(**sizes, **options)
    cache = make(**sizes, kv_dtype="int4", recent=6, rings=3)
    rings = sum(each.nbytes for each in (*cache.k_recent, *cache.v_recent))
    pools = sum(each.nbytes for lists in cache._pool_lists() for each in lists)
    token = bytes_per_token(**SIZES, dtype="int4")
    assert pools == 3 * PAGE * token and rings == 3 * 6 * bytes_per_token(**SIZES, dtype="float32")
    assert cache.stored.endswith("; the newest 6 tokens also in float32, 1536 bytes per sequence and layer")
    about = {**SIZES, "page_size": PAGE, "dtype": "int4"}
    fits = framework.frontend.pages_that_fit
    options = {"recent": 6, "rings": 3, "recent_dtype": "float32"}
    assert fits(pools + rings, **about, **options) == 3
    with pytest.raises(SpecError, match=rf"^memory={rings}: expected at least the \d+ bytes of one page and of rings"):
        fits(rings, **about, **options)
    with pytest.raises(SpecError, match=r"^recent=6: expected None with pages in bfloat16, which are exact$"):
        fits(10**6, **{**about, "dtype": "bfloat16"}, recent=6)


def test_a_copy_of_a_ring_keeps_its_tensor() -> None:
    """A captured CUDA graph reads the tensors of a cache."""
    model = Model(BOTH[0])
    before = [each.data_ptr() for each in (*model.cache.k_recent, *model.cache.v_recent)]
    model.add("a")
    model.step("a", new=7)
    model.fork("a", "b")
    model.step("b")
    assert [each.data_ptr() for each in (*model.cache.k_recent, *model.cache.v_recent)] == before
    assert all(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in model.cache.k_recent)
