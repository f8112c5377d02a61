"""The attention family in plain jnp: what runs on a CPU, and where no kernel serves.

Tiles of a row's queries against those tiles of its keys that any of them sees, one after another, so that time grows
with the visible pairs and memory with the tokens. Gradients are written out, as in the kernels (gem, section 3):
autodiff cannot reverse such loops.

A tile may reach past its row. What lies there is replaced by zeros when it is read and left alone when it would be
written, so that no row sees another, whatever it holds.

Dimension key: T query tokens, S key tokens, B rows, H query heads, which are G key heads with R query heads each, K
head width, Q queries of a tile, C keys of a tile.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.jagged import bias as bias_tables
from pallas_kernels.jagged import geometry
from pallas_kernels.jagged.bias import RelativeBias
from pallas_kernels.jagged.form import Form
from pallas_kernels.jagged.rotary import Rotary


class Gradients(NamedTuple):
  """Of everything that is differentiable."""

  q_THK: jax.Array
  k_SGK: jax.Array
  v_SGK: jax.Array
  position: jax.Array | None
  time: jax.Array | None


def forward(
  q_THK, k_SGK, v_SGK, q_offsets, k_offsets, history_B, bias: RelativeBias | None, form: Form
) -> tuple[jax.Array, jax.Array | None]:
  """o_THK in the dtype of q, and for softmax the logarithm of each query's sum, [H, T]: -inf if it sees no key."""
  call = _Call(q_THK, k_SGK, v_SGK, q_offsets, k_offsets, history_B, bias, form)

  def query_tile(n, results):
    tile = call.query_tile(n)
    q_QGRK = tile.read(call.q_TGRK)

    def key_tile(m, carry):
      o_GRQK, most_GRQ, total_GRQ = carry
      keys = tile.keys(m)
      s_GRQC, visible_QC, _ = tile.scores(q_QGRK, keys)
      if form.is_softmax:
        s_GRQC = jnp.where(visible_QC, s_GRQC, -jnp.inf)
        new_GRQ = jnp.maximum(most_GRQ, jnp.max(s_GRQC, axis=-1))
        # Until a query has seen a key, its largest score is -inf, from which nothing may be subtracted.
        base_GRQ = jnp.where(new_GRQ == -jnp.inf, jnp.zeros_like(new_GRQ), new_GRQ)
        p_GRQC, kept_GRQ = jnp.exp(s_GRQC - base_GRQ[..., None]), jnp.exp(most_GRQ - base_GRQ)
        o_GRQK, most_GRQ = o_GRQK * kept_GRQ[..., None], new_GRQ
        total_GRQ = total_GRQ * kept_GRQ + jnp.sum(p_GRQC, axis=-1)
      else:
        p_GRQC = jnp.where(visible_QC, _by_head(form.activate, s_GRQC), 0)
      return o_GRQK + _einsum("grqc,cgk->grqk", p_GRQC, keys.read(call.v_SGK)), most_GRQ, total_GRQ

    o_GRQK = jnp.zeros_like(q_QGRK.transpose(1, 2, 0, 3))
    start = o_GRQK, jnp.full_like(o_GRQK[..., 0], -jnp.inf), jnp.zeros_like(o_GRQK[..., 0])
    o_GRQK, most_GRQ, total_GRQ = lax.fori_loop(0, tile.key_tiles, key_tile, start)
    if form.is_softmax:
      o_GRQK = o_GRQK / jnp.where(total_GRQ == 0, 1, total_GRQ)[..., None]
    found = form.post_scale * o_GRQK.transpose(2, 0, 1, 3), (most_GRQ + jnp.log(total_GRQ)).transpose(2, 0, 1)
    return [tile.write(result, values) for result, values in zip(results, found)]

  start = [jnp.zeros_like(call.q_TGRK), jnp.full_like(call.q_TGRK[..., 0], -jnp.inf)]
  o_TGRK, lse_TGR = lax.fori_loop(0, call.query_tiles, query_tile, start)
  num_tokens, heads, width = call.shape
  o_THK = o_TGRK[:num_tokens].reshape(num_tokens, heads, width).astype(q_THK.dtype)
  return o_THK, lse_TGR[:num_tokens].reshape(num_tokens, heads).T if form.is_softmax else None


