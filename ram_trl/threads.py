"""Work in threads, results in order, memory bounded."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch


__all__ = ["in_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[tuple[Item, Result]]:
    """Do some work on every item in as many threads as torch may use; items and results in their order.

    Each thread computes with one thread of torch: tiles are small, and threads that meet after every operation wait
    for the slowest. At most two items a thread are begun and not yet taken.
    """
    threads = torch.get_num_threads()
    begun: deque[tuple[Item, Future]] = deque()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            try:
                for item in items:
                    begun.append((item, pool.submit(work, item)))
                    if len(begun) >= 2 * threads:
                        first, future = begun.popleft()
                        yield first, future.result()
                for first, future in begun:
                    yield first, future.result()
            finally:
                for _, future in begun:
                    future.cancel()
    finally:
        torch.set_num_threads(threads)
