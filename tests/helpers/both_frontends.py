"""Runs a drawn call through either frontend and gives its results as numpy arrays of their own dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import xla_compiler
from hypothesis import settings
from spec_strategies import Call

import jax_frontend
import torch_frontend
from attn_core import SeqInfo, Target, backends
from attn_core.call.seq_info import tail_of
from attn_core.call.spec import AttentionSpec
from attn_core.call.tensors import Tangents
from attn_core.cli.trial import as_keywords
from attn_core.correctness import accuracy
from jax_frontend.dispatch import plan as jax_plan
from tests.campaign.judge import compared
from torch_frontend.dispatch import plan as torch_plan

FRAMEWORKS = ("torch", "jax")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.cuda))
Results = dict[str, np.ndarray]
PAIRS = (("out", "lse"), ("dout", "dlse"))
"""The names of results, and of their tangents."""


def claimed(names: tuple[str, ...] | None = None, *devices: str) -> list[Any]:
    """(backend, device) as params: this version's backends (or ``names``) and the devices that each claims."""
    pairs = [(name, device) for name in _backends_of_dense_calls(names) for device in devices or ("cpu", "cuda")]
    marks = {"cuda": (pytest.mark.cuda,)}
    return [
        pytest.param(name, device, marks=marks.get(device, ()), id=f"{name}-{device}")
        for name, device in pairs
        if claims_device(name, device)
    ]


def _backends_of_dense_calls(names: tuple[str, ...] | None) -> list[str]:
    """The backends without those for keys and values in pages alone, which tests/paged/test_paged.py tests."""
    return [name for name in names or backends.names() if not backends.load(name).takes_pages_alone]


def claims_device(name: str, device: str) -> bool:
    """Whether a backend has a file that claims a kind of device."""
    claims = module_on(name, device).forward_claims
    return claims.runs_on(device) or device in map(backends.kind_of, claims.devices)


def module_on(name: str, device: str) -> Any:
    """A backend's record for a kind of device."""
    return backends.load(name, device)


def run(
    framework: str,
    call: Call,
    backend: str | None = None,
    device: str = "cpu",
    *,
    rounding_matters: bool = True,
    ranges_on_host: bool = False,
) -> Results:
    """out, lse if the call returns it, and dq, dk, dv, dbias, dsinks as far as the call has gradients.

    Shapes are those of the spec; ``run`` checks that the frontend returned the caller's own shapes.
    JAX runs inside ``jax.jit``; if rounding does not matter, the program is compiled as quickly as possible. With
    ``ranges_on_host`` key ranges are passed in numpy.
    """
    if framework == "torch":
        actual = _run_torch(call, backend, device, ranges_on_host)
    else:
        actual = _run_jax(call, backend, device, rounding_matters, ranges_on_host)
    given, spec = call.arrays(), call.spec
    shapes = {"out": (*given["q"].shape[:-1], spec.value_dim), "lse": spec.lse_shape}
    shapes |= {f"d{name}": given[name].shape for name in call.learned}
    assert {name: array.shape for name, array in actual.items()} == {name: shapes[name] for name in actual}
    if call.one_row:
        actual |= {name: actual[name][0] for name in ("out", "dq", "dk", "dv") if name in actual}
    if "dbias" in actual:
        actual["dbias"] = actual["dbias"].reshape(spec.bias_shape)
    return actual


def target(framework: str, device: str = "cpu") -> Target:
    """Where ``run`` runs. Skips the test if JAX sees no such device."""
    if framework == "torch":
        return Target.here("torch", torch_plan.device_name(torch.device(device)))
    with jax.default_device(jax_device(device)):
        return Target.here("jax", jax_plan.device_name(None))


def jax_device(device: str) -> Any:
    """JAX's first device of the kind; skips the test where there is none."""
    platform = "gpu" if device == "cuda" else device
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        pytest.skip(f"needs a {platform} in JAX: {error}")


def run_forward_mode(
    framework: str, call: Call, tangents: Tangents, backend: str | None, device: str = "cpu"
) -> Results:
    """out, lse, dout and dlse in the shapes of the spec; the call returns its log-sum-exp."""
    arrays = call.arrays()
    moved = {name[1:]: each for name, each in tangents._asdict().items() if each is not None}
    moved = {name: tangent.reshape(arrays[name].shape) for name, tangent in moved.items()}
    named = (_jvp_in_torch if framework == "torch" else _jvp_in_jax)(call, moved, backend, device)
    return named | {name: named[name][0] for name in ("out", "dout") if call.one_row}


