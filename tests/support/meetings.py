"""What inline code means by which CTAs wait for each other: turns, tickets, claims and mail.

Operations are called with the thread, the operands, references as where they lie, and the source's place. They
return the results, if there are any.
"""

import dataclasses
import functools

import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_fa2.backends.sm90.backward.dq import first_store
from tests.support import shared
from tests.support.shared import row_of, the_memory


def _fetch_and_add(place, amount, thread):
    """What there was before; within `Turns.tell`, as one operation."""
    memory = the_memory()
    old, _, _ = memory.get_buffer_content(*place, thread)
    memory.store_buffer_content(*place, old + np.int32(amount), thread)
    return old


def _counter(place, thread):
    """What an integer in memory is, whenever it is asked."""
    return lambda: np.int32(the_memory().get_buffer_content(*place, thread)[0])


def _await_turn(thread, place, ordinal, **_):
    told = _counter(place, thread)
    the_memory().turns.promise(thread, row_of(place), int(ordinal), told)


def _take_turn(thread, place, ordinal, **_):
    """By who adds: nothing else depends on the thread then."""
    told = _counter(place, thread)
    the_memory().turns.wait_for(lambda: told() >= ordinal)
    shared.current.added.append((row_of(place), int(ordinal), told()))


def _end_turn(thread, place, *, warps=1, **_):
    the_memory().turns.tell(lambda: _fetch_and_add(place, warps, thread))


def _take_ticket(thread, place, **_):
    """A ticket: how many there were before, and who of the others has stored."""
    found = []
    the_memory().turns.tell(lambda: found.append(np.int32(_fetch_and_add(place, 1, thread))))
    return found


def _share_ticket(thread, place, ticket, *, source_info):
    memory = the_memory()
    memory.store_buffer_content(*place, np.int32(ticket), thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, *place, source_info)


def _resolve_ticket(thread, row, slot, *, source_info):
    memory = the_memory()
    told, ticket = _counter(row, thread), _counter(slot, thread)()
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_read(thread, clock, *slot, source_info)
    if ticket == 0:
        return [np.int32(1)]
    if ticket < first_store.ALL_STORED:
        memory.turns.wait_for(lambda: told() >= first_store.ALL_STORED)
        shared.current.added.append((row_of(row), int(ticket), told()))
    with memory.lock:
        for clock in memory.turns.stored[row_of(row)]:
            memory.clocks[thread].update(clock)
    return [np.int32(0)]


def _signal_stored(thread, place, first, **_):
    memory = the_memory()

    def add() -> None:
        _fetch_and_add(place, 4 << first_store.STORED_BIT, thread)
        if memory.detect_races:
            memory.turns.stored[row_of(place)].append(memory.incr_clock(thread).copy())
            shared.current.told[row_of(place)] = gpu_callbacks.get_races().cluster

    if int(first):
        memory.turns.tell(add)


def _claim_tile(thread, last, entries, place, already, count, number, together, **_):
    memory = the_memory()

    def read(place: tuple) -> np.ndarray:
        return memory.get_buffer_content(*place, thread)[0]

    def claim() -> None:
        claims = read(last)[0]
        memory.store_buffer_content(*last, read(last) + np.array([1, 0], np.int32), thread)
        key, first = entries
        claimed = min(int(claims + already), int(count)) * int(together)
        at = (row_of(entries) + claimed, *first.range[1:])
        entry = read((key, dataclasses.replace(first, range=at))).copy()
        entry[0] |= np.int32(-1 << 31) if number & 1 else 0
        memory.store_buffer_content(*place, entry, thread)

    memory.turns.tell(claim)


def _prefetch_entry(thread, place, **_):
    """What is claimed there, or was a round ago."""
    return tuple(the_memory().get_buffer_content(*place, thread)[0])


def _resolve_entry(thread, place, number, counts, turn, **_):
    """An entry, or what is claimed there if it is of another round, by its last bit."""
    memory = the_memory()
    found = np.array([number, counts])

    def is_of_the_round() -> bool:
        return (found[0] < 0) == (turn & 1 == 1)

    def look_again() -> bool:
        found[:] = memory.get_buffer_content(*place, thread)[0]
        return is_of_the_round()

    if not is_of_the_round():
        memory.turns.wait_for(look_again)
    return found[0] & np.int32(2**31 - 1), found[1]


def _cluster_send(thread, source, target, arrived, block, *, source_info):
    """Copies to the same place in another block of the cluster, which finds mail there."""
    memory, (letterbox, at) = the_memory(), arrived
    value, _, _ = memory.get_buffer_content(*source, thread)
    block = thread.block_id // 2 * 2 + int(block)  # of a cluster that may hold several pairs
    target = target[0]._replace(block_id=block), target[1]
    memory.store_buffer_content(*target, value, thread)
    clock = None
    if memory.detect_races:
        races, clock = gpu_callbacks.get_races(), memory.incr_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        races.check_read(thread, clock.async_smem_clock.copy(), *source, source_info)
        races.check_write(thread, clock.async_smem_clock.copy(), *target, source_info)
    letterbox = letterbox._replace(block_id=block)
    memory.mail.deliver((letterbox, str(at.range)), clock)


def _cluster_wait(thread, arrived, _turn, **_):
    memory, (letterbox, at) = the_memory(), arrived
    clock = memory.mail.wait(thread, (letterbox, str(at.range)))
    if clock is not None:
        with memory.lock:
            memory.clocks[thread].update(clock)


# By the names of inline operations.
OPERATIONS = {
    "claim_tile": _claim_tile,
    "cluster_send": _cluster_send,
    "cluster_wait": _cluster_wait,
    "end_dq_turn": _end_turn,
    "give_dq_turn": functools.partial(_end_turn, warps=4),
    "prefetch_entry": _prefetch_entry,
    "resolve_dq_ticket": _resolve_ticket,
    "resolve_entry": _resolve_entry,
    "share_dq_ticket": _share_ticket,
    "signal_dq_stored": _signal_stored,
    "take_dq_ticket": _take_ticket,
    "take_dq_turn": _take_turn,
    "wait_dq_turn": _await_turn,
}
