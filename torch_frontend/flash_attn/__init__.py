"""The functions of the flash-attn package under their own names, on the kernel that selection picks.

Signatures, defaults and results are those of flash-attn 2.8; ``hopper`` has FlashAttention 3's, ``cute``
FlashAttention-4's. They run on any device. docs/how_to/migrate/flash_attn.md lists every argument.
"""

from torch_frontend.flash_attn.dense import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from torch_frontend.flash_attn.kvcache import flash_attn_with_kvcache
from torch_frontend.flash_attn.varlen import (
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
