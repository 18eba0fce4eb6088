"""The orders and names that follow from the records of backends, as literals: a rank that moves one shows here."""

from __future__ import annotations

import pytest

from attn_core import backends
from attn_core.backends import ANY

CUDA = ("flash3", "flash4", "sdpa_cudnn", "flash2", "sdpa_flash", "xformers", "sdpa_efficient", "ffpa", "flex")
PAGED = ("flash3", "flash4", "flash2", "triton_splitkv")
USUAL = {
    ("torch", "cpu"): ("sdpa_flash", "math", "flex"),
    ("jax", "cpu"): ("sdpa_flash", "math", "jax_xla", "flex"),
    ("torch", "cuda"): (*CUDA, "math"),
    ("jax", "cuda"): (*CUDA[:2], "flash3_xla", *CUDA[2:], "jax_cudnn", "jax_xla", "math"),
    ("torch", ANY): ("math",),
    ("jax", ANY): ("jax_xla",),
}
IN_PAGES = {**USUAL, ("torch", "cuda"): (*PAGED, "math"), ("jax", "cuda"): (*PAGED, "jax_xla", "math")}
TANGENTS = {
    ("torch", "cpu"): ("math",),
    ("jax", "cpu"): ("jax_xla", "math"),
    ("torch", "cuda"): ("triton_jvp", "math"),
    ("jax", "cuda"): ("triton_jvp", "jax_xla", "math"),
    ("torch", ANY): ("math",),
    ("jax", ANY): ("jax_xla",),
}
OF_TORCH = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "math")
FLASH = ("flash2", "flash3", "flash4", "sdpa_flash")
FOREIGN = {
    "eager": ("math",),
    "sdpa": OF_TORCH,
    "flash": FLASH,
    "fa": FLASH,
    "flex_attention": ("flex",),
    **{f"{word}{n}": (f"flash{n}",) for n in (2, 3, 4) for word in ("fa", "flash_", "flash_attention_", "flash_attn_")},
    "flash_attention": ("sdpa_flash", "flash2", "flash3", "flash4"),
    "efficient_attention": ("sdpa_efficient",),
    "cudnn_attention": ("sdpa_cudnn",),
    "mem_efficient": ("sdpa_efficient",),
    "efficient": ("sdpa_efficient",),
    "cutlass": ("sdpa_efficient", "xformers"),
    "cudnn": ("sdpa_cudnn", "jax_cudnn"),
    "xla": ("jax_xla",),
    "triton": ("triton_splitkv",),
    "native": OF_TORCH,
    "torch": OF_TORCH,
    "sageattention": ("sage",),
    "sage_attention": ("sage",),
}


@pytest.mark.parametrize(("framework", "kind"), USUAL)
def test_the_orders_of_automatic_choice(framework: str, kind: str) -> None:
    place = framework, kind
    assert backends.usual_order(*place) == USUAL[place]
    assert backends.usual_order(*place, paged=True) == IN_PAGES[place]
    assert backends.forward_mode_order(*place) == backends.row_maximum_order(*place) == TANGENTS[place]


@pytest.mark.parametrize("kind", ["tpu", "rocm", "mps", "xpu"])
def test_a_kind_without_an_order_of_its_own_has_that_of_any(kind: str) -> None:
    for framework in ("torch", "jax"):
        assert backends.usual_order(framework, kind) == USUAL[framework, ANY]
        assert backends.usual_order(framework, kind, paged=True) == USUAL[framework, ANY]
        assert backends.forward_mode_order(framework, kind) == TANGENTS[framework, ANY]
        assert backends.row_maximum_order(framework, kind) == TANGENTS[framework, ANY]


def test_the_kinds_of_devices_with_an_order() -> None:
    assert backends.kinds_in_order() == ("cpu", "cuda", ANY)


def test_the_backends_of_invariant_calls_and_of_decoding() -> None:
    assert {kind: backends.in_order_on(kind) for kind in ("cpu", "cuda", "rocm")} == {
        "cpu": None,
        "cuda": "triton_ordered",
        "rocm": None,
    }
    assert backends.usual_order("torch", "cuda", paged=True, few_queries=True) == (
        "triton_splitkv",
        *(name for name in IN_PAGES["torch", "cuda"] if name != "triton_splitkv"),
    )
    assert backends.usual_order("jax", "cpu", paged=True, few_queries=True) == IN_PAGES["jax", "cpu"]


def test_the_names_of_other_libraries() -> None:
    assert backends.foreign_names() == FOREIGN
