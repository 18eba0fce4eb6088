"""Launches of compiled kernels without Python around them: Triton's, and programs that XLA launches."""
