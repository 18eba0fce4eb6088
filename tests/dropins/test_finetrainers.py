"""Finetrainers' attention_dispatch: torch's meaning in torch's place, one meaning on every provider."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from finetrainers_cases import (
    ADDED,
    HEADS,
    KEEP,
    KEEP4,
    KV_LEN,
    Q_LEN,
    close,
    expected,
    tensors,
)
from frameworks import spied
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from attn_core import NoBackendError, SpecError, Target
from torch_frontend import attention, explain, use_backend
from torch_frontend.finetrainers import (
    AttentionProvider,
    attention_dispatch,
    attention_provider,
    list_providers,
    providers,
)

TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
WORDS = tuple(provider.value for provider in AttentionProvider)
ON_CPU = ("flash", "flash_varlen", "flex", "native", "_native_flash", "_native_math")


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention_dispatch)
    yield


# In torch's place


@st.composite
def calls(draw: Any, every_row_sees: bool = False) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """Arguments that torch's own function takes: (query, key, value), the others."""
    rank = draw(st.sampled_from([4, 4, 4, 3, 2]))
    batch, kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    q_len, kv_len, head_dim = (draw(st.integers(1, 9)) for _ in range(3))
    value_dim = draw(st.sampled_from([head_dim, 5]))
    dtype = draw(st.sampled_from([torch.float64, torch.float32, torch.float32]))
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    group = group if rank > 2 else 1
    heads = kv_heads * group
    full = [
        torch.randn(batch, n, length, width, generator=random, dtype=dtype)
        for n, length, width in ((heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, value_dim))
    ]
    if draw(st.booleans()):  # as models make them
        full = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in full]
    qkv = tuple(tensor[(0,) * (4 - rank)] for tensor in full)
    options: dict[str, Any] = {"scale": draw(st.sampled_from([None, 0.3, 1]))}
    options["enable_gqa"] = group > 1 or (rank > 2 and draw(st.booleans()))
    kind = draw(st.sampled_from(["none", "bool", "float"]))
    options["is_causal"] = draw(st.booleans())  # with a mask, too: some of torch's kernels take both
    if kind != "none":
        sizes = [batch, heads, q_len, kv_len][4 - rank :]
        kept = draw(st.lists(st.booleans(), min_size=rank, max_size=rank))
        shape = [size if keep else 1 for size, keep in zip(sizes, kept, strict=True)]
        shape = shape[draw(st.integers(0, rank - 2)) :]
        seen = torch.rand(shape, generator=random) < 0.7
        if every_row_sees:
            seen[..., 0] = True
        added = torch.randn(shape, generator=random, dtype=dtype)
        options["attn_mask"] = seen if kind == "bool" else added.masked_fill(~seen, -torch.inf)
    return qkv, options


@settings(max_examples=150, deadline=None)
@given(calls())
def test_it_is_torchs_function(call: Any) -> None:
    check_torchs_function(*call)


