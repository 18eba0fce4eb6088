"""Tests subclasses of Tensor, and layouts whose memory differs from their meaning: read, forwarded to torch, or
refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from attn_core.errors import SpecError
from torch_frontend import (
    SeqInfo,
    append_kv,
    attention,
    attention_qkvpacked,
    paged_attention,
)
from torch_frontend.diffusers import installed
from torch_frontend.finetrainers import attention_dispatch, attention_provider
from torch_frontend.module import Attention
from torch_frontend.unsloth import (
    AttentionConfig,
    AttentionContext,
    run_attention,
    slow_attention_softcapping,
)

pytestmark = pytest.mark.sampled

Tensor = torch.Tensor
TORCHS_OWN = F.scaled_dot_product_attention
HEADS, DIM = 2, 8


class Negated(Tensor):
    """Means the negative of its numbers, and applies that if attention is looked up under its name."""

    # the function that it compares with; None: the current function of that name
    named: Callable[..., Any] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is (cls.named or F.scaled_dot_product_attention):
            meant = [-each.as_subclass(Tensor) if isinstance(each, Negated) else each for each in args]
            return F.scaled_dot_product_attention(*meant, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


class NegatedByBuiltin(Negated):
    """The same, comparing with the function that it found when it was defined."""

    named = TORCHS_OWN


class NegatedByTable(Negated):
    """The same, with a table of implementations and nothing else."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {TORCHS_OWN: True}:
            meant = [-each.as_subclass(Tensor) if isinstance(each, Negated) else each for each in args]
            return TORCHS_OWN(*meant, **(kwargs or {}))
        if getattr(func, "__name__", "") in ("__get__", "dim", "as_subclass", "is_floating_point"):
            return super().__torch_function__(func, types, args, kwargs)
        return NotImplemented


class Wrapped(Tensor):
    """Stores its numbers in an inner tensor; its own memory holds nothing."""

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inside.shape, dtype=inside.dtype, device=inside.device)
        made.inside = inside
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrap = lambda each: each.inside if isinstance(each, cls) else each  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


def jagged(*lengths: int) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, HEADS, DIM) for n in lengths], layout=torch.jagged)


def masked(tensor: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return masked_tensor(tensor, torch.ones(tensor.shape, dtype=torch.bool))


SUBCLASSES: dict[str, Callable[[Tensor], Any]] = {
    "user's": lambda tensor: tensor.as_subclass(Negated),
    "wrapper": Wrapped,
    "masked": masked,
}
LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "sparse": Tensor.to_sparse,
    "sparse_csr": lambda tensor: tensor.to_sparse_csr(),
    "mkldnn": Tensor.to_mkldnn,
    "nested": lambda tensor: torch.nested.nested_tensor(list(tensor)),
    "jagged": lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged),
}


@pytest.fixture(params=["diffusers", "finetrainers"])
def in_torchs_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "finetrainers":
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention_dispatch)
        yield
        return
    with installed():
        yield


def rows(q_len: int = 5, kv_len: int = 9) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, HEADS, n, DIM) for n in (q_len, kv_len, kv_len)]


