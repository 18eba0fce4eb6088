"""SmolLM2-135M-Instruct through torch and through JAX: the same kernels, the same text. See README.md here."""
