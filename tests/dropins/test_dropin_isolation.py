"""Tests drop-ins side by side, each on its own kernel, in threads and tasks; and that drop-ins leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from frameworks import replaced
from torch_first import torch_first  # noqa: F401 (a fixture)

pytest.importorskip("transformers")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
import transformers
from both_frontends import jax_device
from flax import linen, nnx
from transformers.masking_utils import AttentionMaskInterface

import jax_frontend
import torch_frontend
from attn_core import backends
from attn_core.selection import override
from jax_frontend.linen import attention_fn
from torch_frontend import diffusers, finetrainers, huggingface
from torch_frontend.finetrainers import providers

SIZES = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3}
ROUNDS = 3


@pytest.fixture(autouse=True, scope="module")
def nothing_registered() -> None:
    """Random calls of other tests register our attention for their process and leave it."""
    huggingface.unregister()


class Host(NamedTuple):
    """One drop-in with its own choice of kernel: how it is chosen, the call, and the backend that must run it."""

    block: Callable[[], AbstractContextManager[Any]]
    call: Callable[[], Any]
    backend: str


def torch_heads(length: int, device: str, *, heads_first: bool) -> Any:
    random = torch.Generator().manual_seed(length)
    shape = (2, 3, length, 16) if heads_first else (2, length, 3, 16)
    return tuple(torch.randn(shape, generator=random).to(device) for _ in range(3))


def jax_heads(length: int, device: str, *, heads_first: bool) -> Any:
    arrays = torch_heads(length, "cpu", heads_first=heads_first)
    return tuple(jax.device_put(array.numpy(), jax_device(device)) for array in arrays)


def dispatch(qkv: Any) -> Callable[[], Any]:
    return lambda: finetrainers.attention_dispatch(*qkv, is_causal=True)


def unsloth(frontend: Any, word: str, qkv: Any) -> Callable[[], Any]:
    length = qkv[0].shape[2]
    config, context = (
        frontend.unsloth.AttentionConfig(word, 3, 1),
        frontend.unsloth.AttentionContext(2, length, length, 3, 16),
    )
    return lambda: frontend.run_attention(config=config, context=context, **dict(zip("QKV", qkv, strict=True)))


def language_model(implementation: str, length: int, device: str) -> Callable[[], Any]:
    config = transformers.LlamaConfig(
        vocab_size=31, num_hidden_layers=1, attn_implementation=implementation, num_key_value_heads=3, **SIZES
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().to(device)
    ids = torch.arange(2 * length, device=device).reshape(2, length) % 31

    def logits() -> Any:
        with torch.no_grad():
            return model(ids).logits

    return logits


@contextmanager
def in_torchs_place(backend: str) -> Iterator[None]:
    """As diffusers' models use ours: the process has it, and the block chooses the kernel."""
    with torch_frontend.use_backend(backend), diffusers.installed():
        yield


def hosts(device: str) -> dict[int, Host]:
    """Every host with another kernel than its neighbours, by the length of its keys, which identifies its calls."""
    plain = "sdpa_flash" if device == "cpu" else "sdpa_efficient"
    word = "_native_flash" if device == "cpu" else "_native_efficient"
    rows = {"heads_first": False}
    first = {"heads_first": True}
    use_torch, use_jax = torch_frontend.use_backend, jax_frontend.use_backend
    replaced_call = torch_heads(41, device, **first)  # of torch's function, which diffusers' models call
    layer = linen.MultiHeadDotProductAttention(3, attention_fn=attention_fn(backend="math"))
    x = jax.device_put(jnp.linspace(-1, 1, 2 * 29 * 12).reshape(2, 29, 12), jax_device(device))
    params = layer.init(jax.random.key(0), x)
    return {
        5: Host(lambda: use_torch("math"), lambda: torch_frontend.attention(*torch_heads(5, device, **rows)), "math"),
        7: Host(lambda: use_torch(plain), unsloth(torch_frontend, "xformers", torch_heads(7, device, **first)), plain),
        11: Host(
            lambda: finetrainers.attention_provider("_native_math"),
            dispatch(torch_heads(11, device, **first)),
            "math",
        ),
        13: Host(
            lambda: finetrainers.attention_provider(word),
            dispatch(torch_heads(13, device, **first)),
            plain,
        ),
        17: Host(nullcontext, language_model("attn_core:math", 17, device), "math"),
        19: Host(nullcontext, language_model(f"attn_core:{plain}", 19, device), plain),
        23: Host(lambda: use_jax("jax_xla"), lambda: jax_frontend.attention(*jax_heads(23, device, **rows)), "jax_xla"),
        29: Host(lambda: use_jax("jax_xla"), lambda: layer.apply(params, x), "math"),
        31: Host(
            lambda: use_jax(plain),
            lambda: jax_frontend.dot_product_attention(*jax_heads(31, device, **rows), is_causal=True),
            plain,
        ),
        37: Host(lambda: use_jax("math"), unsloth(jax_frontend, "sdpa", jax_heads(37, device, **first)), "math"),
        41: Host(
            lambda: in_torchs_place("flex" if device == "cpu" else "math"),
            lambda: F.scaled_dot_product_attention(*replaced_call, is_causal=True),
            "flex" if device == "cpu" else "math",
        ),
    }


