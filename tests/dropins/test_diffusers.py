"""Tests diffusers' tiny random models with our attention in torch's place, against the same models without it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")

import diffusers
from diffusers_models import FAMILIES, Inputs, built, moved
from frameworks import spied

from attn_core import NoBackendError
from torch_frontend import diffusers as dropin
from torch_frontend import use_backend
from torch_frontend.diffusers import install, installed, is_installed, uninstall
from torch_frontend.dispatch import tensor_kinds
from torch_frontend.finetrainers import attention_dispatch, attention_provider

pytestmark = pytest.mark.sampled

TORCH_ATTENTION = torch._C._nn.scaled_dot_product_attention
Found = dict[str, torch.Tensor]

families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def torchs_function_restored() -> Iterator[None]:
    """Checks that torch's own function is in its place before and after every test."""
    assert F.scaled_dot_product_attention is TORCH_ATTENTION
    yield
    left = F.scaled_dot_product_attention
    uninstall()
    F.scaled_dot_product_attention = TORCH_ATTENTION
    assert left is TORCH_ATTENTION


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], list[Any]]]:
    """The backends that ran, and the calls that went to torch's own function."""
    returned: list[Any] = []

    def torchs(*arguments: Any, **options: Any) -> torch.Tensor:
        returned.append((arguments, options))
        return TORCH_ATTENTION(*arguments, **options)

    monkeypatch.setattr(tensor_kinds, "_torch_attention", torchs)
    with spied() as ran:
        yield ran, returned


# Models


def step(model: torch.nn.Module, inputs: Inputs) -> Found:
    """The output, and the gradient of every parameter and of every floating input that has one."""
    model.zero_grad()
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }
    (out, *_) = model(**inputs | leaves, return_dict=False)
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype, device=out.device).reshape(out.shape)
    (out * weights).sum().backward()
    gradients = [*model.named_parameters(), *leaves.items()]
    return {"out": out.detach()} | {name: leaf.grad.clone() for name, leaf in gradients if leaf.grad is not None}


def exact(family: str, device: str) -> Found:
    """The same step in float64, with torch's own function."""
    model, inputs = built(family, device)
    return step(model.double(), moved(inputs, torch.float64))


def assert_as_near(actual: Found, plain: Found, right: Found) -> None:
    """Checks that the results are as close to float64 as the plain model in float32: at most four times its error per
    tensor.

    A small tensor may have no error by chance, so a rounding of its largest value for every 16 operations is allowed.
    """
    assert actual.keys() == plain.keys() == right.keys()
    for name, expected in right.items():
        size = float(expected.abs().max())
        mine, theirs = (float((one[name].double() - expected).abs().max()) for one in (actual, plain))
        assert mine <= 4 * theirs + 16 * torch.finfo(torch.float32).eps * size, (name, mine, theirs, size)


