"""Score functions and dropout on the mma.sync kernels: values, and gradients of all that they read."""

import pytest

from tests.support import interpreter
from tests.support.hopper import A100, planned_for
from tests.support.tiers import slow
from tests.test_sm90_scores import ON_A_GPU, check


# Dropout in each kind of backward kernel, and gradients of each kind of data; the device runs all cases.
@pytest.mark.parametrize(
    "name, t, s, head_dim",
    [
        ("dropped", 70, 75, 64),
        ("dropped_at_places", 70, 75, 128),
        slow("dropped_capped_causal_end", 70, 75, 96),
        slow("dropped_biased", 70, 75, 256),
        ("learned_cap_causal_end", 150, 75, 64),
        slow("learned_cap_documents", 75, 75, 128),
        ("infinite_in_the_padding", 70, 101, 256),
        slow("biased_and_capped_holes", 70, 139, 64),
        ("biased_in_16_bits_causal", 70, 75, 128),
        slow("biased", 70, 75, 96),
        slow("elementary", 70, 75, 192),
    ],
)
def test_scores_interpreted(name: str, t: int, s: int, head_dim: int) -> None:
    with planned_for(A100):
        check(name, t, s, head_dim, (2, 1), interpreter.run, "ampere")


@pytest.mark.gpu
@pytest.mark.parametrize("name, head_dim", ON_A_GPU)
def test_scores_on_a_gpu(name: str, head_dim: int) -> None:
    check(name, 261, 139, head_dim, implementation="ampere")
