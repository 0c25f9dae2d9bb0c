"""A small GPT serves a stream of requests by continuous batching, with a paged cache and a prefix that all share.

    python examples/generate.py                        # a laptop
    python examples/generate.py --preset h200          # an H200

The model of `examples/char_gpt.py` is trained first, briefly. Every step runs one program on a fixed number of rows: a
decode step of each request that has its prompt behind it, and as much of other prompts as fits. Each request's page
table begins with the pages of the prefix. Then Flax's dense attention decodes the same texts, and every character must
be the same.
"""

import argparse
import dataclasses
import functools
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script, it finds the other example there

import pallas_fa2 as fa
from examples import char_gpt
from examples.char_gpt import GPT, VOCABULARY, Config
from pallas_fa2.flax.linen import MultiHeadAttention

BANDWIDTH = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}  # bytes/s of device memory
PREFIX = '"""Tools for files and text, without dependencies."""\n\nimport os\nimport sys\n\n\n'
# Where two logits differ by less, products in another order may exchange them.
TIE = {"float32": 1e-4, "bfloat16": 0.1}


@dataclasses.dataclass(frozen=True)
class Serving:
    """`slots` requests run at a time, on `rows` rows a step; `prompt` and `new` are the fewest and most characters."""

    slots: int
    rows: int
    page: int
    requests: int
    prompt: tuple[int, int]
    new: tuple[int, int]
    steps: int  # of training


PRESETS = {
    "cpu": Serving(4, 16, 16, requests=12, prompt=(6, 24), new=(8, 24), steps=600),
    "h200": Serving(64, 256, 64, requests=256, prompt=(16, 1024), new=(64, 512), steps=100),
}


class PagedGPT(nn.Module):
    """The transformer of `GPT`, with parameters of the same names, on packed rows of requests."""

    config: Config

    @nn.compact
    def __call__(
        self, tokens: jax.Array, positions: jax.Array, caches: list[fa.Pages], rows: fa.Packed
    ) -> tuple[jax.Array, list[fa.Pages]]:
        """Return the logits `[R, vocabulary]` after the last of each request's `tokens [rows]`, and the caches."""
        c, after = self.config, []
        x = nn.Embed(VOCABULARY, c.width, dtype=c.dtype, name="characters")(tokens)
        x = x + nn.Embed(c.length, c.width, dtype=c.dtype, name="positions")(positions)
        for i, cache in enumerate(caches):
            layer = MultiHeadAttention(
                num_heads=c.heads, num_kv_heads=c.kv_heads, dtype=c.dtype, name=f"attention_{i}"
            )
            y, cache = layer(nn.LayerNorm(dtype=c.dtype)(x), cache=cache, queries=rows)
            after.append(cache)
            x = x + y
            y = nn.Dense(4 * c.width, dtype=c.dtype)(nn.LayerNorm(dtype=c.dtype)(x))
            x = x + nn.Dense(c.width, dtype=c.dtype)(nn.gelu(y))
        x = x[jnp.maximum(rows.starts[1:] - 1, 0)]
        return nn.Dense(VOCABULARY, name="logits")(nn.LayerNorm()(x)), after


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def run_step(
    config: Config, params: Any, pools: Any, table: Any, lengths: Any, tokens: Any, starts: Any
) -> tuple[jax.Array, Any]:
    """Return the likeliest next token of each request `[R]` and the pools, written in place."""
    rows = fa.Packed(starts)
    _, positions = rows.locate(lengths + rows.counts(), tokens.size)
    caches = [fa.Pages(key, value, table, lengths) for key, value in pools]
    results: Any = PagedGPT(config).apply(params, tokens, positions, caches, rows)
    logits, caches = results
    return jnp.argmax(logits, -1), [(cache.key, cache.value) for cache in caches]


@dataclasses.dataclass(eq=False)
class Request:
    """What is to come of a request: `text` is what the cache holds and what is still to be read, prompt and all."""

    text: list[int]
    end: int  # the length of its whole text
    read: int = 0  # of which the cache holds so many
    pages: list[int] = dataclasses.field(default_factory=list)  # its own