@contextmanager
def arguments(framework: str, call: Call, device: str = "cpu") -> Iterator[tuple[Any, dict[str, Any]]]:
    """The frontend, and the keywords of ``attention`` for a call, in a block where JAX is set up for it."""
    if framework == "torch":
        arrays, _ = _torch_arrays(call, device)
        yield torch_frontend, as_keywords(arrays) | call.options | _torch_info(call, device)
        return
    with _jax_on(call, device):
        info, key = _jax_info(call)
        drawn = {} if key is None else {"dropout_rng": key}
        yield jax_frontend, as_keywords(_jax_arrays(call)) | call.options | {"seq_info": info} | drawn


def attend(framework: str, call: Call, device: str = "cpu", **options: Any) -> list[np.ndarray]:
    """The results of ``attention``, called eagerly with more options."""
    with arguments(framework, call, device) as (frontend, given):
        results = frontend.attention(**given | options)
        convert = _numpy if framework == "torch" else np.asarray
        return [convert(each) for each in (results if isinstance(results, tuple) else (results,))]


def spec_seen(framework: str, call: Call, device: str = "cpu") -> AttentionSpec:
    """The spec that the frontend builds from the call's arguments."""
    with arguments(framework, call, device) as (frontend, given):
        learns = {} if framework == "torch" else {"needs_backward": bool(call.learned)}  # torch's tensors say it
        return frontend.explain(**given, **learns).spec


def with_every_token(call: Call, *, on_host: bool = True) -> AttentionSpec:
    """The spec of a drawn call, with documents for the tokens behind the last one.

    Args:
        on_host: whether the frontend can read the offsets; of offsets on a GPU or in ``jax.jit`` it assumes the most.
    """
    spec, cu_q, cu_k = call.spec, call.inputs.cu_seqlens_q, call.inputs.cu_seqlens_k
    if not spec.packed:
        return spec
    ended, longest = (int(cu_q[-1]), int(cu_k[-1])) if on_host else None, (spec.max_len_q, spec.max_len_k)
    tail = tail_of((spec.q_len, spec.kv_len), longest, spec.documents, ended)
    if tail is None:
        return spec
    documents = spec.documents + len(tail.ends_q)
    return replace(spec, documents=documents, max_len_q=tail.max_len_q, max_len_k=tail.max_len_k)


def judge(framework: str, call: Call, results: Results, device: str = "cpu") -> accuracy.Accuracy:
    """Judges results against the float64 reference by the acceptance rule of the whole suite."""
    inputs = call.inputs._replace(rng=dropout_words(framework, call, device))
    dlse = call.dlse if call.spec.return_lse else None
    expected = accuracy.expect(call.spec, inputs, dout=call.dout if call.learned else None, dlse=dlse)
    return compared(expected, call.learned, results)


def dropout_words(framework: str, call: Call, device: str = "cpu") -> Any:
    """The two words that the frontend draws from the generator or key that ``run`` passes."""
    if not call.spec.dropout:
        return None
    if framework == "torch":
        generator = torch.Generator(device).manual_seed(call.seed)
        return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=device).tolist()
    return jax.random.bits(jax.random.key(call.seed), (2,), jnp.uint32).tolist()


