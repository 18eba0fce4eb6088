"""Tests our provider in Finetrainers' registry: with a registry that stands for its own, and with an installed or
unpacked Finetrainers (set FINETRAINERS_SOURCE to the folder), whose module and Trainer are loaded without the rest.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as functional

from attn_core import SpecError
from torch_frontend import finetrainers
from torch_frontend.finetrainers import attention_provider, install, installed, is_installed, uninstall

DISPATCH = "finetrainers.models.attention_dispatch"
torch_attention = functional.scaled_dot_product_attention


def _source() -> Path | None:
    """Returns the folder of an unpacked or installed Finetrainers, without importing it."""
    if "FINETRAINERS_SOURCE" in os.environ:
        return Path(os.environ["FINETRAINERS_SOURCE"])
    spec = find_spec("finetrainers")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


class AttentionProvider(str, enum.Enum):  # noqa: UP042  as the host's
    """Stands for the host's enumeration."""

    NATIVE = "native"
    FLASH = "flash"


def standing_registry() -> ModuleType:
    """A module that stands for the host's: its registry, its block and its dispatch, in a few lines."""

    class _AttentionProviderRegistry:
        _providers: ClassVar[dict[str, Any]] = {}
        _constraints: ClassVar[dict[str, Any]] = {}
        _supported_arg_names: ClassVar[dict[str, Any]] = {}
        _active_provider = AttentionProvider.NATIVE
        _checks_enabled = False

        @classmethod
        def register(cls, provider: str, constraints: Any = None) -> Any:
            def decorate(function: Any) -> Any:
                cls._providers[provider] = function
                cls._constraints[provider] = constraints or []
                cls._supported_arg_names[provider] = set(inspect.signature(function).parameters)
                return function

            return decorate

    registry = _AttentionProviderRegistry
    for member in AttentionProvider:
        registry.register(member)(lambda query, key, value, is_causal=False: "theirs")

    def dispatch(query: Any, key: Any, value: Any, attention_kwargs: Any = None, **options: Any) -> Any:
        provider = registry._active_provider
        given = {"query": query, "key": key, "value": value, **options, **(attention_kwargs or {})}
        known = registry._supported_arg_names[provider]
        return registry._providers[provider](**{name: given[name] for name in given if name in known})

    @contextmanager
    def block(provider: Any) -> Iterator[None]:
        if provider not in registry._providers:
            raise ValueError(provider)
        before, registry._active_provider = registry._active_provider, provider
        try:
            yield
        finally:
            registry._active_provider = before

    module = ModuleType(DISPATCH)
    vars(module).update(_AttentionProviderRegistry=registry, AttentionProvider=AttentionProvider)
    vars(module).update(attention_dispatch=dispatch, attention_provider=block)
    return module


def load(source: Path) -> ModuleType:
    """Imports the host's own dispatch, without the packages around it: those import trackers and data sets."""
    for name in ("finetrainers", "finetrainers.utils", "finetrainers.models", "finetrainers.trainer"):
        package = ModuleType(name)
        package.__path__ = [str(source.joinpath(*name.split(".")))]
        sys.modules[name] = package
    sys.modules["finetrainers.args"] = ModuleType("finetrainers.args")
    sys.modules["finetrainers.args"].BaseArgsType = object
    return importlib.import_module(DISPATCH)


needs_finetrainers = pytest.mark.skipif(
    _source() is None, reason="no Finetrainers: install it or set FINETRAINERS_SOURCE to its folder"
)
HOSTS = ["standing", pytest.param("real", marks=needs_finetrainers)]


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "finetrainers"}
    try:
        for name in before:
            del sys.modules[name]
        if request.param == "real":
            source = _source()
            assert source is not None
            yield load(source)
        else:
            sys.modules["finetrainers"] = sys.modules["finetrainers.models"] = ModuleType("finetrainers")
            sys.modules[DISPATCH] = standing_registry()
            yield sys.modules[DISPATCH]
    finally:
        uninstall()
        functional.scaled_dot_product_attention = torch_attention
        for name in [name for name in sys.modules if name.split(".")[0] == "finetrainers"]:
            del sys.modules[name]
        sys.modules.update(before)


