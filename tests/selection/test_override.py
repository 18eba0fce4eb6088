"""Tests use_backend: it nests, is always undone, and belongs to one thread and one task; and its effect under jit."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import jax
import pytest
import torch
from frameworks import BOTH, JAX, JAX_ON_GPU, TORCH, Framework, spied
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from torch_first import torch_first  # noqa: F401 (a fixture)

import jax_frontend
import torch_frontend
from attn_core import NoBackendError, SpecError, selection
from attn_core.selection import override
from attn_core.selection.override import requested, use_backend

SIZES = {"q": (1, 3, 2, 5), "k": (1, 3, 2, 5), "v": (1, 3, 2, 5)}


def call(framework: Framework) -> dict[str, Any]:
    return {name: framework.zeros(*size) for name, size in SIZES.items()}


def chosen(framework: Framework, **options: Any) -> str | None:
    return framework.frontend.explain(**call(framework), **options).backend


@pytest.fixture
def ran() -> Iterator[list[str]]:
    with spied() as names:
        yield names


def test_both_frontends_share_one_use_backend() -> None:
    assert torch_frontend.use_backend is use_backend
    with jax_frontend.use_backend("math"):
        assert requested() == ("math",)
        with torch_frontend.use_backend("flex"):
            assert requested() == ("flex",)
    assert requested() is None
    with pytest.raises(SpecError, match="unknown backend"), jax_frontend.use_backend("mathh"):
        pass


def test_a_block_is_undone_after_an_exception() -> None:
    with pytest.raises(KeyError), use_backend("math"):
        try:
            with use_backend("flex"):
                raise ZeroDivisionError
        except ZeroDivisionError:
            assert requested() == ("math",)
        raise KeyError
    assert requested() is None


def test_it_decorates_a_function() -> None:
    @use_backend("math")
    def inside() -> Any:
        return requested()

    assert (inside(), inside(), requested()) == (("math",), ("math",), None)


NO_STRINGS = r"^use_backend\(.*\): expected names of backends as strings"


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("flex", "maths"), "^backend='maths': unknown backend; did you mean math"),
        *((names, NO_STRINGS) for names in (((),), (("flex", "math"), "math"), (("flex", 3),), (["math"],))),
        *(((name,), NO_STRINGS) for name in (None, 3)),
    ],
)
def test_wrong_names_are_refused_before_the_block(names: tuple[Any, ...], says: str) -> None:
    with pytest.raises(SpecError, match=says), use_backend(*names):
        pytest.fail("the block ran")
    assert requested() is None


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_one_tuple_of_names_is_the_names(framework: Framework) -> None:
    with framework.frontend.use_backend(("flex", "math")):
        assert requested() == ("flex", "math")
        with framework.frontend.use_backend("math"):
            assert chosen(framework) == "math"
    assert requested() is None


@pytest.mark.usefixtures("torch_first")
@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_block_decides_which_backend_runs(framework: Framework, ran: list[str]) -> None:
    attention = framework.frontend.attention
    attention(**call(framework))
    with use_backend("math"):
        attention(**call(framework))
        with use_backend("jax_xla" if framework is JAX else "flex", "math"):
            attention(**call(framework))
        attention(**call(framework), softcap=3.0)
    attention(**call(framework))
    runs = [name for name, before in zip(ran, [None, *ran], strict=False) if name != before]
    assert runs == ["sdpa_flash", "math", "jax_xla" if framework is JAX else "flex", "math", "sdpa_flash"]


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_the_backend_argument_of_a_call_wins(framework: Framework) -> None:
    with use_backend("math"):
        assert chosen(framework) == "math"
        assert chosen(framework, backend="flex") == "flex"
        assert chosen(framework, backend=("flex", "math")) == "flex"
        assert chosen(framework, backend=["flex"]) == "flex"
        assert chosen(framework, backend=None) == "math"
    for nothing in ((), [], "", 0, False):  # neither a name nor None
        with pytest.raises(SpecError, match=r"^backend="):
            chosen(framework, backend=nothing)
        with pytest.raises(SpecError, match=r"^backend="):
            framework.frontend.attention(**call(framework), backend=nothing)


@pytest.mark.parametrize("framework", BOTH, ids=str)
def test_a_block_never_falls_back_to_other_backends(framework: Framework, ran: list[str]) -> None:
    with use_backend("sdpa_flash"), pytest.raises(NoBackendError, match=r"^backend='sdpa_flash' cannot run this call"):
        framework.frontend.attention(**call(framework), softcap=3.0)
    assert ran == []
    with use_backend("sdpa_flash", "math"):
        framework.frontend.attention(**call(framework), softcap=3.0)
    assert set(ran) == {"math"}


def test_a_thread_starts_without_a_block() -> None:
    seen: list[Any] = []
    with use_backend("math"):
        thread = threading.Thread(target=lambda: seen.append(requested()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_a_copied_context_carries_the_block() -> None:
    with use_backend("math"):
        context = contextvars.copy_context()
    assert context.run(requested) == ("math",)


def test_threads_do_not_see_the_blocks_of_others() -> None:
    names, everyone = ("math", "flex", "sdpa_flash", None), threading.Barrier(4)
    given = call(TORCH)

    def work(name: str | None) -> set[str | None]:
        everyone.wait()
        with use_backend(*([name] if name else [])):
            return {TORCH.frontend.explain(**given).backend for _ in range(100)}

    with ThreadPoolExecutor(4) as pool:
        actual = list(pool.map(work, names))
    assert actual == [{"math"}, {"flex"}, {"sdpa_flash"}, {"sdpa_flash"}]


def test_tasks_do_not_see_the_blocks_of_others() -> None:
    async def work(name: str) -> bool:
        assert requested() == ("sdpa_flash",)  # a task starts with the block of its creator
        with use_backend(name):
            for _ in range(5):
                await asyncio.sleep(0)
                if requested() != (name,):
                    return False
        return requested() == ("sdpa_flash",)

    async def main() -> list[bool]:
        with use_backend("sdpa_flash"):
            tasks = [asyncio.create_task(work(name)) for name in ("math", "flex") * 4]
        assert requested() is None
        return await asyncio.gather(*tasks)

    assert all(asyncio.run(main()))


class Nesting(RuleBasedStateMachine):
    """Enters and leaves blocks in every possible order, beside a plain stack."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[ExitStack] = []
        self.expected: list[tuple[str, ...] | None] = [None]

    def enter(self, *names: str) -> None:
        block = ExitStack()
        block.enter_context(use_backend(*names))
        self.blocks.append(block)
        self.expected.append(names or None)

    @rule()
    def enter_one(self) -> None:
        self.enter("math")

    @rule()
    def enter_several(self) -> None:
        self.enter("flex", "math")

    @rule()
    def enter_automatic(self) -> None:
        self.enter()

    @rule()
    def fail_to_enter(self) -> None:
        with pytest.raises(SpecError):
            self.enter("math", "nonsense")

    @precondition(lambda self: self.blocks)
    @rule()
    def leave(self) -> None:
        self.blocks.pop().close()
        self.expected.pop()

    @precondition(lambda self: self.blocks)
    @rule()
    def leave_by_an_exception(self) -> None:
        with pytest.raises(ZeroDivisionError), self.blocks.pop():
            raise ZeroDivisionError
        self.expected.pop()

    @rule()
    def look(self) -> None:
        assert requested() == self.expected[-1]
        order = self.expected[-1] or ("sdpa_flash",)
        assert chosen(TORCH) == order[0]

    def teardown(self) -> None:
        while self.blocks:
            self.blocks.pop().close()
        assert requested() is None


