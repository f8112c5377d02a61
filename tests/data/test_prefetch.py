"""A generator in a thread: order, how far ahead it runs, its errors, its end."""

import threading
import time

import pytest

from sparse_lm.data.prefetch import Prefetch


def wait_until(condition):
  deadline = time.monotonic() + 10
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.001)


def threads():
  return sum(thread.name == "prefetch" for thread in threading.enumerate())


def test_items_come_in_order_and_never_more_than_asked_for_are_made_ahead():
  made = []

  def items():
    for n in range(1000):
      made.append(n)
      yield n

  ahead = Prefetch(items(), ahead=3)
  wait_until(lambda: len(made) == 4)  # three wait, one is in hand
  for n in range(20):
    assert next(ahead) == n
    wait_until(lambda n=n: len(made) == n + 5)
  time.sleep(0.05)
  assert len(made) == 24
  ahead.close()


def test_an_error_comes_after_the_items_before_it_as_it_was_raised():
  def items():
    yield 1
    raise LookupError("its own message")

  ahead = Prefetch(items(), ahead=3)
  assert next(ahead) == 1
  with pytest.raises(LookupError, match=r"^its own message$"):
    next(ahead)


def test_the_end_of_the_generator_is_the_end_of_iteration():
  ahead = Prefetch((n for n in range(2)), ahead=3)
  assert [next(ahead), next(ahead)] == [0, 1]
  with pytest.raises(StopIteration):
    next(ahead)


@pytest.mark.parametrize("taken", [0, 5])
def test_close_ends_the_thread_and_lets_the_generator_clean_up(taken):
  closed = []

  def items():
    try:
      while True:
        yield 0
    finally:
      closed.append(threading.current_thread().name)

  before = threads()
  ahead = Prefetch(items(), ahead=2)
  for _ in range(taken):
    next(ahead)
  ahead.close()
  ahead.close()  # twice is once
  assert closed == ["prefetch"]
  assert threads() == before
