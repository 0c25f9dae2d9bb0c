"""Inline operations by which CTAs wait for each other: turns, tickets, claims, and copies within a cluster.

Operations are called with the thread, the operands (references as the location of what they refer to) and the source's
line. They return the results, if there are any.
"""

import dataclasses
import functools

import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_fa2.backends.common.decode import arrivals
from pallas_fa2.backends.sm90.backward.dq import first_store
from tests.support import shared
from tests.support.shared import row_of, the_memory


def _fetch_and_add(place, amount, thread):
    """Add to an integer in memory, and return what it was; within `Turns.tell`, this is one operation."""
    memory = the_memory()
    old, _, _ = memory.get_buffer_content(*place, thread)
    memory.store_buffer_content(*place, old + np.int32(amount), thread)
    return old


def _counter(place, thread):
    """Return a function that reads an integer in memory."""
    return lambda: np.int32(the_memory().get_buffer_content(*place, thread)[0])


def _await_turn(thread, place, ordinal, **_):
    told = _counter(place, thread)
    the_memory().turns.promise(thread, row_of(place), int(ordinal), told)


def _take_turn(thread, place, ordinal, **_):
    """Wait for a turn in the thread that adds; nothing else depends on it then."""
    told = _counter(place, thread)
    the_memory().turns.wait_for(lambda: told() >= ordinal)
    shared.current.added.append((row_of(place), int(ordinal), told()))


def _end_turn(thread, place, *, warps=1, **_):
    the_memory().turns.tell(lambda: _fetch_and_add(place, warps, thread))


def _take_ticket(thread, place, **_):
    """Return a ticket: how many there were before, and how many warps have stored."""
    ticket = []
    the_memory().turns.tell(lambda: ticket.append(np.int32(_fetch_and_add(place, 1, thread))))
    return ticket


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


def _prepare_arrivals(thread, place, **_):
    """Begin to count in a word, if it does not count."""
    memory = the_memory()

    def prepare() -> None:
        words, _, _ = memory.get_buffer_content(*place, thread)
        assert words.size == 2, "there is no such word"
        if not _counts(words):
            memory.store_buffer_content(*place, _word_of_arrivals(0), thread)
            shared.current.counting.add((place[0], str(place[1].range)))

    memory.turns.tell(prepare)


def _arrive_last(thread, first, second, flags, *others, source_info):
    """Count an arrival in one word or two; the last one ends a count, and comes after what all others had done."""
    last = [
        expected >= 0 and _count_arrival(thread, place, expected)
        for place, expected in zip((first, second), others, strict=True)
    ]
    memory = the_memory()
    words = memory.get_buffer_content(*flags, thread)[0]
    memory.store_buffer_content(*flags, np.array([*last, *words[2:]], np.int32), thread)
    if memory.detect_races:
        clock = memory.incr_clock(thread).generic_clock
        gpu_callbacks.get_races().check_write(thread, clock, *flags, source_info)
    return [np.int32(last[0] + 2 * last[1])]


def _count_arrival(thread, place, others) -> bool:
    memory, arrivals = the_memory(), []
    word = place[0], str(place[1].range)
    released = shared.current.released[word]

    def arrive() -> None:
        words, _, _ = memory.get_buffer_content(*place, thread)
        assert words.size == 2, "there is no such word"
        before = int(words[0]) & 0xFFFF if _counts(words) else 0
        shared.current.counting.add(word)
        arrivals.append(before)
        count = _word_of_arrivals(before + 1)
        if before == others:
            count = np.zeros(2, np.int32)
            shared.current.counting.discard(word)
        memory.store_buffer_content(*place, count, thread)
        if memory.detect_races:
            clock = memory.incr_clock(thread).copy()
            released[gpu_callbacks.get_races().cluster] = clock.generic_clock

    memory.turns.tell(arrive)
    is_last = arrivals[0] == others
    if is_last and memory.detect_races:
        shared.current.acquired.setdefault(thread, {}).update(released)
        released.clear()
    return is_last


def _word_of_arrivals(count: int) -> np.ndarray:
    return np.array([arrivals.COUNTS << 16 | count], np.uint64).view(np.int32)


def _counts(words: np.ndarray) -> bool:
    """Whether two int32 are a word that counts."""
    (word,) = words.view(np.uint64)
    return int(word) >> 16 == arrivals.COUNTS


def _claim_tile(thread, last_claim, entries, slot, first_claim, num_claims, phase, tiles, **_):
    memory = the_memory()

    def read(place: tuple) -> np.ndarray:
        return memory.get_buffer_content(*place, thread)[0]

    def claim() -> None:
        claims = read(last_claim)[0]
        count = read(last_claim) + np.array([1, 0], np.int32)
        memory.store_buffer_content(*last_claim, count, thread)
        key, first = entries
        claimed = min(int(claims + first_claim), int(num_claims)) * int(tiles)
        at = (row_of(entries) + claimed, *first.range[1:])
        entry = read((key, dataclasses.replace(first, range=at))).copy()
        entry[0] |= np.int32(-1 << 31) if phase & 1 else 0
        memory.store_buffer_content(*slot, entry, thread)

    memory.turns.tell(claim)


def _prefetch_entry(thread, place, **_):
    """Return what is claimed there, or was a phase ago."""
    return tuple(the_memory().get_buffer_content(*place, thread)[0])


def _resolve_entry(thread, place, tile_id, counts, phase, **_):
    """Return an entry, or what is claimed there once it is of this phase, by its last bit."""
    memory = the_memory()
    entry = np.array([tile_id, counts])

    def is_current() -> bool:
        return (entry[0] < 0) == (phase & 1 == 1)

    def read_again() -> bool:
        entry[:] = memory.get_buffer_content(*place, thread)[0]
        return is_current()

    if not is_current():
        memory.turns.wait_for(read_again)
    return entry[0] & np.int32(2**31 - 1), entry[1]


def _cluster_send(thread, source, target, arrived, block, *, source_info):
    """Copy to the same buffer of another block of the cluster, which waits for it."""
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
    "arrive_last": _arrive_last,
    "claim_tile": _claim_tile,
    "cluster_send": _cluster_send,
    "cluster_wait": _cluster_wait,
    "end_dq_turn": _end_turn,
    "give_dq_turn": functools.partial(_end_turn, warps=4),
    "prefetch_entry": _prefetch_entry,
    "prepare_arrivals": _prepare_arrivals,
    "resolve_dq_ticket": _resolve_ticket,
    "resolve_entry": _resolve_entry,
    "share_dq_ticket": _share_ticket,
    "signal_dq_stored": _signal_stored,
    "take_dq_ticket": _take_ticket,
    "take_dq_turn": _take_turn,
    "wait_dq_turn": _await_turn,
}
