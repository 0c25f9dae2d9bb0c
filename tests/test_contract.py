"""Every implementation against dense softmax in float64, by one contract suite.

Here NumPy runs what is traced, for XLA takes longest of all to compile it. `pytest -m gpu` runs the plain cases on the
Hopper kernels; `tests/test_sm90.py` runs them interpreted.
"""

import dataclasses
import re

import jax.numpy as jnp
import pytest

from pallas_fa2.backends.sm90.configs import ConfigRule
from tests.contract import suite
from tests.contract.cases import GENERAL, MASKED, PLAIN, Case
from tests.support import interpreter
from tests.support.hopper import each_variant, is_first, name, planned_with, runs_on_ampere
from tests.support.tiers import slow_but

# Head dims and the kernels' own lengths are nothing for which reference and blockwise have branches.
ALIKE = re.compile(
    r"h\d+(_.*)?|hv_(smaller.*|much_smaller|larger)|odd_h\d+|rising_4_.*|rising_7_h(128|256)"
    r"|float16_.*"
)
# One for each kind of branch in the loops of blockwise, and each dtype.
COMPILED = (
    "causal_1000",
    "causal_end_one_query",
    "h96",
    "lengths_33x90",
    "biased_and_capped_causal",
)


def in_16_bits(case: Case) -> Case:
    is_wide = case.dtype == jnp.float32
    return dataclasses.replace(case, dtype=jnp.bfloat16) if is_wide else case


@pytest.mark.parametrize(
    "case", slow_but(lambda case: not ALIKE.fullmatch(case.name), PLAIN + GENERAL), ids=str
)
def test_contract_of_reference_and_blockwise(case: Case) -> None:
    suite.check(case, "reference", "blockwise", jit=interpreter.jit)


@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in COMPILED, PLAIN + GENERAL), ids=str
)
def test_contract_of_compiled_xla_backends(case: Case) -> None:
    suite.check(case, "reference", "blockwise")


@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in COMPILED, PLAIN + GENERAL), ids=str
)
def test_contract_of_caches(case: Case) -> None:
    suite.check(case, "reference", "blockwise", jit=interpreter.jit, on_cache=True)


@pytest.mark.parametrize("quantized", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize(
    "case", slow_but(lambda case: case.name in COMPILED, PLAIN + GENERAL), ids=str
)
def test_contract_of_caches_of_8_bits(case: Case, quantized: str) -> None:
    options = {"on_cache": True, "gradients": False, "quantized": quantized}
    suite.check(case, "reference", "blockwise", jit=interpreter.jit, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("case, tuned", each_variant(PLAIN + MASKED), ids=name)
def test_contract_of_hopper(case: Case, tuned: ConfigRule) -> None:
    gradients = is_first(case, tuned)
    with planned_with(tuned):
        suite.check(case, "hopper", gradients=gradients)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [in_16_bits(case) for case in PLAIN + GENERAL if runs_on_ampere(case)], ids=str
)
def test_contract_of_hopper_on_caches(case: Case) -> None:
    suite.check(case, "hopper", gradients=False, on_cache=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [case for case in PLAIN + MASKED + GENERAL if runs_on_ampere(case)], ids=str
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_contract_of_ampere(case: Case, deterministic: bool) -> None:
    suite.check(case, "ampere", deterministic=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize("case", PLAIN + MASKED + GENERAL, ids=str)
def test_contract_of_blockwise_on_a_gpu(case: Case) -> None:
    suite.check(case, "blockwise")
