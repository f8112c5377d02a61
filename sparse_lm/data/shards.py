"""Tokens of a corpus on disk: equal shards of one token stream, where each document starts, and an index of checksums.

  index.json          counts, dtype, bytes and CRC-32 of every file, and what the tokens were made from
  tokens-00000.bin    little-endian uint16 or uint32, shard_tokens of them; the last shard holds the rest
  starts.npy          i64[N+1]: document n is tokens starts[n] to starts[n + 1]

Dimension key: N documents, L tokens in a run.
"""

import array
import dataclasses
import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparse_lm.data.cache import DamagedError

FORMAT_VERSION = 1
SHARD_TOKENS = 1 << 26  # 128 MiB of uint16: few files for a large corpus, yet small enough to copy one by one
_STARTS = "starts.npy"


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """Read-only view of the stream; pages come from disk as they are touched."""

  shards: list[np.ndarray]
  shard_tokens: int
  starts_N: np.ndarray  # N + 1 entries

  @property
  def num_tokens(self) -> int:
    """Length of the stream."""
    return int(self.starts_N[-1])

  @property
  def num_documents(self) -> int:
    """Number of documents in the stream."""
    return len(self.starts_N) - 1

  def read(self, start: int, out_L: np.ndarray) -> None:
    """Copies the tokens from `start` on into `out_L`; a run may cross shards."""
    filled = 0
    while filled < len(out_L):
      shard, offset = divmod(start + filled, self.shard_tokens)
      piece = self.shards[shard][offset : offset + len(out_L) - filled]
      out_L[filled : filled + len(piece)] = piece
      filled += len(piece)


def memory_store(documents: Sequence[np.ndarray]) -> TokenStore:
  """The stream of these documents' ids, in memory; at least one token."""
  tokens = np.concatenate(documents)
  return TokenStore([tokens], len(tokens), np.cumsum([0, *map(len, documents)]))


def write_store(
  folder: Path, documents: Iterable[np.ndarray], *, vocab_size: int, made_from: dict[str, Any], shard_tokens: int
) -> None:
  """Streams the documents' ids into `folder`; holds one document and the starts (8 bytes a document) in memory."""
  dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
  starts, files, shard = array.array("q", [0]), {}, None
  for tokens_L in documents:
    position, end = starts[-1], starts[-1] + len(tokens_L)
    while position < end:
      if position % shard_tokens == 0:
        if shard is not None:
          files[shard.name] = shard.close()
        shard = _ShardWriter(folder / f"tokens-{position // shard_tokens:05d}.bin")
      assert shard is not None
      upto = min(end, (position // shard_tokens + 1) * shard_tokens)
      shard.write(tokens_L[position - starts[-1] : upto - starts[-1]].astype(dtype).tobytes())
      position = upto
    starts.append(end)
  if shard is not None:
    files[shard.name] = shard.close()
  np.save(folder / _STARTS, np.frombuffer(starts, "<i8"), allow_pickle=False)
  files[_STARTS] = _measure(folder / _STARTS)
  content = {
    "format_version": FORMAT_VERSION,
    "made_from": made_from,
    "num_tokens": starts[-1],
    "num_documents": len(starts) - 1,
    "dtype": dtype.str,
    "shard_tokens": shard_tokens,
    "files": files,
  }
  index = {"crc32": _crc_of(content), "content": content}
  (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n")


def load_store(folder: Path, *, made_from: dict[str, Any]) -> TokenStore:
  """Opens a folder after reading every byte of it once for its CRC-32; raises DamagedError.

  The check runs at the speed of the disk, or 1 to 3 GB/s once the files are in memory: a second for a few billion
  tokens, against a run of hours on tokens that nobody wrote.
  """
  try:
    index = json.loads((folder / "index.json").read_text())
    content, crc = index["content"], index["crc32"]
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise DamagedError(f"{folder / 'index.json'} cannot be read ({error})") from error
  if _crc_of(content) != crc:
    raise DamagedError(f"{folder / 'index.json'} does not match its checksum")
  if content["format_version"] != FORMAT_VERSION or content["made_from"] != made_from:
    raise DamagedError(f"{folder / 'index.json'} belongs to other data")
  for name, wanted in content["files"].items():
    try:
      found = _measure(folder / name)
    except OSError as error:
      raise DamagedError(f"{folder / name} cannot be read ({error.strerror})") from error
    if found["bytes"] != wanted["bytes"]:
      raise DamagedError(f"{folder / name} has {found['bytes']} bytes instead of {wanted['bytes']}")
    if found != wanted:
      raise DamagedError(f"{folder / name} does not match its checksum")
  # asarray drops the memmap class, whose every slice costs microseconds; the memory stays mapped.
  shards = [
    np.asarray(np.memmap(folder / name, content["dtype"], mode="r")) for name in content["files"] if name != _STARTS
  ]
  starts_N = np.asarray(np.load(folder / _STARTS, mmap_mode="r", allow_pickle=False))
  return TokenStore(shards, content["shard_tokens"], starts_N)


class _ShardWriter:
  def __init__(self, path: Path):
    self.name = path.name
    self._file: BinaryIO = path.open("wb")
    self._bytes = self._crc = 0

  def write(self, raw: bytes) -> None:
    self._file.write(raw)
    self._bytes += len(raw)
    self._crc = zlib.crc32(raw, self._crc)

  def close(self) -> dict[str, int]:
    self._file.close()
    return {"bytes": self._bytes, "crc32": self._crc}


def _measure(path: Path) -> dict[str, int]:
  size = crc = 0
  with path.open("rb") as file:
    while chunk := file.read(1 << 20):
      size, crc = size + len(chunk), zlib.crc32(chunk, crc)
  return {"bytes": size, "crc32": crc}


def _crc_of(content: Any) -> int:
  return zlib.crc32(json.dumps(content, sort_keys=True).encode())
