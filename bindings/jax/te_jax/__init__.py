"""te_core for JAX programs: its operations and layers on JAX arrays. Its functions come later."""