@families
def test_outputs_and_gradients(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built(family, device)
    plain = step(model, inputs)
    with watched(monkeypatch) as (ran, returned), installed():
        actual = step(model, inputs)
    assert len(ran) == FAMILIES[family].calls and not returned
    assert_as_near(actual, plain, exact(family, device))
    again = step(model, inputs)
    if device == "cpu":  # torch's own kernels, which add in one order
        assert all(torch.equal(again[name], plain[name]) for name in plain)


@families
def test_every_call_of_attention_is_ours(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The expected counts of the test above, as torch's own function sees them."""
    masks = []

    def count_calls(*arguments: Any, **options: Any) -> torch.Tensor:
        masks.append(options.get("attn_mask", arguments[3] if len(arguments) > 3 else None))
        return TORCH_ATTENTION(*arguments, **options)

    model, inputs = built(family, "cpu")
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", count_calls)
        model(**inputs)
    assert len(masks) == FAMILIES[family].calls
    assert sum(mask is not None for mask in masks) == FAMILIES[family].masked


@families
@pytest.mark.parametrize("fault", ["scale", "mask", "values"])
def test_a_wrong_attention_is_noticed(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, **options: Any) -> Any:
        if fault == "scale":
            options["scale"] = 1.01 * (options["scale"] or query.shape[-1] ** -0.5)
        if fault == "values":
            value = value.roll(1, 2)
        return attention_dispatch(query, key, value, None if fault == "mask" else mask, dropout, causal, **options)

    model, inputs = built(family, "cpu")
    plain, right = step(model, inputs), exact(family, "cpu")
    monkeypatch.setattr(dropin, "attention_dispatch", wrong)
    with installed():
        actual = step(model, inputs)
    if fault == "mask" and not FAMILIES[family].masked:
        return assert_as_near(actual, plain, right)
    with pytest.raises(AssertionError):
        assert_as_near(actual, plain, right)


@families
def test_a_forced_backend_runs_all_of_it(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built(family, device)
    plain, right = step(model, inputs), exact(family, device)
    with watched(monkeypatch) as (ran, returned), installed():
        for block in (use_backend("math"), attention_provider("_native_math")):
            with block:
                assert_as_near(step(model, inputs), plain, right)
    assert ran == ["math"] * 2 * FAMILIES[family].calls and not returned


def test_a_backend_that_cannot_run_raises_and_restores_torchs_function() -> None:
    model, inputs = built("flux", "cpu")
    for block in (use_backend("flash2"), attention_provider("sage")):
        with pytest.raises(NoBackendError, match=r"flash2|sage"), installed(), block:
            model(**inputs)
        assert not is_installed()


def test_each_part_of_a_pipeline_runs_on_the_first_backend_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, masked = built("flux", "cpu"), built("ltx", "cpu")
    with watched(monkeypatch) as (ran, _), installed(), use_backend("xformers", "math"), torch.no_grad():
        for model, inputs in (plain, masked):
            model(**inputs)
    assert ran == ["math"] * 7


def test_half_precision_and_autocast(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built("ltx", device)
    (right,) = model.double()(**moved(inputs, torch.float64), return_dict=False)

    def error(run: torch.nn.Module, given: Inputs) -> float:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=run is autocasting):
            return float((run(**given, return_dict=False)[0].double() - right).abs().mean())

    autocasting = built("ltx", device)[0]
    for run, given in ((autocasting, inputs), (model.bfloat16(), moved(inputs, torch.bfloat16))):
        plain = error(run, given)
        with watched(monkeypatch) as (ran, returned), installed():
            actual = error(run, given)
        assert len(ran) == FAMILIES["ltx"].calls and not returned
        assert 0 < actual < 1.5 * plain


def test_gradient_checkpointing(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built("flux", device)
    plain, right = step(model, inputs), exact("flux", device)
    model.train()
    model.enable_gradient_checkpointing()
    with watched(monkeypatch) as (ran, returned), installed():
        actual = step(model, inputs)
    assert len(ran) == 2 * FAMILIES["flux"].calls and not returned
    assert_as_near(actual, plain, right)


def test_compiles_in_one_graph_and_again_after_installing(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model, inputs = built("qwen_image", "cpu")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        plain = model(**inputs).sample
        for expected in (0, 2, 0):
            with watched(monkeypatch) as (ran, _):
                if expected:
                    with installed():
                        actual = compiled(**inputs).sample
                else:
                    actual = compiled(**inputs).sample
            assert len(ran) == expected
            torch.testing.assert_close(actual, plain, atol=1e-5, rtol=1e-4)


# diffusers' dispatcher


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bool mask of keys": {"attn_mask": torch.tensor([[1, 1, 0, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1]]).bool()},
    "float mask of keys": {"attn_mask": torch.linspace(-2, 1, 14).reshape(2, 7)},
    "table": {"attn_mask": torch.ones(5, 7).tril(1).bool()},
    "four axes": {"attn_mask": torch.linspace(-2, 1, 2 * 6 * 5 * 7).reshape(2, 6, 5, 7)},
    "one head's": {"attn_mask": torch.ones(2, 1, 1, 7).bool()},
}


@pytest.mark.parametrize("kv_heads", [6, 3, 1])
@pytest.mark.parametrize("name", CALLS)
def test_diffusers_native_backend_runs_on_ours(
    name: str, kv_heads: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    random = torch.Generator().manual_seed(0)
    shapes = ((2, 5, 6, 8), (2, 7, kv_heads, 8), (2, 7, kv_heads, 8))  # [batch, len, heads, head_dim]
    qkv = [torch.randn(shape, generator=random).to(device) for shape in shapes]
    options = moved(CALLS[name], device) | {"enable_gqa": kv_heads < 6}

    def run(dtype: torch.dtype = torch.float32) -> Found:
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor in qkv]
        table = options.get("attn_mask")
        mask = {} if table is None else {"attn_mask": table if table.dtype == torch.bool else table.to(dtype)}
        out = dispatch_attention_fn(*tensors, **options | mask)
        return dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(out.square().sum(), tensors))))

    plain, right = run(), run(torch.float64)
    with watched(monkeypatch) as (ran, returned), installed():
        actual = run()
    assert len(ran) == 1 and not returned
    assert_as_near(actual, plain, right)


def test_a_row_that_sees_no_key_is_zero(device: str) -> None:
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    query = torch.randn(2, 5, 3, 8, device=device, requires_grad=True)
    mask = torch.tensor([[False] * 5, [True] * 5], device=device)
    with installed():
        out = dispatch_attention_fn(query, query, query, attn_mask=mask)
        out.sum().backward()
    assert not out[0].any() and out[1].all()
    assert query.grad is not None and query.grad.isfinite().all() and not query.grad[0].any()


def test_diffusers_other_backends_do_not_use_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """They allow only one of torch's kernels, or do not call torch's function."""
    model, inputs = built("flux", "cpu")
    with torch.no_grad(), watched(monkeypatch) as (ran, returned), installed():
        for name, calls in (("_native_math", 3), ("flex", 0), ("native", 0)):
            returned.clear()
            with diffusers.attention_backend(name), use_backend("math"):
                model(**inputs)
            assert len(returned) == calls
        assert ran == ["math"] * 3  # those of native
        refused = pytest.raises(NoBackendError, match=r"(?s)'flex' cannot run.*sdpa_kernel\(...\) around the call")
        with diffusers.attention_backend("_native_math"), attention_provider("flex"), refused:
            model(**inputs)
        with diffusers.attention_backend("_native_math"), attention_provider("_native_math"):
            model(**inputs)
        assert ran == ["math"] * 6


def test_diffusers_backends_are_a_closed_list() -> None:
    """The reason why ours is not registered there. If this test fails, diffusers may accept new backends, and ours
    can be one."""
    from diffusers.models import attention_dispatch as dispatcher

    model, _ = built("flux", "cpu")
    with pytest.raises(ValueError, match="must be one of the following"):
        model.set_attention_backend("attn_core")
    with pytest.raises(ValueError, match="must be one of the following"):
        model.transformer_blocks[0].attn.set_attention_backend("attn_core")
    with pytest.raises(ValueError, match="is not registered"), diffusers.attention_backend("attn_core"):
        pass
    names: Any = diffusers.AttentionBackendName
    with pytest.raises(ValueError, match="not a valid AttentionBackendName"):
        names("attn_core")
    with pytest.raises(TypeError, match="cannot extend"):

        class _(names):
            ATTN_CORE = "attn_core"

    public = {name for module in (diffusers, diffusers.models, dispatcher) for name in dir(module)}
    assert not [name for name in public if re.match("[a-z]*regist|(add|set)_.*backend", name)]


def test_no_file_of_diffusers_binds_torchs_function_at_import() -> None:
    root = Path(diffusers.__file__).parent
    bound = re.compile(r"(import\b.*|=\s*[\w.]*)\bscaled_dot_product_attention\b(?!\()", re.MULTILINE)
    sources = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    assert sum("scaled_dot_product_attention(" in text for text in sources.values()) > 15
    assert [path.name for path, text in sources.items() if bound.search(text)] == []


def test_perturbed_attention_guidance_still_leaves_scores_out() -> None:
    """diffusers leaves scores out by a torch function mode, which waits for torch's function by its name."""
    from diffusers.hooks import LayerSkipConfig
    from diffusers.hooks.layer_skip import apply_layer_skip

    model, inputs = built("qwen_image", "cpu")
    with torch.no_grad():
        before = model(**inputs).sample
        config = LayerSkipConfig(
            [0], fqn="transformer_blocks", skip_attention=False, skip_attention_scores=True, skip_ff=False
        )
        apply_layer_skip(model, config)
        plain = model(**inputs).sample
        with installed():
            actual = model(**inputs).sample
    assert (plain - before).abs().max() > 0.1
    torch.testing.assert_close(actual, plain, atol=1e-5, rtol=1e-4)


# Installing and uninstalling


def test_installed_for_the_process() -> None:
    install()
    install()
    assert is_installed()
    with installed():
        pass
    assert is_installed()
    uninstall()
    assert F.scaled_dot_product_attention is TORCH_ATTENTION and not is_installed()
    uninstall()
    with installed():
        install()
        uninstall()
        assert is_installed()  # the block's own
        install()
    assert is_installed()
    uninstall()


def test_blocks_nest_and_end_with_exceptions() -> None:
    @installed()
    def run_decorated() -> bool:
        return is_installed()

    with pytest.raises(ZeroDivisionError), installed():
        with pytest.raises(KeyError), installed():
            raise KeyError
        assert is_installed()
        raise ZeroDivisionError
    assert not is_installed() and run_decorated() and run_decorated() and not is_installed()


def test_blocks_of_two_threads_overlap() -> None:
    """The block that started first ends first. The other one keeps our attention, and afterwards torch's function is
    back."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def second() -> None:
        first_in.wait(300)
        with installed():
            second_in.set()
            first_out.wait(300)
            seen.append(is_installed())

    thread = threading.Thread(target=second)
    thread.start()
    with installed():
        first_in.set()
        assert second_in.wait(300)
    seen.append(is_installed())
    first_out.set()
    thread.join(300)
    assert seen == [True, True]
    assert not is_installed()


def test_the_function_of_another_library_is_not_replaced() -> None:
    def theirs(*arguments: Any, **options: Any) -> torch.Tensor:
        return TORCH_ATTENTION(*arguments, **options)

    F.scaled_dot_product_attention = theirs
    try:
        for start in (install, installed().__enter__):
            with pytest.raises(RuntimeError, match=r"test_diffusers.*theirs"):
                start()
            assert F.scaled_dot_product_attention is theirs
        uninstall()  # nothing of ours to remove
        assert F.scaled_dot_product_attention is theirs
    finally:
        F.scaled_dot_product_attention = TORCH_ATTENTION
    install()
    ours = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = theirs
    with pytest.raises(RuntimeError, match="on top"):
        uninstall()
    assert F.scaled_dot_product_attention is theirs
    F.scaled_dot_product_attention = ours
    uninstall()


def test_attention_dispatch_is_restored_if_it_was_there_before() -> None:
    F.scaled_dot_product_attention = attention_dispatch
    try:
        with installed():
            assert is_installed()
        assert F.scaled_dot_product_attention is attention_dispatch
    finally:
        F.scaled_dot_product_attention = TORCH_ATTENTION


def test_the_signature_is_torchs() -> None:
    query = torch.randn(1, 2, 5, 8)
    with installed():
        by_position = F.scaled_dot_product_attention(query, query, query, None, 0.0, True, scale=0.3)
        by_name = F.scaled_dot_product_attention(query=query, key=query, value=query, is_causal=True, scale=0.3)
        for wrong in ({"attention_kwargs": {}}, {"window": 3}):
            with pytest.raises(TypeError):
                F.scaled_dot_product_attention(query, query, query, **wrong)
    assert torch.equal(by_position, by_name)
    torch.testing.assert_close(by_name, TORCH_ATTENTION(query, query, query, is_causal=True, scale=0.3))


def test_modes_and_subclasses_see_the_call() -> None:
    class Tagged(torch.Tensor):
        pass

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(func is F.scaled_dot_product_attention)
            return func(*args, **(kwargs or {}))

    names: list[bool] = []
    query = torch.randn(1, 2, 5, 8)
    with installed():
        with Seen():
            out = F.scaled_dot_product_attention(query, query, query)
        assert names == [True]
        assert type(F.scaled_dot_product_attention(query.as_subclass(Tagged), query, query)) is Tagged
    torch.testing.assert_close(out, TORCH_ATTENTION(query, query, query))
