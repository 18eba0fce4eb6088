"""Tests that torch's default device changes nothing: every tensor that the product creates names its device.

tests/torch_frontend/test_watched_calls.py calls every entry point under it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

import torch_frontend
from attn_core.call.seq_info import SeqInfo

ROOT = Path(__file__).resolve().parents[2]
FACTORIES = {made.__name__ for made in _device_constructors()}
LENGTH = 6


def _without_device(path: Path) -> list[str]:
    results = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        named = any(keyword.arg in ("device", None) for keyword in node.keywords)  # None: **keywords
        if of_torch and node.func.attr in FACTORIES and not named:
            results.append(f"{path.relative_to(ROOT)}:{node.lineno} torch.{node.func.attr}")
    return results


def test_every_factory_call_names_a_device() -> None:
    paths = [
        path for folder in ("attn_core", "torch_frontend", "jax_frontend") for path in (ROOT / folder).rglob("*.py")
    ]
    assert len(paths) > 100
    assert [line for path in paths for line in _without_device(path)] == []


def _tensors(*shape: int) -> list[torch.Tensor]:
    random = np.random.default_rng(0)
    return [torch.from_numpy(random.standard_normal(shape).astype(np.float32)) for _ in range(3)]


def _attention(backend: str | None = None, **options: Any) -> Any:
    q, k, v = (tensor.requires_grad_() for tensor in _tensors(1, LENGTH, 2, 16))
    out = torch_frontend.attention(q, k, v, backend=backend, **options)
    return out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))


def _packed(backend: str | None = None, **options: Any) -> Any:
    q, k, v = _tensors(LENGTH, 2, 16)
    return torch_frontend.attention(q, k, v, seq_info=SeqInfo.from_lengths([4, 2]), backend=backend, **options)


def _no_grad(backend: str | None = None, **options: Any) -> Any:
    return torch_frontend.attention(*_tensors(1, LENGTH, 2, 16), backend=backend, **options)


def _compiled() -> Any:
    torch.compiler.reset()
    return torch.compile(torch_frontend.attention, backend="eager")(*_tensors(1, LENGTH, 2, 16), causal=True)


def _cache(kv_dtype: str | None = None, **options: Any) -> Any:
    sizes = {"num_layers": 1, "num_pages": 9, "page_size": 2, "kv_heads": 2, "head_dim": 16}
    cache = torch_frontend.PagedKVCache(**sizes, kv_dtype=kv_dtype)
    cache.add("a")
    made = []
    for count in (3, 1):
        if count == 1:
            cache.fork("a", "b")
        q, k, v = _tensors(2 if count == 1 else count, 2, 16)
        step = cache.step(["a", "b"] if count == 1 else ["a"], count)
        cache.update(0, k, v, step)
        made.append(cache.attend(0, q, step, **options))
    return made


def _module() -> Any:
    from torch_frontend.module import Attention

    layer = Attention(2, 32, head_dim=16, sinks=True, device="cpu")
    with torch.no_grad():
        for number, parameter in enumerate(layer.parameters()):
            parameter.copy_(torch.from_numpy(np.random.default_rng(number).standard_normal(parameter.shape)))
    return layer(_tensors(1, LENGTH, 32)[0]).detach()


def _unsloth_packing() -> Any:
    from torch_frontend.unsloth import packing

    return packing.get_packed_info_from_kwargs({"packed_seq_lengths": [4, 2]}, torch.device("cpu"))


ENTRIES: dict[str, Any] = {
    **{
        f"{name} on {backend}": (call, {"backend": backend, **options})
        for backend in ("math", "sdpa_flash", "flex", None)
        for name, call, options in (
            ("training", _attention, {"causal": True}),
            ("no gradient", _no_grad, {"causal": True, "return_lse": True}),
            ("window", _no_grad, {"window": (2, 0)}),
            ("softcap", _no_grad, {"softcap": 5.0}),
            ("packed", _packed, {"causal": True}),
            ("packed window", _packed, {"window": (1, 1)}),
        )
        if not (backend == "flex" and call is _attention) and not (backend == "sdpa_flash" and "softcap" in options)
    },
    "sinks": (lambda: _attention(sinks=torch.from_numpy(np.ones(2, np.float32))), {}),
    "alibi": (lambda: _attention(alibi_slopes=torch.from_numpy(np.ones(2, np.float32)), causal=True), {}),
    "bias": (lambda: _attention(bias=torch.from_numpy(np.ones((LENGTH, LENGTH), np.float32))), {}),
    "mask": (lambda: _attention(mask=torch.from_numpy(np.tri(LENGTH) > 0)), {}),
    "empty": (lambda: torch_frontend.attention(*_tensors(0, LENGTH, 2, 16)), {}),
    "explain": (lambda: str(torch_frontend.explain(*_tensors(1, LENGTH, 2, 16))), {}),
    "pages": (_cache, {}),
    "pages with a window": (_cache, {"window": (1, 0)}),
    **{f"{kind} pages": (_cache, {"kv_dtype": kind}) for kind in ("int8", "int4", "float8_e4m3fn")},
    "module": (_module, {}),
    "unsloth's packing": (_unsloth_packing, {}),
    "compiled": (_compiled, {}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_default_device_changes_nothing(entry: str) -> None:
    call, options = ENTRIES[entry]
    with torch.device("meta"):
        got = call(**options)
    if not isinstance(got, str):
        torch.testing.assert_close(got, call(**options), rtol=0, atol=0)