def backward(
  q_THK,
  k_SGK,
  v_SGK,
  q_offsets,
  k_offsets,
  history_B,
  bias: RelativeBias | None,
  rotary: Rotary | None,
  o_THK,
  lse_HT,
  d_o_THK,
  form: Form,
) -> Gradients:
  """Gradients in the dtypes of the arguments, turned back where q and k were turned."""
  call = _Call(q_THK, k_SGK, v_SGK, q_offsets, k_offsets, history_B, bias, form)
  d_o_TGRK = call.of_queries(d_o_THK)
  if form.is_softmax:
    delta_TGR = jnp.sum(call.of_queries(o_THK) * d_o_TGRK, axis=-1)
    lse_TGR = call.of_queries(lse_HT.T[:, :, None])[..., 0]

  def query_tile(n, carry):
    tile = call.query_tile(n)
    q_QGRK, d_o_QGRK = tile.read(call.q_TGRK), form.post_scale * tile.read(d_o_TGRK)
    if form.is_softmax:
      delta_GRQ1, lse_GRQ1 = (tile.read(a_TGR).transpose(1, 2, 0)[..., None] for a_TGR in (delta_TGR, lse_TGR))

    def key_tile(m, carry):
      d_q_QGRK, d_k_SGK, d_v_SGK, d_tables = carry
      keys = tile.keys(m)
      s_GRQC, visible_QC, places = tile.scores(q_QGRK, keys)
      d_p_GRQC = _einsum("qgrk,cgk->grqc", d_o_QGRK, keys.read(call.v_SGK))
      if form.is_softmax:
        p_GRQC = jnp.where(visible_QC, jnp.exp(s_GRQC - lse_GRQ1), 0)
        d_s_GRQC = jnp.where(visible_QC, p_GRQC * (d_p_GRQC - delta_GRQ1), 0)
      else:
        p_GRQC = jnp.where(visible_QC, _by_head(form.activate, s_GRQC), 0)
        d_s_GRQC = jnp.where(visible_QC, d_p_GRQC * _by_head(form.slope, s_GRQC), 0)
      if places is not None:
        d_s_QC = jnp.sum(d_s_GRQC, axis=(0, 1))
        d_tables = bias.add_gradients(d_tables, d_s_QC.astype(jnp.float32), *places)
      d_s_GRQC = form.pre_scale * d_s_GRQC
      d_q_QGRK = d_q_QGRK + _einsum("grqc,cgk->qgrk", d_s_GRQC, keys.read(call.k_SGK))
      d_k_SGK = keys.add(d_k_SGK, _einsum("grqc,qgrk->cgk", d_s_GRQC, q_QGRK))
      d_v_SGK = keys.add(d_v_SGK, _einsum("grqc,qgrk->cgk", p_GRQC, d_o_QGRK))
      return d_q_QGRK, d_k_SGK, d_v_SGK, d_tables

    d_q_TGRK, *rest = carry
    d_q_QGRK, *rest = lax.fori_loop(0, tile.key_tiles, key_tile, (jnp.zeros_like(q_QGRK), *rest))
    return tile.write(d_q_TGRK, d_q_QGRK), *rest

  d_tables = () if bias is None else (jnp.zeros_like(bias.position), jnp.zeros_like(bias.time))
  start = *(jnp.zeros_like(a) for a in (call.q_TGRK, call.k_SGK, call.v_SGK)), d_tables
  d_q_TGRK, d_k_SGK, d_v_SGK, d_tables = lax.fori_loop(0, call.query_tiles, query_tile, start)
  d_q_THK = d_q_TGRK[: call.shape[0]].reshape(call.shape)
  if form.broadcast_q:
    d_q_THK = jnp.sum(d_q_THK.reshape(len(q_offsets) - 1, *q_THK.shape), axis=0)
  d_k_SGK, d_v_SGK = (d_SGK[: len(k_SGK)] for d_SGK in (d_k_SGK, d_v_SGK))
  if rotary is not None:
    d_q_THK, d_k_SGK = rotary.turned_back(d_q_THK), rotary.turned_back(d_k_SGK)
    d_v_SGK = rotary.turned_back(d_v_SGK) if form.turn_values else d_v_SGK
  found = (d.astype(q_THK.dtype) for d in (d_q_THK, d_k_SGK, d_v_SGK))
  return Gradients(*found, *(d_tables or (None, None)))


class _Call:
  """The arguments of one call, in float32 at least, with a tile of padding behind the last token."""

  def __init__(self, q_THK, k_SGK, v_SGK, q_offsets, k_offsets, history_B, bias: RelativeBias | None, form: Form):
    num_rows = len(q_offsets) - 1
    if form.broadcast_q:
      q_THK = jnp.tile(q_THK, (num_rows, 1, 1))
    self.shape, self.bias, self.form, self.history_B = q_THK.shape, bias, form, history_B
    self.q_offsets, self.k_offsets = q_offsets, k_offsets
    self.q_tile, self.k_tile = geometry.tile_size(len(q_THK), num_rows), geometry.tile_size(len(k_SGK), num_rows)
    self._groups = k_SGK.shape[1]
    self.q_TGRK = self.of_queries(q_THK)
    self.k_SGK, self.v_SGK = _padded(k_SGK, self.k_tile), _padded(v_SGK, self.k_tile)
    self.tiles = geometry.Tiles.of(jnp.diff(q_offsets), len(q_THK), self.q_tile)
    self.query_tiles = self.tiles.number
    if bias is not None:
      requested_T = bias_tables.requests(bias.timestamps, q_offsets)
      self.requested_T, self.happened_S = _padded(requested_T, self.q_tile), _padded(bias.timestamps, self.k_tile)

  def of_queries(self, a_THK: jax.Array) -> jax.Array:
    """[T, G, R, K]."""
    a_THK = _padded(a_THK, self.q_tile)
    return a_THK.reshape(len(a_THK), self._groups, -1, a_THK.shape[2])

  def query_tile(self, n) -> "_QueryTile":
    """Tile n of the queries."""
    return _QueryTile(self, n)


