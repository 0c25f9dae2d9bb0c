"""A process without JAX that runs an implementation of another framework."""

import pickle
import subprocess
import sys
from typing import Any, Self

import numpy as np

from benchmarks.shapes import Shape


class Worker:
    """A process that runs a module such as `benchmarks.torch_fa2` on one shape; it ends with the context."""

    def __init__(self, module: str, shape: Shape):
        self.shape, self.is_loaded = shape, False
        command = [sys.executable, "-m", module]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Return the process's answer to a request; raise a RuntimeError with its error, or if it has ended."""
        requests, answers = self.process.stdin, self.process.stdout
        assert requests is not None and answers is not None
        try:
            pickle.dump((name, arguments), requests)
            requests.flush()
            done, answer = pickle.load(answers)
        except (BrokenPipeError, EOFError):
            raise RuntimeError(f"its process ended with exit code {self.process.wait()}") from None
        if not done:
            raise RuntimeError(answer)
        return answer

    def load(self, arrays: tuple) -> None:
        """Send bfloat16 q, k, v and the cotangent of the output, once for all programs."""
        if not self.is_loaded:
            self.ask("load", vars(self.shape), [np.asarray(x).view(np.uint16) for x in arrays])
            self.is_loaded = True
