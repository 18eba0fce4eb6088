"""triton_jvp: its rules, its launches and the choice of it as data, and its numbers on a GPU at the sizes of models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from attn_core import AttentionSpec, Target, explain
from attn_core.backends import triton_jvp
from attn_core.backends.triton_jvp import launches
from attn_core.selection import forward_mode

GPU = Target("torch", "sm90")
SIZES = {
    "batch": 2,
    "q_len": 2048,
    "kv_len": 2048,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "value_dim": 128,
}


def spec_of(**fields: Any) -> AttentionSpec:
    return AttentionSpec(**{**SIZES, "dtype": "bfloat16", **fields})


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"mask_shape": (1, 1, 2048, 2048)},
            "mask of shape [1, 1, 2048, 2048]: the Triton forward-mode kernel has none",
        ),
        ({"bias_shape": (1, 1, 1, 2048)}, "bias of shape [1, 1, 1, 2048]: the Triton forward-mode kernel has none"),
        ({"alibi_shape": (8,)}, "alibi_slopes: the Triton forward-mode kernel has none"),
        ({"dropout": 0.1}, "dropout=0.1: the Triton forward-mode kernel has none"),
        ({"dtype": "float64"}, "dtype float64: the Triton forward-mode kernel takes float32, bfloat16, float16"),
        ({"head_dim": 264}, "head_dim=264: the Triton forward-mode kernel stops at 256"),
        ({"key_ranges_shape": (1, 1, 2048, 1, 2)}, "key_ranges of shape [1, 1, 2048, 1, 2]"),
    ],
)
def test_what_the_kernel_lacks_is_left_to_plain_operations(fields: dict[str, Any], reason: str) -> None:
    for framework, other in (("torch", "math"), ("jax", "jax_xla")):
        choice = forward_mode.choose(spec_of(**fields), Target(framework, "sm90"), None)
        assert choice.backend == other
        assert any(why.startswith(reason) for why in dict(choice.refusals)["triton_jvp"])
        assert reason in str(choice) and str(choice).startswith(f"{other}, because triton_jvp: ")
    error = str(forward_mode.choose(spec_of(**fields), GPU, ("triton_jvp",)).error())
    assert error.startswith("backend='triton_jvp': expected reverse mode") and reason in error
    assert error.endswith('; backend="math" has forward mode')


@pytest.mark.parametrize(
    "fields",
    [
        {"causal": True},
        {"causal": True, "alignment": "top_left", "kv_len": 77},
        {"window": (100, 3), "softcap": 30.0, "sinks": True},
        {"head_dim": 192},
        {"head_dim": 7, "value_dim": 250, "dtype": "float32"},
        {"batch": 1, "documents": 5, "max_len_q": 512, "max_len_k": 512, "causal": True},
    ],
)
def test_what_bands_and_documents_express_runs_on_the_kernel(fields: dict[str, Any]) -> None:
    spec = spec_of(**fields)
    for framework in ("torch", "jax"):
        choice = forward_mode.choose(spec, Target(framework, "sm90"), None)
        assert choice.backend == "triton_jvp" and choice.refusals == ()
    assert explain(spec, GPU).forward_mode == "triton_jvp"
    assert "forward mode: triton_jvp" in explain(spec, GPU).text(everything=True)
    assert forward_mode.choose(spec, Target("torch", "cpu"), None).backend == "math"


@pytest.mark.parametrize("device", ["tpu", "gfx942", "mps", "xpu"])
def test_other_devices_have_forward_mode_by_plain_operations(device: str) -> None:
    frameworks = {"jax": "jax_xla", "torch": "math"}
    for framework in ("jax",) if device == "tpu" else frameworks:
        assert forward_mode.choose(spec_of(), Target(framework, device), None).backend == frameworks[framework]


def test_the_names_of_a_call_decide() -> None:
    spec = spec_of(causal=True)
    for names, chosen in {("math",): "math", ("flash3", "triton_jvp"): "triton_jvp", ("flash3",): None}.items():
        assert forward_mode.choose(spec, GPU, names).backend == chosen
    old = forward_mode.choose(spec, Target("torch", "sm75"), ("triton_jvp",))
    assert "device sm75: the Triton forward-mode kernel needs sm80 or newer" in str(old)
    missing = Target("torch", "sm90", unavailable=(("triton_jvp", "not available: no triton"),))
    assert str(forward_mode.choose(spec, missing, None)) == "math, because triton_jvp: not available: no triton"


def test_arguments_of_the_kernel() -> None:
    spec = spec_of(window=(5, None), causal=True, softcap=20.0, sinks=True, scale=0.3)
    flags = {"PACKED": False, "BOTTOM_RIGHT": True, "LEFT": True, "SOFTCAP": True, "SINKS": True}
    assert triton_jvp.lower(spec) == {"scale": 0.3, "softcap": 20.0, "left": 5, "right": 0, **flags}
    whole = triton_jvp.lower(spec_of(alignment="top_left"))
    assert whole["left"] == whole["right"] == 2**30 and not whole["LEFT"] and not whole["BOTTOM_RIGHT"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kib", [99, 163, 227])
def test_tiles_fit_into_shared_memory(dtype: str, kib: int) -> None:
    for head_dim in (1, 16, 40, 64, 96, 128, 192, 256):
        for value_dim in (8, 64, 128, 256):
            for q_len in (1, 64, 2048):
                spec = spec_of(head_dim=head_dim, value_dim=value_dim, q_len=q_len, dtype=dtype)
                tile = launches.tiles(spec, kib * 1024)
                assert tile.shared <= kib and (q_len > 64 or tile.queries <= 64)
                grid, numbers, constants = launches.attend(
                    spec, ((1, 2, 3, 1),) * 6, (True,) * 4, True, triton_jvp.lower(spec), tile
                )
                parts = -(-value_dim // constants["VALUE_WIDTH"])
                assert grid[0] == 2 * 8 * parts * -(-q_len // tile.queries)
                assert constants["HEAD_WIDTH"] >= head_dim and numbers[7:10] == (1, 2, 3)


def test_too_many_programs_are_refused() -> None:
    (reason,) = triton_jvp.refuses(spec_of(batch=2**20, num_heads=64, num_kv_heads=64), "sm90", None)
    assert reason.startswith(
        "q_len=2048 with 1048576 rows and 64 heads: the Triton forward-mode kernel launches at most"
    )


# On a GPU


def on_gpu(dtype: str, spec: AttentionSpec, seed: int = 0) -> tuple[Any, Any]:
    """(q, k, v) of a spec and their tangents."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    rows = () if spec.packed else (spec.batch,)
    shapes = [
        (*rows, spec.q_len, spec.num_heads, spec.head_dim),
        (*rows, spec.kv_len, spec.num_kv_heads, spec.head_dim),
    ]
    shapes.append((*rows, spec.kv_len, spec.num_kv_heads, spec.value_dim))
    kind = getattr(torch, dtype)
    return tuple(
        tuple(torch.randn(shape, generator=generator, device="cuda").to(kind) for shape in shapes) for _ in range(2)
    )


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        *((64, "bfloat16", {"causal": True}), (256, "bfloat16", {"causal": True}), (128, "bfloat16", {})),
        *((96, "bfloat16", {"window": (300, 20)}), (192, "bfloat16", {"softcap": 5.0})),
        (128, "float16", {"causal": True}),
        *((128, "float32", {"causal": True, "softcap": 5.0}), (256, "float32", {})),
    ],
)
def test_lengths_of_models_against_plain_operations(head_dim: int, options: dict[str, Any], dtype: str) -> None:
    """The bounds need a table of all pairs, so here the other side is ``math`` in float64."""
    import torch

    from torch_frontend import attention

    spec = spec_of(batch=1, q_len=1000, kv_len=1100, head_dim=head_dim, value_dim=min(head_dim, 128))
    primals, tangents = on_gpu(dtype, spec)
    call = partial(attention, **options, return_lse=True)
    actual = torch.func.jvp(partial(call, backend="triton_jvp"), primals, tangents)
    exact = torch.func.jvp(
        partial(call, backend="math"), *(tuple(x.double() for x in group) for group in (primals, tangents))
    )
    roundoff = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-21}[dtype]
    for (one, other), (right, moved) in zip(zip(*actual, strict=True), zip(*exact, strict=True), strict=True):
        for found, truth in ((one, right), (other, moved)):
            scale = truth.abs().max() + 1.0
            assert (found.double() - truth).abs().max() <= 4 * roundoff * scale


