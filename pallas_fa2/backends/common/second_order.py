"""Refuses second derivatives of the kernels."""

from typing import Any

import jax


@jax.custom_jvp
def forbid_second_order(arrays: tuple) -> tuple:
    """Return the arrays; their derivative raises `NotImplementedError`."""
    return arrays


@forbid_second_order.defjvp
def _(*_: Any) -> Any:
    raise NotImplementedError(
        "the gradients of the fused kernels cannot be differentiated again; ask for "
        "implementation='blockwise' where second derivatives are needed"
    )
