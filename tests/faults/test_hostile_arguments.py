"""Tests that bad arguments to any public function end in a right result or in an error that names an argument.

The number in a failure is that of its call.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")

import json
import os
import selectors
import subprocess
import sys
import tempfile

import hostile_calls
import hostile_judge
import hostile_values
import numpy as np
import torch
import xla_compiler
from hostile_judge import Case

from attn_core import SpecError


@pytest.fixture(scope="module", autouse=True)
def no_group_left() -> Iterator[None]:
    """Ends the process group of the DTensors, because other tests start their own."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    hostile_values.one_rank_mesh.cache_clear()


ROOT = Path(__file__).parents[2]
JUDGE = Path(hostile_judge.__file__)
PATIENCE = 120.0
"""Seconds after which a call hangs."""


def judged(framework: str, seed: int, first: int, count: int, judge: Path = JUDGE) -> Iterator[dict[str, Any]]:
    """Yields a line for every call: number, function, case, outcome, text. Starts another process if one ends early."""
    end = first + count
    while first < end:
        begun = None
        for line in _lines(framework, seed, first, end - first, judge):
            if line["outcome"]:
                first = line["number"] + 1
                begun = None
                yield line
            else:
                begun = line
        if begun is None:
            if first < end:
                raise RuntimeError(f"the process of {framework} ended between two calls, before call {first}")
            return
        yield begun | {"outcome": begun.get("ended", "crash"), "text": begun.get("log", "")}
        first = begun["number"] + 1


def _lines(framework: str, seed: int, first: int, count: int, judge: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of one process. The last one says how the process ended if it ended within a call."""
    command = [sys.executable, "-P", str(judge), framework, *map(str, (seed, first, count))]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=_environment(), cwd=ROOT)
        assert process.stdout is not None
        last: dict[str, Any] = {}
        with process, selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                ready = selector.select(PATIENCE)
                if not ready:
                    process.kill()
                chunk = os.read(process.stdout.fileno(), 2**16) if ready else b""
                if not chunk:
                    break
                *whole, rest = (rest + chunk).split(b"\n")
                for line in map(json.loads, whole):
                    last = line
                    yield line
        if not last:
            log.seek(0)
            raise RuntimeError(f"the process of {framework} ran no call:\n{log.read()[-3000:]}")
        if not last["outcome"]:
            log.seek(0)
            yield last | {"ended": "crash" if ready else "hang", "log": log.read()[-600:]}


def _environment() -> dict[str, str]:
    """The environment of a process: one thread, a CPU, and XLA's quick compiler."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_compiler.flags()}


CALLS = {"torch": 900, "jax": 250, "core": 300}


@pytest.mark.slow
@pytest.mark.parametrize("framework", CALLS)
def test_bad_arguments_are_refused_by_name_or_give_right_results(framework: str) -> None:
    lines = list(judged(framework, 1, 0, CALLS[framework]))
    assert len(lines) == CALLS[framework]
    faults = [f"{line['number']}: {line['outcome']}: {line['case']}: {line['text']}" for line in lines]
    faults = [fault for fault, line in zip(faults, lines, strict=True) if line["outcome"] not in hostile_judge.GOOD]
    assert not faults, "\n".join(faults)
    assert {line["outcome"] for line in lines} >= {"refused", "accepted"}


@pytest.mark.parametrize("framework", CALLS)
def test_every_public_function_has_a_good_call(framework: str) -> None:
    found = hostile_calls.functions(framework)
    assert len(found) >= {"torch": 30, "jax": 25, "core": 15}[framework]
    for function in found.values():
        case = Case(function.name, function.required, ())
        assert hostile_judge.judge(framework, case)[0] in ("right", "accepted"), function.name


def _planted(monkeypatch: pytest.MonkeyPatch, call: Any) -> tuple[str, str]:
    """The outcome of a call of a faulty function."""
    good = {"q": lambda: torch.ones(3), "scale": lambda: 1.0}
    function = hostile_calls.Function("planted", "torch", call, good, ("q",))
    monkeypatch.setattr(hostile_calls, "functions", lambda framework: {"planted": function})
    return hostile_judge.judge("torch", Case("planted", ("q",), (("scale", "str 'junk'"),)))


def _raises(error: Exception) -> Any:
    def call(**keywords: Any) -> Any:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "outcome"),
    [
        (_raises(KeyError("scale")), "wrong exception"),
        (_raises(RuntimeError("scale")), "wrong exception"),
        (_raises(AssertionError("scale")), "wrong exception"),
        (_raises(TypeError("unhashable type: 'list'")), "no argument named"),
        (_raises(SpecError("scale='junk': expected a number")), "refused"),
        (lambda q, scale: q.add_(1), "argument written to"),
        (lambda q, scale: torch.rand(3), "wrong numbers"),
        (lambda q, scale: q * 2, "right"),
        (lambda q, scale: None, "accepted"),
    ],
)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, call: Any, outcome: str) -> None:
    assert _planted(monkeypatch, call)[0] == outcome


