"""triton_jvp: our Triton kernel for attention together with its tangents (forward mode)."""
