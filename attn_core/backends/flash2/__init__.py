"""flash2: FlashAttention 2, the kernels of the flash-attn package."""
