"""State of a run and the step that advances it. All that decides the next step is in the state or in the batch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from sparse_lm.config import LmConfig, TrainingConfig
from sparse_lm.models.transformer import Transformer
from sparse_lm.parallel import sharding
from sparse_lm.training import losses, sparsity


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """A pytree; every leaf is an array on the mesh."""

  step: jax.Array  # i32[], steps done
  model: Transformer  # float32 master weights
  optimizer: optax.OptState
  key: jax.Array  # u32[2], data of the run's random key; step n uses fold_in(key, n)
  l1_coefficient: jax.Array  # f32[], the configured one, or what the L0 controller has made of it
  l0: jax.Array  # f32[], of the last step with tokens, which the controller reads; -1 before the first
  is_sparse: jax.Array  # bool[], whether gates are sparse enough for twell; what `sparsity.decide` said last
  first_bad_step: jax.Array  # i32[], first step whose loss or gradient was NaN or infinite; -1 while there is none


def learning_rate(training: TrainingConfig) -> optax.Schedule:
  """Linear from 0 over warmup_steps, then a cosine that reaches 0 when all steps are done."""
  return optax.warmup_cosine_decay_schedule(0.0, training.learning_rate, training.warmup_steps, training.steps)


def make_optimizer(config: LmConfig) -> optax.GradientTransformation:
  """AdamW after clipping by the global norm. Norm scales do not decay, whatever their rank after stacking."""
  training = config.training

  def decays(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: sharding.parameter_name(path) != "scale_D", params)

  return optax.chain(
    optax.clip_by_global_norm(training.clip_norm),
    optax.adamw(
      learning_rate(config.training),
      b1=training.beta1,
      b2=training.beta2,
      eps=training.epsilon,
      weight_decay=training.weight_decay,
      mask=decays,
    ),
  )


# The random draws of a model run once; optimising their code takes longer than everything else before the first step.
COMPILE_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# For every program whose results are written down.
COMPILER_OPTIONS = {
  # Otherwise XLA adds with atomics and picks matrix kernels by timing them anew in each process, and a run that is
  # resumed would not continue with the same bits.
  "xla_gpu_deterministic_ops": True,
  # Otherwise virtual devices start independent collectives together, each wait takes a thread, and a machine of few
  # cores runs out of threads: it hangs, then aborts. (On two cores a step is not slower without it.)
  "xla_cpu_enable_concurrency_optimized_scheduler": False,
}


def make_init(config: LmConfig) -> jax.stages.Wrapped:
  """Returns the jitted maker of a fresh state, laid out by the sharding rules; its values depend on the seed alone."""

  @functools.partial(jax.jit, compiler_options=COMPILE_FAST)
  def init():
    init_key, run_key = jax.random.split(jax.random.key(config.seed))
    model = sharding.shard_parameters(Transformer(config.model, config.precision, rngs=nnx.Rngs(init_key)))
    return TrainState(
      step=jnp.int32(0),
      model=model,
      optimizer=make_optimizer(config).init(model),
      key=jax.random.key_data(run_key),
      l1_coefficient=jnp.float32(config.sparsity.l1_coefficient),
      l0=jnp.float32(-1),
      is_sparse=jnp.bool_(config.sparsity.sparse_below == 1),  # no L0 is too high then, and none need be waited for
      first_bad_step=jnp.int32(-1),
    )

  return init


def make_train_step(config: LmConfig) -> jax.stages.Wrapped:
  """Returns the jitted `step(state, batch) -> (state, metrics)`, which consumes the state.

  model.ffn_implementation of the config decides what computes the step, whatever the model in the state was made for.
  Each array of the batch is [A, B/A, L]: A micro-batches of the global batch, whose gradients add up to the gradient of
  all B sequences at once.
  """
  optimizer, schedule, scale = make_optimizer(config), learning_rate(config.training), losses.l1_scale(config)

  def coefficients(state):
    """(what the state keeps, what is in force in this step)."""
    ramp = sparsity.warmup(state.step, config)
    if config.sparsity.target_l0 is None:
      return state.l1_coefficient, ramp * state.l1_coefficient
    kept, now = sparsity.control(state.l1_coefficient, state.l0, ramp, config.sparsity.target_l0)
    return kept, ramp * now

  def gradients(model, batch, sizes, coefficient):
    def objective(model, micro):  # changes the model in here, so that gradients have the structure of the state's
      return losses.objective(model.with_ffn(config.model.ffn_implementation), micro, sizes, coefficient, config)

    grad = jax.grad(objective, has_aux=True)

    def add(carry, micro):
      return losses.add(carry, grad(model, micro)), None

    # A single micro-batch costs nothing extra: XLA inlines a loop of one iteration and drops the addition to zero.
    first = jax.tree.map(lambda x: x[0], batch)
    shapes = jax.eval_shape(lambda: grad(model, first))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, out_sharding=s.sharding), shapes)
    return jax.lax.scan(add, zeros, batch)[0]

  @functools.partial(jax.jit, donate_argnums=0, compiler_options=COMPILER_OPTIONS)
  def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
    sizes = losses.totals(batch)
    no_tokens = sizes.tokens == 0  # padding alone tells nothing about neurons
    kept_coefficient, coefficient = coefficients(state)
    grads, sums = gradients(state.model, batch, sizes, coefficient)

    updates, optimizer_state = optimizer.update(grads, state.optimizer, state.model)
    model = optax.apply_updates(state.model, updates)
    if config.sparsity.reinit_rate > 0:
      key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
      model = sparsity.revive_dead(model, sums.stats.active_F | no_tokens, key, config)

    metrics = losses.summarize(sums, sizes)
    l1_loss = coefficient * scale * jnp.mean(metrics["l1_per_layer"])
    loss, grad_norm = metrics["cross_entropy"] + l1_loss, optax.tree.norm(grads)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    first_bad_step = jnp.where((state.first_bad_step < 0) & ~finite, state.step + 1, state.first_bad_step)
    metrics |= {
      "loss": loss,
      "l1_loss": l1_loss,
      "l1_coefficient": coefficient,
      "grad_norm": grad_norm,
      "learning_rate": schedule(state.step),
      "first_bad_step": first_bad_step,
    }
    return TrainState(
      step=state.step + 1,
      model=model,
      optimizer=optimizer_state,
      key=state.key,
      l1_coefficient=kept_coefficient,
      l0=jnp.where(no_tokens, state.l0, jnp.mean(metrics["l0_per_layer"])),
      is_sparse=sparsity.decide(state.is_sparse, state.step + 1, metrics["l0_per_layer"], no_tokens, config),
      first_bad_step=first_bad_step,
    ), metrics

  return step
