"""Runs the attention forwards of Unsloth itself on our attention, against transformers' eager models.

It needs an installed Unsloth, which the tests' environment does not have: it pins older releases of transformers and
TRL. ``pip install --no-deps unsloth unsloth_zoo bitsandbytes`` into a copy of the environment is enough on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if find_spec("unsloth") is None:
    pytest.skip("needs unsloth, unsloth_zoo and bitsandbytes", allow_module_level=True)

import unsloth_models
from unsloth_models import KINDS

HELPERS = Path(unsloth_models.__file__).parent
CASES = [(kind, "static", case) for kind in KINDS for case in ("rows", "left", "right", "packed", "decoded")]
CASES.remove(("gemma2", "static", "packed"))  # Unsloth's softcapped attention has no documents
CASES += [("gemma2", "described", case) for case in ("rows", "left", "right", "decoded")]
CASES += [("gemma2", "fused", case) for case in ("rows", "left", "right", "packed", "decoded")]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """The reports of the worker by (place, kind, path, case)."""
    folder = tmp_path_factory.mktemp("unsloth")  # importing unsloth writes files into the working directory
    expected: dict[Any, Any] = {}
    for kind in KINDS:
        for case, side in (("rows", None), ("left", "left"), ("right", "right")):
            expected[kind, case] = tuple(unsloth_models.eager_rows(kind, side))
        expected[kind, "packed"] = tuple(unsloth_models.eager_documents(kind))
        with torch.no_grad():
            expected[kind, "decoded"] = unsloth_models.build(kind).eval()(unsloth_models.batch().ids).logits
    torch.save(expected, folder / "expected.pt")
    paths = os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS)])
    done = subprocess.run(
        [sys.executable, str(HELPERS / "unsloth_worker.py"), str(folder / "expected.pt")],
        **{"cwd": folder, "env": os.environ | {"PYTHONPATH": paths}, "capture_output": True, "text": True},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {(line["place"], line["kind"], line["path"], line["case"]): line for line in lines}


@pytest.mark.parametrize(("kind", "path", "case"), CASES)
def test_unsloths_forward_on_our_attention_equals_eager(
    kind: str, path: str, case: str, reports: dict[Any, Any]
) -> None:
    report = reports["ours", kind, path, case]
    assert report["logits"] < 1e-5, report
    assert case == "decoded" or report["gradients"] < 1e-5, report


@pytest.mark.parametrize("kind", KINDS)
def test_unsloths_own_attention_runs_in_the_same_models(kind: str, reports: dict[Any, Any]) -> None:
    """Otherwise the other test could compare something that Unsloth does not do."""
    report = reports["unsloth", kind, "static", "rows"]
    assert report["logits"] < 1e-5 and report["gradients"] < 1e-5, report


@pytest.mark.parametrize("kind", ["llama", "granite"])
def test_unsloths_chunk_behind_a_cache_sees_later_keys(kind: str, reports: dict[Any, Any]) -> None:
    """The documentation says so of its SDPA branch."""
    assert reports["unsloth", kind, "static", "decoded"]["logits"] > 0.01
