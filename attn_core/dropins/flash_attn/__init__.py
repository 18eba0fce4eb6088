"""flash-attn's functions, once for both frontends: a frontend adds what torch and JAX do in their own ways."""
