"""What threads of different blocks wait for: mail, and turns to add to device memory."""

import collections
import threading
from collections.abc import Callable, Hashable
from typing import Any


class Aborted(Exception):
    """Another thread has failed, which this one waits for."""


class _Awaited:
    """What threads wait for until another changes it."""

    def __init__(self, timeout: float):
        self.timeout = timeout
        self.changed = threading.Condition()
        self.aborted = False

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def _await(self, there: Callable[[], bool], too_late: Callable[[], str]) -> None:
        """With the lock held."""
        found = self.changed.wait_for(lambda: self.aborted or there(), self.timeout)
        if self.aborted:
            raise Aborted
        if not found:
            raise TimeoutError(too_late())


class Letterboxes(_Awaited):
    """What has been copied to each place in another block, and who has waited for it how often."""

    def __init__(self, timeout: float):
        super().__init__(timeout)
        self.delivered = collections.defaultdict(list)
        self.taken = collections.Counter()

    def deliver(self, place: Hashable, clock: Any) -> None:
        with self.changed:
            self.delivered[place].append(clock)
            self.changed.notify_all()

    def wait(self, thread: Any, place: Hashable) -> Any:
        with self.changed:
            number = self.taken[thread, place]
            self.taken[thread, place] += 1
            delivered = self.delivered[place]
            self._await(
                lambda: len(delivered) > number,
                lambda: f"{thread} waited for mail that never came",
            )
            return delivered[number]


class Turns(_Awaited):
    """Which additions to device memory must wait, and until how many have been told of.

    The four warps of a warpgroup that loads are one thread here, which cannot wait for a turn and pass
    others on at the same time. So what it waits for is put down, and whoever adds waits instead.
    """

    def __init__(self, timeout: float, added: list[tuple[int, int, int]]):
        super().__init__(timeout)
        self.added = added
        self.promises = collections.defaultdict(list)
        self.kept = collections.Counter()
        self.stored = collections.defaultdict(list)  # by row, the clocks of who has stored there

    def promise(self, thread: Any, row: int, ordinal: int, told: Any) -> None:
        """The block's next addition to a row comes after so many; `told()` says how many there were."""
        with self.changed:
            self.promises[thread.block_id, row].append((ordinal, told))

    def wait(self, thread: Any, row: int) -> None:
        with self.changed:
            mine = self.promises.get((thread.block_id, row))
            if mine is None:
                return
            ordinal, told = mine[self.kept[thread, row]]
            self.kept[thread, row] += 1
            self._await(
                lambda: told() >= ordinal,
                lambda: f"{thread}: row {row} is at turn {told()}, not {ordinal}",
            )
            self.added.append((row, ordinal, told()))

    def wait_for(self, there: Callable[[], bool]) -> None:
        with self.changed:
            self._await(
                there, lambda: "waited for a turn that does not come, or a tile that nobody claims"
            )

    def tell(self, add: Any) -> None:
        with self.changed:
            add()
            self.changed.notify_all()