def as_numpy(result: Any) -> np.ndarray:
    return result.detach().cpu().numpy() if isinstance(result, torch.Tensor) else np.asarray(result)


@pytest.fixture
def ran() -> Iterator[set[tuple[int, str]]]:
    """(length of the keys, backend) of every forward that runs, in any thread."""
    seen: set[tuple[int, str]] = set()

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(spec: Any, *arguments: Any) -> Any:
            seen.add((spec.kv_len, name))
            return function(spec, *arguments)

        return run

    with ExitStack() as stack:
        for name in backends.names():
            for record in dict.fromkeys(backends.records(name).values()):
                stack.enter_context(replaced(record, forward=watched(name, record.forward), shortcut=None))
        yield seen


@pytest.fixture
def registered() -> Iterator[None]:
    huggingface.register()
    yield
    huggingface.unregister()


def results_alone(table: dict[int, Host]) -> dict[int, np.ndarray]:
    """Every host's result while it runs alone; a later result from another kernel would differ."""
    results = {}
    for length, host in table.items():
        with host.block():
            results[length] = as_numpy(host.call())
    return results


def check_all(
    table: dict[int, Host], actual: dict[int, list[np.ndarray]], right: Any, ran: set[tuple[int, str]]
) -> None:
    assert ran == {(length, host.backend) for length, host in table.items()}
    for length, results in actual.items():
        assert len(results) == ROUNDS
        for result in results:
            np.testing.assert_allclose(result, right[length], atol=1e-6, rtol=0, err_msg=str(length))
    assert override.requested() is None and providers.stated_provider() is None


def test_each_thread_keeps_its_own_kernel(device: str, registered: None, ran: set[tuple[int, str]]) -> None:
    table = hosts(device)
    right, together = results_alone(table), threading.Barrier(len(table), timeout=300)

    def work(host: Host) -> list[np.ndarray]:
        results = []
        with host.block():
            for _ in range(ROUNDS):
                together.wait()  # every thread is inside its own block
                results.append(as_numpy(host.call()))
                together.wait()
        assert override.requested() is None and providers.stated_provider() is None
        return results

    # The blocks of the thread that starts the others do not reach them.
    with ThreadPoolExecutor(len(table)) as pool, finetrainers.attention_provider("sage"):
        actual = dict(zip(table, pool.map(work, table.values()), strict=True))
        assert providers.stated_provider() == "sage"
    check_all(table, actual, right, ran)


def test_each_task_keeps_its_own_kernel(device: str, registered: None, ran: set[tuple[int, str]]) -> None:
    table = hosts(device)
    right = results_alone(table)

    async def work(host: Host, together: asyncio.Barrier) -> list[np.ndarray]:
        results = []
        with host.block():
            for _ in range(ROUNDS):
                await together.wait()
                results.append(as_numpy(host.call()))
                await together.wait()
        assert override.requested() is None and providers.stated_provider() is None
        return results

    async def all_of_them() -> list[list[np.ndarray]]:
        together = asyncio.Barrier(len(table))
        return await asyncio.gather(*(work(host, together) for host in table.values()))

    check_all(table, dict(zip(table, asyncio.run(all_of_them()), strict=True)), right, ran)