class Server:
    """Pages of a pool for the requests that run, and a program that runs them."""

    def __init__(self, config: Config, params: Any, serving: Serving, prefix: Sequence[int]):
        self.config, self.params, self.serving = config, params, serving
        width = config.length // serving.page
        num_pages = (serving.slots + 1) * width
        shape = num_pages, serving.page, config.kv_heads, config.width // config.heads
        self.pools = [
            (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
            for _ in range(config.layers)
        ]
        self.free = deque(range(num_pages))
        self.running: list[Request | None] = [None] * serving.slots
        self.table = np.zeros((serving.slots, width), np.int32)
        self.shared: list[int] = []
        self.bytes_read = self.steps = 0
        self._compute_prefix(prefix)

    def _compute_prefix(self, prefix: Sequence[int]) -> None:
        """Fill the pages that all tables begin with: whole ones, to which no request appends."""
        pages = len(prefix) // self.serving.page
        self.prefix = list(prefix[: pages * self.serving.page])
        owner = Request([*self.prefix], end=len(self.prefix) + 1)
        self.start(owner)
        while pages and owner not in self.step():
            pass
        self.shared = owner.pages[:pages]
        self.free = deque(page for page in self.free if page not in self.shared)

    @property
    def has_room(self) -> bool:
        return None in self.running

    def start(self, request: Request) -> None:
        """Give a request a slot and pages of its own for all of its text; the prefix is read already."""
        slot = self.running.index(None)
        request.read = len(self.shared) * self.serving.page
        needed = -(-request.end // self.serving.page) - len(self.shared)
        request.pages = [self.free.popleft() for _ in range(needed)]
        pages = self.shared + request.pages
        self.table[slot, : len(pages)] = pages
        self.running[slot] = request

    def step(self) -> list[Request]:
        """Read a token of each request that decodes and as many of prompts as fit; return those that are done."""
        room = self.serving.rows - sum(r is not None for r in self.running)
        tokens, counts = np.zeros(self.serving.rows, np.int32), np.zeros(len(self.running), int)
        lengths = np.array([0 if r is None else r.read for r in self.running], np.int32)
        for slot, request in enumerate(self.running):
            if request is None:
                continue
            counts[slot] = min(len(request.text) - request.read, 1 + room)
            room -= counts[slot] - 1
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for request, (first, last) in zip(self.running, itertools.pairwise(starts), strict=True):
            if request is not None:
                tokens[first:last] = request.text[request.read : request.read + last - first]
        following, self.pools = run_step(
            self.config, self.params, self.pools, self.table, lengths, tokens, starts
        )
        self._count_bytes(int(np.sum(lengths + counts)))
        return self._advance(np.asarray(following), counts)

    def _advance(self, following: np.ndarray, counts: np.ndarray) -> list[Request]:
        done = []
        for slot, request in enumerate(self.running):
            if request is None:
                continue
            request.read += int(counts[slot])
            if request.read == len(request.text) < request.end:
                request.text.append(int(following[slot]))
            if len(request.text) == request.end:
                self.free.extend(request.pages)
                self.running[slot] = None
                done.append(request)
        return done

    def _count_bytes(self, tokens: int) -> None:
        """Count what a step must read: the parameters, and the keys and values of so many tokens."""
        c = self.config
        per_token = 2 * c.layers * c.kv_heads * (c.width // c.heads) * np.dtype(c.dtype).itemsize
        parameters = sum(x.nbytes for x in jax.tree.leaves(self.params))
        self.bytes_read += parameters + tokens * per_token
        self.steps += 1


def make_requests(serving: Serving, prefix: Sequence[int], seed: int) -> list[Request]:
    """Return requests whose prompts are the prefix and the beginning of a function of the held-out text."""
    rng, (_, held_out) = np.random.default_rng(seed), char_gpt.read_text()
    functions = [x.start() for x in re.finditer(b"^def ", held_out.tobytes(), re.MULTILINE)]
    requests = []
    for _ in range(serving.requests):
        start, length = rng.choice(functions), rng.integers(*serving.prompt, endpoint=True)
        text = [*prefix, *map(int, held_out[start : start + length])]
        requests.append(Request(text, len(text) + int(rng.integers(*serving.new, endpoint=True))))
    return requests


def check_by_dense(
    config: Config, params: Any, done: Sequence[Request], prompts: Sequence[int]
) -> int:
    """Return how many characters were generated, all of which dense attention must give too, after the same text.

    Raises:
      AssertionError: one differs, and by more than a tie.
    """

    @jax.jit
    def logits_of(params: Any, tokens: jax.Array) -> jax.Array:
        return jnp.asarray(GPT(config, "flax").apply(params, tokens[None]))[0]

    count, ties = 0, 0
    for request, prompt in zip(done, prompts, strict=True):
        tokens = np.zeros(config.length, np.int32)
        tokens[: request.end] = request.text
        logits = np.asarray(logits_of(params, tokens))[prompt - 1 : request.end - 1]
        generated = tokens[prompt : request.end]
        behind = logits.max(-1) - logits[np.arange(len(generated)), generated]
        count, ties = count + len(generated), ties + int(np.sum(behind > 0))
        worst = float(behind.max())
        assert worst <= TIE[np.dtype(config.dtype).name], (
            f"a character whose logit is {worst:.3g} below that of dense attention's"
        )
    print(
        f"{count} characters are those of dense decoding"
        + (f", {ties} of them tied" if ties else "")
    )
    return count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--steps", type=int, help="of training, instead of the preset's number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    serving = PRESETS[args.preset]
    steps = serving.steps if args.steps is None else args.steps
    config = dataclasses.replace(char_gpt.PRESETS[args.preset], steps=steps)
    params, _, _ = char_gpt.train(config, "pallas_fa2", args.seed)

    server = Server(config, params, serving, list(PREFIX.encode()))
    requests = make_requests(serving, server.prefix, args.seed)
    prompts = {id(request): len(request.text) for request in requests}
    waiting, done = deque(requests), []
    start, bytes_before, steps_before = time.time(), server.bytes_read, server.steps
    while len(done) < len(requests):
        while waiting and server.has_room:
            server.start(waiting.popleft())
        done += server.step()
    seconds = time.time() - start

    generated = sum(request.end - prompts[id(request)] for request in done)
    print(
        f"{len(done)} requests, {server.steps - steps_before} steps of up to {serving.slots} requests and "
        f"{serving.rows} rows: {generated / seconds:,.0f} characters per second"
    )
    rate = (server.bytes_read - bytes_before) / seconds
    peak = BANDWIDTH.get(jax.devices()[0].device_kind)
    share = "" if peak is None else f", {rate / peak:.1%} of the memory's bandwidth"
    print(f"{rate / 1e9:.3g} GB/s of parameters, keys and values{share}")
    for request in done[:2]:
        print("-" * 40, bytes(request.text[len(server.prefix) :]).decode(), sep="\n")
    print("-" * 40)
    return check_by_dense(config, params, done, [prompts[id(request)] for request in done])


if __name__ == "__main__":
    main()
