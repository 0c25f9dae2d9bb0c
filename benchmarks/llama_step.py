"""A training step of a model with Llama-8B's layers, on one device or on a device's tokens of a sequence.

The step is gradient descent on bfloat16 parameters, gradients are summed over devices in float32. A layer is recomputed
in the backward, but for its attention (`jax.checkpoint`). There are few layers and 8192 words, so that the head has the
share of a step that 128,256 words have beside 32 layers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.decode_step import rms_norm, rotate

RATE = 1e-3
KEPT = jax.checkpoint_policies.save_only_these_names("attention_out", "attention_lse")


class Sizes(NamedTuple):
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


def sizes(layers: int, heads: int, kv_heads: int, head_dim: int) -> Sizes:
    """Return the sizes of a model in Llama-8B's proportions: a hidden layer is 3.5 times as wide as the model."""
    return Sizes(layers, heads, kv_heads, head_dim, 7 * heads * head_dim // 2, 2 * heads * head_dim)


def parameters(sizes: Sizes) -> dict[str, jax.Array]:
    """Return random bfloat16 matrices; those of layers have a leading axis."""
    width, rows = sizes.width, sizes.heads + 2 * sizes.kv_heads
    shapes = {
        "qkv": (sizes.layers, width, rows, sizes.head_dim),
        "out": (sizes.layers, width, width),
        "gate_up": (sizes.layers, width, 2 * sizes.hidden),
        "down": (sizes.layers, sizes.hidden, width),
        "embedding": (sizes.vocabulary, width),
        "head": (width, sizes.vocabulary),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: (jax.random.normal(key, shape) * width**-0.5).astype(jnp.bfloat16)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def loss_of(
    parameters: dict[str, jax.Array], attention: Callable, tokens: Any, labels: Any, positions: Any
) -> jax.Array:
    """Return the sum of the cross-entropies of labels `[1, T]` at positions `[T]`, in float32."""

    def rotated(x: jax.Array) -> jax.Array:
        return rotate(x.swapaxes(0, 1), positions).swapaxes(0, 1)

    def layer(x: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        qkv = jnp.einsum("btd,dnh->btnh", rms_norm(x), weights["qkv"])
        kv_heads = (qkv.shape[2] - x.shape[2] // qkv.shape[3]) // 2
        q, k, v = jnp.split(qkv, (-2 * kv_heads, -kv_heads), 2)
        out = attention(rotated(q), rotated(k), v)
        x = x + out.reshape(x.shape) @ weights["out"]
        gate, up = jnp.split(rms_norm(x) @ weights["gate_up"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ weights["down"], None

    layers = {name: parameters[name] for name in ("qkv", "out", "gate_up", "down")}
    x, _ = jax.lax.scan(jax.checkpoint(layer, policy=KEPT), parameters["embedding"][tokens], layers)
    logits = jnp.einsum(
        "btd,dv->btv", rms_norm(x), parameters["head"], preferred_element_type=jnp.float32
    )
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)


def make_step(attention: Callable, length: int, axis_name: str | None = None) -> Callable:
    """Return (parameters, tokens, labels, positions) -> (parameters, (loss, norms of gradients)).

    With an axis, it is the step of a device inside `shard_map`, which has some of the `length` tokens.
    """

    def step(parameters: dict[str, jax.Array], tokens: Any, labels: Any, positions: Any) -> tuple:
        def mean(parameters: Any) -> jax.Array:
            return loss_of(parameters, attention, tokens, labels, positions) / length

        loss, gradients = jax.value_and_grad(mean)(parameters)
        gradients = jax.tree.map(lambda x: x.astype(jnp.float32), gradients)
        if axis_name is not None:
            loss, gradients = jax.lax.psum((loss, gradients), axis_name)
        updated = jax.tree.map(
            lambda p, g: (p.astype(jnp.float32) - RATE * g).astype(p.dtype), parameters, gradients
        )
        return updated, (loss, jax.tree.map(jnp.linalg.norm, gradients))

    return step
