"""Sequences over devices in whole programs: a Llama-shaped model learns as on one device, a million tokens are
right."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa2 as fa

STEPS = 20


def mesh(**axes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(axes.values())])
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def parameters(layers: int, width: int, heads: int, key_heads: int, vocabulary: int) -> dict:
    """Return random float32 parameters of a decoder with grouped heads of width / heads."""
    dim, keys = width // heads, iter(jax.random.split(jax.random.key(0), 100))

    def matrix(*shape: int) -> Any:
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    return {
        "embedding": matrix(vocabulary, width),
        "layers": [
            {
                "q": matrix(width, heads, dim),
                "kv": matrix(width, 2 * key_heads, dim),
                "out": matrix(width, width),
                "gate": matrix(width, 4 * width),
                "down": matrix(2 * width, width),
            }
            for _ in range(layers)
        ],
    }


def rms_norm(x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotate(x: Any, positions: Any) -> Any:
    """Apply rotary embeddings at these positions `[T]` to `[B, T, heads, dim]`."""
    half = x.shape[-1] // 2
    frequencies = jnp.asarray(1e4 ** (-np.arange(half, dtype=np.float32) / half))
    angles = positions.astype(jnp.float32)[None, :, None, None] * frequencies[None, None, None]
    (a, b), (sin, cos) = jnp.split(x, 2, -1), (jnp.sin(angles), jnp.cos(angles))
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def loss_of(attention: Any, parameters: Any, tokens: Any, labels: Any, positions: Any) -> Any:
    """Return the mean cross-entropy of labels `[B, T]`."""
    x = parameters["embedding"][tokens]
    for layer in parameters["layers"]:
        y = rms_norm(x)
        q = rotate(jnp.einsum("btd,dnh->btnh", y, layer["q"]), positions)
        k, v = jnp.split(jnp.einsum("btd,dkh->btkh", y, layer["kv"]), 2, 2)
        q, k, v = (z.astype(jnp.bfloat16) for z in (q, rotate(k, positions), v))
        out = attention(q, k, v).astype(jnp.float32)
        x = x + out.reshape(x.shape) @ layer["out"]
        gate, up = jnp.split(rms_norm(x) @ layer["gate"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ layer["down"]
    logits = jax.nn.log_softmax(rms_norm(x) @ parameters["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, labels[..., None], -1))


def train(
    attention: Any, parameters: Any, batch: tuple, shardings: tuple, rate: float
) -> list[float]:
    """Return the losses of STEPS steps of gradient descent on one batch (tokens, labels, positions)."""

    @functools.partial(jax.jit, in_shardings=(None, *shardings))
    def step(parameters: Any, *batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, attention))(
            parameters, *batch
        )
        return jax.tree.map(lambda p, g: p - rate * g, parameters, gradients), loss

    losses = []
    for _ in range(STEPS):
        parameters, loss = step(parameters, *batch)
        losses.append(float(loss))
    return losses


def check_training(layers: int, width: int, heads: int, length: int, rate: float) -> None:
    """Train on one device, with two sequences on two devices, and with each sequence over two devices.

    At larger rates the loss leaps in the first steps, and one rounding leads to another path.
    """
    start = parameters(layers, width, heads, heads // 2, 64)
    tokens = np.random.default_rng(0).integers(0, 64, (2, length + 1), dtype=np.int32)
    tokens[:, 1::2] = tokens[:, :-1:2]  # every second token can be predicted
    batch = tokens[:, :-1], tokens[:, 1:], np.arange(length, dtype=np.int32)

    causal = functools.partial(fa.flash_attention, is_causal=True)
    expected = train(causal, start, batch, (None, None, None), rate)
    assert expected[-1] < expected[0] - 0.2, expected

    over_data = mesh(data=2)
    rows = NamedSharding(over_data, P("data"))
    losses = train(causal, start, batch, (rows, rows, NamedSharding(over_data, P())), rate)
    np.testing.assert_allclose(losses, expected, atol=1e-3)

    over_tokens = mesh(data=1, sequence=2)
    order = fa.zigzag(length, 2).permutation
    spec = P("data", "sequence")
    attend = functools.partial(
        fa.context_parallel_attention, axis_name="sequence", layout="zigzag", is_causal=True
    )
    attention = jax.shard_map(attend, mesh=over_tokens, in_specs=(spec,) * 3, out_specs=spec)
    columns, along = NamedSharding(over_tokens, spec), NamedSharding(over_tokens, P("sequence"))
    in_order = batch[0][:, order], batch[1][:, order], order
    losses = train(attention, start, in_order, (columns, columns, along), rate)
    np.testing.assert_allclose(losses, expected, atol=1e-3)


@pytest.mark.slow
def test_a_model_learns_as_on_one_device() -> None:
    check_training(layers=2, width=32, heads=4, length=64, rate=0.02)


@pytest.mark.gpus
def test_a_model_learns_on_two_gpus_as_on_one() -> None:
    check_training(layers=2, width=512, heads=8, length=2048, rate=0.002)


@pytest.mark.gpus
def test_a_million_tokens_equal_halves_on_one_gpu() -> None:
    """Their keys in two halves, merged by logsumexps: nothing in common with zigzag chunks on two devices."""
    length, half = 2**20, 2**19
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (1, length, heads, 128), jnp.bfloat16)
        for key, heads in zip(keys, (4, 1, 1, 4), strict=True)
    )

    def in_halves(q: Any, k: Any, v: Any) -> Any:
        attend = functools.partial(fa.flash_attention, return_lse=True)
        first = attend(q[:, :half], k[:, :half], v[:, :half], is_causal=True)
        parts = (
            attend(q[:, half:], k[:, :half], v[:, :half]),
            attend(q[:, half:], k[:, half:], v[:, half:], is_causal=True),
        )
        return jnp.concatenate([first[0], fa.merge(*parts)[0]], 1)

    @functools.partial(jax.jit, static_argnums=0)
    def step(attend: Any, q: Any, k: Any, v: Any, dout: Any) -> tuple:
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    attend = functools.partial(
        fa.context_parallel_attention, axis_name="sequence", layout="zigzag", is_causal=True
    )
    order, spec, over = fa.zigzag(length, 2), P(None, "sequence"), mesh(sequence=2)
    ring = jax.shard_map(attend, mesh=over, in_specs=(spec,) * 3, out_specs=spec)
    divided = (
        jax.device_put(x[:, order.permutation], NamedSharding(over, spec)) for x in (q, k, v, dout)
    )
    actual = step(ring, *divided)
    for a, b in zip(actual, step(in_halves, q, k, v, dout), strict=True):
        a = jax.device_put(a, jax.devices()[0])[:, order.inverse].astype(jnp.float32)
        b = b.astype(jnp.float32)
        assert jnp.linalg.norm(a - b) <= 0.01 * jnp.linalg.norm(b)
