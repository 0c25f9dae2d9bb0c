"""Spec: every bad call is refused before anything is lowered; equal calls have equal Specs."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.parse_call import parse_call
from tests.support.masks import causal_end

B, T, S, N, K, H = 2, 6, 5, 4, 2, 16
CAPTURED = jnp.arange(S)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


GOOD = {"query": array(B, T, N, H), "key": array(B, S, K, H), "value": array(B, S, K, H)}


def arrays(**changes):
    return {**GOOD, **changes}


def of_dtype(dtype):
    return {name: array(*x.shape, dtype=dtype) for name, x in GOOD.items()}


def traced(use):
    """Calls `use` with a scalar tracer."""
    return lambda call: jax.jit(lambda t: call(**use(t)))(1.0)


def plain(**changes):
    return lambda call: call(**changes)


key = jax.random.key
SHAPES = {
    "rank of query": (
        plain(query=array(T, H)),
        r"query must have shape \[\*B, T, N, H\], at least three axes, but it has shape \(6, 16\)",
    ),
    "rank of key": (plain(key=array(S)), r"key must have shape \[\*B, S, K, H\].*shape \(5,\)"),
    "rank of value": (plain(value=array()), r"value must have shape \[\*B, S, K, Hv\].*shape \(\)"),
    "batch of key": (
        plain(key=array(3, S, K, H)),
        r"key must have query's batch axes \(2,\), but it has \(3,\).*jax\.vmap",
    ),
    "batch of value": (
        plain(value=array(S, K, H)),
        r"value must have query's batch axes \(2,\), but it has \(\)",
    ),
    "lengths of key and value": (
        plain(value=array(B, S + 1, K, H)),
        r"key and value must have one length S, but have 5 and 6",
    ),
    "heads of key and value": (
        plain(value=array(B, S, 1, H)),
        r"key and value must have one number of heads K, but have 2 and 1",
    ),
    "head dims": (
        plain(key=array(B, S, K, 8)),
        r"query and key must have one head dim H, but have 16 and 8",
    ),
    "grouped heads": (
        plain(query=array(B, T, 3, H)),
        r"query's heads N \(= 3\) must be a multiple of key's heads K \(= 2\).*n // \(N // K\)",
    ),
    "more key heads than query heads": (
        plain(query=array(B, T, 1, H)),
        r"query's heads N \(= 1\) must be a multiple of key's heads K \(= 2\)",
    ),
    "no queries": (plain(query=array(B, 0, N, H)), r"T \(query's axis -3\) must be .* but is 0"),
    "no keys": (
        plain(key=array(B, 0, K, H), value=array(B, 0, K, H)),
        r"S \(key's axis -3\) must be at least 1, but is 0",
    ),
    "no value dim": (plain(value=array(B, S, K, 0)), r"Hv \(value's axis -1\) must be .* but is 0"),
    "shape of a mask": (
        plain(mask=np.ones((N, T, S + 1), bool)),
        r"^mask must have shape .* T = 6, S = 5.*\(4, 6, 6\)",
    ),
    "shape of mask data": (
        plain(mask=fa.Segments(np.zeros(T, np.int32))),
        r"Segments\(ids=int32\[6\]\): k_tokens\['segment'\] .* S = 5 .*\(6,\)",
    ),
    "shape of a bias": (
        plain(score=fa.bias(np.zeros((N, S, T), np.float32))),
        r"^bias must have shape .*N = 4, T = 6, S = 5.*\(4, 5, 6\)",
    ),
    "positions of another length": (
        plain(q_positions=np.arange(S)),
        r"q_positions must .* 6.* has shape \(5,\)",
    ),
    "one position": (
        plain(kv_positions=np.arange(1)),
        r"kv_positions must give one position a token, 5, but has shape \(1,\)",
    ),
    "positions of another batch": (
        plain(kv_positions=np.zeros((3, S), np.int32)),
        r"kv_positions must .*broadcast to \(2,\).*shape \(3, 5\)",
    ),
}

DTYPES = {
    "a flag that is None": (
        plain(deterministic_gradients=None),
        r"deterministic_gradients must be a Python bool, but it is None; it chooses the backward",
    ),
    "is_causal that is an array": (
        plain(is_causal=np.ones(1)),
        r"is_causal must be a Python bool, but it is array.*mask=",
    ),
    "integers": (
        plain(**of_dtype(jnp.int32)),
        r"query's dtype must be one of bfloat16, float16, .* but it is int32; cast it",
    ),
    "complex": (plain(**of_dtype(jnp.complex64)), r"query's dtype must .* but it is complex64"),
    "booleans": (plain(**of_dtype(jnp.bool_)), r"query's dtype must .* but it is bool"),
    "fp8": (plain(**of_dtype(jnp.float8_e4m3fn)), r"query's dtype must .* it is float8_e4m3fn"),
    "mixed keys": (
        plain(key=array(B, S, K, H, dtype=jnp.bfloat16)),
        r"key's dtype must be query's, float32, but it is bfloat16; cast one",
    ),
    "mixed values": (
        plain(value=array(B, S, K, H, dtype=jnp.float16)),
        r"value's dtype must be query's, float32, but it is float16; cast one",
    ),
    "float mask": (
        plain(mask=np.ones((T, S), np.float32)),
        r"mask must be boolean, but it has dtype float32; pass mask\.astype\(bool\)",
    ),
    "mask of text": (plain(mask="causal"), r"mask must be a mask object, a function .* it is str"),
    "mask function of numbers": (
        plain(mask=lambda q, k: q.index - k.index),
        r"mask FunctionMask\(fn=<lambda>\) must return a boolean .* returns int32\[\]",
    ),
    "score array": (
        plain(score=np.ones((T, S), np.float32)),
        r"score must be a score function .* ndarray; wrap a dense array as bias\(array\)",
    ),
    "score of booleans": (
        plain(score=lambda s, q, k: s > 0),
        r"score Score\(fn=<lambda>\) must return one float32 .* returns bool\[\]",
    ),
    "float positions": (
        plain(q_positions=np.zeros(T, np.float32)),
        r"q_positions must be integers, but it has dtype float32",
    ),
    "scale of each head": (
        plain(scale=np.ones(N, np.float32)),
        r"scale must be one real number, but it has shape \(4,\) .*score_fn",
    ),
    "complex scale": (plain(scale=1j), r"scale must be a finite real number, .* is 1j"),
    "NaN scale": (plain(scale=float("nan")), r"scale must be a finite real number, .* is nan"),
    "NaN scale of NumPy": (plain(scale=np.float32("nan")), r"scale must be a finite .* is nan"),
    "infinite scale": (plain(scale=float("inf")), r"scale must be a finite .* but it is inf"),
    "text scale": (plain(scale="auto"), r"scale must be a finite .* but it is 'auto'"),
}

VALUES = {
    "long scale": (
        plain(scale=10**400),
        r"scale must be at most 3\.4\d*e\+38 in size.*but it is about 10\^400; ",
    ),
    "large scale": (plain(scale=-1e39), r"scale must be at most .*but it is -1e\+39; "),
    "positions of 64 bits": (
        plain(q_positions=np.arange(T) + 2**33),
        r"q_positions must hold integers that fit int32.* 8589934592 to 8589934597; ",
    ),
    "unsigned positions": (
        plain(kv_positions=np.arange(S, dtype=np.uint32) + np.uint32(2**31)),
        r"kv_positions must hold integers that fit int32.* 2147483648 to 2147483652; ",
    ),
    "dropout without a key": (
        plain(dropout_rate=0.1),
        r"dropout_rng must be given where dropout_rate \(= 0\.1\) is not 0: pass a jax\.random",
    ),
    "dropout of all": (
        plain(dropout_rate=1.0, dropout_rng=key(0)),
        r"dropout_rate must be a Python number in \[0, 1\), but it is 1\.0",
    ),
    "negative dropout": (plain(dropout_rate=-0.1), r"dropout_rate must .* but it is -0\.1"),
    "NaN dropout": (plain(dropout_rate=float("nan")), r"dropout_rate must .* but it is nan"),
    "traced dropout": (
        traced(lambda t: {"dropout_rate": t, "dropout_rng": key(0)}),
        r"dropout_rate must be a Python number in \[0, 1\)",
    ),
    "several keys": (
        plain(dropout_rate=0.1, dropout_rng=jax.random.split(key(0))),
        r"dropout_rng must be one key, but it has shape \(2,\).*jax\.vmap",
    ),
    "a seed for a key": (
        plain(dropout_rate=0.1, dropout_rng=42),
        r"dropout_rng must be one key, but it has shape \(\) and dtype int32",
    ),
    "array in a mask": (
        plain(mask=lambda q, k: CAPTURED[k.index] > 2),
        r"mask FunctionMask\(fn=<lambda>\) captures an array of shape \(5,\).*Pass the array as",
    ),
    "array in a score": (
        plain(score=lambda s, q, k: s + CAPTURED[k.index].astype(s.dtype)),
        r"score Score\(fn=<lambda>\) captures an array of shape \(5,\).*Pass the array as",
    ),
    "tracer in a mask": (
        traced(lambda t: {"mask": lambda q, k: q.index.astype(t.dtype) > t}),
        r"mask FunctionMask\(fn=<lambda>\) captures an array of shape \(\)",
    ),
    "unknown implementation": (
        plain(implementation="cudnn"),
        r"implementation must be one of hopper, ampere, blockwise, reference, fused or None, but it is 'cudnn'",
    ),
    "an implementation that cannot run": (
        plain(implementation="hopper"),
        r"implementation 'hopper' does not support this call: .*Hopper GPU.*implementation=None",
    ),
}

BAD = {
    name: (call, error, message)
    for cases, error in ((SHAPES, ValueError), (DTYPES, TypeError), (VALUES, ValueError))
    for name, (call, message) in cases.items()
}


@pytest.mark.parametrize("name", BAD)
def test_invalid_calls_are_errors_before_lowering(name):
    """Nothing can be lowered here: the arrays are shapes."""
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(lambda **changes: fa.explain(**arrays(**changes)))


@pytest.mark.parametrize("name", BAD)
def test_invalid_calls_are_errors_in_flash_attention(name):
    call, error, message = BAD[name]

    def attend(**changes):
        call_arguments = arrays(**changes)
        qkv = [jnp.zeros(call_arguments.pop(n).shape, arrays(**changes)[n].dtype) for n in GOOD]
        return fa.flash_attention(*qkv, **call_arguments)

    with pytest.raises(error, match=message):
        call(attend)


@pytest.mark.parametrize("name", BAD)
def test_every_message_names_the_remedy(name):
    """Behind the rule and the value a further clause or sentence, or a choice in the rule."""
    call, error, _ = BAD[name]
    with pytest.raises(error) as raised:
        call(lambda **changes: fa.explain(**arrays(**changes)))
    message = str(raised.value)
    assert re.search(r"; \w|\. \w|: pass |\bor\b", message), message


HEADS_FIRST = (2, 8, 33, 4), (2, 2, 65, 4)  # [B, N, T, H]


@pytest.mark.parametrize(
    "query, key, options",
    [
        (*HEADS_FIRST, {}),  # 33 heads are no multiple of 65
        ((2, 8, 1, 4), (2, 2, 65, 4), {}),
        ((2, 8, 4, 4), (2, 8, 65, 4), {}),
        ((2, 8, 33, 4), (2, 4, 33, 4), {"mask": np.ones((33, 33), bool)}),
        ((2, 8, 33, 4), (2, 4, 33, 4), {"mask": fa.Segments(np.ones((2, 33), np.int32))}),
    ],
    ids=["shapes", "one query", "few queries", "mask", "tokens"],
)
def test_a_layout_with_heads_first_is_recognized(query, key, options):
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (query, key))
    with pytest.raises(ValueError, match=r"\[\*B, N, T, H\]"):
        fa.explain(q, k, k, **options)


def test_errors_with_symbolic_sizes_suggest_no_layout():
    (batch,) = jax.export.symbolic_shape("b")
    (length,) = jax.export.symbolic_shape("t")
    q, k = (jax.ShapeDtypeStruct((batch, length, heads, 4), jnp.float32) for heads in (8, 3))
    with pytest.raises(ValueError, match="multiple of key's heads"):
        fa.explain(q, k, k)


def test_invalid_heads_suggest_no_layout():
    q, k = (jax.ShapeDtypeStruct((2, 33, heads, 4), jnp.float32) for heads in (8, 3))
    with pytest.raises(ValueError, match="multiple of key's heads") as caught:
        fa.explain(q, k, k)
    assert "[*B, N" not in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
@pytest.mark.parametrize("entry", [fa.flash_attention, fa.dot_product_attention, fa.explain])
def test_non_arrays_are_errors(entry, name):
    qkv = {n: np.zeros(x.shape, x.dtype) for n, x in GOOD.items()}
    with pytest.raises(TypeError, match=rf"{name} must be an array, but it is list"):
        entry(**{**qkv, name: [[[1.0]]]})


def test_explain_takes_what_flash_attention_takes():
    """`explain` describes the same call for each argument."""
    options = {
        "mask": fa.Window(1), "is_causal": True, "score": fa.soft_cap(2.0), "scale": 0.5, "sinks": np.zeros(N, np.float32),
        "dropout_rate": 0.5, "dropout_rng": key(0), "align": "end", "q_positions": np.arange(T),
        "kv_positions": np.arange(S), "return_lse": True, "deterministic_gradients": True,
        "implementation": "reference",
    }  # fmt: skip
    assert {*GOOD, *options} == set(inspect.signature(fa.flash_attention).parameters)
    needed = {"dropout_rate": {"dropout_rng": key(0)}, "align": {"mask": fa.Causal()}}
    plain, of_call = spec(), {"sinks", "return_lse", "implementation"}
    for option, value in options.items():
        explanation = fa.explain(**GOOD, **{option: value}, **needed.get(option, {}))
        if option not in of_call | {"dropout_rng"}:
            assert explanation.spec != plain, option
            assert explanation.spec == spec(**{option: value}, **needed.get(option, {})), option
    assert fa.explain(**GOOD, implementation="reference").implementation == "reference"
    with pytest.raises(ValueError, match="sinks must be floats of shape"):
        fa.explain(**GOOD, sinks=np.zeros(N + 1))


def spec(**options):
    return parse_call(**arrays(**options))[0]


def options():
    """Equal for every call, with functions made anew."""
    return {
        "mask": fa.Causal() & (lambda q, k: q.index != k.index + 3) | fa.Prefix(np.int32(2)),
        "score": (lambda s, q, k: s * 0.5, fa.soft_cap(3.0), fa.alibi(N)),
        "scale": 0.3,
        "dropout_rate": 0.1,
        "dropout_rng": key(0),
    }


def test_equal_calls_have_equal_specs():
    first, second = spec(**options()), spec(**options())
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "change",
    [
        {"mask": None},
        {"mask": fa.Causal() & (lambda q, k: q.index != k.index + 2) | fa.Prefix(np.int32(2))},
        {"mask": fa.Causal() & (lambda q, k: q.index != k.index + 3) | fa.Chunked(2)},
        {"score": ()},
        {"score": (lambda s, q, k: s * 0.5, fa.soft_cap(3.0000002), fa.alibi(N))},
        {"score": (fa.soft_cap(3.0), lambda s, q, k: s * 0.5, fa.alibi(N))},
        {"scale": 0.3000001},
        {"dropout_rate": 0.2},
        {"q_positions": np.arange(T)},
        {"query": array(B, T + 1, N, H)},
        of_dtype(jnp.bfloat16),
    ],
    ids=lambda change: ",".join(change),
)
def test_different_calls_have_different_specs(change):
    assert spec(**{**options(), **change}) != spec(**options())


@pytest.mark.parametrize("seed", [1, 2])
def test_specs_do_not_depend_on_data_and_keys(seed):
    data = np.random.default_rng(seed).integers(0, 9, S, np.int32)
    masked = {"mask": fa.Segments(data[:1], data), "dropout_rng": key(seed)}
    other = {"mask": fa.Segments(data[1:2], 1 + data), "dropout_rng": key(0)}
    assert spec(**{**options(), **masked}) == spec(**{**options(), **other})


def test_a_spec_is_printed_with_all_fields():
    text = str(spec(**options()))
    terms = ["float32 [B 2, T 6, S 5, N 4, K 2, H 16, Hv 16]", "scale 0.3", "dropout 0.1"]
    terms += ["mask ((Causal() & FunctionMask(fn=<lambda>)) | Prefix(length=int32[]))"]
    terms += [
        "score Score(fn=<lambda>), Score(fn=SoftCap(cap=3.0)), Score(fn=_linear_bias, heads={slope:"
    ]
    for part in terms:
        assert part in text
    assert "dropout" not in str(spec())


def test_the_scale_is_that_of_the_head_dim():
    assert spec().scale == pytest.approx(0.25)
    assert spec(scale=np.float32(0.5)).scale == 0.5
    assert spec(scale=2).scale == 2.0


@pytest.mark.parametrize(
    "mask, causal",
    [(None, None), (fa.Causal(), "start"), (causal_end, "end"), (fa.Window(1), None),
     (fa.Causal() & fa.Window(1), None)],
)  # fmt: skip
def test_causal_is_set_for_purely_causal_masks(mask, causal):
    assert spec(mask=mask).causal == causal
    assert spec(mask=mask, q_positions=np.arange(T)).causal is None


def test_batch_axes_are_merged():
    merged = parse_call(array(2, 3, T, N, H), array(2, 3, S, K, H), array(2, 3, S, K, 8))[0]
    assert (merged.batch, merged.value_dim, merged.group) == (6, 8, 2)
    assert parse_call(array(T, N, H), array(S, K, H), array(S, K, H))[0].batch == 1


def test_raw_and_typed_keys_are_equivalent():
    typed = parse_call(**arrays(dropout_rate=0.1, dropout_rng=key(3)))[1].seed
    raw = parse_call(**arrays(dropout_rate=0.1, dropout_rng=jax.random.PRNGKey(3)))[1].seed
    np.testing.assert_array_equal(typed, raw)


def test_keys_of_all_generators_are_supported():
    call_arguments = jax.random.key(3, impl="rbg")
    seed = parse_call(**arrays(dropout_rate=0.1, dropout_rng=call_arguments))[1].seed
    assert seed.shape == (2,) and seed.dtype == jnp.uint32


def test_the_seed_depends_on_both_words_of_a_key():
    """Keys made of small numbers differ in the second one alone."""

    def seed(rng):
        return parse_call(**arrays(dropout_rate=0.1, dropout_rng=rng))[1].seed.tolist()

    assert seed(key(3)) == [0, 3] and seed(jnp.array([5, 9], jnp.uint32)) == [5, 9]
    words = jax.random.key_data(jax.random.key(3, impl="rbg"))
    assert seed(jax.random.key(3, impl="rbg")) == [words[0] ^ words[2], words[1] ^ words[3]]