def test_memory_that_is_not_the_tensors_is_seen() -> None:
    whole = torch.ones(4)
    assert not hostile_judge._reads_beyond(whole)
    whole.untyped_storage().resize_(8)
    assert hostile_judge._reads_beyond(whole)
    assert not hostile_judge._reads_beyond(torch.ones(1).expand(2**40))


@pytest.mark.parametrize(("deed", "outcome"), [("os.abort()", "crash"), ("time.sleep(60)", "hang")])
def test_a_process_that_dies_or_hangs_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deed: str, outcome: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PATIENCE", 3.0)
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, os, sys, time\n"
        "for number in range(int(sys.argv[3]), int(sys.argv[3]) + int(sys.argv[4])):\n"
        "    line = {'number': number, 'function': 'f', 'case': 'f()', 'outcome': '', 'text': ''}\n"
        "    print(json.dumps(line), flush=True)\n"
        f"    if number == 1: {deed}\n"
        "    print(json.dumps(line | {'outcome': 'right'}), flush=True)\n"
    )
    lines = list(judged("torch", 0, 0, 3, judge))
    assert [line["outcome"] for line in lines] == ["right", outcome, "right"]


def test_a_query_of_strided_channels_in_pages_is_read_by_its_strides() -> None:
    import torch_frontend

    q, pages = torch.randn(2, 4, 8), torch.randn(3, 4, 2, 8)
    tables = {"block_table": np.array([[0], [2]], np.int32), "seq_lens": np.array([4, 2], np.int32)}
    for view in (q[..., :1].expand(q.shape), torch.randn(2, 4, 16)[..., ::2], torch.randn(2, 8, 4).mT):
        actual, expected = (
            torch_frontend.paged_attention(each, pages, pages, **tables) for each in (view, view.clone())
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("size", [0, 100])
def test_every_form_of_a_call_names_the_tensor_whose_storage_was_freed(size: int, layout: Any, trains: bool) -> None:
    from torch_frontend import attention

    visible, lengths = torch.ones(9, 9, dtype=torch.bool), torch.tensor([9, 7], dtype=torch.int32)
    forms: list[dict[str, Any]] = [{}, {"causal": True}, {"mask": visible}, {"bias": visible.float()}, {"softcap": 2.0}]
    forms += [{"alibi_slopes": torch.ones(4)}, {"kv_lengths": lengths}, {"return_lse": True}]
    forms += [{"kv_lengths": lengths, "alibi_slopes": torch.ones(4)}]
    for form in forms:
        for name in "qkv":
            shape = (2, 9, 4, 8) if layout == "bshd" else (2, 4, 9, 8)
            given = {each: torch.ones(shape) for each in "qkv"}
            given[name].requires_grad_(trains).untyped_storage().resize_(size)
            with pytest.raises(SpecError, match=f"^{name}: expected a tensor with its memory"):
                attention(**given, layout=layout, **form)


@pytest.mark.parametrize("size", [0, 100])
def test_a_tensor_whose_storage_was_freed_is_refused(size: int) -> None:
    import torch_frontend

    def freed(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        tensor = torch.ones(*shape, dtype=dtype)
        tensor.untyped_storage().resize_(size)
        return tensor

    q, new, pages = torch.ones(2, 9, 4, 8), torch.ones(2, 4, 8), torch.ones(3, 4, 4, 8)
    tables = {"block_table": torch.zeros(2, 1, dtype=torch.int32), "seq_lens": torch.ones(2, dtype=torch.int32)}
    tables["block_table"][1] = 1
    for name, use in {
        "q": lambda: torch_frontend.attention(freed(2, 9, 4, 8), q, q),
        "v": lambda: torch_frontend.attention(q, q, freed(2, 9, 4, 8)),
        "bias": lambda: torch_frontend.attention(q, q, q, bias=freed(9, 9)),
        "mask": lambda: torch_frontend.attention(q, q, q, mask=freed(2, 4, 9, 9, dtype=torch.bool)),
        "k_pages": lambda: torch_frontend.paged_attention(new, freed(3, 4, 4, 8), pages, **tables),
        "k": lambda: torch_frontend.append_kv(pages, pages.clone(), freed(2, 4, 8), new, **tables),
    }.items():
        with pytest.raises(SpecError, match=f"^{name}: expected a tensor with its memory"):
            use()


def test_an_error_never_prints_the_values_of_an_array() -> None:
    """They may be on a device, or in memory that is freed."""
    import torch_frontend

    q, freed = torch.ones(1, 2, 3, 4), torch.ones(7)
    freed.untyped_storage().resize_(0)
    for option in ("causal", "scale", "window", "layout", "backend", "alignment"):
        for value in (freed, [freed], {"a": freed}):
            with pytest.raises(SpecError, match=rf"^{option}=.*torch\.Tensor of shape \[7\]"):
                torch_frontend.attention(q, q, q, **{option: value})
