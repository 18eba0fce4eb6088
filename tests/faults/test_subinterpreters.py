"""Tests attn_core in a sub-interpreter: it imports, or raises an ImportError; the main interpreter goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = """
try:
    import attn_core
    print("imported", flush=True)
except ImportError as error:
    print("ImportError:", str(error).strip().splitlines()[0], flush=True)
"""
SCRIPT = f"""
import sys
try:
    import _interpreters as interpreters
except ImportError:  # Python 3.12
    import _xxsubinterpreters as interpreters
import attn_core
inner = interpreters.create()
failed = interpreters.run_string(inner, f"import sys; sys.path[:] = {{sys.path}}" + {INSIDE!r})
interpreters.destroy(inner)
sizes = dict(batch=1, q_len=5, kv_len=5, num_heads=1, num_kv_heads=1, head_dim=8, value_dim=8)
spec = attn_core.AttentionSpec(**sizes, dtype="float32")
print(failed, "math" in attn_core.explain(spec, attn_core.Target("torch", "cpu")).considered)
"""


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12, whose sub-interpreters have their own GIL")
def test_attn_core_in_a_subinterpreter_imports_or_raises() -> None:
    """numpy 2 refuses to load there, and attn_core needs numpy."""
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *(path for path in sys.path if path)])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    inside, outside = done.stdout.strip().splitlines()
    assert inside == "imported" or inside.startswith("ImportError: ")
    assert outside == "None True"
