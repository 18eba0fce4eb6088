"""Tests calls in child processes: forked before and after JAX and torch have started threads, and with locks held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def scene(name: str) -> dict[str, Any]:
    """What a scene of ``fork_scenes`` says."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "fork_scenes", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_process_forked_after_jax_has_started_is_refused_in_words() -> None:
    said = scene("jax")
    right = said["here"]
    assert right == said["before"] == said["spawn"] == said["after"]
    for name, text in {**said["refused"], "fork": said["fork"], "grandchild": said["grandchild"]}.items():
        assert text.startswith("RuntimeError: this process was forked after JAX had started"), (name, text)
        assert "multiprocessing's spawn or forkserver" in text
    assert said["explained"]  # explaining runs nothing


def test_workers_of_a_data_loader_call_attention() -> None:
    said = scene("torch")
    assert said["here"] == said["fork"] == said["spawn"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert said["one thread"] == pytest.approx(2 * 300 * 4 * 16, rel=1e-4)


def test_a_child_finds_the_locks_of_other_threads_free() -> None:
    assert scene("locks")["child"] == ["made", True, True, True, 40.0]
