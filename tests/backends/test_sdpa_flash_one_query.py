"""One query of each row with ``invariant`` on torch's CPU flash kernel: the bits of a prompt, in small calls."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest

pytest.importorskip("torch")
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attn_core.backends.sdpa_flash import cpu_kernel, cpu_lone, cpu_rows, cpu_same_bits
from torch_frontend import SeqInfo, attention, paged_attention

LONGEST = 1100
HEADS = ((4, 1), (4, 2), (8, 2), (3, 3), (1, 1), (40, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS = st.one_of(
    st.integers(1, 300),
    st.integers(300, LONGEST),
    st.sampled_from([32, 33, 96, 127, 128, 129, 384, 385, 512, 513, 640, 1024, 1025]),
)
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def unknown() -> Iterator[None]:
    """What was found about torch's own kernel does not hold for another, nor the other way round."""
    caches = cpu_rows.rows_of, cpu_rows.groups_a_prompt, cpu_rows.keeps_rows_apart, cpu_same_bits.keeps_few_queries
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def rows(count: int, heads: tuple[int, int], dim: int, dtype: torch.dtype) -> Tensors:
    torch.manual_seed(count)
    return tuple(torch.randn(count, LONGEST, number, dim).to(dtype) for number in (heads[0], heads[1], heads[1]))  # type: ignore[return-value]


def from_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], size: int, offsets: bool, **how: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of the last token of each row's first ``ends`` tokens; free slots are NaN, free entries anything."""
    width = -(-max(ends) // size)
    order = torch.randperm(len(ends) * width)
    pools = [torch.full((len(order), size, *each.shape[2:]), torch.nan, dtype=each.dtype) for each in (k, v)]
    table = order.view(len(ends), width).int()
    for row, end in enumerate(ends):
        pages = table[row, : -(-end // size)].long()
        for pool, each in zip(pools, (k, v), strict=True):
            used = torch.full((len(pages) * size, *each.shape[2:]), torch.nan, dtype=each.dtype)
            used[:end] = each[row, :end]
            pool[pages] = used.unflatten(0, (len(pages), size))
        table[row, len(pages) :] = -7
    last = torch.stack([q[row, end - 1] if end else q[row, 0] for row, end in enumerate(ends)])
    numbers = torch.arange(len(ends) + 1, dtype=torch.int32)
    how |= {"cu_seqlens_q": numbers, "max_len_q": 1} if offsets else {}
    lengths = torch.tensor(ends, dtype=torch.int32)
    return paged_attention(
        last, *pools, block_table=table, seq_lens=lengths, causal=True, return_lse=True, backend="sdpa_flash", **how
    )


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], **how: Any) -> Any:
    """(out, lse) of the last token of each row's first ``ends`` tokens, as documents with one query each."""
    info = SeqInfo.from_lengths([1] * len(ends), ends, array=torch.from_numpy)
    last = torch.stack([q[row, end - 1] for row, end in enumerate(ends)])
    keys = (torch.cat([each[row, :end] for row, end in enumerate(ends)])[None] for each in (k, v))
    out, lse = attention(last[None], *keys, seq_info=info, causal=True, return_lse=True, backend="sdpa_flash", **how)
    return out[0], lse[0] if lse.dim() == 3 else lse


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal, but for those of NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all()) and one.dtype == other.dtype


def equal_lengths() -> list[bool]:
    """Whether the last token of some lengths, of which none fills a block, has the bits that it has in a prompt."""
    torch.set_num_threads(1)
    q, k, v = rows(2, (3, 3), 64, torch.float32)
    how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "invariant": "prefix"}
    whole = attention(q, k, v, **how)
    return [
        torch.equal(attention(q[:, end - 1 : end], k[:, :end], v[:, :end], **how), whole[:, end - 1 : end])
        for end in (5, 100, 300, 700, 1001)
    ]


