"""The functions of FlashAttention-4 (``flash_attn.cute``), for JAX arrays.

They run on any device, on the kernel that selection picks. Results have FlashAttention-4's form: always a pair
``(out, lse)``, in which lse is None without ``return_lse``, and -inf for a query that sees no key.
"""

import jax

from attn_core.dropins.flash_attn.cute import FlashAttention4
from jax_frontend.flash_attn.frontend import JAX

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


class _Functions(FlashAttention4[jax.Array]):
    frontend = JAX


flash_attn_func = _Functions.flash_attn_func
flash_attn_varlen_func = _Functions.flash_attn_varlen_func
