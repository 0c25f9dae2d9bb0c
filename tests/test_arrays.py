"""Auxiliary arrays with the five leading axes, against layouts and sums written out in NumPy."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa2.ir.arrays import (
    NUM_LEADING_AXES,
    AuxArrays,
    CallShape,
    add_to_tile,
    slice_tile,
    vmap_over_leading_axes,
)

T, S, K, G = 5, 7, 2, 3
N = K * G
BATCHES = [(), (2,), (2, 3)]


def dims(batch=(2,)):
    return CallShape(batch, T, S, K, G)


def random_array(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def normalize(kind, x, batch=(2,)):
    (normalized,) = jax.tree.leaves(
        AuxArrays(**{kind: {"x": x}}).to_leading_axes("owner", dims(batch))
    )
    return normalized


def everywhere(x, batch, *axes):
    """`x` as `[B, N, T, S]`, where `axes` says which axes of that its last axes are."""
    own = len(axes)
    x = np.broadcast_to(x, batch + x.shape[x.ndim - own :]).reshape(-1, *x.shape[x.ndim - own :])
    shape = [x.shape[0], 1, 1, 1]
    for axis, size in zip(axes, x.shape[1:], strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), (x.shape[0], N, T, S))


def check_placed(normalized, expected, trailing=()):
    full = (len(expected), K, G, T, S)
    assert all(a in (1, b) for a, b in zip(normalized.shape, full, strict=False)), normalized.shape
    actual = np.broadcast_to(normalized, full + trailing).reshape(-1, N, T, S, *trailing)
    np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


def batch_shapes(batch):
    """Every way to give `batch`: whole, its last axes, axes of 1, not at all."""
    yield from {batch, batch[1:], batch[:0], (1,) * len(batch), (1, *batch[1:])[: len(batch)]}


@pytest.mark.parametrize("batch", BATCHES, ids=str)
@pytest.mark.parametrize("kind, size, axis", [("q_tokens", T, 2), ("k_tokens", S, 3)])
def test_token_data_vary_along_their_own_axis(kind, size, axis, batch):
    for have in batch_shapes(batch):
        for own in (size, 1):
            x = random_array(*have, own)
            check_placed(normalize(kind, x, batch), everywhere(x, batch, axis))


@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_pairwise_arrays_broadcast_to_heads_queries_and_keys(batch):
    for have in batch_shapes(batch):
        for own in [(N, T, S), (1, T, S), (N, 1, S), (1, 1, S), (N, T, 1), (1, 1, 1)]:
            x = random_array(*have, *own)
            check_placed(normalize("pairwise", x, batch), everywhere(x, batch, 1, 2, 3))


@pytest.mark.parametrize("shape", [(T, S), (1, S), (T, 1), (S,), ()], ids=str)
def test_pairwise_arrays_without_heads_broadcast(shape):
    x = random_array(*shape)
    expected = np.broadcast_to(x, (2, N, T, S))
    check_placed(normalize("pairwise", x), expected)


@pytest.mark.parametrize(
    "shape, kind",
    [
        ((1, T, S), "pairwise"),
        ((N, 1, S), "pairwise"),
        ((2, 1, 1, S), "pairwise_k"),
        ((T, 1), "pairwise_q"),
        ((2, N, 1, 1), "per_head"),
        ((), "per_head"),
    ],
    ids=str,
)
def test_pairwise_arrays_are_stored_by_the_axes_over_which_they_vary(shape, kind):
    data = AuxArrays(pairwise={"x": random_array(*shape)}).to_leading_axes("owner", dims())
    assert list(getattr(data, kind)) == ["x"] and len(jax.tree.leaves(data)) == 1
    assert data.views(0, 0, dims())[2].x is getattr(data, kind)["x"]


@pytest.mark.parametrize("trailing", [(), (4,), (4, 2)], ids=str)
def test_head_data_belong_to_query_heads_in_order(trailing):
    x = random_array(N, *trailing)
    expected = np.broadcast_to(x[None, :, None, None], (6, N, T, S, *trailing))
    check_placed(normalize("per_head", x, (2, 3)), expected, trailing)


@pytest.mark.parametrize("shape", [(), (4,), (4, 2)], ids=str)
def test_params_keep_their_shape_behind_the_leading_axes(shape):
    x = random_array(*shape)
    chex.assert_trees_all_equal(normalize("params", x), x.reshape((1,) * NUM_LEADING_AXES + shape))


def test_data_without_batch_are_not_repeated():
    assert normalize("q_tokens", random_array(T), (2, 3)).shape == (1, 1, 1, T, 1)
    assert normalize("pairwise", random_array(1, T, S), (2, 3)).shape == (1, 1, 1, T, S)
    assert normalize("pairwise", random_array(1, 1, N, T, S), (2, 3)).shape == (1, K, G, T, S)


BAD_SHAPES = [
    (
        "q_tokens",
        (T + 1,),
        r"q_tokens\['x'\] must have shape \[\*B, T\] with T = 5.*has shape \(6,\)",
    ),
    ("q_tokens", (), r"q_tokens\['x'\] must have shape \[\*B, T\] with T = 5.*has shape \(\)"),
    ("q_tokens", (3, T), r"q_tokens\['x'\] must have .* broadcast to \(2,\).*has shape \(3, 5\)"),
    (
        "q_tokens",
        (1, 2, T),
        r"q_tokens\['x'\] must have .* broadcast to \(2,\).*has shape \(1, 2, 5\)",
    ),
    (
        "k_tokens",
        (2, T),
        r"k_tokens\['x'\] must have shape \[\*B, S\] with S = 7.*has shape \(2, 5\)",
    ),
    ("per_head", (K,), r"heads\['x'\] must have shape \[N, \.\.\.\] with N = 6.*has shape \(2,\)"),
    ("per_head", (), r"heads\['x'\] must have shape \[N, \.\.\.\] with N = 6.*has shape \(\)"),
    ("pairwise", (K, T, S), r"pairs\['x'\] must have .*N = 6, T = 5, S = 7.*has shape \(2, 5, 7\)"),
    ("pairwise", (S, T), r"pairs\['x'\] must have .*N = 6, T = 5, S = 7.*has shape \(7, 5\)"),
    (
        "pairwise",
        (3, N, T, S),
        r"pairs\['x'\] must .*broadcast to \(2,\).*has shape \(3, 6, 5, 7\)",
    ),
]
BAD_IDS = [f"{kind}-{shape}" for kind, shape, _ in BAD_SHAPES]


@pytest.mark.parametrize("kind, shape, message", BAD_SHAPES, ids=BAD_IDS)
def test_errors_about_shapes_name_the_array_and_the_rule(kind, shape, message):
    with pytest.raises(ValueError, match="owner: " + message):
        normalize(kind, random_array(*shape))


@pytest.mark.parametrize("kind, shape", [case[:2] for case in BAD_SHAPES], ids=BAD_IDS)
def test_errors_about_shapes_name_the_remedy(kind, shape):
    with pytest.raises(ValueError, match=r"; \w|\. \w|\(or "):
        normalize(kind, random_array(*shape))


@pytest.mark.parametrize("name", ["index", "length"])
@pytest.mark.parametrize("kind", ["q_tokens", "k_tokens"])
def test_token_data_cannot_take_the_name_of_a_position(kind, name):
    """The attribute of this name would silently take precedence."""
    with pytest.raises(ValueError, match=name):
        AuxArrays(**{kind: {name: random_array(1)}}).to_leading_axes("owner", dims())


@pytest.mark.parametrize(
    "kinds", [("per_head", "params"), ("params", "pairwise"), ("per_head", "pairwise")]
)
def test_one_name_in_two_kinds_is_an_error(kinds):
    """`c.x` could mean either."""
    arrays = {"per_head": random_array(N), "params": random_array(), "pairwise": random_array(T, S)}
    with pytest.raises(ValueError, match="'x'"):
        AuxArrays(**{kind: {"x": arrays[kind]} for kind in kinds}).to_leading_axes("owner", dims())


SHAPES = [
    ((2, K, G, T, S), (1, 1, 1, 1, 1)),
    ((2, 1, 1, T, 1), (1, 1, 1, 1, S)),
    ((1, K, G, 1, 1), (2, 1, 1, 1, S)),
    ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_vmap_over_leading_axes_broadcasts_as_arrays_do(shapes):
    a, b = (random_array(*shape, seed=i) for i, shape in enumerate(shapes))
    chex.assert_trees_all_close(
        vmap_over_leading_axes(lambda x, y: x * y + x, a, b), a * b + a, rtol=1e-6
    )


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_vmap_over_leading_axes_sums_gradients_over_broadcast_axes(shapes):
    a, b = (random_array(*shape, seed=i) for i, shape in enumerate(shapes))
    weight = random_array(*np.broadcast_shapes(*shapes), seed=2)

    def loss(a, b):
        return jnp.sum(vmap_over_leading_axes(lambda x, y: x * y, a, b) * weight)

    def reduced(x, shape):
        axes = tuple(i for i, size in enumerate(shape) if size == 1)
        return np.sum(x, axes, keepdims=True)

    expected = (reduced(weight * b, a.shape), reduced(weight * a, b.shape))
    chex.assert_trees_all_close(jax.grad(loss, (0, 1))(a, b), expected, rtol=1e-4, atol=1e-5)


def test_vmap_over_leading_axes_passes_trailing_axes():
    table = random_array(1, K, G, 1, 1, 4)
    index = np.array([3, 0, 0, 2, 1], np.int32)
    actual = vmap_over_leading_axes(lambda row, i: row[i], table, index.reshape(1, 1, 1, T, 1))
    chex.assert_trees_all_equal(actual[0, ..., 0], table[0, :, :, 0, 0][..., index])


def test_vmap_over_leading_axes_keeps_trees():
    a = random_array(2, 1, 1, T, 1)
    actual = vmap_over_leading_axes(
        lambda data, y: data["x"] - data["y"] + y, {"y": a, "x": 2 * a}, a
    )
    chex.assert_trees_all_close(actual, 2 * a, rtol=1e-6)


TILED = [(2, K, G, T, S), (2, 1, 1, T, 1), (1, 1, 1, 1, S), (1, K, G, 1, 1), (1, 1, 1, T, S, 4)]


@pytest.mark.parametrize("shape", TILED, ids=str)
def test_slice_tile_slices_the_axes_that_vary(shape):
    x = random_array(*shape)
    rows = slice(2, 5) if shape[3] > 1 else slice(None)
    columns = slice(4, 6) if shape[4] > 1 else slice(None)
    chex.assert_trees_all_equal(slice_tile(x, 2, 3, 4, 2), x[:, :, :, rows, columns])


@pytest.mark.parametrize("shape", TILED, ids=str)
def test_add_to_tile_is_the_transpose_of_slice_tile(shape):
    x, total = random_array(*shape), random_array(*shape, seed=1)
    part = slice_tile(x, 2, 3, 4, 2)
    weight = random_array(*part.shape, seed=2)
    spread = add_to_tile(jnp.zeros(shape), weight, 2, 4)
    chex.assert_trees_all_close(jnp.sum(part * weight), jnp.sum(x * spread), rtol=1e-5)
    added = add_to_tile(jnp.asarray(total), weight, jnp.int32(2), jnp.int32(4))
    chex.assert_trees_all_close(added, total + spread, rtol=1e-6)


def test_a_tile_is_added_with_x64() -> None:
    """A Python number beside a traced int32 would be an int64."""
    with jax.enable_x64(True):
        total = jnp.zeros((1, 1, 1, 4, 6), jnp.float32)
        tile = jnp.ones((1, 1, 1, 2, 3), jnp.float32)
        added = jax.jit(lambda q_start: add_to_tile(total, tile, q_start, 3))(np.int32(2))
    expected = np.zeros((4, 6))
    expected[2:, 3:] = 1
    np.testing.assert_array_equal(added[0, 0, 0], expected)
