"""``import torch_frontend`` is quick: torch's compiler and FLOP counter learn of attention when they are imported."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from own_process import in_its_own_process

from torch_frontend.dispatch.after_import import after_import

QUICK = """
import sys
import torch
before = set(sys.modules)
import torch_frontend
slow = {"torch._dynamo", "torch.utils.flop_counter", "torch.distributed.tensor", "sympy", "triton", "jax"}
assert not slow & set(sys.modules) - before, slow & set(sys.modules) - before
"""
COMPILED = """
x = torch.ones(3, 1, 4, 2, 8)
attend = torch.vmap(lambda q: torch_frontend.attention(q, q, q))
assert "torch._dynamo" not in sys.modules
assert torch.equal(torch.compile(attend, fullgraph=True, backend="eager")(x), attend(x))
"""
COUNTED = """
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch_frontend.attention(*torch.ones(3, 1, 4, 2, 8))
assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 4 * 8, counter.get_total_flops()
"""
DROP_INS = """
from torch_frontend import diffusers, finetrainers, huggingface, module, unsloth
from torch_frontend.huggingface import context
assert "torch._dynamo" not in sys.modules
x = torch.ones(1, 2, 4, 8)
dispatch = lambda q: finetrainers.attention_dispatch(q, q, q, attention_kwargs={"window_size": (2, 2)})
counts = []
compiled = torch.compile(lambda q: dispatch(q) + 1, backend=lambda graph, _: counts.append(graph) or graph)
assert torch.equal(compiled(x), dispatch(x) + 1)
assert counts and all("attn" not in str(graph.graph) for graph in counts)  # left to Python
assert context.mask._torchdynamo_disable
"""


@pytest.mark.slow
@pytest.mark.parametrize("use", [COMPILED, COUNTED, DROP_INS], ids=["compiled", "counted", "drop-ins"])
def test_importing_torch_frontend_loads_neither_the_compiler_nor_the_counter(use: str) -> None:
    done = in_its_own_process(QUICK + use)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported and was not."""
    (tmp_path / "late_module.py").write_text("words = ['module']\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield "late_module"
    sys.modules.pop("late_module", None)
    assert sys.meta_path == finders  # a finder that has done its work is gone


def test_the_action_runs_once_directly_after_the_import(module: str) -> None:
    after_import(module, lambda: sys.modules[module].words.append("action"))
    assert module not in sys.modules
    assert import_module(module).words == ["module", "action"]
    assert import_module(module).words == ["module", "action"]


def test_looking_for_the_module_is_not_importing_it(module: str) -> None:
    after_import(module, lambda: sys.modules[module].words.append("action"))
    assert importlib.util.find_spec(module) is not None and importlib.util.find_spec("nowhere_at_all") is None
    assert import_module(module).words == ["module", "action"]


def test_an_imported_module_runs_the_action_at_once(module: str) -> None:
    import_module(module)
    after_import(module, lambda: sys.modules[module].words.append("action"))
    assert sys.modules[module].words == ["module", "action"]


def test_two_actions_run_in_the_order_in_which_they_were_registered(module: str) -> None:
    for word in ("first", "second"):
        after_import(module, lambda word=word: sys.modules[module].words.append(word))  # type: ignore[misc]
    assert import_module(module).words == ["module", "first", "second"]


def test_an_error_of_the_action_is_an_error_of_the_import(module: str) -> None:
    def fail() -> None:
        raise RuntimeError("the action failed")

    after_import(module, fail)
    with pytest.raises(RuntimeError, match="the action failed"):
        import_module(module)
