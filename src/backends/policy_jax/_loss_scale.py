"""Dynamic loss scaling for float16, as a pytree: values in, values out."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._ops import Array


class DynamicLossScale(NamedTuple):
    """A factor on the loss that keeps float16 gradients from vanishing, and what moves it.

    A step whose gradients hold a NaN or an infinity must be skipped, and halves the factor; so
    many good steps in a row double it.

    Attributes:
        scale: float32 scalar, at least 1.
        good_steps: int32 scalar, the finite steps since the factor changed.
        period: int32 scalar, how many of them double it.

    >>> scaling = DynamicLossScale.create()
    >>> float(scaling.scale)
    32768.0
    """

    scale: Array
    good_steps: Array
    period: Array

    @classmethod
    def create(cls, scale: float = 2.0**15, period: int = 2000) -> "DynamicLossScale":
        """Gives a fresh one.

        Raises:
            ValueError: `scale` is less than 1, or `period` is less than 1.
        """
        if not 1 <= scale < float("inf") or period < 1:
            raise ValueError(
                f"Expected a finite scale and a period of at least 1. Received: {scale}, {period}."
            )
        return cls(jnp.float32(scale), jnp.int32(0), jnp.int32(period))

    def scale_loss(self, loss: Array) -> Array:
        """Gives the loss, as float32, times the factor."""
        return loss.astype(jnp.float32) * self.scale

    def unscale(self, gradients: Any) -> Any:
        """Gives a pytree of gradients without the factor; each keeps its dtype."""
        inverse = 1 / self.scale

        def divided(g: Any) -> Any:
            if not jnp.issubdtype(g.dtype, jnp.floating):
                return g
            return (g.astype(jnp.float32) * inverse).astype(g.dtype)

        return jax.tree.map(divided, gradients)

    def update(self, gradients: Any) -> tuple[Array, "DynamicLossScale"]:
        """Says whether all gradients are finite, and gives the scaling after the step.

        Returns:
            A bool scalar, False if the step must be skipped; and the new scaling.
        """
        finite = jnp.bool_(True)
        for leaf in jax.tree.leaves(gradients):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                finite &= jnp.isfinite(leaf).all()
        good = jnp.where(finite, self.good_steps + 1, 0)
        grown = good >= self.period
        scale = jnp.where(finite, self.scale, jnp.maximum(self.scale / 2, 1))
        doubled = jnp.where(jnp.isfinite(scale * 2), scale * 2, scale)
        new = DynamicLossScale(
            jnp.where(grown, doubled, scale), jnp.where(grown, 0, good), self.period
        )
        return finite, new

    @staticmethod
    def select(finite: Array, new: Any, old: Any) -> Any:
        """Gives one of two pytrees of the same structure: the new one of a finite step."""
        return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