@pytest.mark.cuda
@settings(max_examples=60, deadline=None)
@given(calls(every_row_sees=True))  # of other rows torch's kernels there make different things
def test_it_is_torchs_function_on_a_gpu(call: Any) -> None:
    qkv, options = call
    moved = {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    check_torchs_function(tuple(tensor.cuda() for tensor in qkv), moved)


def check_torchs_function(qkv: Any, options: dict[str, Any]) -> None:
    try:
        right_out, right = with_gradients(TORCH_ATTENTION, qkv, options)
    except RuntimeError:
        assert options["is_causal"] and "attn_mask" in options  # which some of torch's kernels refuse
        return
    found_out, found = with_gradients(attention_dispatch, qkv, options)
    assert found_out.shape == right_out.shape and found_out.dtype == right_out.dtype
    torch.testing.assert_close(found_out, right_out, atol=1e-5, rtol=1e-5)
    for gradient, wanted in zip(found, right, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


def with_gradients(function: Any, qkv: Any, options: dict[str, Any]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    out = function(*leaves, **options)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    (out * weights).sum().backward()
    return out.detach(), [leaf.grad for leaf in leaves]


def test_most_of_that_is_ours_and_not_torchs_own(device: str) -> None:
    q, k, v = tensors(value_dim=5, device=device)
    mask = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool, device=device)
    with spied() as ran:
        for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
            attention_dispatch(q, k, v, enable_gqa=True, **options)
        attention_dispatch(q[0], k[0], v[0], enable_gqa=True)
        attention_dispatch(q[0, 0], k[0, 0], v[0, 0])
        attention_dispatch(q, k[:, :1], v[:, :1])
    assert len(ran) == 6


@pytest.mark.parametrize("word", ["native", "_native_math"])
def test_a_mode_that_looks_for_torchs_function_finds_it(patched: None, word: str) -> None:
    class Watch(torch.overrides.TorchFunctionMode):  # as diffusers leaves out attention scores
        seen = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    q, k, v = tensors(kv_len=Q_LEN)
    with attention_provider(word):
        right = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with Watch() as watch:
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert watch.seen == 1
    assert torch.equal(found, right)


def test_arguments_by_position(device: str) -> None:
    q, k, v = tensors(kv_len=Q_LEN, device=device)
    mask = torch.ones(Q_LEN, Q_LEN, device=device).tril().bool()
    with torch.no_grad():
        by_position = attention_dispatch(q, k, v, None, 0.0, True, 0.3, True)
        by_mask = attention_dispatch(q, k, v, mask, 0.0, False, 0.3, True)
    torch.testing.assert_close(by_position, by_mask, atol=1e-5, rtol=1e-5)
    close(by_position, expected((q, k, v), causal=True, scale=0.3)[0])


def test_the_gradient_of_a_float_mask(device: str) -> None:
    q, k, v = tensors(device=device)
    found, right = (torch.zeros(1, HEADS, Q_LEN, KV_LEN, requires_grad=True, device=device) for _ in range(2))
    for function, mask in ((attention_dispatch, found), (TORCH_ATTENTION, right)):
        function(q, k, v, mask, enable_gqa=True).square().sum().backward()
    torch.testing.assert_close(found.grad, right.grad, atol=1e-5 if device == "cpu" else 1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_a_wider_mask(dtype: torch.dtype, device: str) -> None:
    q, k, v = (tensor.to(dtype) for tensor in tensors(device=device))
    bias = torch.randn(Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(0)).to(device)
    found = attention_dispatch(q, k, v, bias, enable_gqa=True)
    assert found.dtype == dtype
    torch.testing.assert_close(found, TORCH_ATTENTION(q, k, v, bias.to(dtype), enable_gqa=True), atol=2e-2, rtol=2e-2)


def test_rows_that_see_nothing_are_zeros(device: str) -> None:
    q, k, v = tensors(device=device)
    mask = torch.ones(Q_LEN, KV_LEN, dtype=torch.bool, device=device)
    mask[2] = False
    out, gradients = with_gradients(attention_dispatch, (q, k, v), {"attn_mask": mask, "enable_gqa": True})
    assert not out[:, :, 2].any() and not gradients[0][:, :, 2].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_autocast_casts_as_torch_does(patched: None, device: str) -> None:
    q, k, v = tensors(device=device)
    bias = torch.randn(Q_LEN, KV_LEN, generator=torch.Generator().manual_seed(0)).to(device)
    with torch.autocast(device, torch.bfloat16):
        found, right = (f(q, k, v, bias, enable_gqa=True) for f in (F.scaled_dot_product_attention, TORCH_ATTENTION))
        with attention_provider("flex"):
            assert attention_dispatch(q, k, v.bfloat16(), enable_gqa=True).dtype == torch.bfloat16
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(found, right, atol=2e-2, rtol=2e-2)


def unusual(device: str = "cpu") -> dict[str, Any]:
    """Calls that only torch's own function takes, by name: functions of it."""
    q, k, v = (tensor[:, :3] for tensor in tensors(device=device))
    rows = [torch.randn(length, 2, 4, device=device) for length in (3, 5)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged)
    mask = torch.ones(1, 1, Q_LEN, KV_LEN, dtype=torch.bool, device=device)
    return {
        "five axes": lambda f: f(q[None], k[None], v[None]),
        "a mask of more axes": lambda f: f(q[0], k[0], v[0], mask),
        "a row for a batch": lambda f: f(q, k[:1], v[:1]),
        "vmap": lambda f: torch.vmap(f)(q, k, v),
        "jvp": lambda f: torch.func.jvp(lambda q: f(q, k, v), (q,), (q,))[1],
        "func.grad": lambda f: torch.func.grad(lambda q: f(q, k, v).sum())(q),
        "meta": lambda f: f(*(tensor.to("meta") for tensor in (q, k, v))),
        "no keys": lambda f: f(q, k[:, :, :0], v[:, :, :0]),
        "no rows": lambda f: f(q[:0], k[:0], v[:0]),
        "kv heads that differ": lambda f: f(*(torch.cat((q, q), 1), k, v[:, :1]), enable_gqa=True),
        "nested": lambda f: f(*(nested.transpose(1, 2),) * 3).values(),
        "dual": lambda f: dual(f, device),
    }


def dual(function: Any, device: str) -> torch.Tensor:
    q, k, v = (tensor[:, :3] for tensor in tensors(value_dim=5, device=device))
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(q, q), k, v)).tangent


@pytest.mark.parametrize("name", unusual())
def test_the_rest_is_torchs_own(name: str, device: str) -> None:
    call = unusual(device)[name]
    with spied() as ran:
        check_alike(call)
    assert ran == []


def check_alike(call: Any) -> None:
    try:
        right = call(TORCH_ATTENTION)
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            call(attention_dispatch)
        return
    found = call(attention_dispatch)
    assert found.shape == right.shape
    if found.device.type != "meta":
        torch.testing.assert_close(found, right, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"attn_mask": torch.ones(Q_LEN, KV_LEN, dtype=torch.int64)},
        {"attn_mask": torch.ones(4, KV_LEN, dtype=torch.bool)},
        {"dropout_p": 2.0},
        {"enable_gqa": False},
    ],
    ids=["integers", "shape", "dropout", "heads"],
)
def test_what_torch_refuses_torch_refuses(arguments: dict[str, Any], device: str) -> None:
    call = {"enable_gqa": True, **arguments}
    call = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with pytest.raises(RuntimeError) as right:
        TORCH_ATTENTION(*tensors(device=device), **call)
    with pytest.raises(RuntimeError) as found:
        attention_dispatch(*tensors(device=device), **call)
    assert str(found.value) == str(right.value)