def test_threads_with_one_jitted_function_keep_their_own_kernels() -> None:
    program, together = jax.jit(lambda q: jax_frontend.attention(q, q, q)), threading.Barrier(2, timeout=300)
    q = jnp.ones((1, 5, 2, 8))

    def work(name: str) -> list[bool]:
        with jax_frontend.use_backend(name):
            called_back = []
            for _ in range(ROUNDS):
                together.wait()
                called_back.append("attn_core.callback" in program.lower(q).as_text())
        return called_back

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, ["math", "jax_xla"])) == [[True] * ROUNDS, [False] * ROUNDS]


# Swapping in and out


def observable_state() -> dict[str, Any]:
    """All that a drop-in could leave changed: functions by identity, registries, methods, contexts, the environment."""
    return {
        "torch": F.scaled_dot_product_attention,
        "jax": jax.nn.dot_product_attention,
        "linen": linen.dot_product_attention,
        "nnx": nnx.dot_product_attention,
        "defaults": (linen.MultiHeadDotProductAttention.attention_fn, nnx.MultiHeadAttention.__init__.__kwdefaults__),
        "attention": dict(transformers.AttentionInterface._global_mapping),
        "masks": dict(AttentionMaskInterface._global_mapping),
        "methods": dict(vars(transformers.PreTrainedModel)),
        "chosen": (override.requested(), providers.stated_provider()),
        "environment": dict(os.environ),
    }


class Zoo(NamedTuple):
    """A model that calls its host's attention: how to run it, and how to put our attention in place for a block."""

    run: Callable[[], list[np.ndarray]]
    """Its output, and gradients if they are cheap."""
    swapped: Callable[[], AbstractContextManager[Any]]


@contextmanager
def replacing_torchs_function() -> Iterator[None]:
    """As the documentation of Finetrainers shows it."""
    original = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = finetrainers.attention_dispatch
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def run_torch(model: torch.nn.Module, call: Callable[[], torch.Tensor]) -> list[np.ndarray]:
    model.zero_grad()
    out = call()
    out.square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [out.detach().cpu().numpy(), *(gradient.cpu().numpy().copy() for gradient in gradients)]


def encoder_and_decoder(device: str) -> Zoo:
    torch.manual_seed(0)
    model = torch.nn.Transformer(12, 4, 1, 1, 16, dropout=0.0, batch_first=True).to(device)
    source, target = torch.randn(2, 7, 12).to(device), torch.randn(2, 5, 12).to(device)
    mask = model.generate_square_subsequent_mask(5, device=device)
    return Zoo(
        lambda: run_torch(model, lambda: model(source, target, tgt_mask=mask, tgt_is_causal=True)),
        replacing_torchs_function,
    )


def encoder(device: str) -> Zoo:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True).to(device)
    x, padding = torch.randn(3, 7, 24).to(device), torch.zeros(3, 7, dtype=torch.bool, device=device)
    padding[0, 5:] = True
    return Zoo(lambda: run_torch(layer, lambda: layer(x, src_key_padding_mask=padding)), replacing_torchs_function)


