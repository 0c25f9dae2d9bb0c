"""The launch of a decode kernel of any architecture."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_fa2.backends.common.decode.arrays import Cta, Inputs, Outputs
from pallas_fa2.backends.common.decode.config import DecodeConfig, reduction_bytes
from pallas_fa2.backends.common.decode.spec import DecodeSpec
from pallas_fa2.backends.common.primitives.launch import build_kernel


def launch(
    spec: DecodeSpec,
    config: DecodeConfig,
    inputs: Inputs,
    out_type: jax.ShapeDtypeStruct,
    memory: Any,
    visit_share: Callable[[Cta[Any]], None],
) -> tuple[jax.Array, jax.Array]:
    """Return out, of the type that the kernel wants, and natural lse `[tokens, N]`, float32.

    `memory` is the kernel's shared memory, and `visit_share` what each CTA does.
    """
    flat, tree = jax.tree.flatten(inputs)

    def run(refs: tuple, memory: Any) -> None:
        inputs, outputs = jax.tree.unflatten(tree, refs[: len(flat)]), Outputs(*refs[len(flat) :])
        visit_share(Cta(spec, config, inputs, outputs, memory))

    kernel = build_kernel(
        "decode",
        run,
        memory,
        tuple(Outputs.types(spec, config, out_type)),
        {"cta": config.num_ctas},
        1,
        reduction_bytes=reduction_bytes(spec),
    )
    out, lse, *_ = kernel(*flat)
    return out, lse.reshape(spec.num_tokens, spec.q_heads)
