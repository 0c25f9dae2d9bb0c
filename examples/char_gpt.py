"""A small GPT with grouped-query attention learns to write Python, one character at a time.

    python examples/char_gpt.py                        # a laptop
    python examples/char_gpt.py --preset h200          # an H200
    python examples/char_gpt.py --attention flax       # the same on Flax's own attention

The text is the top-level modules of Python's standard library, with every tenth file held out. On two CPU cores, 2
million characters take 95 seconds to a held-out loss of 1.51 nats per character, with either attention. On an H200, 538
million parameters train on 10 million characters in bfloat16; MFU, the model's FLOP/s over the peak, is 0.48 to 0.52. A
sample is printed, and the loss curve is written to out/.
"""

import argparse
import dataclasses
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import pallas_fa2 as fa
from pallas_fa2.flax.linen import MultiHeadAttention

VOCABULARY = 128  # ASCII
PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}  # FLOP/s, dense bfloat16


@dataclasses.dataclass(frozen=True)
class Config:
    layers: int
    width: int
    heads: int
    kv_heads: int
    length: int
    batch: int
    steps: int
    rate: float
    dtype: Any = jnp.float32


PRESETS = {
    "cpu": Config(2, 128, 4, 2, length=128, batch=8, steps=2000, rate=4e-3),
    "h200": Config(12, 2048, 16, 4, length=4096, batch=8, steps=300, rate=3e-4, dtype=jnp.bfloat16),
}


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Return the standard library in ASCII codes: the training text and the held-out text."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [x[x < VOCABULARY] for x in (np.fromfile(file, np.uint8) for file in files)]
    return np.concatenate([x for i, x in enumerate(texts) if i % 10]), np.concatenate(texts[::10])


def batches(text: np.ndarray, config: Config, seed: int, count: int) -> Iterator[np.ndarray]:
    """Yield `count` batches of random windows of the text, `[batch, length + 1]`."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        starts = rng.integers(0, len(text) - config.length, (config.batch, 1))
        yield text[starts + np.arange(config.length + 1)].astype(np.int32)


def flax_attention(group: int) -> Any:
    """Return Flax's own layer with our parameters: each key head is repeated for its query heads."""

    def repeat(variables: Any) -> Any:
        shared = {name: variables["params"][name] for name in ("key", "value")}
        repeated = jax.tree.map(lambda x: jnp.repeat(x, group, axis=-2), shared)
        return {"params": {**variables["params"], **repeated}}

    return nn.map_variables(nn.MultiHeadDotProductAttention, "params", trans_in_fn=repeat)


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    config: Config
    attention: str
    decode: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array, start: Any = 0) -> jax.Array:
        """Return the logits `[B, T, vocabulary]` of the character after each of `tokens [B, T]`."""
        c = self.config
        positions = start + jnp.arange(tokens.shape[1])
        x = nn.Embed(VOCABULARY, c.width, dtype=c.dtype, name="characters")(tokens)
        x = x + nn.Embed(c.length, c.width, dtype=c.dtype, name="positions")(positions)
        for i in range(c.layers):
            x = x + self.attend(nn.LayerNorm(dtype=c.dtype)(x), f"attention_{i}")
            y = nn.Dense(4 * c.width, dtype=c.dtype)(nn.LayerNorm(dtype=c.dtype)(x))
            x = x + nn.Dense(c.width, dtype=c.dtype)(nn.gelu(y))
        return nn.Dense(VOCABULARY, name="logits")(nn.LayerNorm()(x))

    def attend(self, x: jax.Array, name: str) -> jax.Array:
        c = self.config
        options = {"num_heads": c.heads, "dtype": c.dtype, "decode": self.decode, "name": name}
        if self.attention == "pallas_fa2":
            return MultiHeadAttention(num_kv_heads=c.kv_heads, causal=True, **options)(x)
        return flax_attention(c.heads // c.kv_heads)(**options)(
            x, mask=nn.make_causal_mask(x[..., 0])
        )


