"""Work in threads: results in order, few at a time, failures heard."""

import threading
import time

import pytest
import torch

from ram_trl.threads import Scratch, Workers, in_threads


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def slowest_first(number):
    time.sleep(0.02 / (number + 1))
    return number * number


def test_results_come_in_the_order_of_the_items():
    assert list(in_threads(slowest_first, range(20))) == [(number, number * number) for number in range(20)]


def test_no_work_gives_no_results():
    assert list(in_threads(slowest_first, [])) == []


def test_work_is_shared_by_as_many_threads_as_torch_may_use_each_with_one_of_torchs():
    seen = {thread for _, thread in in_threads(lambda _: (time.sleep(0.01), threading.get_ident())[1], range(20))}
    assert len(seen) == 2 and threading.get_ident() not in seen
    assert {threads for _, threads in in_threads(lambda _: torch.get_num_threads(), range(4))} == {1}
    assert torch.get_num_threads() == 2


def test_no_more_than_two_pieces_of_work_a_thread_wait_to_be_taken():
    begun, taken, most = [], [], 0
    with Workers() as workers:
        for number in range(30):
            workers.put(lambda number=number: begun.append(number), lambda _: taken.append(None))
            most = max(most, len(begun) - len(taken))
        workers.drain()
    assert sorted(begun) == list(range(30)) and len(taken) == 30
    assert most <= 4


def test_a_failure_is_raised_where_the_result_would_be_taken_and_nothing_after_it_is():
    taken = []

    def work(number):
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"), Workers() as workers:
        for number in range(10):
            workers.put(lambda number=number: work(number), taken.append)
    assert taken == [0, 1, 2]
    assert torch.get_num_threads() == 2


def test_results_that_nobody_asks_for_any_more_end_the_threads():
    before = threading.active_count()
    results = in_threads(slowest_first, range(1000))
    assert next(results) == (0, 0)
    results.close()
    assert threading.active_count() == before
    assert torch.get_num_threads() == 2


def test_scratch_is_memory_of_one_thread_and_slot_used_again():
    scratch = Scratch()
    first = scratch.take(100)
    first[:] = 7
    assert scratch.take(50).base is first.base and (scratch.take(50) == 7).all()
    assert scratch.take(100, "other").base is not first.base
    assert len(scratch.take(1000)) == 1000
    elsewhere = []
    thread = threading.Thread(target=lambda: elsewhere.append(scratch.take(100)))
    thread.start()
    thread.join()
    assert elsewhere[0].base is not scratch.take(100).base