def transformers_model(family: str, way: str, device: str, padding: str = "right") -> Zoo:
    configs = {
        "llama": lambda: transformers.LlamaConfig(
            vocab_size=31, num_hidden_layers=2, num_key_value_heads=1, attn_implementation="sdpa", **SIZES
        ),
        "bert": lambda: transformers.BertConfig(
            vocab_size=31, num_hidden_layers=2, attn_implementation="sdpa", **SIZES
        ),
        "bart": lambda: transformers.BartConfig(
            **{"vocab_size": 31, "d_model": 24, "max_position_embeddings": 16, "attn_implementation": "sdpa"},
            **{f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers",)},
            **{f"{part}_attention_heads": 3 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")},
        ),
    }
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(configs[family]()).eval().to(device)
    ids, keep = torch.arange(14, device=device).reshape(2, 7) + 3, torch.ones(2, 7, dtype=torch.int64, device=device)
    keep[0, slice(3) if padding == "left" else slice(-3, None)] = 0
    shown = keep.bool() if padding == "left" else slice(None)  # with right padding every query sees a key

    @contextmanager
    def registered_and_chosen() -> Iterator[None]:
        huggingface.register()
        model.set_attn_implementation("attn_core")
        try:
            yield
        finally:
            model.set_attn_implementation("sdpa")
            huggingface.unregister()

    def run() -> list[np.ndarray]:
        return run_torch(model, lambda: model(ids, attention_mask=keep).last_hidden_state[shown])

    return Zoo(run, registered_and_chosen if way == "registered" else replacing_torchs_function)


def linen_model() -> Zoo:
    x = jax.random.normal(jax.random.key(0), (2, 7, 12))
    mask = linen.make_causal_mask(x[..., 0])
    held = {"layer": linen.MultiHeadDotProductAttention(3)}
    params = held["layer"].init(jax.random.key(1), x)

    @contextmanager
    def swapped() -> Iterator[None]:
        before, held["layer"] = held["layer"], held["layer"].clone(attention_fn=attention_fn())
        yield
        held["layer"] = before

    @partial(jax.jit, static_argnums=0)
    def step(layer: Any, params: Any) -> Any:
        return jax.value_and_grad(lambda params: (layer.apply(params, x, mask=mask) ** 2).mean())(params)

    def run() -> list[np.ndarray]:
        return [np.asarray(leaf) for leaf in jax.tree.leaves(step(held["layer"], params))]

    return Zoo(run, swapped)


def nnx_model() -> Zoo:
    x = jax.random.normal(jax.random.key(0), (2, 7, 12))
    model = nnx.MultiHeadAttention(4, 12, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))

    @contextmanager
    def swapped() -> Iterator[None]:
        before, model.attention_fn = model.attention_fn, attention_fn()
        yield
        model.attention_fn = before

    return Zoo(lambda: [np.asarray(model(x, is_causal=True))], swapped)


OF_TORCH: dict[str, Callable[[str], Zoo]] = {
    "torch's own layers": encoder_and_decoder,
    "torch's encoder": encoder,
    **{
        f"{family}, {way}": partial(transformers_model, family, way)
        for family in ("llama", "bert", "bart")
        for way in ("registered", "in torch's place")
    },
    "llama, left padding": partial(transformers_model, "llama", "in torch's place", padding="left"),
}
OF_JAX: dict[str, Callable[[], Zoo]] = {"flax.linen": linen_model, "flax.nnx": nnx_model}


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with jax.default_device(jax_device("cpu")):
        yield


@pytest.mark.sampled
@pytest.mark.usefixtures("torch_first")  # a callback shows every run, a compiled program only its trace
@pytest.mark.parametrize("name", [*OF_TORCH, *OF_JAX])
def test_swapping_in_and_out_of_a_model(name: str, device: str, on_the_cpu: None, ran: set[tuple[int, str]]) -> None:
    """During the swap our kernels compute the model's numbers. Afterwards the model gives its old bits."""
    if name in OF_JAX and device == "cuda":
        pytest.skip("a callback shows every run on the CPU alone")
    model, at_first = OF_JAX[name]() if name in OF_JAX else OF_TORCH[name](device), observable_state()
    before = model.run()
    assert not ran
    for word in (None, "_native_math"):
        with model.swapped(), finetrainers.attention_provider(word) if word else nullcontext():
            during = model.run()
        assert ran and (word is None or name in OF_JAX or {backend for _, backend in ran} == {"math"})
        ran.clear()
        after = model.run()
        assert not ran
        assert observable_state() == at_first
        same = np.array_equal if device == "cpu" else np.allclose  # a GPU's sums may be in any order
        assert all(same(one, other) for one, other in zip(before, after, strict=True))
        for one, other in zip(before, during, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-3)


def test_the_compared_state_shows_a_drop_in_left_behind() -> None:
    at_first = observable_state()
    with replacing_torchs_function():
        assert observable_state() != at_first
    huggingface.register()
    try:
        changed = {name for name, value in observable_state().items() if value != at_first[name]}
        assert changed == {"attention", "masks", "methods"}
    finally:
        huggingface.unregister()
    with finetrainers.attention_provider("flash"):
        assert observable_state() != at_first
    assert observable_state() == at_first