@pytest.mark.sampled
def test_a_decoded_token_has_the_bits_of_its_prompt() -> None:
    """Prompts, training, decoding from dense keys, packed documents and pages of drawn lengths."""

    @settings(max_examples=8 if settings.get_current_profile_name() == "ci" else 2000, deadline=None)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        torch.set_num_threads(data.draw(st.sampled_from((1, 2))))
        heads, dtype = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(DTYPES))
        q, k, v = rows(3, heads, data.draw(st.sampled_from((16, 64, 80, 128))), dtype)
        promise = {"causal": True, "backend": "sdpa_flash", "invariant": "prefix"}
        ends = data.draw(st.lists(LENGTHS, min_size=1, max_size=3))
        q, k, v = (each[: len(ends), : max(ends)] for each in (q, k, v))
        whole, whole_lse = attention(q, k, v, return_lse=True, **promise)
        tensors = [each.clone().requires_grad_() for each in (q, k, v)]
        assert torch.equal(attention(*tensors, **promise).detach(), whole), "training"
        expected = torch.stack([whole[row, end - 1] for row, end in enumerate(ends)])
        expected_lse = torch.stack([whole_lse[row, :, end - 1] for row, end in enumerate(ends)], 1)
        end = ends[0]
        place = slice(end - 1, end)
        out, lse = attention(q[:, place], k[:, :end], v[:, :end], return_lse=True, **promise)
        assert torch.equal(out, whole[:, place]) and torch.equal(lse, whole_lse[:, :, place]), "dense"
        assert torch.equal(attention(q[:, place], k[:, :end], v[:, :end], **promise), whole[:, place]), "without lse"
        alone = attention(q[-1:, place], k[-1:, :end], v[-1:, :end], **promise)
        assert torch.equal(alone, whole[-1:, place]), "alone"
        size, offsets = data.draw(st.sampled_from((1, 16, 24, 256))), data.draw(st.booleans())
        for results, name in (
            (from_pages(q, k, v, ends, size, offsets, invariant="prefix"), "pages"),
            (packed(q, k, v, ends, invariant="prefix"), "packed"),
        ):
            assert torch.equal(results[0], expected) and torch.equal(results[1], expected_lse), name

    draws()


@pytest.mark.sampled
def test_decoding_has_the_same_bits_in_every_batch() -> None:
    """With "batch": dense rows, documents and pages of sequences with their own lengths, some of them empty."""

    @settings(max_examples=8 if settings.get_current_profile_name() == "ci" else 2000, deadline=None)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        torch.set_num_threads(data.draw(st.sampled_from((1, 2))))
        heads, dtype = data.draw(st.sampled_from(HEADS)), data.draw(st.sampled_from(DTYPES))
        q, k, v = rows(4, heads, data.draw(st.sampled_from((16, 64, 128))), dtype)
        ends = data.draw(st.lists(LENGTHS, min_size=1, max_size=3))
        how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "invariant": "batch", "return_lse": True}
        alone = [
            attention(q[row : row + 1, end - 1 : end], k[row : row + 1, :end], v[row : row + 1, :end], **how)
            for row, end in enumerate(ends)
        ]
        both = attention(q[:, ends[0] - 1 : ends[0]], k[:, : ends[0]], v[:, : ends[0]], **how)
        assert torch.equal(both[0][:1], alone[0][0]) and torch.equal(both[1][:1], alone[0][1]), "batch"
        expected = torch.cat([out[:, 0] for out, _ in alone]), torch.cat([lse[:, :, 0] for _, lse in alone]).t()
        paged = from_pages(q, k, v, [*ends, 0], data.draw(st.sampled_from((1, 16, 24))), False, invariant="batch")
        assert not paged[0][-1].any() and (paged[1][:, -1] == -torch.inf).all(), "a sequence without keys"
        for results in (packed(q, k, v, ends, invariant="batch"), (paged[0][:-1], paged[1][:, :-1])):
            assert torch.equal(results[0], expected[0]) and torch.equal(results[1], expected[1])

    draws()