@pytest.mark.parametrize(
    ("shape", "grouped", "hint"),
    [
        ((2, KV_LEN), True, "a mask of [batch, kv] is mask[:, None, None, :]"),
        ((2, Q_LEN, KV_LEN), True, "a mask of [batch, q, kv] is mask[:, None]"),
        ((Q_LEN, KV_LEN), False, "enable_gqa=False with 6 heads of query and 3 of key: pass enable_gqa=True"),
    ],
    ids=["keys", "rows", "heads"],
)
def test_an_error_of_torch_has_our_hint(
    shape: tuple[int, ...], grouped: bool, hint: str, patched: None, device: str
) -> None:
    mask = torch.ones(shape, dtype=torch.bool, device=device)
    with pytest.raises(RuntimeError) as found:
        F.scaled_dot_product_attention(*tensors(device=device), attn_mask=mask, enable_gqa=grouped)
    (note,) = found.value.__notes__
    assert note.startswith("in the words of attention(): ") and note.endswith(hint), note


@pytest.mark.parametrize("off", ["FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"])
def test_torchs_own_switches_are_heeded(patched: None, off: str, device: str) -> None:
    q, k, v = (tensor[:, :3, :, :8].contiguous() for tensor in tensors(device=device))
    names = {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", "CUDNN_ATTENTION"} - {off}
    with spied() as ran:
        with torch.nn.attention.sdpa_kernel([getattr(torch.nn.attention.SDPBackend, name) for name in names]):
            F.scaled_dot_product_attention(q, k, v)
        assert ran == []
        F.scaled_dot_product_attention(q, k, v)
        assert ran == ["sdpa_flash"] if device == "cpu" else len(ran) == 1


def test_reading_the_module_again_under_the_swap_does_not_recurse(patched: None) -> None:
    plain, module = (
        importlib.import_module(f"torch_frontend.{name}") for name in ("dispatch.tensor_kinds", "finetrainers")
    )
    before, rule = dict(vars(module)), dict(vars(plain))
    try:
        importlib.reload(plain)
        importlib.reload(module)
        assert plain._torch_attention is TORCH_ATTENTION
        q, k, v = (tensor[None, :, :3] for tensor in tensors())  # five axes: torch's own
        assert module.attention_dispatch(q, k, v).shape == q.shape
    finally:
        vars(module).update(before)
        vars(plain).update(rule)


# Which provider


@pytest.mark.parametrize("word", WORDS)
def test_a_word_or_a_member_of_any_enumeration(word: str) -> None:
    import enum

    host = enum.Enum("AttentionProvider", {"SOME": word}, type=str)
    for name in (word, AttentionProvider(word), host.SOME):
        with attention_provider(name) as provider:
            assert provider is providers.stated_provider() is AttentionProvider(word)
    with attention_provider() as provider:
        assert provider is AttentionProvider.NATIVE


def test_unknown_words_and_meshes_are_refused() -> None:
    with (
        pytest.raises(
            ValueError, match="provider='flash_varlan': unknown attention provider; did you mean flash_varlen"
        ),
        attention_provider("flash_varlan"),
    ):
        pass
    with pytest.raises(TypeError, match=r"mesh: expected a torch DeviceMesh, got builtins\.object"):
        attention_provider("flash", mesh=object())
    for changes, error in (
        ({"rotate_method": "all_gather"}, r"rotate_method='all_gather': expected one of allgather, alltoall"),
        ({"rotate_method": 3}, r"rotate_method=3: expected one of allgather, alltoall"),
        ({"convert_to_fp32": False}, r"convert_to_fp32=False: expected True with a mesh"),
    ):
        with pytest.raises(SpecError, match=error):
            attention_provider("flash", mesh=object(), **changes)
    with attention_provider("flash", mesh=None, convert_to_fp32=True, rotate_method="alltoall"):
        pass


def test_blocks_nest_and_the_kernel_is_the_provider_s(device: str) -> None:
    q, k, v = tensors(device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    native, flash = chosen(q, k, v, "native"), chosen(q, k, v, "flash")
    with spied() as ran:
        for words in (["_native_math"], ["flex", "_native_flash"], ["flex", "native"], ["native", "flex"]):
            enter(words, lambda: attention_dispatch(q, k, v, enable_gqa=True))
        with attention_provider("flash"), use_backend("math"):
            attention_dispatch(q, k, v, enable_gqa=True)
        with pytest.raises(RuntimeError), attention_provider("flex"):
            raise RuntimeError
        attention_dispatch(q, k, v, enable_gqa=True)
    assert ran == ["math", "sdpa_flash", native, "flex", "math", native]
    assert (native, flash) == ("sdpa_flash", "sdpa_flash") or device == "cuda"


def chosen(q: Any, k: Any, v: Any, word: str) -> str | None:
    """The backend of a provider for a call on nothing but query, key and value."""
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))  # [batch, len, heads, head_dim]
    names = AttentionProvider(word).kernels or None
    return explain(*rows, alignment="top_left", backend=names).backend