class _Run:
  """Tokens that follow one another from `start` on, of which some are real: the first ones."""

  def __init__(self, start, position_Q, real_Q):
    self.start, self.position, self.real = start, position_Q, real_Q

  def _slice(self, a_T: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(a_T, self.start, len(self.real))

  def read(self, a_T: jax.Array) -> jax.Array:
    """Zeros for what is not real."""
    return _where(self.real, self._slice(a_T), 0)

  def write(self, a_T: jax.Array, values_Q: jax.Array) -> jax.Array:
    """`a_T` with values for what is real."""
    values_Q = _where(self.real, values_Q, self._slice(a_T))
    return lax.dynamic_update_slice_in_dim(a_T, values_Q, self.start, axis=0)

  def add(self, a_T: jax.Array, values_Q: jax.Array) -> jax.Array:
    """`a_T` with values added to what is real."""
    return self.write(a_T, self._slice(a_T) + values_Q)


class _QueryTile(_Run):
  """Queries of one row, and the tiles of keys, 0 <= m < key_tiles, that any of them sees."""

  def __init__(self, call: _Call, n):
    self._call, self._row = call, call.tiles.row[n]
    begin, end = call.q_offsets[self._row], call.q_offsets[self._row + 1]
    first = call.tiles.block[n] * call.q_tile
    i_Q = first + jnp.arange(call.q_tile)
    super().__init__(begin + first, i_Q, i_Q < end - begin)
    self._k_begin = call.k_offsets[self._row]
    self._k_length = call.k_offsets[self._row + 1] - self._k_begin
    last = jnp.minimum(first + call.q_tile, end - begin) - 1
    self._first_key, end_key = call.form.mask.keys_of(first, last, self._k_length)
    self.key_tiles = jnp.maximum(end_key - self._first_key + call.k_tile - 1, 0) // call.k_tile

  def keys(self, m) -> _Run:
    """Tile m of the keys."""
    first = self._first_key + m * self._call.k_tile
    j_C = first + jnp.arange(self._call.k_tile)
    return _Run(self._k_begin + first, j_C, j_C < self._k_length)

  def scores(self, q_QGRK, keys: _Run) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """s_GRQC, the visible pairs, and where these look in the tables of the bias."""
    call = self._call
    visible_QC = self.real[:, None] & keys.real[None, :]
    history = None if call.history_B is None else call.history_B[self._row]
    seen_QC = call.form.mask.visible(self.position[:, None], keys.position[None, :], history)
    if seen_QC is not None:
      visible_QC = visible_QC & seen_QC
    s_GRQC = call.form.pre_scale * _einsum("qgrk,cgk->grqc", q_QGRK, keys.read(call.k_SGK))
    if call.bias is None:
      return s_GRQC, visible_QC, None
    times = self.read(call.requested_T), keys.read(call.happened_S)
    places = call.bias.places(self.position, keys.position, *times)
    bias_QC = jnp.where(visible_QC, call.bias.at(*places), 0)
    return s_GRQC + bias_QC[None, None].astype(s_GRQC.dtype), visible_QC, places


def _padded(a_T: jax.Array, tile: int) -> jax.Array:
  if jnp.issubdtype(a_T.dtype, jnp.floating):
    a_T = a_T.astype(jnp.promote_types(a_T.dtype, jnp.float32))
  return jnp.pad(a_T, ((0, tile), *((0, 0) for _ in a_T.shape[1:])))


def _where(real_Q: jax.Array, values_Q: jax.Array, others) -> jax.Array:
  return jnp.where(real_Q.reshape(-1, *(1 for _ in values_Q.shape[1:])), values_Q, others)


def _by_head(function, s_GRQC: jax.Array) -> jax.Array:
  return function(s_GRQC.reshape(-1, *s_GRQC.shape[2:])).reshape(s_GRQC.shape)


def _einsum(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
  # float32 products on a GPU use TF32 unless asked otherwise.
  return jnp.einsum(equation, a, b, precision=lax.Precision.HIGHEST)
