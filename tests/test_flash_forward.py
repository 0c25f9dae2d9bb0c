"""Calls of `flash_attention` with few queries, by the decode kernels."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common.decode import flash_forward
from pallas_fa2.backends.registry import BACKENDS
from tests.support import interpreter
from tests.support.decode_cases import SLOPES
from tests.support.hopper import A100, H200, planned_for
from tests.support.tiers import slow_but

DEVICES = {"hopper": H200, "ampere": A100}

FLASH: dict[str, dict] = {
    "full": {},
    "causal": {"mask": fa.Causal(), "align": "end"},
    "window": {"mask": fa.SlidingWindow(300), "align": "end"},
    "flax": {"mask": np.arange(1100)[None, None, None] < 777},
    "alibi": {"mask": fa.Causal(), "align": "end", "score": fa.alibi(SLOPES)},
}


@pytest.mark.parametrize("implementation", ["hopper", "ampere"])
@pytest.mark.parametrize("name", slow_but(lambda name: name in ("causal", "flax"), FLASH))
def test_few_queries_of_flash_attention(
    name: str, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gradients, of which the backward takes out and lse from the decode kernel."""
    monkeypatch.setattr(flash_forward, "MIN_KEYS", 1024)
    options = FLASH[name]
    q, dout, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=x), jnp.bfloat16)
        for i, x in enumerate(((1, 2, 4, 64),) * 2 + ((1, 1100, 2, 64),) * 2)
    )

    def run(q: Any, k: Any, v: Any, dout: Any, implementation: str) -> Any:
        def attend(*arrays: Any) -> Any:
            return fa.flash_attention(*arrays, implementation=implementation, **options)

        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(dout)

    arrays = q, k, v, dout
    expected = run(*(x.astype(jnp.float32) for x in arrays), "blockwise")
    with planned_for(DEVICES[implementation]._replace(num_sms=3)):
        explanation = fa.explain(q, k, v, **options)
        assert explanation.implementation == implementation
        assert "merges its splits" in explanation.forward
        assert not BACKENDS[implementation].candidates(explanation.spec, explanation.device)
        actual = interpreter.run(lambda *args: run(*args, implementation), *arrays)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float32), y, atol=0.02)


@pytest.mark.parametrize(
    "shape, options",
    [
        ((1, 2, 4, 2, 4000), {}),  # few keys
        ((1, 20, 4, 2, 5000), {}),  # many queries
        ((64, 1, 8, 8, 5000), {}),  # enough heads, of their own keys
        ((1, 2, 4, 2, 5000), {"mask": fa.Causal()}),  # with as few keys as queries
        ((1, 2, 4, 2, 5000), {"q_positions": np.array([[3, 4]])}),
    ],
)
@pytest.mark.parametrize("implementation", ["hopper", "ampere"])
def test_other_calls_of_flash_attention_have_the_other_kernels(
    implementation: str, shape: tuple, options: dict
) -> None:
    batch, queries, heads, kv_heads, keys = shape
    q, k = (
        jax.ShapeDtypeStruct((batch, *x, 64), jnp.bfloat16)
        for x in ((queries, heads), (keys, kv_heads))
    )
    with planned_for(DEVICES[implementation]):
        assert "merges its splits" not in fa.explain(q, k, k, **options).forward
