"""Tests that a folder in attn_core/backends/ is a backend: it joins everything that names backends with no edit
elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("jax")
from own_process import in_its_own_process

BACKEND = '''
"""Causal attention for square float32 calls."""

from attn_core.backends.contract import Backend
from attn_core.backends.support import Support
from attn_core.backends.toy import scores

FORWARD = Support(kernel="the toy kernel", devices=("cpu",), dtypes=("float32",), causal=True, lse=True)


def refuses(spec, device, build):
    return () if spec.q_len == spec.kv_len else (f"q_len {spec.q_len}: the toy kernel needs kv_len {spec.kv_len}",)


def probe():
    return "toy 1.0"


def lower(spec):
    return {"scale": spec.scale, "causal": spec.causal}


def forward(spec, inputs):
    import torch

    logits = scores.logits_of(inputs.q, inputs.k, **lower(spec))
    out = torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), inputs.v)
    return out, logits.logsumexp(-1)


BACKEND = Backend(
    name="toy",
    framework="torch",
    requires="torch",
    forward_claims=FORWARD,
    backward_claims=None,
    refuses=refuses,
    probe=probe,
    lower=lower,
    forward=forward,
    backward=None,
)
'''

HELPER = '''
"""The scores of the toy kernel."""


def logits_of(q, k, scale, causal):
    import torch

    logits = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return logits.masked_fill(hidden, float("-inf")) if causal else logits
'''

SCRIPT = """
import json
from attn_core import backends
backends.__path__.append({folder!r})

import jax, numpy as np, torch
import jax_frontend, torch_frontend
from tools.pages.support import render

def calls(frontend, array):
    q, k, v = (array(part) for part in np.random.default_rng(0).standard_normal((3, 2, 5, 3, 8), np.float32))
    def attend(backend):
        return np.asarray(frontend.attention(q, k, v, causal=True, backend=backend))
    return {{
        "near": bool(np.allclose(attend("toy"), attend("math"), atol=1e-5)),
        "chosen": frontend.explain(q, k, v, causal=True, backend="toy").backend,
        "by itself": frontend.explain(q, k, v, causal=True).backend,
        "listed": frontend.explain(q, k, v, causal=True).text(everything=True),
        "refused": frontend.explain(q, k[:, :4], v[:, :4], softcap=2.0, backend="toy").reasons("toy"),
        "version": frontend.available_backends()["toy"].version,
    }}

print(json.dumps({{
    "names": backends.names(),
    "page": render(),
    "torch": calls(torch_frontend, torch.from_numpy),
    "jax": calls(jax_frontend, jax.numpy.asarray),
}}))
"""


@pytest.mark.slow
def test_a_new_folder_becomes_a_backend_without_other_edits(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    for name, text in {"__init__": BACKEND, "scores": HELPER}.items():
        (tmp_path / "toy" / f"{name}.py").write_text(text, encoding="utf-8")
    process = in_its_own_process(SCRIPT.format(folder=str(tmp_path)))
    assert process.returncode == 0, process.stderr
    seen = json.loads(process.stdout)
    assert "toy" in seen["names"] and "flash2" in seen["names"]
    assert "| `toy` | torch | `torch` | cpu | float32 |" in seen["page"]
    for framework in ("torch", "jax"):
        result = seen[framework]
        assert result["near"] and result["chosen"] == "toy" and result["version"] == "toy 1.0"
        assert result["by itself"] not in ("toy", None), "only a rank makes a backend part of automatic choice"
        assert any(line.split()[0] == "toy" and "by name" in line for line in result["listed"].splitlines())
        assert result["refused"] == [
            "softcap=2.0: the toy kernel has none",
            "q_len 5: the toy kernel needs kv_len 4",
        ]
