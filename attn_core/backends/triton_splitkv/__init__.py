"""triton_splitkv: our Triton kernel for keys and values in pages."""
