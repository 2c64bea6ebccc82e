import threading
import time

import pytest

from as2ray.data.prefetch import prefetch


def test_items_come_in_order_from_another_thread():
    threads = set()

    def items():
        for number in range(20):
            threads.add(threading.current_thread())
            yield number

    assert list(prefetch(items(), 3)) == list(range(20))
    assert list(prefetch([7], 3)) == [7]
    assert threading.current_thread() not in threads


def test_a_generator_is_advanced_by_one_thread_alone():
    def items():
        time.sleep(0.03)  # a second thread would find the generator running, which is an error
        yield 7

    assert list(prefetch(items(), 3)) == [7]


def test_next_items_are_prepared_while_one_is_used_and_no_more():
    reached = threading.Semaphore(0)
    prepared = []

    def items():
        for number in range(10):
            prepared.append(number)
            reached.release()
            yield number

    iterator = prefetch(items(), 2)
    assert next(iterator) == 0
    for _ in range(3):
        assert reached.acquire(timeout=10)
    assert prepared == [0, 1, 2]
    iterator.close()


def test_error_is_raised_after_the_items_before_it():
    def items():
        yield 1
        raise ValueError("broken")

    iterator = prefetch(items())
    assert next(iterator) == 1
    with pytest.raises(ValueError, match="broken"):
        next(iterator)