NAMED = {
    # by device: the dtype, and the kernel of some words; what takes float32 on a GPU is no flash kernel
    "cpu": (torch.float32, {"_native_math": "math", "flex": "flex", "flash": "sdpa_flash", "native": "sdpa_flash"}),
    "cuda": (
        torch.bfloat16,
        {"_native_math": "math", "_native_flash": "sdpa_flash", "_native_efficient": "sdpa_efficient"},
    ),
}


def test_the_words_choose_the_kernel_of_attention(device: str) -> None:
    dtype, named = NAMED[device]
    q = torch.zeros(1, 8, 2, 16, device=device, dtype=dtype)
    with spied() as ran:
        for word in map(AttentionProvider, named):
            with attention_provider(word):
                attention(q, q, q)
    assert ran == list(named.values())
    with pytest.raises(NoBackendError, match="sage"), attention_provider("sage"):
        attention(q, q, q, softcap=2.0)  # which SageAttention has not, wherever it is installed
    with pytest.raises(SpecError, match="did you mean"), attention_provider("xformer"):
        pass
    assert {"flash", "native", "_native_math"} <= set(map(str, list_providers(training=True)))


def enter(words: list[str], function: Any) -> Any:
    if not words:
        return function()
    with attention_provider(words[0]):
        return enter(words[1:], function)


def test_use_backend_never_falls_back_to_torchs_own(device: str) -> None:
    with use_backend("flash4"), pytest.raises(NoBackendError, match="flash4"):
        attention_dispatch(*tensors(device=device), enable_gqa=True)


