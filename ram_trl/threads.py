"""Work in threads, results in order, memory bounded."""

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch


__all__ = ["Scratch", "Workers", "in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Scratch(threading.local):
    """Memory that each thread uses again and again: to get fresh pages takes longer than to fill them."""

    def __init__(self):
        self._buffers: dict[Hashable, np.ndarray] = {}

    def take(self, nbytes: int, slot: Hashable = None) -> np.ndarray:
        """uint8, valid until this thread takes from the slot again."""
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) < nbytes:
            buffer = self._buffers[slot] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


class Workers:
    """As many threads as torch may use, for the length of a `with` block.

    Each of them computes with one thread of torch: tiles are small, and threads that meet after every operation wait
    for the slowest. At most two pieces of work a thread are begun and not yet taken.
    """

    def __enter__(self) -> "Workers":
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, initializer=torch.set_num_threads, initargs=(1,))
        self._begun: deque[tuple[Future, Callable[[Any], None]]] = deque()
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads)

    def put(self, work: Callable[[], Result], take: Callable[[Result], None]) -> None:
        """Begin some work. This thread takes what comes out, in the order in which it was put, now or later."""
        self._begun.append((self._pool.submit(work), take))
        if len(self._begun) >= 2 * self._threads:
            self._take_next()

    def drain(self) -> None:
        """Take what comes out of everything that was begun."""
        while self._begun:
            self._take_next()

    def _take_next(self) -> None:
        future, take = self._begun.popleft()
        take(future.result())


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Do some work on every item, by threads of its own; items and results in their order."""
    done: deque[tuple[Item, Result]] = deque()
    with Workers() as workers:
        for item in items:
            workers.put(partial(work, item), lambda result, item=item: done.append((item, result)))
            while done:
                yield done.popleft()
        workers.drain()
    yield from done