def tensors(requires_grad: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    return [torch.randn(shape, generator=generator).requires_grad_(requires_grad) for shape in shapes]


def state(host: ModuleType) -> list[Any]:
    """What the host remembers about providers."""
    registry = host._AttentionProviderRegistry
    tables = {name: dict(value) for name, value in vars(registry).items() if isinstance(value, dict)}
    return [tables, registry._active_provider, dict(vars(host.AttentionProvider))]


def test_the_provider_is_active_in_the_block_and_gone_after_it(host: ModuleType) -> None:
    before = state(host)
    expected = torch_attention(*tensors(), is_causal=True, enable_gqa=True)
    with installed():
        assert is_installed()
        member = host.AttentionProvider("attn_core")
        assert isinstance(member, host.AttentionProvider) and member == "attn_core" and member.value == "attn_core"
        assert host._AttentionProviderRegistry._active_provider is member
        actual = host.attention_dispatch(*tensors(), is_causal=True, enable_gqa=True)
        torch.testing.assert_close(actual, expected)
        with pytest.raises(ValueError, match="nothing"):
            host.AttentionProvider("nothing")
    assert not is_installed() and state(host) == before
    with pytest.raises(ValueError, match="attn_core"):
        host.AttentionProvider("attn_core")


def test_gradients_and_masks_through_the_hosts_dispatch(host: ModuleType) -> None:
    mask = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    ours, theirs = tensors(True), tensors(True)
    with installed():
        out = host.attention_dispatch(*ours, attn_mask=mask, enable_gqa=True, scale=0.3)
    right = torch_attention(*theirs, attn_mask=mask, enable_gqa=True, scale=0.3)
    torch.testing.assert_close(out, right)
    weights = torch.cos(torch.arange(out.numel())).view_as(out)
    for one, other in zip(torch.autograd.grad(out, ours, weights), torch.autograd.grad(right, theirs, weights)):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("checks", [False, True])
def test_keywords_are_honoured_or_refused_and_never_dropped(host: ModuleType, checks: bool) -> None:
    host._AttentionProviderRegistry._checks_enabled = checks
    query, key, value = tensors()
    with installed():
        softcapped = host.attention_dispatch(query, query, query, attention_kwargs={"softcap": 0.5})
        assert not torch.allclose(softcapped, host.attention_dispatch(query, query, query))
        out, lse = host.attention_dispatch(query, query, query, attention_kwargs={"return_lse": True})
        assert out.shape == query.shape and lse.shape == query.shape[:3]
        # With checks, Finetrainers 0.2.0 fails at its own warning of an unknown keyword.
        with pytest.raises((SpecError, TypeError) if checks else SpecError, match=r"kernel_option|instances of 'int'"):
            host.attention_dispatch(query, key, value, enable_gqa=True, attention_kwargs={"kernel_option": 1})


def test_blocks_of_the_host_choose_other_providers(host: ModuleType) -> None:
    registry = host._AttentionProviderRegistry
    query = tensors()[0]
    expected = torch_attention(query, query, query)
    with installed():
        with host.attention_provider(host.AttentionProvider.NATIVE):
            assert registry._active_provider is host.AttentionProvider.NATIVE
        with host.attention_provider("attn_core"), attention_provider("_native_math"):
            torch.testing.assert_close(host.attention_dispatch(query, query, query), expected)
        registry._active_provider = host.AttentionProvider.FLASH  # as the Trainer does, and leaves it after an error
    assert registry._active_provider is host.AttentionProvider.FLASH


def test_blocks_nest_and_install_lasts(host: ModuleType) -> None:
    before = state(host)
    with installed(), installed():
        install()
        install()
    assert is_installed() and "attn_core" in host._AttentionProviderRegistry._providers
    uninstall()
    assert state(host) == before


def test_the_mesh_of_the_hosts_block_is_ours(host: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """``context_torch_scenes.finetrainers_rows`` runs such calls on ranks."""
    query, ran = tensors()[0], []
    monkeypatch.setattr(finetrainers, "check_mesh", lambda mesh: None)
    monkeypatch.setattr(finetrainers, "run_over_ranks", lambda *call: ran.append(call))
    registry = host._AttentionProviderRegistry
    with installed():
        # As in its later commits.
        registry._mesh, registry._convert_to_fp32, registry._rotate_method = "the mesh", True, "alltoall"
        host.attention_dispatch(query, query, query, scale=0.3, attention_kwargs={"softcap": 2.0})
        registry._rotate_method = "sideways"
        with pytest.raises(SpecError, match="rotate_method='sideways'"):
            host.attention_dispatch(query, query, query)
        registry._mesh = None
        host.attention_dispatch(query, query, query)
    ((shared, provider, call, kwargs),) = ran
    assert shared == ("the mesh", "ring") and provider == "native" and kwargs == {"softcap": 2.0}
    assert call.query is query and call.scale == 0.3 and call.attn_mask is None


def test_the_host_learns_that_our_provider_shares_rows(host: ModuleType) -> None:
    registry, known = host._AttentionProviderRegistry, []
    before = registry.register

    def register(provider: Any, constraints: Any = None, supports_cp: bool = False) -> Any:  # as in its later commits
        known.append((provider, supports_cp))
        return before(provider, constraints)

    registry.register = register
    with installed():
        pass
    assert known == [("attn_core", True)]


def test_another_provider_of_the_name_stays(host: ModuleType) -> None:
    host._AttentionProviderRegistry._providers["attn_core"] = "another"
    with pytest.raises(RuntimeError, match="expected no provider named 'attn_core', found another"):
        install()
    assert not is_installed() and host._AttentionProviderRegistry._providers["attn_core"] == "another"
    with pytest.raises(ValueError, match="attn_core"):
        host.AttentionProvider("attn_core")


class Block(torch.nn.Module):
    """A component of a trainer: one call of torch's function."""

    def forward(self, x: Any) -> Any:
        return functional.scaled_dot_product_attention(x, x, x)


@needs_finetrainers
@pytest.mark.parametrize("host", ["real"], indirect=True)
def test_the_trainer_chooses_the_provider_for_each_component(host: ModuleType) -> None:
    base = importlib.import_module("finetrainers.trainer.base")
    functional.scaled_dot_product_attention = host.attention_dispatch  # as its patches do
    registry, ran = host._AttentionProviderRegistry, []
    x = tensors(True)[0]
    expected = torch_attention(x, x, x)
    with installed():
        for name in ("attn_core", "native"):
            wrapped = registry._providers[name]
            registry._providers[name] = lambda *, _name=name, _wrapped=wrapped, **call: (
                ran.append(_name),
                _wrapped(**call),
            )[1]
        chosen = SimpleNamespace(attn_provider_training=["transformer:attn_core"], attn_provider_inference=None)
        trainer = base.Trainer(chosen)
        trainer.transformer, trainer.text_encoder = Block(), Block()
        registry._active_provider = host.AttentionProvider.NATIVE  # the default of a trainer
        with trainer.attention_provider_ctx(training=True):
            encoded = trainer.text_encoder(x)
            out = trainer.transformer(x)
            out.sum().backward()
        with trainer.attention_provider_ctx(training=False):
            trainer.transformer(x)
    assert ran == ["native", "attn_core", "native"]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(encoded, expected)
    assert registry._active_provider is host.AttentionProvider.NATIVE