@pytest.mark.cuda
def test_torch_and_jax_give_equal_bits_on_a_gpu() -> None:
    """With documents whose offsets JAX traces."""
    import torch

    jax = pytest.importorskip("jax")
    import jax_frontend
    import torch_frontend

    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    spec = replace(spec_of(batch=1, documents=3, max_len_q=900, max_len_k=900), q_len=2048, kv_len=2048)
    primals, tangents = on_gpu("bfloat16", spec)
    info = torch_frontend.SeqInfo.from_lengths([900, 248, 900])
    options = {"causal": True, "window": 500, "return_lse": True, "backend": "triton_jvp"}
    expected = torch.func.jvp(partial(torch_frontend.attention, **options, seq_info=info), primals, tangents)

    @jax.jit
    def run(primals: Any, tangents: Any, offsets: Any) -> Any:
        info = jax_frontend.SeqInfo(offsets, offsets, 900, 900)
        return jax.jvp(partial(jax_frontend.attention, **options, seq_info=info), primals, tangents)

    arrays = [tuple(jax.dlpack.from_dlpack(each) for each in group) for group in (primals, tangents)]
    actual = run(*arrays, jax.numpy.asarray(info.cu_seqlens_q))
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(np.asarray(one, np.float32), other.float().cpu().numpy())


@pytest.mark.cuda
def test_memory_grows_with_the_tokens_alone() -> None:
    import torch

    from attn_core.call.tensors import Inputs, Tangents

    peaks = []
    for tokens in (4096, 8192):
        spec = spec_of(batch=1, q_len=tokens, kv_len=tokens, causal=True, return_lse=True)
        primals, tangents = on_gpu("bfloat16", spec)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        triton_jvp.jvp(spec, Inputs(*primals), Tangents(*tangents), primals=True)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    results = 2 * (spec.q_len * 8 * 128 * 2 + spec.q_len * 8 * 4)
    assert peaks[1] <= 1.1 * results and peaks[1] <= 2.1 * peaks[0]
