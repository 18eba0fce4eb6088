"""SmolLM2-135M-Instruct in torch and in JAX, with the same kernels and the same text. See README.md in this folder."""
