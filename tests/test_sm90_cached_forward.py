"""The forward of Hopper on a cache, interpreted with race detection and compiled for an H200."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa2.backends.common.decode.spec import DecodeSpec, max_packed_entries
from pallas_fa2.backends.sm90.configs import cached_forward_config
from pallas_fa2.backends.sm90.forward import cached_tiles
from pallas_fa2.backends.sm90.forward.cached_tiles import CachedTiles, plan_tiles
from pallas_fa2.backends.sm90.forward.kernel import attention_on_cache
from tests.support import compile_gate
from tests.support.decode_cases import CAUSAL, FULL, Case, check
from tests.support.shared import RaceDetected
from tests.support.tiers import slow_but


class Tiles(Case):
    """Requests whose entries are tiles of the forward."""

    @property
    def config(self) -> Any:
        config = cached_forward_config(*self.dims)
        assert config is not None
        return dataclasses.replace(config, num_ctas=self.num_ctas)

    @property
    def spec(self) -> DecodeSpec:
        spec = super().spec
        entries = max_packed_entries(self.num_tokens, len(self.lengths), self.config.block_q)
        return dataclasses.replace(spec, q_len=self.config.block_q, max_entries=entries)

    def plan(self, lengths: Any, starts: Any) -> Any:
        return plan_tiles(self.spec, self.config, lengths, starts)


H128 = {"dims": (128, 128)}
CASES = {
    "one_prompt": Tiles((256,), queries=(256,)),
    "parts": Tiles((256, 250), queries=(5, 130)),
    # every kind of request: a prompt, one without tokens, more tokens than keys, a decode step; NaN behind all lengths
    "prompts": Tiles((200, 77, 120, 70), queries=(150, 0, 130, 1)),
    "unpacked": Tiles((200, 131), queries=70),
    "empty": Tiles((0, 0), queries=3),
    "too_long": Tiles((300, 1 << 30), queries=(20, 9), capacity=200),
    "negative": Tiles((-5, 70), queries=(9, 9)),
    "mqa": Tiles((256, 40), queries=(129, 40), heads=(3, 1)),
    "full": Tiles((130, 64), queries=(3, 64), distances=FULL),
    "h128": Tiles((256, 140), queries=(131, 7), **H128),
    "float16": Tiles((256,), queries=(20,), dtype=jnp.float16, **H128),
    "pages_8": Tiles((250, 64), queries=(130, 9), page_size=8),
    "pages_16": Tiles((256, 130), queries=(130, 9), page_size=16, **H128),
    "pages_24": Tiles((120, 50), queries=(20, 50), capacity=120, page_size=24),
    "pages_128": Tiles((200, 129), queries=(129, 1), page_size=128),
    "pages_256": Tiles((200, 512), queries=(129, 130), capacity=512, page_size=256),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_interpreted(case: Tiles) -> None:
    check(case, attention_on_cache)


def of_next_request(self: Any, entry: Any, field: str) -> Any:
    found = load(self, entry, field)
    return found + 64 if field == "num_queries" else found


def pages_in_order(self: Any, source: Any, request: Any, keys: Any, *rest: Any) -> Any:
    return kv_rows(self._replace(table=None), source, request, keys, *rest)


load, kv_rows = CachedTiles.load, CachedTiles.kv_rows

BUGS: dict[str, tuple[Any, str, Any]] = {
    "rows of the next request are stored": (CachedTiles, "load", of_next_request),
    "a table that nobody reads": (CachedTiles, "kv_rows", pages_in_order),
    "partial blocks taken for full ones": (
        cached_tiles,
        "_count_full_blocks",
        lambda *args: args[2].num_blocks,
    ),
    "a skipped wait": (plgpu, "barrier_wait", lambda barrier: None),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    # no NaN behind the first length: rows that meet one are computed again, with the whole mask
    with pytest.raises((RaceDetected, AssertionError, IndexError)):
        check(Tiles((256, 64), queries=(130, 9), page_size=64), attention_on_cache)


# H, size of pages
COMPILED = {
    "h128": (128, None),
    "h128_pages_16": (128, 16),
    "h128_pages_64": (128, 64),
    "h128_pages_256": (128, 256),
    "h64": (64, None),
    "h64_pages_16": (64, 16),
    "h64_pages_64": (64, 64),
}
COMPILED_QUICKLY = {"h128", "h128_pages_16", "h64_pages_16"}


@pytest.mark.parametrize("name", slow_but(COMPILED_QUICKLY.__contains__, COMPILED))
def test_compiles_clean(name: str) -> None:
    dim, page_size = COMPILED[name]
    tokens, requests, capacity = 4096, 16, 8192
    config = cached_forward_config(dim, dim)
    assert config is not None
    entries = max_packed_entries(tokens, requests, config.block_q)
    dims = 32, 8, dim, dim
    spec = DecodeSpec(*(entries, config.block_q, tokens, capacity, *dims, 0.125, CAUSAL, page_size))

    def run(q: Any, k: Any, v: Any, lengths: Any, starts: Any, table: Any) -> Any:
        plan = plan_tiles(spec, config, lengths, starts)
        return attention_on_cache(spec, config, q, k, v, plan, table)

    def integers(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    keys, table = (requests, capacity), None
    if page_size is not None:
        keys = requests * capacity // page_size, page_size
        table = integers(requests, capacity // page_size)
    q = jax.ShapeDtypeStruct((tokens, 32, dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((*keys, 8, dim), jnp.bfloat16)
    starts = integers(requests + 1)
    (report,) = compile_gate.compile_for_h200(run, q, k, k, integers(requests), starts, table)
    compile_gate.assert_clean(report)
