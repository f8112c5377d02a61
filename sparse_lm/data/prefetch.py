"""A generator that runs in a thread, a bounded number of items ahead of whoever takes them."""

import queue
import threading
from collections.abc import Generator

_SECONDS_TO_END = 5.0  # a thread that hangs in the network ends with the program instead


class Prefetch[T]:
  """The items of a generator, in order. What the generator raises, `__next__` raises."""

  def __init__(self, items: Generator[T], *, ahead: int):
    """Starts at once; at most `ahead` items wait to be taken, while one more is being made."""
    self._items = items
    self._ready: queue.SimpleQueue[tuple[T] | Exception] = queue.SimpleQueue()
    self._places, self._closed = threading.Semaphore(ahead), threading.Event()
    self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
    self._thread.start()

  def __next__(self) -> T:
    """Waits for the next item."""
    item = self._ready.get()
    if isinstance(item, Exception):
      raise item
    self._places.release()
    return item[0]

  def close(self) -> None:
    """Ends the thread; what it has made is dropped."""
    self._closed.set()
    self._places.release()
    self._thread.join(_SECONDS_TO_END)

  def _work(self) -> None:
    try:
      for item in self._items:
        self._places.acquire()
        if self._closed.is_set():
          break
        self._ready.put((item,))
      else:
        raise StopIteration  # for the consumer
    except Exception as error:
      self._ready.put(error)
    finally:
      self._items.close()  # in the thread that ran it: files that it holds open are let go here
