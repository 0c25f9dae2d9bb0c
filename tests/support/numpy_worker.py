"""A worker of `benchmarks.remote` that computes dense attention in NumPy, and is wrong or ends on request.

python -m tests.support.numpy_worker [wrong | dies]
"""

import pickle
import sys

import numpy as np


def widen(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def narrow(x):
    """Round to bfloat16, halves up."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x8000) >> 16).astype(np.uint16)


def attend(shape, arrays):
    """Return out, dq, dk and dv of a call without grouped heads."""
    q, k, v, dout = map(widen, arrays)
    s = np.einsum("btnh,bsnh->bnts", q, k) * shape["head_dim"] ** -0.5
    if shape["causal"]:
        s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("btnh,bsnh->bnts", dout, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * shape["head_dim"] ** -0.5
    out, dv = np.einsum("bnts,bsnh->btnh", p, v), np.einsum("bnts,btnh->bsnh", p, dout)
    return out, np.einsum("bnts,bsnh->btnh", ds, k), np.einsum("bnts,btnh->bsnh", ds, q), dv


def main(mood=""):
    results = []
    while True:
        try:
            name, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer = None
        if name == "load":
            results = [narrow(x) for x in attend(*arguments)]
        elif name == "results":
            if mood == "dies":
                sys.exit(3)
            answer = results[: 1 if arguments == ("forward",) else 4]
            answer = [x ^ 0x8000 if mood == "wrong" else x for x in answer]
        else:
            answer = [2.0 if arguments[0] == "forward" else 4.0] * arguments[1]
        pickle.dump((True, answer), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
