"""The functions of the flash-attn package under their own names, on the kernel that selection picks.

Signatures, defaults and results are those of flash-attn 2.8; ``hopper`` has FlashAttention 3's, ``cute``
FlashAttention-4's. They run on any device. docs/how_to/migrate/flash_attn.md lists every argument.
"""

import jax

from attn_core.dropins.flash_attn.functions import FlashAttention2
from jax_frontend.flash_attn.frontend import JAX

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


class _Functions(FlashAttention2[jax.Array, jax.Array]):
    frontend = JAX


flash_attn_func = _Functions.flash_attn_func
flash_attn_kvpacked_func = _Functions.flash_attn_kvpacked_func
flash_attn_qkvpacked_func = _Functions.flash_attn_qkvpacked_func
flash_attn_varlen_func = _Functions.flash_attn_varlen_func
flash_attn_varlen_kvpacked_func = _Functions.flash_attn_varlen_kvpacked_func
flash_attn_varlen_qkvpacked_func = _Functions.flash_attn_varlen_qkvpacked_func
flash_attn_with_kvcache = _Functions.flash_attn_with_kvcache
