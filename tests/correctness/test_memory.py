"""Tests that many different calls keep little memory: texts that only explanations need must not be stored."""

from __future__ import annotations

import pytest
from own_process import in_its_own_process

pytest.importorskip("torch")

# In a process of its own: what other tests have left there allocates, too.
SCRIPT = """
import gc
import tracemalloc

import torch
import torch_frontend

ENOUGH = 300  # so many different calls that every kind of text exists
q = torch.zeros(1, 2, 1, 8)


def calls(start):
    for step in range(ENOUGH):
        with torch.no_grad():
            torch_frontend.attention(q, q, q, softcap=start + step / 1024, backend={backend!r})


calls(10.0)
gc.collect()
tracemalloc.start()
calls(20.0)
gc.collect()
print(tracemalloc.get_traced_memory()[0] / ENOUGH)
"""


@pytest.mark.parametrize("backend", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in ("math", "flex"))])
def test_a_softcap_that_changes_with_every_call_keeps_little_memory(backend: str | None) -> None:
    done = in_its_own_process(SCRIPT.format(backend=backend))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 6 * 1024, "a plan and its spec are 3 KiB, the reasons of a selection 8"
