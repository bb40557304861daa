"""Not built: the modules of transformer_engine.jax.flax."""

raise ImportError(
    "te_jax.flax: the flax modules are not built. Allowed: te_jax's functions. To do: call them in a module of your "
    "own, with a state of te_jax.scaling that jax.grad's gradient overwrites"
)
