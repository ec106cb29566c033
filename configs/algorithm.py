"""``[trainer.algorithm]``: advantages, losses, corrections and further terms."""

from typing import Annotated, Literal

from msgspec import Meta, field

from staleflow.configs.section import MOST, NonNegativeFloat, PositiveFloat, Section, Share, Text


class Algorithm(Section, frozen=True, kw_only=True):
    """From rewards to gradients. Keys that do not apply to the chosen loss must be left at their defaults."""

    advantage: Text = "grpo"
    """Advantage estimator. ``grpo``, ``dr_grpo``, ``rloo``: relative to the group. ``reinforce_pp``: relative to the
    batch. ``gae``: relative to a critic, token by token; starts the critic stage. Or the import path of ``f(rewards
    [N], group_ids [N]) -> [N]``, on tensors. If it has an argument ``stages``, it also gets the stage columns with one
    value for each sample. ``reinforce_pp_baseline``: relative to the group, then to the batch. ``none``: 0, rewards do
    not train; for ``distill_coef`` alone."""
    loss: Text = "ppo_clip"
    """``ppo_clip``, ``gspo``, ``gmpo``, ``cispo``, ``aipo``, ``m2po``, ``opsm``, ``dppo``; all but the first two bound
    the ratio to the engine, so they need no ``correction``. Or the import path of ``f(logprobs, old, behavior,
    advantages, row) -> loss``, tensors over the trained tokens of some whole trajectories, aggregated by ``loss_agg``.
    If it has an argument ``stages``, it also gets the stage columns with one value for each token."""
    loss_agg: Literal["auto", "token_mean", "sequence_mean", "sequence_sum"] = "auto"
    """Aggregation of the token losses of a batch. ``token_mean``: every token counts the same, long trajectories count
    more (DAPO). ``sequence_mean``: every trajectory counts the same, so tokens of long ones count less (GRPO, GSPO).
    ``sequence_sum``: the sum over a trajectory's tokens, over the constant ``rollout.max_new_tokens`` (Dr. GRPO); the
    gradient then grows with the lengths. ``auto``: ``sequence_mean`` for the losses ``gspo``, ``gmpo`` and ``opsm``,
    else ``sequence_sum`` for the advantage ``dr_grpo``, else ``token_mean``."""
    ratio_to: Literal["old", "behavior"] = "old"
    """Denominator of the ratio of ``ppo_clip`` and ``gspo``. ``old``: the weights at the start of the step; the clip is
    then idle unless the step has several updates, and ``correction`` accounts for staleness. ``behavior``: the
    engine's; the clip then accounts for staleness, and stale tokens lose their gradient."""
    clip_low: PositiveFloat = 0.2
    """PPO's ratio is clipped below 1 - ``clip_low``."""
    clip_high: PositiveFloat = 0.2
    """PPO's ratio is clipped above 1 + ``clip_high``."""
    dual_clip: NonNegativeFloat = 0.0
    """Second clip, for negative advantages: a ratio above this value (e.g. 3) has no further effect. 0 disables it."""
    correction: Literal["none", "tis", "decoupled", "masked_is", "masked_is_sequence", "masked_is_geometric"] = "tis"
    """Importance correction by the weight k = trainer/engine of each token. ``none``: weight 1, old data counts as new.
    ``tis``: k, at most ``tis_cap``. ``decoupled``: k, unbiased and unbounded. ``masked_is``: k, and tokens outside
    ``mask_low`` to ``mask_high`` are left out (IcePop). ``masked_is_sequence``: the product over the trajectory, and
    trajectories above ``sequence_cap`` are left out. ``masked_is_geometric``: k, at most ``tis_cap``, and trajectories
    whose geometric mean of k is outside ``geometric_low`` to ``geometric_high`` are left out."""
    tis_cap: PositiveFloat = 2.0
    """Maximum weight. Lower values discard more of the information in old data, higher ones make gradients noisier."""
    tis_cap_by_age: list[PositiveFloat] = field(default_factory=list[PositiveFloat])
    """Maximum weights of tokens that are 0, 1, 2, ... versions old, in place of ``tis_cap``; the last is also that of
    older ones. Falling values, such as ``[4, 2, 1.2]``, keep most of new data and damp old data. Empty: ``tis_cap`` for
    each age."""
    mask_low: NonNegativeFloat = 0.5
    """Weights below this value become 0. A narrow band up to ``mask_high`` learns from less data, nearly all of it
    on-policy."""
    mask_high: PositiveFloat = 5.0
    """Weights above this value become 0."""
    sequence_cap: PositiveFloat = 2.0
    """Products above this value become 0. Products of long trajectories vary widely, so many exceed it."""
    geometric_low: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Minimum geometric mean of k over a trajectory. The mean moves little with length: verl's recipes use 0.99 to 1.01
    and narrower against numeric mismatch alone; staleness and short trajectories move it further."""
    geometric_high: Annotated[float, Meta(gt=1, le=MOST)] = 1.05
    """Maximum geometric mean of k over a trajectory. A narrower band trains fewer trajectories, all nearly
    on-policy."""
    veto_below: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Leave out trajectories of negative advantage with a token whose k is below this value, with any loss. 1e-4 is
    usual: the trainer's model would almost never produce such a token, by numeric mismatch or age. 0: no veto."""
    gspo_low: PositiveFloat = 3e-4
    """The length-normalised ratio of a trajectory is clipped below 1 - ``gspo_low``. The paper's bounds, for ratios
    within one step. Numeric noise between engine and trainer alone exceeds them, and staleness more so: with
    ``ratio_to = "behavior"`` both must be set, for example to 0.01."""
    gspo_high: PositiveFloat = 4e-4
    """The same ratio is clipped above 1 + ``gspo_high``."""
    gmpo_low: PositiveFloat = 0.4
    """A token's log-ratio counts as at least -``gmpo_low``, in nats, if the advantage is negative (``gmpo``)."""
    gmpo_high: PositiveFloat = 0.4
    """A token's log-ratio counts as at most ``gmpo_high``, in nats, if the advantage is positive. Beyond it, the token
    has no gradient."""
    dppo_divergence: Literal["tv", "kl"] = "tv"
    """Distance between engine and model at a token (``dppo``), of the sampled token against all others: ``tv``: the
    change of its probability. ``kl``: KL divergence in nats, stricter where probabilities are near 0 or 1."""
    dppo_low: PositiveFloat = 0.15
    """Distance above which a token of negative advantage that became less likely loses its gradient. The authors use
    0.15 with ``tv`` and 0.05 with ``kl``."""
    dppo_high: PositiveFloat = 0.15
    """Distance above which a token of positive advantage that became likelier loses its gradient."""
    cispo_low: PositiveFloat = 1.0
    """The weight is at least 1 - ``cispo_low``; 1 sets no bound. A token always keeps its gradient."""
    cispo_high: PositiveFloat = 4.0
    """The weight is at most 1 + ``cispo_high``."""
    aipo_cap: PositiveFloat = 4.0
    """Maximum weight; 2 to 10 are usual."""
    m2_threshold: PositiveFloat = 0.04
    """Maximum mean of the squared log-ratio over the tokens that PPO could clip (good tokens that became likelier, bad
    ones that became less likely). The tokens farthest off are left out until it holds. Costs a second forward pass."""
    opsm_delta: PositiveFloat = 0.01
    """Bad trajectories from which the model has diverged by more than this, in nats a token, are left out."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the divergence from the reference model; above 0 it starts the reference stage. 0: no such term."""
    kl: Literal["k1", "k2", "k3"] = "k2"
    """Estimator of the divergence. ``k2`` has the gradient of KL, ``k1`` the same with an unbiased value. ``k3`` pushes
    less on tokens of which the model is surer than the reference, and exponentially more on the others: with a
    ``kl_coef`` of 0.001, one token 10 nats below the reference has 28 times the gradient of the mean token."""
    kl_in_reward: bool = False
    """Subtract ``kl_coef`` x (engine - reference) log-probabilities from each token's reward instead (``gae``,
    ``reinforce_pp``)."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of an entropy bonus: the entropy of the model's distribution at each trained token, in nats, is subtracted
    from its loss. Above 0 keeps the policy exploring, too much makes it random; 1e-4 to 1e-2 are usual. Costs a second
    pass over the logits; the metric ``entropy`` is then exact. 0: no bonus."""
    distill_coef: NonNegativeFloat = 0.0
    """Weight of on-policy distillation: ``distill_coef`` x (teacher - trainer) log-probability is added to each token's
    advantage. With ``advantage = "none"`` it is the only signal. 0: no teacher."""
    teacher: Text = "reference/logprobs"
    """Column with the teacher's log-probability of each completion token, at ``rollout.temperature``: ``STAGE/COLUMN``
    of a stage, or the name of a ``[[column]]``. The default starts the reference stage, whose model ``reference.path``
    is the teacher."""
    ess_scaled_lr: bool = False
    """Multiply each step's learning rate by the square root of the normalised effective sample size of the
    trajectories' importance weights (VCPO): stale batches, whose gradient is noisier, move the model less. The weights
    of long trajectories vary most, so the rate may fall far; the metric ``lr`` shows it."""
    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Discount for each token (``gae``)."""
    gae_lambda: Share = 1.0
    """Trace decay of ``gae``: 1 uses the returns, without bias; 0 uses the critic, without noise. Below 1, only the
    last tokens get a share of the reward until the critic has learned: set ``trainer.critic_warmup``."""
    whiten_advantages: bool = True
    """Give the advantages of ``gae`` mean 0 and deviation 1 over the trained tokens of the batch, as PPO in verl and
    TRL does. Without it, the size of the step follows the scale of the rewards and falls as the critic learns."""
