"""Runs FlashAttention-2's CUDA kernels, as PyTorch has them, in a process without JAX: `remote.Worker` starts it.

    python -m benchmarks.torch_fa2

PyTorch and JAX have an allocator of GPU memory and CUDA libraries each, and would get into each other's way in one
process. Requests and answers are pickles on stdin and stdout, in pairs; arrays are those of NumPy, bfloat16 as uint16.
"""

import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]
from torch.nn.attention import SDPBackend, sdpa_kernel  # type: ignore[import-not-found]
from torch.profiler import ProfilerActivity, profile  # type: ignore[import-not-found]

RUNS = 4  # between two events
# The GPU waits 10 ms at 1.8 GHz before the first event, in which all runs are launched: kernels of 0.3 ms take less
# than their launches where other processes have the CPU.
LAUNCH_CLOCKS = 18_000_000


def attention_of(shape: dict[str, Any], device: str = "cuda") -> Callable[..., Any]:
    """Return attention of q `[B, T, N, H]`, k and v `[B, S, K, H]`; packed documents lie in one row of a batch.

    `shape` has the fields of `benchmarks.shapes.Shape`.
    """
    for feature in ("window", "soft_cap", "bias"):
        if shape[feature]:
            raise NotImplementedError(f"its function has no {feature}")
    causal = shape["causal"]
    if causal and shape["q_len"] != shape["kv_len"]:
        raise NotImplementedError("its causal mask is aligned to the first key")
    if documents := shape["documents"]:
        ends = torch.tensor(np.cumsum((0, *documents)), dtype=torch.int32, device=device)
        longest = max(documents)

        def packed(q: Any, k: Any, v: Any) -> Any:
            tokens_first = (x.flatten(0, 1) for x in (q, k, v))  # a view, as its gradient is
            lengths = ends, ends, longest, longest
            out, *_ = torch.ops.aten._flash_attention_forward(
                *tokens_first, *lengths, 0.0, causal, False
            )
            return out[None]

        return packed

    def attend(q: Any, k: Any, v: Any) -> Any:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(*heads_first, is_causal=causal, enable_gqa=grouped)
        return out.transpose(1, 2)

    return attend


class Problem:
    """A shape with its inputs on a device."""

    def __init__(self, shape: dict[str, Any], arrays: list[np.ndarray], device: str = "cuda"):
        q, k, v, self.dout = (
            torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device) for x in arrays
        )
        self.inputs = tuple(x.requires_grad_() for x in (q, k, v))
        self.attention = attention_of(shape, device)

    def run(self, phase: str) -> tuple:
        """Return out, and in the phase "both" the gradients of q, k and v as well."""
        if phase == "forward":
            with torch.no_grad():
                return (self.attention(*self.inputs),)
        out = self.attention(*self.inputs)
        return out, *torch.autograd.grad(out, self.inputs, self.dout)

    def results(self, phase: str) -> list[np.ndarray]:
        return [
            x.detach().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
            for x in self.run(phase)
        ]

    def times(self, phase: str, count: int) -> list[float]:
        """Return the milliseconds of all kernels of each of `count` runs after a first one, by CUPTI."""
        self.run(phase)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(count):
                self.run(phase)
            torch.cuda.synchronize()
        return times_by_run(profiled.events(), count)

    def event_time(self, phase: str, count: int) -> float:
        """Return the milliseconds of a run by CUDA's events around `RUNS` of them, with what lies between kernels.

        Of `count` measurements the least counts: other processes may have the GPU between the events.
        """
        self.run(phase)
        pairs = []
        for _ in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(LAUNCH_CLOCKS)
            start.record()
            for _ in range(RUNS):
                self.run(phase)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return min(start.elapsed_time(end) for start, end in pairs) / RUNS


def times_by_run(events: Any, count: int) -> list[float]:
    """Return the milliseconds of each run's kernels; all runs have launched the same ones, one after the other.

    Copies and memsets are no kernels, here and where JAX's programs are timed.
    """
    kernels = [
        event
        for event in events
        if event.device_type.name == "CUDA" and not event.name.startswith(("Memcpy", "Memset"))
    ]
    if not kernels or len(kernels) % count:
        raise RuntimeError(f"{len(kernels)} kernels were profiled in {count} runs")
    kernels.sort(key=lambda event: event.time_range.start)
    each = len(kernels) // count
    ms = [1e-3 * event.time_range.elapsed_us() for event in kernels]
    return [sum(ms[i : i + each]) for i in range(0, len(ms), each)]


def serve(requests: Any, answers: Any, device: str = "cuda") -> None:
    """Answer requests, (name, arguments), by (True, result) or (False, error) until there are no more."""
    problem = None
    while True:
        try:
            name, arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            if name == "load":
                answer, problem = None, Problem(*arguments, device=device)
            else:
                answer = getattr(problem, name)(*arguments)
            reply = True, answer
        except Exception as e:  # noqa: BLE001 - the process that asks decides what to do
            reply = False, f"{type(e).__name__}: {e}"
        pickle.dump(reply, answers)
        answers.flush()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    serve(sys.stdin.buffer, answers)