@pytest.mark.parametrize("sizes", [(5, 9), (7, 7), (9, 5), (1, 6)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("how", ["eager", "compiled", "math", "trained"])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias_in_torchs_place(in_torchs_place: None, make: Any, sizes: tuple[int, int], how: str) -> None:
    q, k, v = rows(*sizes)
    dense = make(*sizes)._materialize()
    seen = dense.any(dim=-1)[:, None]  # a row that sees nothing is NaN in torch and 0 in ours
    expected = TORCHS_OWN(q, k, v, attn_mask=dense).masked_fill(~seen, 0.0)
    call = lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, bias)  # noqa: E731
    with attention_provider("_native_math" if how == "math" else "native"):
        if how == "compiled":
            torch._dynamo.reset()
            call = torch.compile(call, backend="eager", fullgraph=True)
        q.requires_grad_(how == "trained")
        out = call(q, k, v, make(*sizes))
    torch.testing.assert_close(out.masked_fill(~seen, 0.0), expected, rtol=1e-5, atol=1e-5)
    if how == "trained":
        out.masked_fill(~seen, 0.0).sum().backward()
        assert q.grad is not None and bool(q.grad.isfinite().all())


def test_causal_bias_with_is_causal_is_refused_as_by_torch(in_torchs_place: None) -> None:
    with pytest.raises(ValueError, match="CausalBias"):
        F.scaled_dot_product_attention(*rows(), attn_mask=causal_upper_left(5, 9), is_causal=True)


@pytest.mark.parametrize("kind", [Negated, NegatedByBuiltin, NegatedByTable])
@pytest.mark.parametrize("at", ["query", "key", "value", "attn_mask"])
@pytest.mark.parametrize("compiled", [False, True])
def test_subclasses_keep_their_meaning_in_torchs_place(
    in_torchs_place: None, kind: Any, at: str, compiled: bool
) -> None:
    if compiled and kind is NegatedByTable:
        pytest.skip("torch.compile itself asks such a class for what it does not implement")
    named = dict(zip(("query", "key", "value"), rows(), strict=True)) | {"attn_mask": torch.randn(5, 9)}
    expected = TORCHS_OWN(**(named | {at: -named[at]}))
    call = lambda *tensors: F.scaled_dot_product_attention(*tensors)  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager")
    out = call(*(named | {at: named[at].as_subclass(kind)}).values())
    torch.testing.assert_close(out.as_subclass(Tensor), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", range(4))
def test_wrappers_reach_torchs_own_function(in_torchs_place: None, at: int) -> None:
    tensors = [*rows(), torch.randn(5, 9)]
    expected = TORCHS_OWN(*tensors)
    out = F.scaled_dot_product_attention(*(Wrapped(t) if at == i else t for i, t in enumerate(tensors)))
    torch.testing.assert_close(out.inside if isinstance(out, Wrapped) else out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("kind", ["masked", "sparse", "sparse_csr", "mkldnn", "nested"])
def test_other_tensors_have_the_same_outcome_as_in_torch(in_torchs_place: None, kind: str, at: int) -> None:
    def outcome(call: Callable[..., Any]) -> Any:
        torch.manual_seed(0)
        try:
            return call(*tensors)
        except Exception as error:
            return type(error)

    tensors = [*rows(5, 5), torch.randn(2, 5)[:, None, None, :]]
    tensors[at] = (SUBCLASSES | LAYOUTS)[kind](tensors[at])
    expected, actual = outcome(TORCHS_OWN), outcome(F.scaled_dot_product_attention)
    assert type(actual) is type(expected)
    if isinstance(expected, type):
        assert actual is expected
    elif type(expected) is Tensor:
        torch.testing.assert_close(actual, expected)


def test_jagged_rows_reach_torchs_own_function(in_torchs_place: None) -> None:
    q, k, v = (jagged(3, 5, 4) for _ in range(3))
    out = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
    for got, *row in zip(out.unbind(), q.unbind(), k.unbind(), v.unbind(), strict=True):
        expected = TORCHS_OWN(*(each.transpose(0, 1)[None] for each in row))[0]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def _packed(cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
    tokens = torch.randn(5, HEADS, DIM)
    return attention(tokens, tokens, tokens, seq_info=SeqInfo(cu_seqlens_q, cu_seqlens_k, 3, 3))


def _unsloth(attention_mask: Any, **qkv: Any) -> Any:
    config = AttentionConfig("sdpa", n_kv_heads=HEADS, n_groups=1)
    context = AttentionContext(2, 5, 5, HEADS, DIM, attention_mask=attention_mask)
    return run_attention(config=config, context=context, **qkv)


def _softcapping(**given: Any) -> Any:
    layer = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=4, attn_logit_softcapping=5.0))
    return slow_attention_softcapping(**given, self=layer, bsz=2, q_len=5)


def _provider(**given: Any) -> Any:
    with attention_provider("_native_math"):
        return attention_dispatch(**given)


def _three(names: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name in names}


QUERIES, TOKENS = torch.randn(1, HEADS, DIM), torch.tensor([0, 2, 5], dtype=torch.int32)
POOLS = {name: torch.randn(3, 4, HEADS, DIM) for name in ("k_pages", "v_pages")}
TABLES = {"block_table": torch.tensor([[0, 1]]).int(), "seq_lens": torch.tensor([3]).int()}
PER_HEAD = {"alibi_slopes": torch.rand(HEADS), "sinks": torch.randn(HEADS)}
ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "attention": (
        attention,
        {**_three("qkv", 2, 5, HEADS, DIM), "bias": torch.randn(5, 5), "mask": torch.ones(5, 5).bool(), **PER_HEAD},
    ),
    "bare": (attention, _three("qkv", 2, 5, HEADS, DIM)),
    "packed": (_packed, {"cu_seqlens_q": TOKENS, "cu_seqlens_k": TOKENS}),
    "qkvpacked": (attention_qkvpacked, {"qkv": torch.randn(2, 5, 3, HEADS, DIM)}),
    "unsloth": (_unsloth, {**_three("QKV", 2, HEADS, 5, DIM), "attention_mask": torch.zeros(2, 1, 5, 5)}),
    "softcapping": (_softcapping, {**_three("QKV", 2, HEADS, 5, DIM), "causal_mask": torch.zeros(5, 5)}),
    "provider": (
        _provider,
        {**dict(zip(("query", "key", "value"), rows(), strict=True)), "attn_mask": torch.zeros(5, 9)},
    ),
    "paged": (paged_attention, {"q": QUERIES, **POOLS, **TABLES, "sinks": PER_HEAD["sinks"]}),
    "append": (append_kv, {**POOLS, **TABLES, "k": QUERIES, "v": QUERIES}),
}
"""Entry points, and the tensors of a good call."""


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_unchanged_calls_run(entry: str) -> None:
    function, given = ENTRIES[entry]
    function(**given)


@pytest.mark.parametrize("kind", [*SUBCLASSES, *LAYOUTS])
@pytest.mark.parametrize(("entry", "name"), [(entry, name) for entry, (_, given) in ENTRIES.items() for name in given])
def test_every_other_entry_point_refuses_special_tensors_by_name(entry: str, name: str, kind: str) -> None:
    function, given = ENTRIES[entry]
    try:
        made = (SUBCLASSES | LAYOUTS)[kind](given[name])
    except (RuntimeError, TypeError, IndexError):
        pytest.skip(f"torch has no {kind} tensor of this dtype and rank")
    with pytest.raises(SpecError, match=rf"{name}'?\]?: expected (a plain|a strided)"):
        function(**given | {name: made})


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_attention_reads_a_causal_bias(name: str, compiled: bool) -> None:
    q, k = torch.randn(1, 5, HEADS, DIM), torch.randn(1, 9, HEADS, DIM)
    call: Any = lambda bias: attention(q, k, k, **{name: bias})  # noqa: E731
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(call(causal_lower_right(5, 9)), attention(q, k, k, causal=True))


def test_other_functions_name_the_option_for_a_causal_bias() -> None:
    with pytest.raises(SpecError, match=r"attention_mask.*: .*CausalBias.*alignment"):
        _unsloth(**ENTRIES["unsloth"][1] | {"attention_mask": causal_upper_left(5, 5)})


def test_jagged_rows_run_as_the_error_says() -> None:
    rows = [torch.randn(n, 3, HEADS, DIM) for n in (3, 5, 4)]
    qkv = torch.nested.nested_tensor(rows, layout=torch.jagged)
    remedy = r"pass qkv.values\(\) and seq_info=\(None, qkv.offsets\(\).int\(\), the longest row\)"
    with pytest.raises(SpecError, match=f"^qkv: .*; {remedy}"):
        attention_qkvpacked(qkv)
    out = attention_qkvpacked(qkv.values(), seq_info=(None, qkv.offsets().int(), 5), causal=True)
    for one, row in zip(out.split([3, 5, 4]), rows, strict=True):
        torch.testing.assert_close(one, attention_qkvpacked(row[None], causal=True)[0])


def test_parameters_count_as_plain_tensors() -> None:
    q = torch.nn.Parameter(torch.randn(2, 5, HEADS, DIM))
    attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert Attention(HEADS, in_features=8)(torch.randn(2, 5, 8)).shape == (2, 5, 8)
