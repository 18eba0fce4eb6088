"""Tests the cases for compute-sanitizer as far as a CPU can run them: they run, and they detect a wrong one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import memcheck_cases
import numpy as np
import small_paged_calls as paged
import torch

TRUE_KINDS = paged.TRUE_KINDS


@pytest.mark.parametrize("kind", TRUE_KINDS)
def test_paged_cases_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_paged("math", kind, "cpu")
    assert memcheck_cases.run_append("append_kv", kind, "cpu")
    assert capsys.readouterr().out == f"ran: math, {kind}, forward\nran: append_kv, {kind}, in place\n"


@pytest.mark.parametrize("kind", memcheck_cases.KINDS)
def test_tangents_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_tangents("math", kind, "cpu")
    assert memcheck_cases.run_tangents("triton_jvp", kind, "cpu") is None
    ran, not_run = capsys.readouterr().out.splitlines()
    assert ran == f"ran: math, {kind}, tangents" and "the Triton forward-mode kernel needs cuda" in not_run


@pytest.mark.parametrize("name", memcheck_cases.OTHERS)
def test_other_kernels_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_other(name, name, "cpu")
    assert capsys.readouterr().out == f"ran: {name}, beside torch's operations\n"


def no_flash4() -> None:
    raise ImportError("flash-attn-4 is not here")


@pytest.mark.parametrize("name", memcheck_cases.OF_FLASH4)
def test_kernels_of_the_cute_dsl_need_flash4(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memcheck_cases.flash4, "probe", no_flash4)
    assert memcheck_cases.run_of_flash4(name, name) is None
    assert capsys.readouterr().out == f"not run: {name}: ImportError: flash-attn-4 is not here\n"


def test_a_wrong_block_is_noticed() -> None:
    """The judge of block tables: a block too many, too few, or full though it is not."""
    shown = np.zeros((1, 1, 128, 256), bool)
    shown[..., :130] = True
    right = [np.array(array) for array in ([[[1]]], [[[[1, 0]]]], [[[1]]], [[[[0, 0]]]])]
    assert memcheck_cases.same_blocks(*right, shown, True)
    for place, value in ((0, [[[0]]]), (2, [[[2]]]), (3, [[[[1, 0]]]])):
        wrong = [*right]
        wrong[place] = np.array(value)
        if place == 2:
            wrong[3] = np.array([[[[0, 1]]]])
        assert not memcheck_cases.same_blocks(*wrong, shown, True)


def test_a_case_that_cannot_run_prints_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_paged("triton_splitkv", TRUE_KINDS[0], "cpu") is None
    said = capsys.readouterr().out
    assert said.startswith(f"not run: {TRUE_KINDS[0]}: triton_splitkv: ") and "needs cuda" in said


def test_a_read_beside_the_pool_is_detected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wider(kind: str, page_size: int, **more: object) -> paged.PagedCall:
        call = made(kind, page_size, **more)
        # page 0 is one of the NaN pages before it
        return call._replace(pools=tuple(whole[1:] for whole in call.around))

    made = paged.paged_call
    monkeypatch.setattr(paged, "paged_call", wider)
    assert memcheck_cases.run_paged("math", TRUE_KINDS[0], "cpu") is False
    assert memcheck_cases.run_append("append_kv", TRUE_KINDS[0], "cpu") is False
    assert capsys.readouterr().out.count("wrong: ") == 2


@pytest.mark.parametrize("kind", paged.LYING_KINDS)
def test_the_wrong_tables_are_wrong(kind: str) -> None:
    """The host refuses them; on a GPU nothing checks them."""
    with pytest.raises(ValueError, match=r"^(seq_lens|cu_seqlens_q)"):
        paged.paged_call(kind, 16, device="cpu").attend("math")
    table = paged.paged_call(kind, 16, device="cpu").tables["block_table"]
    assert (table < 0).any() and (table >= paged.PAGES).any() and ((table >= 0) & (table < paged.PAGES)).any()


def test_backends_that_claim_pages() -> None:
    assert {"flash2", "flash3", "math", "triton_splitkv"} <= set(paged.paged_backends())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_runs_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.main([]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "memcheck cases: 0 ran"