def same_bits(results: Results, others: Results) -> list[str]:
    """The names of the results that differ in any bit, dtype or shape; empty if none does."""
    names = sorted(results.keys() | others.keys())
    return [
        name for name in names if name not in results or name not in others or not _same(results[name], others[name])
    ]


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values of ``[..., seq, heads, dim]`` in another memory layout, with NaN between the values."""
    if layout == "heads_outside":
        return tensor.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "one_head_expanded":
        return tensor[..., :1, :].expand_as(tensor)
    if layout in ("sliced", "stepped"):
        dim = tensor.shape[-1]
        wide = tensor.new_full((*tensor.shape[:-1], 2 * dim + 1), torch.nan)
        view = wide[..., 1 : dim + 1] if layout == "sliced" else wide[..., 1::2]
        view.copy_(tensor)
        return view
    return tensor


def _torch_arrays(call: Call, device: str) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    arrays = {}
    for name, array in call.arrays().items():
        tensor = torch.from_numpy(np.array(array)).to(device, getattr(torch, call.dtype_of(name)))
        if name in ("q", "k", "v"):
            tensor = laid_out(tensor, call.layout)
        elif name in ("mask", "bias") and tensor.ndim > 1 and call.layout != "contiguous":
            tensor = tensor.mT.contiguous().mT
        arrays[name] = tensor
        arrays[name].requires_grad_(name in call.learned)
    dout = torch.from_numpy(call.dout).to(device, getattr(torch, call.spec.dtype))
    dout = laid_out(dout[None] if call.one_row else dout, call.layout)
    dlse = torch.from_numpy(call.dlse).to(device, getattr(torch, call.spec.lse_dtype))
    return arrays, [dout, dlse]


def _torch_info(call: Call, device: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    if call.spec.packed:
        offsets = (torch.from_numpy(cu).to(device) for cu in (call.inputs.cu_seqlens_q, call.inputs.cu_seqlens_k))
        results["seq_info"] = SeqInfo(*offsets, call.spec.max_len_q, call.spec.max_len_k)
    if call.spec.dropout:
        results["dropout_rng"] = torch.Generator(device).manual_seed(call.seed)
    return results


def _run_torch(call: Call, backend: str | None, device: str, ranges_on_host: bool) -> Results:
    arrays, cotangents = _torch_arrays(call, device)
    if ranges_on_host:
        arrays |= {"key_ranges": call.inputs.key_ranges}
    actual = torch_frontend.attention(
        **as_keywords(arrays), **call.options, **_torch_info(call, device), backend=backend
    )
    results = list(actual) if call.spec.return_lse else [actual]
    named = dict(zip(PAIRS[0], results, strict=False))
    if call.learned:
        learned = [arrays[name] for name in call.learned]
        gradients = torch.autograd.grad(results, learned, cotangents[: len(results)])
        named |= {f"d{name}": gradient for name, gradient in zip(call.learned, gradients, strict=True)}
    return {name: _numpy(tensor) for name, tensor in named.items()}


def _jvp_in_torch(call: Call, moved: dict[str, np.ndarray], backend: str | None, device: str) -> Results:
    arrays, _ = _torch_arrays(call, device)
    primals = {name: arrays[name] for name in moved}
    tangents = [torch.from_numpy(np.array(moved[name])).to(device, each.dtype) for name, each in primals.items()]

    def forward(*moving: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = as_keywords(arrays | dict(zip(moved, moving, strict=True)))
        return torch_frontend.attention(**given, **call.options, **_torch_info(call, device), backend=backend)

    pairs = torch.func.jvp(forward, tuple(primals.values()), tuple(tangents))
    return {name: _numpy(each) for names, pair in zip(PAIRS, pairs) for name, each in zip(names, pair, strict=True)}


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@contextmanager
def _jax_on(call: Call, device: str) -> Iterator[None]:
    """Switches JAX's float64 on for float64 calls alone, and selects a device."""
    with jax.enable_x64(call.spec.dtype == "float64"), jax.default_device(jax_device(device)):
        yield


def jax_array(values: Any, dtype: Any = None) -> jax.Array:
    """A JAX array of these numbers. numpy casts them: JAX would compile a program for each new shape."""
    return jnp.array(np.array(values, None if dtype is None else jnp.dtype(dtype)))


def _jax_arrays(call: Call) -> dict[str, jax.Array]:
    return {name: jax_array(array, call.dtype_of(name)) for name, array in call.arrays().items()}


def _jax_info(call: Call) -> tuple[SeqInfo | None, Any]:
    info = None
    if call.spec.packed:
        offsets = (jax_array(cu) for cu in (call.inputs.cu_seqlens_q, call.inputs.cu_seqlens_k))
        info = SeqInfo(*offsets, call.spec.max_len_q, call.spec.max_len_k)
    return info, jax.random.key(call.seed) if call.spec.dropout else None


def _run_jax(call: Call, backend: str | None, device: str, rounding_matters: bool, ranges_on_host: bool) -> Results:
    with _jax_on(call, device):
        given = _jax_arrays(call)
        learned = {name: given.pop(name) for name in call.learned}
        dout = jax_array(call.dout[None] if call.one_row else call.dout, call.spec.dtype)
        cotangents = (dout, jax_array(call.dlse, call.spec.lse_dtype))[: 1 + call.spec.return_lse]
        options = _hashable(call)
        if ranges_on_host:
            del given["key_ranges"]
            options += (("key_ranges", call.inputs.key_ranges),)
        # An array cannot be a key of the cache.
        build = _program.__wrapped__ if ranges_on_host else _program
        program = build(_pulled, backend, options, rounding_matters)
        actual = program(learned, cotangents, given, *_jax_info(call))
        return {name: np.asarray(array) for name, array in actual.items()}


