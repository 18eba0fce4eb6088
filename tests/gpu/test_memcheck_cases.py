"""Tests the cases for compute-sanitizer as far as a CPU can run them: they run, and they detect a wrong one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import memcheck_cases
import small_paged_calls as paged
import torch

TRUE_KINDS = [kind for kind in paged.KINDS if "lying" not in kind]


@pytest.mark.parametrize("kind", TRUE_KINDS)
def test_paged_cases_run(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_paged("math", kind, "cpu")
    assert memcheck_cases.run_append("append_kv", kind, "cpu")
    assert capsys.readouterr().out == f"ran: math, {kind}, forward\nran: append_kv, {kind}, in place\n"


@pytest.mark.parametrize("name", memcheck_cases.OTHERS)
def test_other_kernels_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert memcheck_cases.run_other(name, name, "cpu")
    assert capsys.readouterr().out == f"ran: {name}, beside torch's operations\n"


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


@pytest.mark.parametrize("kind", paged.KINDS[2:])
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
