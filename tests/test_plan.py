"""Which implementation runs a call, why the faster ones do not, and on which tiles."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa2 as fa
from pallas_fa2.backends.common import limits
from pallas_fa2.backends.common.compile_mods import pairwise_bytes
from pallas_fa2.backends.registry import BACKENDS
from pallas_fa2.backends.sm80 import configs, multiprocessor
from pallas_fa2.backends.sm90.backward.config import BackwardConfig
from pallas_fa2.backends.sm90.configs import FORWARD_CONFIGS, forward_configs
from pallas_fa2.backends.sm90.support import MAX_TOKEN_ROWS
from pallas_fa2.backends.xla.blockwise import TILE_BYTES, block_sizes
from pallas_fa2.device import Device, device_of
from pallas_fa2.parse_call import parse_call
from pallas_fa2.planning.plan import make_plan
from tests.support.hopper import A100
from tests.support.masks import causal_end

CPU = Device("cpu", "cpu", "", 1)
H200 = Device("gpu", "NVIDIA H200", "9.0", 132)
NO_GPUS = [CPU, Device("tpu", "TPU v5e", "", 1)]
GPUS = [
    Device("gpu", "NVIDIA A100-SXM4-80GB", "8.0", 108),
    Device("gpu", "NVIDIA GeForce RTX 3090", "8.6", 82),
    Device("gpu", "NVIDIA GeForce RTX 4090", "8.9", 128),
    Device("gpu", "NVIDIA B200", "10.0", 148),
    Device("gpu", "NVIDIA GeForce RTX 5090", "12.0", 170),
]


def spec(
    *, batch=2, q_len=111, kv_len=63, heads=(4, 2), dims=(64, 64), dtype=jnp.bfloat16, **options
):
    q, k, v = (
        jax.ShapeDtypeStruct((batch, n, h, d), dtype)
        for n, h, d in (
            (q_len, heads[0], dims[0]),
            (kv_len, heads[1], dims[0]),
            (kv_len, heads[1], dims[1]),
        )
    )
    return parse_call(q, k, v, **options)[0]


SUPPORTED = {
    "plain": {},
    "float16": {"dtype": jnp.float16},
    "causal": {"mask": fa.Causal()},
    "causal to the end": {"mask": causal_end, "q_len": 1, "kv_len": 1000},
    "one token": {"q_len": 1, "kv_len": 1},
    "multi-query": {"heads": (8, 1)},
    "head dim 8": {"dims": (8, 8)},
    "head dim 72": {"dims": (72, 72)},
    "head dim 128": {"dims": (128, 128)},
    "head dim 256": {"dims": (256, 256)},
    "other value dim": {"dims": (192, 128)},
    "scale": {"scale": 0.3},
    "positions that nothing reads": {"q_positions": np.arange(111)},
    "window": {"mask": fa.Window(3)},
    "packed documents": {"mask": fa.Causal() & fa.Segments(np.zeros(63, np.int32)), "q_len": 63},
    "function of data": {
        "mask": fa.mask_fn(lambda q, k, c: (q.index % 3 == k.a) | (c.x > 0.5))(
            k_tokens={"a": np.zeros(63, np.int32)}, heads={"x": np.zeros(4, np.float32)}
        )
    },
    "soft cap": {"score": fa.soft_cap(5.0)},
    "alibi under a mask": {"score": fa.alibi(4), "mask": fa.Window(3)},
    "causal positions": {"mask": fa.Causal(), "q_positions": np.arange(111)},
    "dense mask of large heads": {"mask": np.ones((2, 1, 111, 63), bool), "dims": (256, 256)},
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_hopper_runs_what_it_supports(name):
    plan = make_plan(spec(**SUPPORTED[name]), H200)
    assert plan.implementation == "hopper"
    assert plan.rejected == ()


def _sum_of_13(s, q, k):
    return s + sum(getattr(k, f"x{i}") for i in range(13))


REFUSED = {
    "float32": ({"dtype": jnp.float32}, r"bfloat16 or float16, not float32"),
    "dense masks of large heads": (
        {"mask": np.ones((4, 111, 63), bool), "dims": (160, 64)},
        r"differs between heads head dims are at most 128, and here is 160",
    ),
    "bias of large heads": (
        {"score": fa.bias(np.ones((111, 63), np.float32)), "dims": (160, 64)},
        r"with scores of data of pairs, head dims are at most 128, and here is 160",
    ),
    "table": (
        {"mask": fa.mask_fn(lambda q, k, c: c.t[0] > q.index)(params={"t": np.arange(3)})},
        r"single numbers, not arrays of shape \(3,\)",
    ),
    "small integers": (
        {"mask": fa.Segments(np.zeros(111, np.int8), np.zeros(63, np.int8))},
        r"masks read bool, int32, uint32, float32, not int8",
    ),
    "product of floats": (
        {"mask": lambda q, k: q.index.astype(jnp.float32) * 0.5 > k.index.astype(jnp.float32)},
        r"masks compute no mul of float32",
    ),
    "loop": (
        {"mask": lambda q, k: jax.lax.fori_loop(0, 3, lambda i, x: x + k.index, q.index) > 5},
        r"masks compute no scan",
    ),
    "too many blocks": (
        {"mask": fa.Window(3), "q_len": 1 << 19, "heads": (8, 2)},
        r"its masks list 32767 blocks at most, and here are 32768",
    ),
    "three numbers a pair": (
        {"score": tuple(fa.bias(np.ones((111, 63), np.float32)) for _ in range(3))},
        r"too many for shared memory \(12 bytes a pair\)",
    ),
    "thirteen arrays of keys": (
        {
            "score": fa.score_fn(_sum_of_13)(
                k_tokens={f"x{i}": np.ones(63, np.float32) for i in range(13)}
            )
        },
        r"read 12 arrays of keys at most, and here are 13",
    ),
    "score with a loop": (
        {"score": lambda s, q, k: jax.lax.fori_loop(0, 3, lambda i, x: x * 2.0, s)},
        r"scores compute no scan",
    ),
    "score that rounds": (
        {"score": lambda s, q, k: s.astype(jnp.bfloat16).astype(s.dtype)},
        r"scores compute no convert_element_type of bfloat16",
    ),
    "head dim 264": ({"dims": (264, 64)}, r"multiples of 8 up to 256, but H is 264"),
    "head dim 20": ({"dims": (20, 64)}, r"multiples of 8 up to 256, but H is 20"),
    "value dim 12": ({"dims": (64, 12)}, r"multiples of 8 up to 256, but Hv is 12"),
    "negative scale": ({"scale": -1.0}, r"scale must be positive, but it is -1"),
    "scale 0": ({"scale": 0}, r"scale must be positive, but it is 0"),
    "queries too large": (
        {"q_len": 1 << 22, "heads": (8, 2), "dims": (64, 64)},
        r"2\^31 elements",
    ),
    "keys too large": ({"kv_len": 1 << 22, "heads": (8, 8)}, r"2\^31 elements"),
    "too many heads": ({"heads": (65_536, 2)}, r"65535 heads at most, and here are 65536"),
    "too many queries": ({"q_len": 5_000_000, "dims": (64, 64)}, r"4194240 .* here are 5000000"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hopper_leaves_the_rest_to_others_and_says_why(name):
    options, reason = REFUSED[name]
    plan = make_plan(spec(**options), H200)
    assert plan.implementation in ("ampere", "blockwise")
    rejected, why = plan.rejected[0]
    assert rejected == "hopper"
    assert re.search(reason, why), why


def test_what_hopper_has_no_shared_memory_for_runs_on_ampere():
    """Its kernels read aux inputs from device memory."""
    for name in ("dense masks of large heads", "bias of large heads", "three numbers a pair"):
        assert make_plan(spec(**REFUSED[name][0]), H200).implementation == "ampere", name


def test_all_token_data_fit_shared_memory():
    dims = {(tuned.config.head_dim, tuned.config.value_dim) for tuned in FORWARD_CONFIGS}
    for head_dims in dims:
        kernels, indices = forward_configs(*head_dims), 1
        rooms = [
            tuned.config.free_smem(MAX_TOKEN_ROWS + indices) for tuned in kernels if tuned.for_mods
        ]
        assert max(rooms) >= 0, head_dims
    for head_dim in (64, 96, 128):
        of_dropout = 2
        assert BackwardConfig(head_dim, head_dim).free_smem(MAX_TOKEN_ROWS + of_dropout) >= 0, (
            head_dim
        )


@pytest.mark.parametrize(
    "dims, rows, buffers, columns",
    [
        ((128, 128), 0, 2, 128),
        ((128, 128), 2, 2, 128),
        ((128, 128), 3, 2, 64),
        ((128, 128), MAX_TOKEN_ROWS + 1, 2, 64),
        ((192, 192), MAX_TOKEN_ROWS + 1, 2, 96),
        ((256, 256), 0, 1, 64),
    ],
)
def test_queries_come_ahead_where_there_is_room(dims, rows, buffers, columns):
    general = next(tuned.config for tuned in forward_configs(*dims) if tuned.for_mods)
    ahead = general.with_double_buffered_q(rows)
    assert (ahead.q_stages, ahead.epilogue_columns) == (buffers, columns)
    assert ahead.free_smem(rows) >= 0
    in_registers = dataclasses.replace(general, q_in_registers=True)
    assert in_registers.with_double_buffered_q(rows) == in_registers


@pytest.mark.parametrize("rows", range(MAX_TOKEN_ROWS + 2))
def test_what_leaves_together_makes_up_an_output(rows):
    for tuned in FORWARD_CONFIGS:
        config = tuned.config.with_double_buffered_q(rows)
        columns = [i for x in config.epilogue_tiles for i in range(x.start, x.start + x.size)]
        assert columns == list(range(config.value_dim)), tuned


def test_values_that_are_multiplied_at_once_make_up_a_block():
    for tuned in FORWARD_CONFIGS:
        keys = [
            i for part in tuned.config.pv_chunks for i in range(part.start, part.start + part.size)
        ]
        assert keys == list(range(tuned.config.block_kv)), tuned


@pytest.mark.parametrize("head_dims", [(96, 96), (192, 128)])
def test_a_mask_alone_takes_larger_tiles_than_a_score(head_dims):
    def planned(**options):
        q, k = (jax.ShapeDtypeStruct((1, 300, 2, head_dims[0]), jnp.bfloat16) for _ in range(2))
        v = jax.ShapeDtypeStruct((1, 300, 2, head_dims[1]), jnp.bfloat16)
        return make_plan(parse_call(q, k, v, **options)[0], H200).forward

    window, cap = fa.Window(3), fa.soft_cap(2.0)
    alone, scored = planned(mask=window), planned(score=cap)
    assert alone != scored == planned(mask=window, score=cap)
    assert alone == planned(mask=fa.Causal())
    assert alone == planned(mask=fa.Dense(jnp.ones((300, 300), bool)))
    if head_dims == (96, 96):
        assert planned(mask=fa.Dense(jnp.ones((2, 300, 300), bool))) == scored


ZEROS = np.zeros(111, np.int32)
SEGMENTS = fa.Segments(ZEROS, ZEROS[:63])


@pytest.mark.parametrize(
    "dtype, mask, head_dim, block_kv",
    [
        (jnp.bfloat16, None, 128, 128),
        (jnp.float32, None, 128, 64),
        (jnp.bfloat16, SEGMENTS, 128, 128),
        (
            jnp.bfloat16,
            SEGMENTS & fa.mask_fn(lambda q, k: k.a > 0)(k_tokens={"a": ZEROS[:63]}),
            128,
            64,
        ),
        (jnp.float32, None, 64, 128),
    ],
)
def test_blocks_of_keys_leave_room_for_pairs(dtype, mask, head_dim, block_kv):
    score = fa.bias(jnp.zeros((111, 63), dtype))
    call = spec(score=score, mask=mask, dims=(head_dim, head_dim))
    assert make_plan(call, H200).forward.block_kv == block_kv


def test_an_array_that_is_asked_about_before_takes_no_room():
    array = fa.Dense(np.ones((111, 63), bool))
    for mask, size, buffers in ((array, 0, 2), (fa.Dense(np.ones((4, 111, 63), bool)), 2, 1)):
        call = spec(mask=mask, dims=(128, 128))
        forward = make_plan(call, H200).forward
        assert pairwise_bytes(call) == size
        assert (forward if size else forward.with_double_buffered_q(0)).q_stages == buffers
    call = spec(mask=array, score=fa.soft_cap(3.0), dims=(256, 256))
    assert make_plan(call, H200).implementation == "hopper"


@pytest.mark.parametrize("device", NO_GPUS, ids=lambda device: device.kind)
def test_devices_without_kernels_run_blockwise(device):
    plan = make_plan(spec(), device)
    assert plan.implementation == "blockwise"
    assert [name for name, _ in plan.rejected] == ["hopper", "ampere"]
    for _, why in plan.rejected:
        assert device.kind in why


@pytest.mark.parametrize("device", GPUS, ids=lambda device: device.kind)
def test_other_gpus_run_ampere(device):
    plan = make_plan(spec(), device)
    assert plan.implementation == "ampere"
    ((name, why),) = plan.rejected
    assert name == "hopper" and "compute capability 9.0" in why and device.kind in why


def test_gpus_before_ampere_are_refused_before_anything_is_lowered():
    turing = Device("gpu", "Tesla T4", "7.5", 40)
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or more, and Tesla T4 has 7\.5"):
        make_plan(spec(), turing, "ampere")


@pytest.mark.parametrize("device", [H200, *GPUS], ids=lambda device: device.kind)
@pytest.mark.parametrize("options", [{}, {"deterministic_gradients": True}])
@pytest.mark.parametrize("dims", [(64, 64), (96, 80), (128, 128)])
def test_every_gpu_runs_float32_and_its_gradients_on_ampere(device, options, dims):
    plan = make_plan(spec(dtype=jnp.float32, dims=dims, **options), device)
    assert plan.implementation == "ampere" and plan.forward.is_split
    for score_gradients in (False, True):
        assert plan.backward_for(score_gradients) == ("ampere", plan.backward)
    assert plan.backward.is_split and plan.backward.adds_dq in (not options, False)
    assert plan.backward.dq is None or plan.backward.dq.is_split


@pytest.mark.parametrize(
    "dims, smallest", [((192, 128), "9.0"), ((192, 192), "9.0"), ((256, 256), "")]
)
def test_blockwise_forms_gradients_of_float32_where_no_kernel_fits(dims, smallest):
    for device in (H200, GPUS[0]):
        plan = make_plan(spec(dtype=jnp.float32, dims=dims), device)
        name, tiles = plan.backward_for(score_gradients=False)
        assert plan.implementation == "ampere"
        if device.capability == smallest:
            assert name == "ampere" and tiles.is_split
        else:
            assert name == "blockwise" and tiles == make_plan(spec(), CPU).backward


def test_float32_of_large_heads_needs_shared_memory():
    call, dense = spec(dtype=jnp.float32, dims=(256, 256)), fa.Dense(np.ones((111, 63), bool))
    assert configs.configure(call, GPUS[0]).forward.block_kv == 32
    masked = spec(dtype=jnp.float32, dims=(256, 256), mask=dense)
    assert configs.configure(masked, H200).forward.block_kv == 64  # as the bits of a mask
    for refused, device in ((call, GPUS[1]), (masked, GPUS[0])):
        reason = make_plan(refused, device).rejected[1][1]
        assert "for float32 and these head dims needs" in reason and device.kind in reason


def test_kernels_fit_into_the_shared_memory_of_each_gpu():
    for device in GPUS:
        for dims, deterministic in itertools.product(limits.KERNEL_DIMS, (False, True)):
            call = spec(dims=dims, deterministic_gradients=deterministic)
            forward, backward, *_ = configs.configure(call, device)
            assert max(forward.smem_bytes, backward.smem_bytes) <= multiprocessor.smem_bytes(device)
            call = spec(dims=dims, dtype=jnp.float32, deterministic_gradients=deterministic)
            if configs.unsupported_reason(call, device) is None:
                forward, backward, *_ = configs.configure(call, device)
                assert forward.smem_bytes <= multiprocessor.smem_bytes(device)
                assert backward is None or backward.smem_bytes <= multiprocessor.smem_bytes(device)


@pytest.mark.parametrize(
    "device, ctas",  # of the forward, of dK and dV, and of dQ at H = 128
    [(H200, (264, 132, 264)), (GPUS[0], (216, 108, 108)), (GPUS[1], (82, 82, 82))],
)
def test_ampere_orders_masked_tiles_for_as_many_ctas_as_run_at_the_same_time(device, ctas):
    """On a multiprocessor two of 4 warps run, if shared memory has room, or one of 8 warps."""
    call = spec(dims=(128, 128), deterministic_gradients=True)
    forward, backward, *_ = configs.configure(call, device)
    assert (forward.num_ctas, backward.num_ctas, backward.dq.num_ctas) == ctas
    assert forward in configs.candidates(call, device)


@pytest.mark.parametrize("name", ["reference", "blockwise", "ampere", "hopper"])
def test_a_requested_implementation_is_chosen(name):
    plan = make_plan(spec(), H200, name)
    assert plan.implementation == name
    assert plan.rejected == ()


@pytest.mark.parametrize("name", ["reference", "blockwise"])
def test_reference_and_blockwise_support_every_call(name):
    for device in (CPU, H200):
        for options, _ in REFUSED.values():
            assert make_plan(spec(**options), device, name).implementation == name


def test_an_unsupported_implementation_is_an_error_with_the_reason():
    with pytest.raises(
        ValueError, match=r"'hopper' does not support.*float32.*implementation=None"
    ):
        make_plan(spec(dtype=jnp.float32), H200, "hopper")
    with pytest.raises(
        ValueError, match=r"needs a Hopper GPU .*this is cpu.*bfloat16 \[B 2, T 111"
    ):
        make_plan(spec(), CPU, "hopper")


def test_an_unknown_implementation_is_an_error_with_the_known_ones():
    with pytest.raises(
        ValueError, match=", ".join(BACKENDS) + r", fused or None, but it is 'triton'"
    ):
        make_plan(spec(), CPU, "triton")


def test_implementations_are_tried_from_the_fastest():
    assert list(BACKENDS) == ["hopper", "ampere", "blockwise", "reference"]


def test_plans_are_hashable_and_equal_for_equal_calls():
    first, second = (make_plan(spec(mask=fa.Causal()), H200) for _ in range(2))
    assert first == second and hash(first) == hash(second)


@pytest.mark.parametrize(
    "dims, sizes",
    [
        *(
            (dims, (size, size))
            for dim, size in ((8, 64), (64, 64), (80, 96), (72, 128), (128, 128), (200, 256))
            for dims in ((dim, 8), (8, dim))
        ),
        ((144, 128), (192, 128)),
        ((192, 144), (192, 192)),
        ((8, 144), (192, 192)),
        ((192, 120), (192, 128)),
        ((136, 128), (256, 256)),
    ],
)
def test_the_hopper_kernels_are_the_next_size_up(dims, sizes):
    """An odd multiple of 8 runs on the next size whose panels have 128 bytes."""
    plan = make_plan(spec(dims=dims), H200)
    for config in (plan.forward, plan.backward):
        assert (config.head_dim, config.value_dim) == sizes


@pytest.mark.parametrize("batch, heads", [(1, 1), (2, 8), (64, 32), (4096, 64), (0, 4)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bf16", "f32"])
def test_blockwise_tiles_are_as_large_as_their_memory_allows(batch, heads, dtype):
    block_q, block_kv = block_sizes(
        spec(batch=batch, heads=(heads, 1), q_len=4096, kv_len=4096, dtype=dtype)
    )
    assert block_q == block_kv
    assert block_q in (64, 128, 256, 512)
    scores = 4 * batch * heads  # float32
    assert scores * block_q**2 <= TILE_BYTES or block_q == 64
    assert block_q == 512 or scores * (2 * block_q) ** 2 > TILE_BYTES


@pytest.mark.parametrize("q_len, kv_len, expected", [(1, 5, (8, 8)), (9, 100, (16, 104)),
                                                     (1000, 3, (512, 8))])  # fmt: skip
def test_blockwise_tiles_are_no_longer_than_the_sequence(q_len, kv_len, expected):
    assert block_sizes(spec(q_len=q_len, kv_len=kv_len, batch=1)) == expected


def local_device():
    device = jax.devices()[0]
    return device.platform, device.device_kind


@pytest.mark.parametrize(
    "array",
    [jnp.ones(3), np.ones(3), jax.ShapeDtypeStruct((3,), jnp.float32)],
    ids=["jax", "NumPy", "shape"],
)
def test_a_call_runs_on_the_device_of_its_array_or_the_default_one(array):
    assert device_of(array)[:2] == local_device()


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_a_traced_call_runs_on_the_default_device(transform):
    tried = []
    transform(lambda x: (tried.append(device_of(x)), jnp.sum(x))[1])(
        jnp.float32(1) if transform is jax.grad else jnp.ones(3)
    )
    assert tried[0][:2] == local_device()


@pytest.mark.parametrize("default", ["cpu", jax.devices("cpu")[0]], ids=["name", "device"])
def test_a_default_device_that_is_set_is_used(default):
    with jax.default_device(default):
        assert device_of(np.ones(3)).platform == "cpu"


@pytest.mark.parametrize("device, hopper", [(H200, True), *((device, False) for device in (*NO_GPUS, *GPUS))],
                         ids=lambda x: getattr(x, "kind", x))  # fmt: skip
def test_hopper_is_compute_capability_9_on_a_gpu(device, hopper):
    assert device.is_sm90 == hopper


@pytest.mark.parametrize(
    "options, warpgroups",
    [
        ({"mask": fa.Causal(), "q_len": 1024, "kv_len": 1024}, 2),
        ({"mask": fa.Causal(), "q_len": 2048, "kv_len": 2048}, 3),
        ({"q_len": 256, "kv_len": 256}, 2),
        ({"q_len": 512, "kv_len": 512}, 3),
        ({"mask": fa.Causal(), "q_len": 512, "kv_len": 512, "dims": (128, 128)}, 2),
    ],
)
def test_short_calls_take_smaller_tiles(options, warpgroups):
    forward = make_plan(spec(**options), H200).forward
    assert forward.warpgroups == warpgroups
    assert forward.num_ctas == H200.num_sms


def test_deterministic_gradients_of_score_data_are_summed_in_one_order():
    call = {"score": fa.alibi(4), "dtype": jnp.bfloat16}
    any_order, one_order = (
        make_plan(spec(**call, deterministic_gradients=deterministic), H200)
        for deterministic in (False, True)
    )
    assert any_order.backward_for(True) == ("hopper", any_order.backward)
    assert one_order.backward_for(False) == ("hopper", one_order.backward)
    name, config = one_order.backward_for(True)
    assert (name, config) == ("blockwise", block_sizes(spec(**call)))
    assert (any_order.backward.deterministic, one_order.backward.deterministic) == (False, True)
    assert any_order.forward == one_order.forward


def test_ampere_sums_gradients_in_one_order_by_a_kernel_of_dq():
    call = {"score": fa.alibi(4), "dtype": jnp.bfloat16, "deterministic_gradients": True}
    any_order, one_order = (make_plan(spec(**x), A100) for x in ({}, call))
    assert any_order.implementation == one_order.implementation == "ampere"
    dq = dataclasses.replace(configs.DQ_RULES[0].config, num_ctas=2 * A100.num_sms)
    assert (any_order.backward.dq, one_order.backward.dq) == (None, dq)
    assert one_order.backward_for(False) == ("ampere", one_order.backward)
    assert one_order.backward_for(True)[0] == "blockwise"


def test_the_kernels_support_a_traced_scale():
    """A traced scale is a score function, a known one is compiled into the kernel."""
    x = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)
    traced = fa.explain(x, x, x, scale=jax.ShapeDtypeStruct((), jnp.float32), device=H200)
    assert traced.implementation == "hopper" and len(traced.spec.scores) == 1
    known = fa.explain(x, x, x, scale=jnp.float32(0.5), device=H200)
    assert known.spec.scores == () and known.spec.scale == 0.5
