"""Sparse feed-forward blocks and their packed format in float64 NumPy and plain loops; shares no line with the library.

Dimension key: M tokens, D model width, F hidden neurons.
"""

import numpy as np


def feedforward(x_MD, w_gate_FD, w_up_FD, w_down_FD):
  """Returns the output, the hidden values, and which neurons fire, for weights that may lack a gate (None)."""
  x_MD, w_up_FD, w_down_FD = (np.asarray(a, np.float64) for a in (x_MD, w_up_FD, w_down_FD))
  with np.errstate(invalid="ignore"):
    up_MF = x_MD @ w_up_FD.T
    gate_MF = up_MF if w_gate_FD is None else x_MD @ np.asarray(w_gate_FD, np.float64).T
    open_MF = np.where(gate_MF <= 0, 0.0, gate_MF)  # NaN is not below zero
    h_MF = open_MF if w_gate_FD is None else open_MF * up_MF
    return h_MF @ w_down_FD, h_MF, open_MF != 0


def gradients(x_MD, w_gate_FD, w_up_FD, w_down_FD, d_y_MD, d_l1):
  """Returns d_x, d_w_gate or None, d_w_up, d_w_down of sum(y * d_y) + d_l1 * l1, l1 the mean over tokens of sum |h|."""
  x_MD, w_up_FD, w_down_FD, d_y_MD = (np.asarray(a, np.float64) for a in (x_MD, w_up_FD, w_down_FD, d_y_MD))
  _, h_MF, fires_MF = feedforward(x_MD, w_gate_FD, w_up_FD, w_down_FD)
  d_h_MF = d_y_MD @ w_down_FD.T + d_l1 / max(len(x_MD), 1) * np.sign(h_MF)
  if w_gate_FD is None:
    d_up_MF = d_h_MF * fires_MF
    return d_up_MF @ w_up_FD, None, d_up_MF.T @ x_MD, h_MF.T @ d_y_MD
  w_gate_FD = np.asarray(w_gate_FD, np.float64)
  d_up_MF = d_h_MF * np.maximum(x_MD @ w_gate_FD.T, 0)
  d_gate_MF = d_h_MF * (x_MD @ w_up_FD.T) * fires_MF
  return d_up_MF @ w_up_FD + d_gate_MF @ w_gate_FD, d_gate_MF.T @ x_MD, d_up_MF.T @ x_MD, h_MF.T @ d_y_MD


def pack(h_MF, tile, words, first=0):
  """Returns words[row][tile] as lists: the true count, then every entry that fits, and nothing behind it.

  Tiles begin at column `first`; those before it are left out.
  """
  packed = []
  for row in h_MF:
    bits = row.view(np.uint16)
    packed.append([])
    for start in range(first, len(row), tile):
      entries = []
      for lane in range(4):  # two columns of every eight belong to it
        for column in range(start, min(start + tile, len(row))):
          if (column - start) % 8 in (2 * lane, 2 * lane + 1) and bits[column] not in (0x0000, 0x8000):
            entries.append(int(bits[column]) * 65536 + column)
      packed[-1].append([len(entries)] + entries[: words - 1])
  return packed


def unpack(words, columns, dtype):
  """Returns the dense matrix of an array of words whose tiles all fit."""
  h_MF = np.zeros((len(words), columns), dtype)
  for m, row in enumerate(words):
    for tile in row:
      for entry in tile[1 : 1 + tile[0]]:
        h_MF[m, entry % 65536] = np.array([entry // 65536], np.uint16).view(dtype)[0]
  return h_MF


def overflow_rows(x_MD, fires_MF, tile, capacity, row_capacity):
  """Returns the tokens that fire too many neurons of a tile or in all, or are not finite (x_MD None: who may be)."""
  rows = []
  for m, fires in enumerate(fires_MF):
    counts = [np.count_nonzero(fires[start : start + tile]) for start in range(0, len(fires), tile)]
    infinite = x_MD is not None and not np.all(np.isfinite(np.asarray(x_MD[m], np.float64)))
    if infinite or max(counts, default=0) > capacity or sum(counts) > row_capacity:
      rows.append(m)
  return rows
