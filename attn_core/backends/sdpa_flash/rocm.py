"""torch's flash attention on AMD's GPUs: the AOTriton kernels behind the ops of ``cuda.py``. We have never run them.

The claims are what two files of torch's sources say; everything else is denied:
- GPUs: ``check_gpu_arch`` in [1] names gfx90a and gfx942.
- float16 and bfloat16, head_dim a multiple of 8, heads that the kv heads divide: ``mha_fwd_aot`` in [1]. [2] allows a
  head_dim of 256 on every architecture, and needs value_dim == head_dim; ``shared.rewrites`` pads both with zeros.
- causal with as many queries as keys: ``mha_bwd_aot`` refuses others, and SDPA never makes such a call ([2],
  ``check_flash_causal_non_square_seqlens``). Older builds ignore windows, so there are none here.
- No log-sum-exp: the sources do not say in which base the kernel stores it. It only goes back to the kernel's backward.
- No packed documents: the op returns another log-sum-exp for them than on NVIDIA's GPUs.

On ROCm memory-efficient attention is the same kernel ([2], ``check_head_dim_size_flash``), so ``sdpa_efficient`` adds
float32 and a bias at most. It has no claim here: neither source says how a row that a bias hides entirely comes out.

[1] https://github.com/pytorch/pytorch/blob/0119c205/aten/src/ATen/native/transformers/hip/flash_attn/aot/mha_all_aot.hip
[2] https://github.com/pytorch/pytorch/blob/001f694a/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attn_core.backends.contract import Backend
from attn_core.backends.sdpa_flash import cuda
from attn_core.backends.shared import kernel_limits, rewrites
from attn_core.backends.shared.autograd import without_gradient
from attn_core.backends.support import Build, Support
from attn_core.call.spec import AttentionSpec

if TYPE_CHECKING:
    from torch import Tensor

NAME = "the aten ROCm flash kernel"

FORWARD = Support(
    kernel=NAME,
    devices=("gfx90a", "gfx942"),
    dtypes=("bfloat16", "float16"),
    max_head_dim=256,
    value_dim=True,
    grouped_heads=True,
    causal=True,
    unproven=True,
)
BACKWARD = replace(FORWARD)


def refuses(spec: AttentionSpec, device: str, build: Build | None) -> tuple[str, ...]:
    """Refuses too large grids."""
    return kernel_limits.grid(spec, NAME)


def probe() -> str:
    """Checks that torch is a ROCm build with the kernel and returns torch's version."""
    import torch

    if torch.version.hip is None or not torch.backends.cuda.is_flash_attention_available():
        raise ImportError(f"torch {torch.__version__} was built without ROCm's flash attention")
    return torch.__version__


def _generator_states(q: Tensor) -> tuple[Tensor, Tensor]:
    """Returns seed and offset of a random generator in the forward op's format; unused without dropout."""
    import torch

    return q.new_empty((), dtype=torch.int64), q.new_empty((), dtype=torch.int64)


KERNEL = rewrites.Kernel(
    cuda.run_forward, partial(cuda.run_backward, states_of=_generator_states), rewrites.whole_eights
)
"""The kernel that ``shared.rewrites`` completes. Its log-sum-exp is its own, which its backward expects."""
forward = without_gradient(partial(rewrites.forward, KERNEL))
backward = without_gradient(partial(rewrites.backward, KERNEL))


BACKEND = Backend(
    name="sdpa_flash",
    framework="torch",
    requires="torch>=2.11 with ROCm",
    forward_claims=FORWARD,
    backward_claims=BACKWARD,
    refuses=refuses,
    probe=probe,
    lower=cuda.lower,
    forward=forward,
    backward=backward,
)
