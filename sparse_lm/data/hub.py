"""What comes from the Hugging Face hub: the documents of a data set, streamed from any position, and tokenizers.

A folder of .parquet or .jsonl files on this machine stands in for a data set. The library `datasets` finds the files,
reads them in order and knows how to go on in the middle of them; it is imported where it is first needed, which takes
seconds.
"""

import os
import re
import time
from collections.abc import Iterator
from typing import Any

from sparse_lm.config import DataConfig
from sparse_lm.data.progress import Report
from sparse_lm.errors import UserError, first_line

Position = dict[str, Any]  # "document": its number from 0; "stream": state of the reader in front of it, None: at 0
START: Position = {"document": 0, "stream": None}
_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_PAUSES = (1, 5, 25)  # seconds before another try; below, `datasets` has already tried for minutes


class HubText:
  """The documents of data.path in the order of its files; column "text" of each row."""

  def __init__(self, config: DataConfig, report: Report):
    """Finds the files and reads the head of one; raises UserError where this cannot be done."""
    try:
      import datasets
    except ImportError as error:
      raise UserError("data.source='hub' needs the package datasets: pip install -e '.[hf]'") from error
    assert config.path is not None  # DataConfig.validate
    self.name, self._report = f"data.path={config.path!r}", report
    folder = os.path.abspath(os.path.expanduser(config.path))
    local = os.path.isdir(folder)
    if not local and not _NAME.fullmatch(config.path):
      raise UserError(f"{self.name}: is neither a folder on this machine nor OWNER/NAME of a data set on the hub")
    if local and config.hub_revision is not None:
      raise UserError(
        f"data.hub_revision={config.hub_revision!r} is given but {self.name} is a folder on this machine,"
        " which has no revisions; leave it at None"
      )
    try:
      builder: Any = datasets.load_dataset_builder(
        folder if local else config.path, config.hub_subset, revision=config.hub_revision, cache_dir=_cache(config)
      )
      # Not one stream for all reads: a stream keeps its state, and readers must not share it.
      self._open = lambda split=config.hub_split: builder.as_streaming_dataset(split=split)
      self._open()
    except ConnectionError as error:
      raise UserError(
        f"{self.name}: the hub cannot be reached ({first_line(error)}); check the network, or give a local folder"
      ) from error
    except Exception as error:  # the library raises many kinds
      raise UserError(
        f"{self.name}: cannot be opened ({first_line(error)}); check data.path, data.hub_subset={config.hub_subset!r},"
        f" data.hub_split={config.hub_split!r} and data.hub_revision={config.hub_revision!r}"
      ) from error
    found = [str(file) for files in builder.config.data_files.values() for file in files]
    # A file on the hub is named with its commit. One here is known by name and size: hashing all would take hours.
    self.files = [f"{os.path.relpath(f, folder)} {os.path.getsize(f)}" for f in found] if local else found
    commits = sorted({commit for file in found for commit in re.findall(r"@(\w+)/", file)} if not local else ())
    at = f" at commit {', '.join(commits)}" if commits else ""
    report(f"data: streaming {len(found)} file(s) of {config.path}{at}")

  def read(self, position: Position) -> Iterator[tuple[Position, str]]:
    """Yields (its position, text) of each document from `position` to the end.

    Starting inside a file reads that file from its beginning, at times the one before it too, but none before these.
    A failure is said and tried again from the document where it happened.
    """
    pauses = iter(_PAUSES)
    while True:
      try:
        stream = self._open()
        if position["stream"] is not None:
          stream.load_state_dict(position["stream"])
        for row in stream:
          yield position, self._text(row, position["document"])
          position = {"document": position["document"] + 1, "stream": stream.state_dict()}
          pauses = iter(_PAUSES)
        return
      except UserError:
        raise
      except Exception as error:  # of the network, the file system, or a file's content
        failed = f"{self.name}: document {position['document']} cannot be read ({first_line(error)})"
        pause = next(pauses, None)
        if pause is None:
          raise UserError(f"{failed}, tried {len(_PAUSES) + 1} times; the same command goes on from there") from error
        self._report(f"data: {failed}; trying again in {pause} s")
        time.sleep(pause)

  def _text(self, row: dict[str, Any], document: int) -> str:
    if "text" not in row:
      raise UserError(f'{self.name}: has no column "text"; its columns: {", ".join(row)}')
    text = row["text"]
    if not isinstance(text, str):
      got = "null" if text is None else type(text).__name__
      raise UserError(
        f'{self.name}: column "text" must hold strings, but that of document {document} is {got};'
        " nothing is left out in silence: write the data set to local files without such rows"
      )
    return text


def tokenizer_file(config: DataConfig) -> str:
  """Path of data.tokenizer: itself, or, where it is OWNER/NAME on the hub, that of the tokenizer.json fetched."""
  name = config.tokenizer
  assert name is not None
  if os.path.exists(os.path.expanduser(name)) or name.endswith(".json") or not _NAME.fullmatch(name):
    return name
  try:
    from huggingface_hub import hf_hub_download
  except ImportError as error:
    raise UserError(
      f"data.tokenizer={name!r} is no file here; fetching it from the hub needs the package huggingface_hub:"
      " pip install -e '.[hf]'"
    ) from error
  try:
    return hf_hub_download(name, "tokenizer.json", cache_dir=_cache(config))
  except Exception as error:  # the library raises many kinds
    raise UserError(
      f"data.tokenizer={name!r}: is no file here, and its tokenizer.json cannot be fetched from the hub"
      f" ({first_line(error)})"
    ) from error


def _cache(config: DataConfig) -> str | None:
  """None is the hub's own cache, which other programs share."""
  return os.path.join(os.path.expanduser(config.cache_dir), "hub") if config.cache_dir else None
