"""The recipe of "Sparser, Faster, Lighter Transformer Language Models", shared by the eight files paper_*.py.

Shapes and optimisation are its Table 2. Text and tokenizer are those of the authors' configs: the deduplicated
FineWeb-Edu, streamed from the Hugging Face hub in its own order, and the tokenizer of SmolLM2-360M. A run names its
commit of the data set when it starts; pin it with --config.data.hub_revision=... to be able to repeat the run.
Its dense baselines are the same command with --config.sparsity.l1_coefficient=0.

L1: the paper's equation 2 averages |h| over tokens and hidden units. The authors' code sums over hidden units and
averages over tokens. Their trainer then adds this to each micro-batch's loss without dividing by the number of
micro-batches of a step, 512 sequences / 8 a device = 64. We follow the code, since it made the published models:
objective = CE + 2e-5 * 64 * mean over layers of L1, constant from the first step. Equation 2 itself would be
--config.sparsity.l1_reduction=mean --config.sparsity.l1_multiplier=1, a weight smaller by 64 * ffn_width.

None of it has run here: no hub could be reached (streaming is tested on local folders; that this data set has the
column "text" is assumed), and the hours in paper_*.py are 6 * parameters * tokens at 40 % of the bf16 peak of eight
H100s. Holding out the first 2000 documents is our choice.
"""

from sparse_lm.config import CheckpointConfig, DataConfig, LmConfig, ModelConfig, SparsityConfig, TrainingConfig


def paper(*, num_layers: int, steps: int, gated: bool) -> LmConfig:
  """Returns one of the paper's models; they differ in depth, length of training and kind of feed-forward layer."""
  return LmConfig(
    model=ModelConfig(
      vocab_size=49_152,
      context_length=2048,
      num_layers=num_layers,
      model_width=2048,
      num_heads=32,
      ffn_width=5632 if gated else 8192,  # three matrices of 5632 or two of 8192: nearly the same parameters
      ffn_kind="gated_relu" if gated else "relu",
      rope_theta=10_000.0,  # the authors' released checkpoints were trained with 100,000
      norm_epsilon=1e-5,
      init_std=0.02,
      remat="full",
    ),
    sparsity=SparsityConfig(l1_coefficient=2e-5, l1_reduction="sum", l1_multiplier=64.0),
    data=DataConfig(
      source="hub",
      path="skymizer/fineweb-edu-dedup-45B",
      tokenizer="HuggingFaceTB/SmolLM2-360M",
      validation_fraction=0.0,
      validation_documents=2000,
    ),
    training=TrainingConfig(
      steps=steps,
      batch_size=512,
      accumulation_steps=8,  # on eight GPUs a micro-batch is 8 sequences each, as theirs
      learning_rate=1e-3,
      warmup_steps=600,
      beta1=0.9,
      beta2=0.95,
      epsilon=1e-8,
      weight_decay=0.1,
      clip_norm=1.0,
      eval_every=1000,
    ),
    checkpoint=CheckpointConfig(every=1000),
    seed=42,
  )
