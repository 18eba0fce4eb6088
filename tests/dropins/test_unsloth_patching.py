"""Tests that our attention takes the place of Unsloth's in its loaded modules; other modules stand for those."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch_frontend
from attn_core import SpecError
from torch_frontend.unsloth import AttentionConfig, AttentionContext, install, installed, is_installed, uninstall

FILES = {
    "unsloth": "",
    "unsloth.context_parallel": "manager = None\ndef get_cp_manager(): return manager",
    "unsloth.utils": "",
    "unsloth.utils.attention_dispatch": """
def run_attention(*, config, context, Q, K, V): return 'theirs'
def select_attention_backend(use_varlen=False, dropout_p=0.0): return 'theirs'
def decode_scaled_dot_product_attention(query, key, value, **options): return 'theirs'
""",
    "unsloth.kernels": "",
    "unsloth.kernels.flex_attention": """
def slow_attention_softcapping(*call): return 'theirs'
def slow_inference_attention_softcapping(*call): return 'theirs'
""",
    "unsloth.models": "",
    "unsloth.models.llama": """
from unsloth.utils.attention_dispatch import run_attention, select_attention_backend
from unsloth.utils.attention_dispatch import decode_scaled_dot_product_attention as scaled_dot_product_attention
from unsloth.kernels.flex_attention import slow_attention_softcapping, slow_inference_attention_softcapping
""",
}
Q = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(0))  # [bsz, heads, len, head_dim]
CALL = {"config": AttentionConfig("sdpa", 4, 1), "context": AttentionContext(1, 5, 5, 4, 8), "Q": Q, "K": Q, "V": Q}


def load(name: str) -> ModuleType:
    module = ModuleType(name)
    sys.modules[name] = module
    exec(FILES[name], vars(module))
    return module


@pytest.fixture
def llama() -> Iterator[ModuleType]:
    """The module of a model, in a process in which Unsloth is imported."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "unsloth"}
    try:
        for name in before:
            del sys.modules[name]
        *_, last = map(load, FILES)
        yield last
    finally:
        uninstall()
        for name in [name for name in sys.modules if name.split(".")[0] == "unsloth"]:
            del sys.modules[name]
        sys.modules.update(before)


def answers(module: Any) -> list[Any]:
    """What a model's functions return."""
    layer = SimpleNamespace(config=SimpleNamespace(query_pre_attn_scalar=8, attn_logit_softcapping=3.0))
    softcapped = (Q, Q, Q, torch.zeros(5, 5), layer, 1, 5)
    return [
        module.run_attention(**CALL),
        module.scaled_dot_product_attention(Q, Q, Q, is_causal=True),
        module.slow_attention_softcapping(*softcapped),
        module.slow_inference_attention_softcapping(*softcapped),
        module.select_attention_backend(),
    ]


def test_every_name_in_a_loaded_module_is_replaced_and_restored(llama: ModuleType) -> None:
    before = dict(vars(llama))
    with installed():
        assert is_installed()
        ours = answers(llama)
        assert all(answer is not None and not isinstance(answer, str) for answer in ours[:-1]) and ours[-1] == "sdpa"
        torch.testing.assert_close(ours[0], ours[1].transpose(1, 2))
        torch.testing.assert_close(ours[0], torch_frontend.run_attention(**CALL))
    assert not is_installed()
    assert vars(llama) == before and answers(llama) == ["theirs"] * 5


def test_modules_that_are_imported_in_a_block_are_restored_too(llama: ModuleType) -> None:
    with installed():
        mistral = load("unsloth.models.llama")
        assert "theirs" not in answers(mistral)
    assert answers(mistral) == ["theirs"] * 5


def test_blocks_nest_and_the_process_keeps_ours_until_uninstall(llama: ModuleType) -> None:
    with installed():
        with installed():
            pass
        assert llama.run_attention(**CALL) is not None and llama.select_attention_backend() == "sdpa"
        install()
        install()
    assert is_installed() and llama.select_attention_backend() == "sdpa"
    uninstall()
    uninstall()
    assert not is_installed() and llama.select_attention_backend() == "theirs"
    with pytest.raises(ZeroDivisionError), installed():
        raise ZeroDivisionError
    assert llama.select_attention_backend() == "theirs"


def test_an_own_import_of_our_function_stays(llama: ModuleType) -> None:
    llama.mine = torch_frontend.run_attention
    with installed():
        pass
    assert llama.mine is torch_frontend.run_attention


def test_a_release_without_some_functions(llama: ModuleType) -> None:
    dispatch = sys.modules["unsloth.utils.attention_dispatch"]
    del dispatch.decode_scaled_dot_product_attention, sys.modules["unsloth.context_parallel"]
    with installed():
        torch.testing.assert_close(llama.run_attention(**CALL), torch_frontend.run_attention(**CALL))
        assert llama.scaled_dot_product_attention(Q, Q, Q) == "theirs"
    del dispatch.run_attention
    with pytest.raises(RuntimeError, match="expected run_attention, which this release of unsloth does not have"):
        install()
    assert not is_installed()


def test_the_hosts_context_parallelism_is_refused(llama: ModuleType) -> None:
    with installed():
        sys.modules["unsloth.context_parallel"].manager = SimpleNamespace(backend="ulysses")
        with pytest.raises(SpecError, match=r"^unsloth's context parallelism \(ulysses\): expected none"):
            llama.run_attention(**CALL)


def test_unsloth_must_be_imported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "unsloth.utils.attention_dispatch", raising=False)
    with pytest.raises(RuntimeError, match="expected to be imported before install"):
        install()
    assert not is_installed()


@dataclass
class AugustContext:
    """Stands for the context of Unsloth's releases before October 2026, which has two fields less."""

    bsz: int
    q_len: int
    kv_seq_len: int
    n_heads: int
    head_dim: int
    requires_grad: bool = False
    seq_info: Any = None
    attention_mask: Any = None
    causal_mask: Any = None
    sliding_window: int | None = None
    prefix_seg_info: Any = None


def test_contexts_of_earlier_releases_are_taken() -> None:
    call = CALL | {"context": AugustContext(1, 5, 5, 4, 8, sliding_window=3)}
    expected = CALL | {"context": AttentionContext(1, 5, 5, 4, 8, sliding_window=3)}
    torch.testing.assert_close(torch_frontend.run_attention(**call), torch_frontend.run_attention(**expected))