def test_a_row_alone_is_not_a_row_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: too few rows, for a width in which the library multiplies them in another order."""
    shape = cpu_rows.Shape("float32", 3, 3, 64, 1)
    if cpu_rows.rows_of(shape) == 1:
        pytest.skip("this processor's library multiplies one row in the order of many")
    assert all(equal_lengths())
    monkeypatch.setattr(cpu_lone, "rows_of", lambda shape: shape.group)
    assert not all(equal_lengths())


def test_a_mask_that_hides_one_key_less_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = cpu_rows.hides_behind
    monkeypatch.setattr(cpu_lone, "hides_behind", lambda seen, *rest: honest([each + 1 for each in seen], *rest))
    assert not any(equal_lengths())


@pytest.mark.usefixtures("unknown")
@pytest.mark.parametrize("fewest", [8, 1000], ids=["fewer than 8 rows differ", "all small calls differ"])
def test_a_library_with_another_order_for_few_rows_is_noticed(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another kernel, whose calls with a mask or few rows are off by a bit: more rows, or none, are used."""
    honest, backward = cpu_kernel.kernels()

    def kernel(q: Any, k: Any, v: Any, dropout: float, is_causal: bool, **options: Any) -> Any:
        out, lse = honest(q, k, v, dropout, is_causal, **options)
        few = q.shape[2] < min(fewest, 32) or (fewest > 32 and options.get("attn_mask") is not None)
        return (torch.nextafter(out, out + 1), lse) if few else (out, lse)

    for module in (cpu_kernel, cpu_rows):
        monkeypatch.setattr(module, "kernels", lambda: (kernel, backward))
    shape = cpu_rows.Shape("float32", 4, 2, 16, torch.get_num_threads())
    assert cpu_rows.rows_of(shape) == (8 if fewest == 8 else None)
    q, k, v = (each[:2, :300] for each in rows(2, (4, 2), 16, torch.float32))
    how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "invariant": "prefix"}
    whole = attention(q, k, v, **how)
    for end in (20, 128, 129, 300):
        decoded = attention(q[:, end - 1 : end], k[:, :end], v[:, :end], **how)
        assert torch.equal(decoded, whole[:, end - 1 : end])
        paged, _ = from_pages(q, k, v, [end, end], 16, False, invariant="prefix")
        assert torch.equal(paged, whole[:, end - 1])


@pytest.mark.usefixtures("unknown")
def test_half_precision_that_depends_on_the_batch_is_computed_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, backward = cpu_kernel.kernels()

    def kernel(q: Any, *rest: Any, **options: Any) -> Any:
        out, lse = honest(q, *rest, **options)
        return (out, lse + 1e-3) if q.dtype == torch.bfloat16 and len(q) > 2 else (out, lse)

    for module in (cpu_kernel, cpu_rows):
        monkeypatch.setattr(module, "kernels", lambda: (kernel, backward))
    q, k, v = (each[:, :200] for each in rows(3, (4, 2), 16, torch.bfloat16))
    how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "return_lse": True}
    for promise in ("batch", "prefix"):
        _, lse = attention(q, k, v, invariant=promise, **how)
        _, alone = attention(q[:1], k[:1], v[:1], invariant=promise, **how)
        assert torch.equal(lse[:1], alone)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [1, 2], ids=["k", "v"])
def test_a_number_that_is_not_finite_shows_in_a_decoded_token_as_in_the_prompt(at: int, value: float) -> None:
    tensors = list(rows(2, (4, 2), 16, torch.float32))
    tensors[at][0, 133, 1, 3] = tensors[at][1, 3, 0, 2] = value
    how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "invariant": "prefix"}
    q, k, v = (each[:, :300] for each in tensors)
    whole = attention(q, k, v, **how)
    for end in (3, 4, 130, 134, 200, 300):
        decoded = attention(q[:, end - 1 : end], k[:, :end], v[:, :end], **how)
        assert same(decoded, whole[:, end - 1 : end]), end
        assert same(from_pages(q, k, v, [end, end], 16, False, invariant="prefix")[0], whole[:, end - 1])


@pytest.mark.parametrize("promise", ["batch", "prefix"])
def test_documents_of_one_query_need_no_lse(promise: str) -> None:
    """Among documents of many queries, and without the log-sum-exp."""
    q, k, v = (each[0, :300] for each in rows(1, (4, 2), 16, torch.bfloat16))
    info = SeqInfo.from_lengths([1, 40, 1, 1], [200, 40, 30, 30], array=torch.from_numpy)
    how: dict[str, Any] = {"causal": True, "backend": "sdpa_flash", "invariant": promise}
    out = attention(q[None, :43], k[None], v[None], seq_info=info, **how)[0]
    alone = attention(q[None, :1], k[None, :200], v[None, :200], **how)[0]
    assert torch.equal(out[:1], alone)
    assert torch.equal(out[42:], attention(q[None, 42:43], k[None, 270:], v[None, 270:], **how)[0])


def test_the_number_of_rows_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second call of a shape tries nothing."""
    q, k, v = rows(2, (4, 2), 16, torch.float32)
    call = {"causal": True, "backend": "sdpa_flash", "invariant": "prefix"}
    attention(q[:, :1], k, v, **call)
    for module in (cpu_rows, cpu_same_bits):
        monkeypatch.setattr(module, "trials", lambda shape: pytest.fail("tried again"))
    lengths = list(accumulate([100, 200, 300]))
    for length in lengths:
        attention(q[:, :1], k[:, :length], v[:, :length], **call)