def _jvp_in_jax(call: Call, moved: dict[str, np.ndarray], backend: str | None, device: str) -> Results:
    with _jax_on(call, device):
        given = _jax_arrays(call)
        primals = {name: given.pop(name) for name in moved}
        tangents = {name: jax_array(moved[name], array.dtype) for name, array in primals.items()}
        actual = _program(_pushed, backend, _hashable(call), True)(primals, tangents, given, *_jax_info(call))
        return {name: np.asarray(array) for name, array in actual.items()}


def _hashable(call: Call) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(call.options.items(), key=itemgetter(0)))


def compiled_as(backend: str | None) -> Any:
    """``compiler_options`` for a call whose numbers are judged: XLA's defaults if XLA does the arithmetic."""
    return None if backend in backends_of("torch") else xla_compiler.as_users_have_it()


@lru_cache(maxsize=256)
def _program(way: Any, backend: str | None, options: tuple[tuple[str, Any], ...], rounding_matters: bool) -> Any:
    """A compiled function of (moving inputs, what ``way`` takes with them, other inputs, seq_info, key) that returns
    the named results."""

    @partial(jax.jit, compiler_options=compiled_as(backend) if rounding_matters else None)
    def program(moving: Any, others: Any, given: Any, info: Any, key: Any) -> dict[str, Any]:
        def forward(moving: dict[str, Any]) -> tuple[Any, ...]:
            actual = jax_frontend.attention(
                **as_keywords({**moving, **given}), **dict(options), seq_info=info, dropout_rng=key, backend=backend
            )
            return actual if isinstance(actual, tuple) else (actual,)

        return way(forward, moving, others)

    return program


def _pulled(forward: Any, learned: dict[str, Any], cotangents: tuple[Any, ...]) -> dict[str, Any]:
    if not learned:
        return dict(zip(PAIRS[0], forward(learned), strict=False))
    results, pull = jax.vjp(forward, learned)
    (gradients,) = pull(cotangents)
    return dict(zip(PAIRS[0], results, strict=False)) | {f"d{name}": each for name, each in gradients.items()}


def _pushed(forward: Any, primals: dict[str, Any], tangents: dict[str, Any]) -> dict[str, Any]:
    pairs = jax.jvp(forward, (primals,), (tangents,))
    return {name: each for names, pair in zip(PAIRS, pairs) for name, each in zip(names, pair, strict=True)}


def backends_of(framework: str) -> tuple[str, ...]:
    """The backends of this version whose kernels take a framework's arrays."""
    actual = ((name, backends.load(name)) for name in backends.names())
    return tuple(name for name, module in actual if module is not None and framework == module.framework)


COMPILED_ON_GPUS = ("ffpa", "flash4", "flex", "triton_jvp", "triton_ordered")
"""Backends of torch that compile a kernel for seconds for each kind of call on a GPU."""


def judged(framework: str, backend: str, device: str) -> str | None:
    """Why a generated suite does not judge a backend in a framework, or None if it does.

    On a GPU JAX hands its buffers to torch's kernels. ``test_bit_equality`` compares the bits of both for drawn calls,
    so kernels that compile are judged in torch alone.
    """
    if device == "cuda" and framework == "jax" and backend in COMPILED_ON_GPUS:
        return f"{backend} in JAX has torch's bits, which test_bit_equality compares, and compiles for seconds"
    return reachable(framework, backend, device)


def compiles_for_long(backend: str, device: str) -> bool:
    """Whether a backend compiles for half a minute for each kind of call, so that suites run few of its calls."""
    return (backend, device) == ("flex", "cuda")


def only(kept: tuple[Any, ...], case: Any, backend: str, device: str) -> None:
    """Skips a case that is not among those that are kept if the backend ``compiles_for_long``."""
    if compiles_for_long(backend, device) and case not in kept:
        pytest.skip(f"{backend} compiles for half a minute; its cases here are {', '.join(map(str, kept))}")


def number_of_draws(backend: str, device: str) -> int:
    """How many calls to draw for a backend: fewer if it compiles, a third of the usual if it ``compiles_for_long``."""
    usual = settings().max_examples
    if compiles_for_long(backend, device):
        return usual // 3
    return 2 * usual // 3 if device == "cuda" and backend in COMPILED_ON_GPUS else usual


def reachable(framework: str, backend: str, device: str) -> str | None:
    """Why a backend cannot be reached from a framework on a device of this machine, or None if it can."""
    where = target(framework, device)
    if not module_on(backend, device).forward_claims.runs_on(where.device):
        return f"{backend} does not claim {where.device}"
    if framework == "torch" and module_on(backend, device).framework == "jax":
        return f"{backend} runs in JAX only"
    return dict(where.unavailable).get(backend)
