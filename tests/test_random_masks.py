"""Classes of tiles against random masks, which are arrays made in NumPy by the same code."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.ir.block_classes import PARTIAL
from tests.support.tiers import slow_but
from tests.support.tiles import (
    EDGE,
    RAGGED,
    N,
    assert_sound,
    dense,
    exact,
    integers,
    table,
    token_data,
)


class Expressions:
    """Random masks: trees of functions `(env, xp) -> array`, for scalars and for arrays."""

    CONSTANTS = (0, 1, 2, 3, 7, 16, -1, -5, 60, 1000, 100_000, EDGE)

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def pick(self, *options):
        return options[self.rng.integers(len(options))]

    def leaf(self, kind):
        if kind == "i" and self.rng.random() < 0.3:
            constant = np.int32(self.pick(*self.CONSTANTS))
            return lambda env, xp: constant
        name = self.pick(*{
            "i": ("q.index", "k.index", "q.random", "k.random", "q.doc", "k.doc",
                  "c.head", "c.low"),
            "u": ("q.count", "k.count"),
            "f": ("q.x", "k.x"),
            "b": ("q.flag", "k.flag", "c.pair"),
        }[kind])  # fmt: skip
        return lambda env, xp: env[name]

    def number(self, kind, depth):
        if depth == 0:
            return self.leaf(kind)
        a, b = self.number(kind, depth - 1), self.number(kind, self.rng.integers(depth))
        if kind == "i" and self.rng.random() < 0.35:
            n = self.pick(1, 2, 3, 7, 16, -4)
            return self.pick(
                lambda env, xp: a(env, xp) // n,
                lambda env, xp: a(env, xp) % n,
                lambda env, xp: xp.sign(a(env, xp)),
            )
        if kind in "if" and self.rng.random() < 0.2:
            return self.pick(lambda env, xp: abs(a(env, xp)), lambda env, xp: -a(env, xp))
        if kind == "u" and self.rng.random() < 0.3:
            n = np.uint32(self.pick(1, 3, 8))
            return self.pick(lambda env, xp: a(env, xp) // n, lambda env, xp: a(env, xp) % n)
        if kind == "f" and self.rng.random() < 0.3:
            c = self.number("i", 0)
            return self.pick(
                lambda env, xp: xp.floor(a(env, xp)),
                lambda env, xp: a(env, xp) / 2,
                lambda env, xp: c(env, xp).astype(xp.float32),
            )
        if self.rng.random() < 0.2:
            which = self.mask(depth - 1)
            return lambda env, xp: xp.where(which(env, xp), a(env, xp), b(env, xp))
        return self.pick(
            lambda env, xp: a(env, xp) + b(env, xp),
            lambda env, xp: a(env, xp) - b(env, xp),
            lambda env, xp: a(env, xp) * b(env, xp),
            lambda env, xp: xp.minimum(a(env, xp), b(env, xp)),
            lambda env, xp: xp.maximum(a(env, xp), b(env, xp)),
        )

    def mask(self, depth):
        if depth == 0:
            return self.leaf("b")
        if self.rng.random() < 0.4:
            a, b = self.mask(depth - 1), self.mask(self.rng.integers(depth))
            return self.pick(
                lambda env, xp: a(env, xp) & b(env, xp),
                lambda env, xp: a(env, xp) | b(env, xp),
                lambda env, xp: a(env, xp) ^ b(env, xp),
                lambda env, xp: ~a(env, xp),
                lambda env, xp: a(env, xp) == b(env, xp),
            )
        kind = self.pick("i", "i", "i", "u", "f", "f")
        a, b = self.number(kind, depth - 1), self.number(kind, self.rng.integers(depth))
        return self.pick(
            lambda env, xp: a(env, xp) < b(env, xp),
            lambda env, xp: a(env, xp) <= b(env, xp),
            lambda env, xp: a(env, xp) > b(env, xp),
            lambda env, xp: a(env, xp) >= b(env, xp),
            lambda env, xp: a(env, xp) == b(env, xp),
            lambda env, xp: a(env, xp) != b(env, xp),
        )


def random_case(seed, sizes):
    q_len, kv_len = sizes[:2]
    expression = Expressions(seed).mask(1 + seed % 4)
    q_data, k_data = token_data(q_len, 3 * seed), token_data(kv_len, 3 * seed + 1)
    head = integers(N, low=-9, high=60, seed=seed)
    low = integers(low=-(2**31), high=EDGE, seed=seed)
    pair = integers(q_len, kv_len, high=20, seed=seed) > 0

    def of_scalars(q, k, c):
        env = {f"{side}.{n}": getattr(token, n) for side, token in (("q", q), ("k", k))
               for n in (*q_data, "index")}  # fmt: skip
        env |= {"c.head": c.head, "c.low": c.low, "c.pair": c.pair}
        return expression(env, jnp)

    def of_arrays(q, k, xp):
        env = {f"{side}.{n}": getattr(token, n) for side, token in (("q", q), ("k", k))
               for n in (*q_data, "index")}  # fmt: skip
        env |= {"c.head": head.reshape(1, N, 1, 1), "c.low": low, "c.pair": pair}
        return expression(env, xp)

    mask = fa.mask_fn(of_scalars)(
        q_tokens=q_data,
        k_tokens=k_data,
        heads={"head": head},
        params={"low": low},
        pairs={"pair": pair},
    )
    return mask, dense(of_arrays, q_data, k_data)


@pytest.mark.parametrize("group", slow_but(lambda group: group == 0, range(3)))
def test_random_masks_are_classified_soundly(group):
    sizes = RAGGED
    decided = 0
    for seed in range(20 * group, 20 * (group + 1)):
        mask, visible = random_case(seed, sizes)
        actual, want = table(mask, sizes), exact(visible, sizes)
        assert_sound(actual, want)
        decided += np.mean(actual != PARTIAL)
    assert decided > 2, "soundness without any decision is worth nothing"
