"""Tests what callers see of a kernel that returns NaN, leaves its output unwritten, or returns another shape, dtype or
device than the call asks for."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from faulty_kernels import FROM_XLA, LSE_SHAPE, OUT_SHAPE, WAYS, Fault, X, faulty, text_of, with_result
from frameworks import BOTH, JAX, TORCH, Framework, replaced

import jax_frontend
import torch_frontend
from attn_core import CheckWarning, ResultError, SeqInfo, backends, checks

everywhere = pytest.mark.parametrize("framework", BOTH, ids=str)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with checks(False):
        yield


def with_nan(tensor: Any) -> Any:
    """The same values with NaN in one place."""
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.clone()
        tensor[1, 2, 0, 3] = torch.nan
        return tensor
    return tensor.at[1, 2, 0, 3].set(jnp.nan)


def warnings_of(call: Callable[[], Any]) -> list[str]:
    """What ``checks`` warn of in a call, also in a program of XLA."""
    with warnings.catch_warnings(record=True) as record, checks():
        warnings.simplefilter("always", CheckWarning)
        jax.block_until_ready(call())
        jax.effects_barrier()
    return [str(each.message) for each in record if each.category is CheckWarning]


EAGER = [("torch eager", "math"), ("torch eager", "sdpa_flash")]
EAGER += [(way, name) for way in ("jax eager", "jax jit") for name in ("math", "sdpa_flash", "jax_xla")]


@pytest.mark.sampled
@pytest.mark.parametrize(("way", "backend"), EAGER)
@pytest.mark.parametrize(("direction", "result"), [("forward", "out"), ("backward", "dq")])
def test_checks_name_the_backend_that_makes_nan(way: str, backend: str, direction: str, result: str) -> None:
    run = WAYS[way].run
    assert warnings_of(lambda: run(direction, backend)) == []
    with faulty(backend, direction, with_result(0, with_nan)):
        assert np.isnan(run(direction, backend)).sum() == 1  # without checks nothing is read or reported
        (finding,) = warnings_of(lambda: run(direction, backend))
    says = rf"{result}: 1 of 240 values are NaN .*first is {result}\[1, 2, 0, 3\].*call attn.{backend} {direction} b2"
    assert re.match(says, finding), finding
    assert warnings_of(lambda: run(direction, backend)) == []


@everywhere
def test_nan_of_the_input_is_not_blamed_on_the_kernel(framework: Framework) -> None:
    x = X.copy()
    x[0, 0, 0, 0] = np.nan
    q = framework.array(x)
    found = warnings_of(lambda: framework.frontend.attention(q, q, q, layout="bshd", backend="math"))
    assert len(found) == 3 and all(re.match("[qkv]: 1 of 240 values are not finite", each) for each in found)


@everywhere
def test_infinity_in_masks_sinks_and_log_sum_exps_is_not_reported(framework: Framework) -> None:
    q, sinks = framework.array(X), framework.array(np.array([0.5, -np.inf, 1.0], np.float32))
    hidden = np.zeros((1, 1, 5, 5), np.float32)
    hidden[..., 1:] = -np.inf
    options = {"bias": framework.array(hidden), "sinks": sinks, "return_lse": True, "backend": "math"}
    assert warnings_of(lambda: framework.frontend.attention(q, q, q, layout="bshd", **options)) == []


@everywhere
def test_packed_calls_are_checked(framework: Framework) -> None:
    x, info = framework.array(X.reshape(10, 3, 8)), SeqInfo.from_lengths([4, 6])

    def nan_in_token_7(out: torch.Tensor) -> torch.Tensor:
        return out.index_fill(0, torch.tensor([7]), torch.nan)

    with faulty("math", "forward", with_result(0, nan_in_token_7)):
        (finding,) = warnings_of(lambda: framework.frontend.attention(x, x, x, seq_info=info, backend="math"))
    assert "out[7, 0, 0]" in finding and "docs2" in finding


def test_a_backward_on_another_thread_is_checked() -> None:
    # autograd runs the backward of a GPU on its own thread, which does not have the caller's context.
    found: list[str] = []
    q = torch.from_numpy(X).requires_grad_()
    with faulty("math", "backward", with_result(0, with_nan)), warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always", CheckWarning)
        with checks():
            out = torch_frontend.attention(q, q.detach(), q.detach(), layout="bshd", backend="math")
        thread = threading.Thread(target=lambda: out.sum().backward())
        thread.start()
        thread.join()
        found += [str(each.message) for each in record]
    assert len(found) == 1 and found[0].startswith("dq: 1 of 240")


def test_checks_can_raise_instead() -> None:
    with (
        faulty("math", "forward", with_result(0, with_nan)),
        checks(),
        warnings.catch_warnings(),
        pytest.raises(CheckWarning, match=r"attn\.math forward"),
    ):
        warnings.simplefilter("error", CheckWarning)
        WAYS["torch eager"].run("forward", "math")


def unwritten(*call: Any, into: Any = None) -> Any:
    """A kernel of ``writes_into`` that returns the buffers which it was given, and wrote nothing into them."""
    return into or call[-1]


def written(function: Callable[..., Any], operands: int) -> Callable[..., Any]:
    """A kernel of ``writes_into`` that is right, and returns tensors of its own."""
    return lambda *call, into=None: function(*call[:operands])


@pytest.mark.parametrize("way", ["torch eager", "jax eager", "jax jit"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_checks_see_an_output_that_nobody_wrote(way: str, direction: str) -> None:
    # Only the buffers that we allocate can start as NaN; a kernel that allocates its own output can return anything.
    record: Any = backends.load("math", "cpu")
    functions = {"forward": written(record.forward, 2), "backward": written(record.backward, 6)}
    functions[direction] = unwritten
    with replaced(record, **functions, writes_into=("forward", "backward")):
        found = warnings_of(lambda: WAYS[way].run(direction, "math"))
    results = ("out",) if direction == "forward" else ("dq", "dk", "dv")
    for result in results:
        assert any(re.match(rf"{result}: 240 of 240 values are NaN", each) for each in found), found


def test_a_row_that_a_kernel_leaves_out_is_found() -> None:
    record: Any = backends.load("math", "cpu")
    forward = record.forward

    def all_but_one_row(spec: Any, inputs: Any, into: Any) -> Any:
        out, lse = forward(spec, inputs)
        into[0][:, :-1] = out[:, :-1]
        return into[0], lse

    with replaced(record, forward=all_but_one_row, writes_into=("forward", "backward")):
        for way in ("torch eager", "jax eager"):
            (finding,) = warnings_of(lambda way=way: WAYS[way].run("forward", "math"))
            assert re.match(r"out: 48 of 240 values .*first is out\[0, 4, 0, 0\]", finding), finding


FORMS: dict[str, tuple[int, Callable[[torch.Tensor], Any], str]] = {
    "one query": (0, lambda out: out[:, :1].clone(), r"out: .* float32 \[2, 1, 3, 8\]"),
    "twice the batch": (0, lambda out: torch.cat([out, out]), r"out: .* float32 \[4, 5, 3, 8\]"),
    "heads first": (0, lambda out: out.transpose(1, 2), r"out: .* float32 \[2, 3, 5, 8\]"),
    "another dtype": (0, lambda out: out.double(), r"out: .* float64 \[2, 5, 3, 8\]"),
    "another device": (0, lambda out: out.to("meta"), r"out: .* on meta"),
    "nothing": (0, lambda out: None, "out: the kernel returned NoneType"),
    "a log-sum-exp of [batch, seq, heads]": (1, lambda lse: lse.mT.contiguous(), r"lse: .* float32 \[2, 5, 3\]"),
    "a log-sum-exp in half precision": (1, lambda lse: lse.bfloat16(), r"lse: .* bfloat16 \[2, 3, 5\]"),
}


def attend_in_torch(q: torch.Tensor) -> Any:
    return torch_frontend.attention(q, q, q, layout="bshd", return_lse=True, backend="math")


@cache
def compiled_in_torch() -> Any:
    torch._dynamo.reset()
    return torch.compile(attend_in_torch, backend="aot_eager")


def attend_in_jax(q: jax.Array) -> Any:
    return jax_frontend.attention(q, q, q, layout="bshd", return_lse=True, backend="math")


def run_with_lse(way: str) -> Any:
    if way.startswith("torch"):
        return (compiled_in_torch() if way == "torch compiled" else attend_in_torch)(TORCH.array(X))
    return jax.block_until_ready((jax.jit(attend_in_jax) if way == "jax jit" else attend_in_jax)(JAX.array(X)))


@pytest.mark.parametrize("way", ["torch compiled", "jax eager", "jax jit"])
@pytest.mark.parametrize("form", FORMS)
def test_a_result_of_another_form_is_one_error(way: str, form: str) -> None:
    # torch.compile computes with the shape that it expects: such an output of meta ended the process. XLA's buffer got
    # a converted or a repeated copy.
    index, change, says = FORMS[form]
    with faulty("math", "forward", with_result(index, change)):
        with pytest.raises(ResultError if way.startswith("torch") else FROM_XLA) as caught:
            run_with_lse(way)
        assert re.search(says, text_of(caught.value)), text_of(caught.value)
        assert "in the call attn.math forward" in text_of(caught.value)
    out, lse = run_with_lse(way)
    assert out.shape == OUT_SHAPE and lse.shape == LSE_SHAPE


@pytest.mark.parametrize("form", FORMS)
def test_checks_see_a_result_of_another_form_in_an_eager_call(form: str) -> None:
    # Without checks an eager call of torch returns what the kernel returned: looking would cost every small call.
    index, change, says = FORMS[form]
    with (
        faulty("math", "forward", with_result(index, change)),
        checks(),
        pytest.raises(ResultError, match=f"(?s){says}"),
    ):
        run_with_lse("torch eager")


@pytest.mark.parametrize("way", ["torch compiled", "jax eager", "jax jit"])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda dq: dq[:, :1].clone(), r"dq: .* float32 \[2, 1, 3, 8\]"),
        (lambda dq: dq.double(), r"dq: .* float64 \[2, 5, 3, 8\]"),
        (lambda dq: dq.to("meta"), "dq: .* on meta"),
    ],
    ids=["shape", "dtype", "device"],
)
def test_a_gradient_of_another_form_is_one_error(way: str, change: Any, says: str) -> None:
    with faulty("math", "backward", with_result(0, change)):
        with pytest.raises(ResultError if way.startswith("torch") else FROM_XLA) as caught:
            WAYS[way].run("backward", "math")
        assert re.search(says, text_of(caught.value)), text_of(caught.value)
    WAYS[way].run("backward", "math")


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda x: x[:, :1], "float32 [2, 1, 3, 8]"), (lambda x: x.astype(jnp.bfloat16), "bfloat16 [2, 5, 3, 8]")],
    ids=["shape", "dtype"],
)
def test_a_jax_backend_with_a_result_of_another_form(direction: str, change: Any, says: str) -> None:
    fault: Fault = with_result(0, change)
    for way in ("jax eager", "jax jit"):
        with faulty("jax_xla", direction, fault), pytest.raises(ResultError, match=re.escape(says)):
            WAYS[way].run(direction, "jax_xla")
