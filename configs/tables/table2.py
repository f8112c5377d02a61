"""Table 2: hyper-parameters of the paper and of configs/lm/paper_*.py.

python -m experiments.tables --table=configs/tables/table2.py --out=runs/tables
"""

from configs.tables.paper import HARDWARE, SIZES
from sparse_lm.table_config import FixedSetting, Number, PaperTable, Row, Setting, Source

_GATED = tuple(f"configs/lm/{name}.py" for name, _ in SIZES.values())
_NONGATED = tuple(path.replace(".py", "_nongated.py") for path in _GATED)


def get_table() -> PaperTable:
  return PaperTable(
    title="Table 2: hyper-parameters",
    note=(
      "Words are those of our configs. Text and tokenizer are those of the authors' configs, see configs/lm/paper.py."
      " The checkpoints that they published were trained with a rotary base of 100000."
    ),
    hardware=HARDWARE,
    runs="table2",
    rows=(
      *_by_size("layers", "model.num_layers", ("8", "18", "28", "38")),
      *_by_size("steps", "training.steps", ("10000", "20000", "30000", "40000")),
      _row("model width", "2048", _field("model.model_width")),
      _row("attention heads", "32", _field("model.num_heads")),
      _row("key-value heads", "32", _field("model.kv_heads")),
      _row("head width", "64", _field("model.head_width")),
      _row("FFN width, gated", "5632", Setting(files=_GATED, field="model.ffn_width")),
      _row("FFN width, non-gated", "8192", Setting(files=_NONGATED, field="model.ffn_width")),
      _row("activation, gated", "gated_relu", Setting(files=_GATED, field="model.ffn_kind")),
      _row("activation, non-gated", "relu", Setting(files=_NONGATED, field="model.ffn_kind")),
      _row("rotary base", "10000", _field("model.rope_theta")),
      _row("standard deviation of the initial weights", "0.02", _field("model.init_std")),
      _row("vocabulary", "49152", _field("model.vocab_size")),
      _row("embeddings tied", "yes", _field("model.tie_embeddings")),
      _row("tokens a sequence", "2048", _field("model.context_length")),
      _row("biases and dropout", "none", FixedSetting(value="none", file="sparse_lm/models/transformer.py")),
      _row("sequences a step", "512", _field("training.batch_size")),
      _row("micro-batches a step (8 sequences on 8 GPUs each)", "8", _field("training.accumulation_steps")),
      _row("optimiser", "AdamW", FixedSetting(value="AdamW", file="sparse_lm/training/state.py")),
      _row("peak learning rate", "1e-3", _field("training.learning_rate")),
      _row("learning-rate schedule", "cosine", FixedSetting(value="cosine", file="sparse_lm/training/state.py")),
      _row("warm-up steps", "600", _field("training.warmup_steps")),
      _row("AdamW beta 1", "0.9", _field("training.beta1")),
      _row("AdamW beta 2", "0.95", _field("training.beta2")),
      _row("AdamW epsilon", "1e-8", _field("training.epsilon")),
      _row("weight decay", "0.1", _field("training.weight_decay")),
      _row("gradient clipping", "1.0", _field("training.clip_norm")),
      _row("compute", "bf16", _field("precision.recipe")),
      _row("L1 coefficient", "2e-5", _field("sparsity.l1_coefficient")),
    ),
  )


def _row(name: str, paper: str, source: Source) -> Row:
  return Row(name=name, numbers=(Number("value", paper, source),))


def _field(name: str) -> Setting:
  return Setting(files=_GATED + _NONGATED, field=name)


def _by_size(name: str, field: str, values: tuple[str, ...]) -> list[Row]:
  return [
    _row(f"{name}, {size}", value, Setting(files=pair, field=field))
    for size, value, pair in zip(SIZES, values, zip(_GATED, _NONGATED))
  ]
