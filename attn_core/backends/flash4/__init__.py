"""flash4: FlashAttention-4 (CuTe DSL)."""
