"""Tests that a second process finds every kind of program in JAX's persistent cache: equal calls are equal programs,
whatever functions, masks and tables they were built from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("flax")
pytest.importorskip("torch")
import cpu_meshes

pytestmark = [pytest.mark.slow, pytest.mark.sampled]


@pytest.mark.parametrize("backend", ["math", "jax_xla"])
def test_another_process_finds_every_program(backend: str, tmp_path: Path, four_devices: None) -> None:
    folders = [str(Path(cpu_meshes.__file__).parent), str(Path(__file__).parents[2])]
    command = [sys.executable, "-m", "cached_programs", str(tmp_path), backend]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()
        for _ in range(2)
    )
    assert len(first) == len(second) >= 10
    for before, after in zip(first, second, strict=True):
        name, misses, hits, total = before.split("|")
        assert int(misses) > 0, before
        assert after == f"{name}|0|{int(misses) + int(hits)}|{total}", (before, after)
