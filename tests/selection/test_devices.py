"""Tests what runs on devices that no machine of this project has, as data: TPUs, and GPUs of AMD, Apple and Intel."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from attn_core import AttentionSpec, NoBackendError, Target, backends, explain, select
from attn_core.backends.support import ANY, Support, in_words, kind_of
from attn_core.call.spec import PagedKV
from attn_core.selection.target import jax_device_name

SIZES = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "value_dim": 64, "dtype": "float16"}
SPEC = AttentionSpec(**SIZES, q_len=128, kv_len=128, causal=True, needs_backward=True)
PAGED = replace(
    SPEC,
    **{"batch": 1, "q_len": 8, "kv_len": 64, "documents": 8, "max_len_q": 1, "max_len_k": 64, "needs_backward": False},
    paged=PagedKV(num_pages=9, page_size=16, width=4),
)
EVERYTHING: dict[str, Any] = {
    **{"dtype": "float64", "window": (9, 3), "softcap": 3.0, "sinks": True, "dropout": 0.1, "return_lse": True},
    **{"mask_shape": (2, 1, 128, 128), "bias_shape": (1, 4, 1, 128), "alibi_shape": (4,), "deterministic": True},
}
ELSEWHERE = ("tpu", "mps", "xpu", "hpu", "gfx90a", "gfx942", "gfx1201", "a device of tomorrow")


def reasons(name: str, spec: AttentionSpec, framework: str, device: str) -> tuple[str, ...]:
    return explain(spec, Target(framework, device), name).reasons(name)


@pytest.mark.parametrize("device", [*ELSEWHERE, "cpu", "sm50", "sm75", "sm90"])
def test_the_frameworks_own_operations_run_on_every_device(device: str) -> None:
    for spec in (SPEC, PAGED, replace(SPEC, **EVERYTHING)):
        assert reasons("math", spec, "torch", device) == reasons("jax_xla", spec, "jax", device) == ()
        assert select(spec, Target("torch", device)).backend and select(spec, Target("jax", device)).backend


@pytest.mark.parametrize("device", ELSEWHERE)
def test_they_are_the_automatic_choice_where_no_kernel_was_proven(device: str) -> None:
    for spec in (SPEC, PAGED, replace(SPEC, **EVERYTHING)):
        torch, jax = (explain(spec, Target(framework, device)) for framework in ("torch", "jax"))
        assert (torch.automatic, torch.backend) == (("math",), "math")
        assert (jax.automatic, jax.backend) == (("jax_xla",), "jax_xla")
        assert torch.reasons("jax_xla") == ("runs in JAX only",)
        assert jax.reasons("math")[0].endswith("the bridge from JAX to torch's kernels runs on CPUs and NVIDIA GPUs")


@pytest.mark.parametrize("device", ELSEWHERE)
def test_a_bridged_kernel_is_never_one_change_away_there(device: str) -> None:
    gone = Target("jax", device, (("jax_xla", "not available: OSError: gone"),))
    with pytest.raises(NoBackendError) as caught:
        select(SPEC, gone)
    assert str(caught.value).splitlines()[0] == "no backend can run this call"
    assert "one change away:\n  jax_xla  not available: OSError: gone" in str(caught.value)


def test_the_claim_of_any_device_and_of_kinds() -> None:
    def claims(*devices: str) -> Support:
        return Support(kernel="k", devices=devices, dtypes=("float32",))

    assert all(claims(ANY).runs_on(device) for device in ELSEWHERE)
    assert claims("rocm").runs_on("gfx1201") and not claims("rocm").runs_on("sm90")
    assert claims("cuda").runs_on("sm121") and not claims("cuda").runs_on("gfx942")
    assert claims("tpu").runs_on("tpu") and not claims("tpu", "cpu").runs_on("mps")
    assert [kind_of(device) for device in ("sm90", "gfx942", "tpu", "mps")] == ["cuda", "rocm", "tpu", "mps"]
    assert [in_words(names) for names in (("tpu",), ("gfx942", "gfx90a"), ("sm80", "gfx942"), ("cuda",))] == [
        *("a TPU", "a GPU of AMD", "a GPU", "a GPU")
    ]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (SimpleNamespace(platform="cpu"), "cpu"),
        (SimpleNamespace(platform="gpu", compute_capability="9.0"), "sm90"),
        (SimpleNamespace(platform="gpu", compute_capability="gfx942"), "gfx942"),
        (SimpleNamespace(platform="rocm", compute_capability="gfx90a:sramecc+:xnack-"), "gfx90a"),
        (SimpleNamespace(platform="tpu"), "tpu"),
        (SimpleNamespace(platform="METAL"), "metal"),
    ],
)
def test_names_of_jax_devices(device: Any, name: str) -> None:
    assert jax_device_name(device) == name


# Old GPUs of NVIDIA


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("device", ["sm50", "sm60", "sm70", "sm75"])
def test_memory_efficient_attention_serves_old_gpus(framework: str, device: str) -> None:
    target = Target(framework, device)
    for spec in (SPEC, replace(SPEC, dtype="float32"), replace(SPEC, bias_shape=(1, 4, 128, 128), sinks=True)):
        assert explain(spec, target).backend == "sdpa_efficient"
    half = replace(SPEC, dtype="bfloat16")
    assert explain(half, target).backend == ("math" if framework == "torch" else "jax_xla")
    assert reasons("sdpa_efficient", half, framework, device) == (
        f"dtype bfloat16 on {device}: the aten memory-efficient kernel takes float32 and float16 there",
    )
    for name in ("sdpa_flash", "sdpa_cudnn", "flex", "flash2", "xformers"):
        assert f"device {device}: " in reasons(name, SPEC, framework, device)[0]
    assert reasons("sdpa_efficient", half, framework, "sm80") == ()


def test_before_sm50_only_torchs_operations_are_left() -> None:
    assert explain(SPEC, Target("torch", "sm37")).backend == "math"
    assert reasons("sdpa_efficient", SPEC, "torch", "sm37") == (
        "device sm37: the aten memory-efficient kernel needs sm50 or newer",
    )


# GPUs of AMD


@pytest.mark.parametrize("device", ["gfx90a", "gfx942"])
def test_what_runs_by_name_on_gpus_of_amd(device: str) -> None:
    target = Target("torch", device)
    assert {name for name in backends.names() if not explain(SPEC, target).reasons(name)} == {
        *("math", "flash2", "sdpa_flash")
    }
    for name in ("flash2", "sdpa_flash"):
        chosen = select(SPEC, target, name)
        assert "requested by name; never run on a GPU of AMD by this project" in str(chosen)
        assert target.claims(name)[0].unproven and not Target("torch", "sm90").claims(name)[0].unproven
    assert "by name only, never run on a GPU of AMD by this project: flash2, sdpa_flash" in str(explain(SPEC, target))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"kv_len": 256},
            "alignment=bottom_right with q_len 128 and kv_len 256: the aten ROCm flash kernel has no other",
        ),
        ({"alignment": "top_left", "kv_len": 256}, "alignment=top_left with q_len 128 and kv_len 256"),
        ({"window": (5, 0)}, "window=(5, 0): the aten ROCm flash kernel has none"),
        ({"dtype": "float32"}, "dtype float32: the aten ROCm flash kernel takes bfloat16, float16"),
        ({"return_lse": True, "needs_backward": False}, "return_lse: the aten ROCm flash kernel has no log-sum-exp"),
        ({"sinks": True}, "sinks: the aten ROCm flash kernel has none"),
        ({"head_dim": 288, "value_dim": 288}, "head_dim=288: the aten ROCm flash kernel stops at 256"),
        ({"batch": 70_000}, "70000 batch rows or documents: the aten ROCm flash kernel stops at 65535"),
        ({"partial": True}, "a part of each row's keys: the aten ROCm flash kernel has none"),
        ({"deterministic": True}, "deterministic=True: the aten ROCm flash kernel has none"),
    ],
)
def test_torchs_flash_attention_on_rocm_refuses_what_no_source_backs(changes: dict[str, Any], words: str) -> None:
    assert any(why.startswith(words) for why in reasons("sdpa_flash", replace(SPEC, **changes), "torch", "gfx942"))


def test_other_gpus_of_amd_have_torchs_operations_alone() -> None:
    for device in ("gfx1100", "gfx1201", "gfx908"):
        assert reasons("sdpa_flash", SPEC, "torch", device) == (
            f"device {device}: the aten ROCm flash kernel needs gfx90a or gfx942",
        )
    assert reasons("sdpa_flash", SPEC, "torch", "gfx950") != () == reasons("flash2", SPEC, "torch", "gfx950")
