"""What a trace says of kernels, of collectives, and of those that no other kernel hides."""

from jax.profiler import ProfileData

from benchmarks import overlap

TRACE = """
planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 9000000000 } }
  event_metadata { key: 1 value { id: 1 name: "attention" } } }
planes { name: "/device:GPU:0"
  lines { name: "Stream #1(Compute)"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 4000000000 }
    events { metadata_id: 3 offset_ps: 7000000000 duration_ps: 1000000000 } }
  lines { name: "Stream #2(Compute)" events { metadata_id: 2 offset_ps: 3000000000 duration_ps: 3000000000 } }
  lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 0 duration_ps: 20000000000 } }
  event_metadata { key: 1 value { id: 1 name: "attention_gradients" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage)" } }
  event_metadata { key: 3 value { id: 3 name: "input_add_fusion" } } }
"""


def test_a_transfer_is_exposed_where_nothing_else_runs():
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(TRACE))
    assert overlap.summaries(profile) == [
        {
            "span": 8.0,
            "idle": 1.0,
            "attention": 4.0,
            "nccl": 3.0,
            "others": 1.0,
            "exposed": 2.0,
            "exposed ncclDevKernel_SendRecv": 2.0,
        }
    ]


def test_times_that_overlap_are_counted_once():
    assert overlap.union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
