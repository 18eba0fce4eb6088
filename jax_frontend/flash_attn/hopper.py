"""The functions of FlashAttention 3 (``hopper/flash_attn_interface.py`` of flash-attention), for JAX arrays.

They run on any device, on the kernel that selection picks. Results have FlashAttention 3's form: without
``return_attn_probs`` the output, else ``(out, softmax_lse)``, with -inf for a query that sees no key.
"""

import jax

from attn_core.dropins.flash_attn.hopper import FlashAttention3
from jax_frontend.flash_attn.frontend import JAX

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


class _Functions(FlashAttention3[jax.Array]):
    frontend = JAX


flash_attn_func = _Functions.flash_attn_func
flash_attn_qkvpacked_func = _Functions.flash_attn_qkvpacked_func
flash_attn_varlen_func = _Functions.flash_attn_varlen_func
flash_attn_with_kvcache = _Functions.flash_attn_with_kvcache
