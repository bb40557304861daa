"""Documented names that are not built: a call says what to use instead."""

from te_jax.not_built import refusing

make_dot_general_cls = refusing("flax.make_dot_general_cls", "te_jax.flax.DenseGeneral in place of nn.Dense")