def imported_again() -> Any:
    """A copy of the module, which reads the environment anew."""
    spec = importlib.util.find_spec(providers.__name__)
    assert spec is not None and spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def test_the_environment_names_the_provider_outside_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FINETRAINERS_ATTN_PROVIDER", raising=False)
    assert imported_again().default_provider().value == "native"
    monkeypatch.setenv("FINETRAINERS_ATTN_PROVIDER", "_native_math")
    assert imported_again().default_provider().value == "_native_math"
    monkeypatch.setenv("FINETRAINERS_ATTN_PROVIDER", "falsh")
    with pytest.raises(SpecError, match="FINETRAINERS_ATTN_PROVIDER="):
        imported_again().default_provider()


def test_the_provider_of_the_environment_runs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "DEFAULT", "_native_math")
    with spied() as ran:
        attention_dispatch(*tensors(device=device), enable_gqa=True)
        with attention_provider("native"):
            attention_dispatch(*tensors(device=device), enable_gqa=True)
    assert ran == ["math", chosen(*tensors(device=device), "native")]
    monkeypatch.setattr(providers, "DEFAULT", "sage")
    with pytest.raises(NoBackendError, match="sage"):
        attention_dispatch(*tensors(device=device), enable_gqa=True)


# Which providers there are


def test_the_list_of_this_machine_is_what_runs(device: str) -> None:
    assert set(map(str, list_providers())) == set(ON_CPU) or device == "cuda"
    for training, uses_mask in product((False, True), repeat=2):
        listed = list_providers(training=training, uses_mask=uses_mask)
        for provider in AttentionProvider:
            assert (provider in listed) == runs(provider, training, uses_mask, device), (provider, training, uses_mask)


def runs(provider: AttentionProvider, training: bool, uses_mask: bool, device: str) -> bool:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16  # which every kernel of a GPU has
    made, keep = tensors(device=device, dtype=dtype), torch.from_numpy(KEEP4)
    if device == "cuda":  # sizes that every kernel has: the list says what there is, not for which calls
        made = tensors(64, 128, device=device, dtype=dtype)
        made = tuple(torch.nn.functional.pad(tensor, (0, 64 - tensor.shape[-1])) for tensor in made)
        keep = torch.arange(128).expand(len(made[0]), 1, 1, 128) < 64
    leaves = [tensor.detach().requires_grad_(training) for tensor in made]
    try:
        with attention_provider(provider):
            attention_dispatch(*leaves, keep.to(device) if uses_mask else None, enable_gqa=True)
    except NoBackendError as error:
        print(provider, error)
        return False
    return True


def listed(device: str, training: bool, uses_mask: bool, unavailable: Any = ()) -> set[str]:
    target = Target("torch", device, unavailable)
    return set(map(str, providers.providers_on(target, training=training, uses_mask=uses_mask)))


def test_the_hosts_table_on_a_machine_with_everything() -> None:
    """docs/models/attention.md of the host: which providers are for which models."""
    assert {"flash_varlen", "flex", "native"} <= listed("sm90", True, True)
    assert {"flash", "flex", "native", "xformers"} <= listed("sm90", True, False)
    assert {"flash_varlen", "flex", "native", "sage_varlen"} <= listed("sm90", False, True)
    everyone = {"flash", "flash_varlen", "flex", "native", "sage", "sage_varlen", "xformers"}
    assert everyone <= listed("sm90", False, False)
    assert {"flash", "sage", "_native_flash"}.isdisjoint(listed("sm90", False, True))
    assert not any("sage" in word for word in listed("sm90", True, False))
    assert "_sage_qk_int8_pv_fp8_cuda_sm90" in listed("sm90", False, False) - listed("sm80", False, False)
    without = tuple((name, "not installed") for name in ("flash2", "flash3", "flash4", "xformers", "sage"))
    assert listed("sm90", True, True, without) >= {"flash_varlen", "native"}
    assert {"xformers", "sage", "sage_varlen"}.isdisjoint(listed("sm90", False, False, without))


# Compiled


