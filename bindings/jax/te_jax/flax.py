"""Not built: the modules of transformer_engine.jax.flax."""

raise ImportError(
    "te_jax.flax: the flax modules are not built. Allowed: te_jax's functions. To do: call them in a module of your own; "
    "create states with te_jax.scaling, and keep them where jax.grad's gradients overwrite them"
)
