"""The GPT of examples/char_gpt.py reads contexts that are divided over devices, without a change.

    python -m examples.long_context                    # 32,768 characters over 8 virtual devices of a CPU
    python -m examples.long_context --preset gpus      # 262,144 characters over two GPUs

Nothing is done but to place the characters: `P(None, "sequence")` divides each context over the devices. XLA divides
all that is done for each character, and `flash_attention` sends keys and values around the devices; queries stay where
they are. Which transfers a step has is printed, and what it takes of each device's memory. Two CPU cores take three
minutes.
"""

import argparse
import collections
import contextlib
import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.char_gpt import GPT, Config, batches, read_text

DEVICES = {"cpu": 8, "gpus": 2}
PRESETS = {
    "cpu": Config(1, 32, 2, 1, length=32768, batch=1, steps=10, rate=3e-2),
    "gpus": Config(4, 1024, 8, 2, length=262144, batch=1, steps=100, rate=1e-3, dtype=jnp.bfloat16),
}


def transfers(program: Any) -> dict[str, int]:
    """Return how many transfers of each kind a compiled program has; those of a loop are counted once."""
    kinds = r"(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    return dict(collections.Counter(re.findall(rf" {kinds}(?:-start)?\(", program.as_text())))


def train(config: Config, devices: Sequence[Any], seed: int) -> list[float]:
    """Return the loss of every step."""
    text, _ = read_text()
    mesh = jax.make_mesh((len(devices),), ("sequence",), (AxisType.Auto,), devices=devices)
    divided, whole = NamedSharding(mesh, P(None, "sequence")), NamedSharding(mesh, P())
    model = GPT(config, "pallas_fa2")
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(config.rate))

    def loss_of(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        logits = model.bind(params)(tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def step(params: Any, moments: Any, tokens: jax.Array, targets: jax.Array) -> tuple:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens, targets)
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments, loss

    # The parameters do not depend on the length, but for the table of positions.
    params = jax.jit(model.init, out_shardings=whole)(
        jax.random.key(seed), jnp.zeros((1, len(devices)), jnp.int32)
    )
    moments = jax.jit(optimizer.init, out_shardings=whole)(params)
    program, losses = None, []
    for batch in batches(text, config, seed, config.steps):
        tokens, targets = (jax.device_put(x, divided) for x in (batch[:, :-1], batch[:, 1:]))
        arguments = params, moments, tokens, targets
        if program is None:
            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
            program, memory = compiled, compiled.memory_analysis()
            print(f"transfers {transfers(program)}")
            if memory is not None:
                print(f"{memory.temp_size_in_bytes / 2**20:,.0f} MiB of temporaries on each device")
        start = time.perf_counter()
        params, moments, loss = program(*arguments)
        losses.append(float(loss))
        seconds = time.perf_counter() - start
        speed = batch[:, 1:].size / seconds
        print(f"step {len(losses)}: {losses[-1]:.3f} nats per character, {speed:,.0f} characters/s")
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--devices", type=int, help="instead of the preset's number")
    parser.add_argument("--steps", type=int, help="instead of the preset's number")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    count = args.devices or DEVICES[args.preset]
    if args.preset == "cpu":
        with contextlib.suppress(RuntimeError):  # JAX has counted its devices already
            jax.config.update("jax_num_cpu_devices", max(count, DEVICES["cpu"]))
    devices = jax.devices()
    if len(devices) < count:
        raise SystemExit(
            f"{count} devices are needed, but there are {len(devices)}; pass --devices"
        )
    config = dataclasses.replace(
        PRESETS[args.preset], steps=args.steps or PRESETS[args.preset].steps
    )
    print(f"{config.length:,} characters over {count} devices")
    return train(config, devices[:count], args.seed)


if __name__ == "__main__":
    main()