@pytest.mark.parametrize("masked", [False, True])
def test_a_model_under_flash_varlen(patched: None, device: str, masked: bool) -> None:
    """Self-attention with a mask of keys, in half precision on a GPU: with the provider as without one."""
    torch.manual_seed(0)
    dtype, tolerance = (torch.float32, 2e-5) if device == "cpu" else (torch.bfloat16, 3e-2)
    projection = torch.nn.Linear(128, 3 * 128).to(device, dtype)
    x = torch.randn(2, 12, 128).to(device, dtype)
    keep = torch.ones(2, 1, 1, 12, dtype=torch.bool, device=device)
    keep[0, ..., :5] = False

    def run() -> torch.Tensor:
        q, k, v = projection(x).unflatten(-1, (3, 8, 16)).permute(2, 0, 3, 1, 4)  # [3, batch, heads, len, head_dim]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=keep if masked else None)

    right = run()
    with attention_provider(AttentionProvider.FLASH_VARLEN):
        actual = run()
    torch.testing.assert_close(actual, right, atol=tolerance, rtol=tolerance)
    with attention_provider("flash_varlen"):
        assert torch.equal(run(), actual)


def test_compiled_without_a_break_on_the_provider_of_the_run(
    patched: None,
    device: str,
) -> None:
    torch._dynamo.reset()
    q, k, v = tensors(device=device)
    added = torch.from_numpy(ADDED).to(device)
    compiled = torch.compile(
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        fullgraph=True,
        backend="aot_eager",
    )
    right = expected((q, k, v), bias=ADDED)[0]
    with spied() as ran:
        close(compiled(q, k, v, added), right)
        with attention_provider("flex"):
            close(compiled(q, k, v, added), right)
        with attention_provider("_native_cudnn"), pytest.raises(Exception, match="sdpa_cudnn"):
            compiled(q, k, v, added)
    assert len(ran) == 2 and ran[1] == "flex" and (ran[0] == "sdpa_flash" or device == "cuda")


def test_exported_programs_hold_our_op(patched: None, device: str) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    program = torch.export.export(Layer(), tensors(device=device))
    assert torch.ops.attn.forward.default in [node.target for node in program.graph.nodes]
    close(program.module()(*tensors(device=device)), expected(tensors(device=device), causal=True)[0])


def test_compiled_lengths_may_change(patched: None, device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for length in (5, 9, 17, 12):
        qkv = tensors(length, length, device=device)
        close(compiled(*qkv), expected(qkv, causal=True)[0])
    assert counter.frame_count == 1


def test_compiled_masks_of_keys_break_the_graph_and_are_right(patched: None) -> None:
    torch._dynamo.reset()
    q, k, v = tensors()
    keep = torch.from_numpy(KEEP)

    def layer(q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q + 0, k, v, keep, enable_gqa=True) + 0

    with attention_provider("flash_varlen"):
        close(torch.compile(layer, backend="aot_eager")(q), expected((q, k, v), mask=KEEP4)[0])


@pytest.mark.parametrize(
    ("inside", "device"),
    [  # on a GPU autograd computes again in a thread of its own, which is in no block
        pytest.param(True, "cpu", id="backward in the block-cpu"),
        pytest.param(False, "cpu", id="context_fn-cpu"),
        pytest.param(False, "cuda", id="context_fn-cuda", marks=pytest.mark.cuda),
    ],
)
def test_checkpointing_recomputes_on_the_same_provider(inside: bool, device: str) -> None:
    keep, dtype = torch.from_numpy(KEEP).to(device), torch.float32 if device == "cpu" else torch.bfloat16

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention_dispatch(q * 2, k, v, keep, enable_gqa=True)

    def gradients(function: Any, **options: Any) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in tensors(device=device, dtype=dtype)]
        with attention_provider("flash_varlen"):
            loss = function(*leaves, **options).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [leaf.grad for leaf in leaves]

    options: dict[str, Any] = {"use_reentrant": False}
    if not inside:
        options["context_fn"] = lambda: (attention_provider("flash_varlen"), attention_provider("flash_varlen"))
    right = gradients(layer)
    found = gradients(lambda *leaves, **given: checkpoint(layer, *leaves, **given), **options)
    same = torch.equal if device == "cpu" else partial(torch.allclose, atol=0.02)  # its sums may be in any order
    assert all(same(one, other) for one, other in zip(found, right, strict=True))


def test_the_page_s_examples_run() -> None:
    page = Path(__file__).resolve().parents[2] / "docs/how_to/migrate/finetrainers.md"
    original, blocks = F.scaled_dot_product_attention, re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) > 2
    try:
        for block in blocks:
            names: dict[str, Any] = {"__name__": "example"}
            exec(compile(block, page.name, "exec"), names)
    finally:
        F.scaled_dot_product_attention = original
