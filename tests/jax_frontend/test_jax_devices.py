"""Tests JAX's automatic choice on a TPU: without torch, in a process that takes its device for a TPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from own_process import in_its_own_process

import jax_frontend

ON_A_TPU = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "jax_tvm_ffi", "tvm_ffi"):
            raise AssertionError(f"{name} was imported")

sys.meta_path.insert(0, NoTorch())
import jax
import jax.numpy as jnp
import numpy as np
from types import SimpleNamespace
import jax_frontend
from attn_core import SeqInfo
from jax_frontend import explain
from jax_frontend.dispatch import plan
from jax_frontend.paged import append_kv, paged_attention

plan._device = lambda array: SimpleNamespace(platform="tpu", local_hardware_id=0)
assert plan.device_name(None) == "tpu"
random = np.random.default_rng(0)
q, k, v = (jnp.asarray(random.normal(size=(2, 9, heads, 8)), "float32") for heads in (4, 2, 2))

def check(out, expected):
    np.testing.assert_allclose(out, expected, atol=2e-6)

out, lse = jax_frontend.attention(q, k, v, causal=True, softcap=3.0, return_lse=True)
masked = jax_frontend.attention(q, k, v, mask=jnp.tril(jnp.ones((9, 9), bool))[None, None], softcap=3.0)
check(out, masked)
packed = jax_frontend.attention(q[0], k[0], v[0], seq_info=SeqInfo.from_lengths([4, 5]), causal=True)
check(packed[:4], jax_frontend.attention(q[:1, :4], k[:1, :4], v[:1, :4], causal=True)[0])
loss = lambda q: (jax_frontend.attention(q, k, v, causal=True) ** 2).sum()
check(jax.jit(jax.grad(loss))(q), jax.grad(loss)(q))
assert jax.vmap(lambda q: jax_frontend.attention(q, k, v))(jnp.stack([q, q])).shape == (2, *q.shape)
tables = {"block_table": jnp.asarray([[0, 2], [3, 1]], jnp.int32), "seq_lens": jnp.asarray([5, 3], jnp.int32)}
pools = append_kv(jnp.zeros((4, 4, 2, 8)), jnp.zeros((4, 4, 2, 8)), k[:, 0], v[:, 0], **tables)
assert paged_attention(q[:, 0], *pools, **tables).shape == (2, 4, 8)
assert explain(q, k, v).backend == "jax_xla" and explain(q, k, v).target.device == "tpu"
there = jax_frontend.available_backends()
able = [name for name, entry in there.items() if entry.reason is None]
assert able == ["jax_xla"], there
assert there["math"].reason == "device tpu: the bridge from JAX to torch's kernels runs on CPUs and NVIDIA GPUs"
jax_frontend.warm_up(q, k, v)
try:
    jax_frontend.attention(q, k, v, backend="math")
except NotImplementedError as error:
    assert "the bridge from JAX to torch's kernels runs on CPUs and NVIDIA GPUs" in " ".join(str(error).split())
else:
    raise AssertionError("torch's operations ran on a TPU")
assert "torch" not in sys.modules
print("done")
"""


@pytest.mark.slow
def test_a_tpu_needs_nothing_of_torch() -> None:
    done = in_its_own_process(ON_A_TPU)
    assert done.stdout == "done\n", done.stderr


@pytest.mark.parametrize("platform", ["tpu", "rocm", "METAL", "xpu", "a platform of tomorrow"])
def test_xlas_operations_lower_for_every_platform(platform: str) -> None:
    """The blocked maths, the few queries and the whole matrix each choose between a CPU and any other platform."""

    def calls(q: jax.Array, k: jax.Array) -> list[jax.Array]:
        keywords = {"causal": True, "backend": "jax_xla"}
        packed = jax_frontend.SeqInfo.from_lengths([500, 524], array=jnp.asarray)
        return [
            jax_frontend.attention(q, k, k, **keywords),
            jax_frontend.attention(q[:, :3], k, k, **keywords),
            jax_frontend.attention(q[:, :40], k[:, :40], k[:, :40], **keywords),
            jax_frontend.attention(q[0], k[0], k[0], seq_info=packed, **keywords),
        ]

    arrays = jax.ShapeDtypeStruct((2, 1024, 4, 8), "float32"), jax.ShapeDtypeStruct((2, 1024, 2, 8), "float32")
    program = jax.export.export(jax.jit(calls), platforms=[platform])(*arrays)
    assert program.platforms == (platform,) and "stablehlo.dot_general" in program.mlir_module()
    assert "custom_call" not in program.mlir_module()