def train(config: Config, attention: str, seed: int) -> tuple[Any, list[float], dict[int, float]]:
    """Return the parameters, the loss of every step, and the held-out loss after every tenth of the steps."""
    text, held_out_text = read_text()
    held_out_batches = list(batches(held_out_text, config, seed=0, count=20))
    schedule = optax.warmup_cosine_decay_schedule(0.0, config.rate, 50, max(config.steps, 51))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))

    @jax.jit
    def loss_of(params: Any, batch: jax.Array) -> jax.Array:
        logits = GPT(config, attention).bind(params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    @jax.jit(donate_argnums=(0, 1))
    def step(params: Any, moments: Any, batch: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    # Both kinds of attention start from the same parameters.
    tokens = jnp.zeros((1, config.length), jnp.int32)
    params = jax.jit(GPT(config, "pallas_fa2").init)(jax.random.key(seed), tokens)
    moments = optimizer.init(params)
    size = sum(x.size for x in jax.tree.leaves(params))
    print(f"{size:,} parameters, {text.size:,} characters, {held_out_text.size:,} held out")

    losses, held_out, per_step = [], {}, config.batch * config.length
    # PaLM (arXiv:2204.02311), appendix B, for causal pairs: embeddings are no products.
    weights = size + (config.layers * config.length - VOCABULARY - config.length) * config.width
    seconds = 6 * per_step * weights / PEAK.get(jax.devices()[0].device_kind, float("inf"))
    mfus, since = [], (0, time.time())
    with tqdm(total=config.steps * per_step, unit=" tokens", unit_scale=True) as bar:
        for batch in batches(text, config, seed, config.steps):
            params, moments, loss = step(params, moments, batch)
            losses.append(loss)
            bar.update(per_step)
            if len(losses) % 10 == 0:  # rarely, as it waits for the device
                value, (steps, start) = float(loss), since
                mfus.append((len(losses) - steps) * seconds / (time.time() - start))
                bar.set_postfix(loss=value, MFU=mfus[-1])
                since = len(losses), time.time()
            if 10 * len(losses) % config.steps < 10:
                held_out[len(losses)] = last = float(
                    np.mean([loss_of(params, x) for x in held_out_batches])
                )
                bar.set_description(f"held out {last:.3f}")
                since = len(losses), time.time()
    if any(mfus):
        print(f"MFU {np.median(mfus):.1%}")
    return params, [float(loss) for loss in losses], held_out


def generate(config: Config, params: Any, prompt: str, seed: int) -> str:
    """Continue a prompt with a cache of keys and values."""
    model = GPT(config, "pallas_fa2", decode=True)
    padded = jnp.asarray([list(prompt.ljust(min(config.length, 256)).encode())])
    _, variables = model.apply(params, padded, mutable=["cache"])

    def step(carry: tuple, i: jax.Array) -> tuple:
        cache, sample = carry
        token = jnp.where(i < len(prompt), padded[:, i], sample)
        logits, new = model.apply({**params, "cache": cache}, token[:, None], i, mutable=["cache"])
        key = jax.random.fold_in(jax.random.key(seed), i)
        return (new["cache"], jax.random.categorical(key, logits[:, 0] / 0.7)), token[0]

    tokens = jax.lax.scan(step, (variables["cache"], padded[:, 0]), jnp.arange(padded.size))[1]
    return bytes(np.asarray(tokens, np.uint8)).decode()


def main(arguments: Sequence[str] | None = None) -> tuple[list[float], dict[int, float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", choices=["flax", "pallas_fa2"], default="pallas_fa2")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--steps", type=int, help="instead of the preset's number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"), help="the folder of the curve")
    args = parser.parse_args(arguments)
    steps = args.steps or PRESETS[args.preset].steps
    config = dataclasses.replace(PRESETS[args.preset], steps=steps)
    shape = (config.batch, config.length, config.heads, config.width // config.heads)
    query = jax.ShapeDtypeStruct(shape, config.dtype)
    key = jax.ShapeDtypeStruct((*shape[:2], config.kv_heads, shape[3]), config.dtype)
    if args.attention == "pallas_fa2":
        print(fa.explain(query, key, key, mask=fa.Causal()))

    params, losses, held_out = train(config, args.attention, args.seed)
    axes = (figure := Figure(layout="constrained")).subplots()
    axes.plot(range(1, config.steps + 1), losses, color="0.7", label="training")
    axes.plot(*zip(*held_out.items(), strict=True), "o-", label="held out")
    axes.set(xlabel="step", ylabel="nats per character")
    axes.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out / f"char_gpt_{args.preset}_{args.attention}.png", dpi=150)
    print(generate(config, params, "def ", args.seed))
    print(f"held-out loss {held_out[config.steps]:.3f} nats per character, curve in {args.out}/")
    return losses, held_out


if __name__ == "__main__":
    main()