class TestNesting(Nesting.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=25, stateful_step_count=20)


# jit and compile


def test_eager_jax_calls_obey_each_block(ran: list[str]) -> None:
    """Outside jit a block applies to each call, whatever was compiled before: the names are part of the cache key."""
    attention = JAX.frontend.attention
    for _ in range(2):
        for name in ("math", "sdpa_flash"):
            ran.clear()
            with use_backend(name):
                jax.block_until_ready(attention(**call(JAX)))
            assert set(ran) == {name}


@pytest.mark.usefixtures("torch_first")
def test_a_jitted_function_is_traced_again_under_other_names(ran: list[str]) -> None:
    """The names are part of jit's cache key, so no block runs a program that another block compiled."""

    def run(program: Any) -> set[str]:
        ran.clear()
        jax.block_until_ready(program(call(JAX)))
        return set(ran)

    program = jax.jit(lambda given: JAX.frontend.attention(**given))
    for _ in range(2):
        with JAX.frontend.use_backend("math"):
            assert run(program) == {"math"}
        assert run(program) == {"sdpa_flash"}
        with JAX.frontend.use_backend("sdpa_flash"), JAX.frontend.use_backend("math"):
            assert run(program) == {"math"}
    with JAX.frontend.use_backend("flex"), pytest.raises(NoBackendError, match="FlexAttention on CPU has no gradient"):
        jax.jit(jax.grad(lambda given: JAX.frontend.attention(**given).sum()))(call(JAX))

    @jax.jit
    def with_its_own(given: dict[str, Any]) -> jax.Array:
        with JAX.frontend.use_backend("math"):
            return JAX.frontend.attention(**given)

    assert run(with_its_own) == {"math"}
    with JAX.frontend.use_backend("sdpa_flash"):
        assert run(with_its_own) == {"math"}


@pytest.mark.cuda
@pytest.mark.usefixtures("torch_first")
def test_a_jitted_function_is_traced_again_on_a_gpu(ran: list[str]) -> None:
    names = ["math", "sdpa_flash", "sdpa_efficient"]
    q = JAX_ON_GPU.zeros(1, 8, 2, 16, dtype="bfloat16")
    program = jax.jit(lambda q: JAX_ON_GPU.frontend.attention(q, q, q))
    for name in names:
        with JAX_ON_GPU.frontend.use_backend(name):
            program(q).block_until_ready()
    assert ran == names


def test_gradients_come_from_the_block_of_the_forward() -> None:
    """The backward runs later, perhaps outside the block: it uses the forward's backend, bit for bit."""
    given = {name: torch.randn(2, 7, 2, 5) for name in "qkv"}

    def gradient(name: str | None, later: str | None) -> torch.Tensor:
        leaves = {which: tensor.clone().requires_grad_() for which, tensor in given.items()}
        with use_backend(*([name] if name else [])):
            out = TORCH.frontend.attention(**leaves, causal=True)
        with use_backend(*([later] if later else [])):
            out.square().sum().backward()
        return leaves["q"].grad  # type: ignore[return-value]

    assert torch.equal(gradient("math", None), gradient("math", "math"))
    assert torch.equal(gradient(None, "math"), gradient("sdpa_flash", None))


def test_a_compiled_function_reads_the_block_when_it_runs(ran: list[str]) -> None:
    torch._dynamo.reset()
    program = torch.compile(lambda given: TORCH.frontend.attention(**given), fullgraph=True, backend="eager")
    for name in ("math", "flex", "sdpa_flash"):
        ran.clear()
        with use_backend(name):
            program(call(TORCH))
        assert ran == [name]


def test_the_names_of_a_block_are_in_the_explanation() -> None:
    with use_backend("math"):
        actual = TORCH.frontend.explain(**call(TORCH))
    assert isinstance(actual, selection.Selection)
    assert actual.requested == ("math",)
    assert override.requested() is None
