"""Tests that many different calls keep little memory: texts that only explanations need must not be stored."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

import torch_frontend

ENOUGH = 300
"""So many different calls that every kind of text exists."""


@pytest.mark.parametrize("backend", ["math", "flex", None])
def test_a_softcap_that_changes_with_every_call_keeps_little_memory(backend: str | None) -> None:
    q = torch.zeros(1, 2, 1, 8)

    def calls(start: float) -> None:
        for step in range(ENOUGH):
            with torch.no_grad():
                torch_frontend.attention(q, q, q, softcap=start + step / 1024, backend=backend)

    calls(10.0)
    gc.collect()
    tracemalloc.start()
    try:
        calls(20.0)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / ENOUGH < 6 * 1024, "a plan and its spec are 3 KiB, the reasons of a selection 8"
