"""Lines about a long step, at the rate a person reads."""

import time
from collections.abc import Callable, Iterable, Iterator

Report = Callable[[str], None]
_SECONDS_BETWEEN_LINES = 5.0


def reported(texts: Iterable[str], step: str, report: Report) -> Iterator[str]:
  """Yields `texts`, and says every few seconds how much went through; a step shorter than that stays silent."""
  done, last = 0, time.monotonic()
  for text in texts:
    yield text
    done += len(text)
    if (now := time.monotonic()) - last >= _SECONDS_BETWEEN_LINES:
      last = now
      report(f"data: {step}, {done / 1e6:.1f} M characters so far")
