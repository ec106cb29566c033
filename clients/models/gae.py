# pyright: basic, reportMissingImports=false
"""Per-token rewards and returns: generalised advantage estimation with a critic, and divergence as a cost.

The inputs hold the *trained* tokens of a rank, flat [T], trajectory after trajectory; ``lengths`` [N] integer counts
those of each trajectory and sums to T (``trained_lengths``). Tokens of the environment are no actions, so they are no
steps: the token after the last one of a turn is the first trained token of the next turn. If they counted, 500 tokens
of a tool would multiply the next turn's share of an advantage by lambda^500, which is 7e-12 at 0.95. verl's
``compute_gae_advantage_return`` likewise carries value and advantage across a masked token.
"""

import torch
from torch import Tensor


def trained_lengths(mask: Tensor, lengths: Tensor) -> Tensor:
    """Count the trained tokens of each trajectory: ``mask`` [M] bool over all completion tokens, ``lengths`` [N] sums
    to M -> [N] int64."""
    row = torch.arange(len(lengths), device=mask.device).repeat_interleave(lengths.to(mask.device))
    return torch.zeros(len(lengths), dtype=torch.int64, device=mask.device).index_add(0, row, mask.to(torch.int64))


def token_rewards(rewards: Tensor, lengths: Tensor, costs: Tensor | None = None) -> Tensor:
    """Assign the trajectory's reward to its last trained token, minus each token's cost; [N], [N], [T] -> [T] float32::

        r_t = [t is last] * R - cost_t

    The reward of a trajectory without trained tokens is dropped. With ``costs = kl_coef * (behaviour - reference)``
    this is the reward of RLHF, whose penalty is per token: Ouyang et al., InstructGPT (arXiv 2203.02155), section 3.5
    and equation 2.
    """
    result = torch.zeros(int(lengths.sum()), dtype=torch.float32, device=rewards.device)
    some = lengths > 0
    result[lengths.cumsum(0)[some] - 1] = rewards.to(torch.float32)[some]
    return result if costs is None else result - costs


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimation, backwards over each trajectory; [T] float32.

    ``rewards`` [T], ``values`` [T]: the critic's estimate *before* the token, for the state in which it was chosen.
    ``t + 1`` is the trajectory's next trained token. The end of a trajectory ends the episode, even at the length
    limit::

        delta_t = r_t + gamma * V_{t+1} - V_t,   V after the last token = 0
        A_t     = delta_t + gamma * lambda * A_{t+1}

    lambda 1 is the return minus V_t (no bias, most variance), lambda 0 the one-step error. A value's target is A_t +
    V_t.

    Source: Schulman et al., GAE (arXiv 1506.02438), section 3, equation 16.
    """
    rows, width = len(lengths), int(lengths.max()) if lengths.numel() else 0
    inside = torch.arange(width, device=rewards.device) < lengths.unsqueeze(1)
    reward = torch.zeros(rows, width + 1, dtype=torch.float64, device=rewards.device)
    value = torch.zeros_like(reward)
    reward[:, :-1][inside] = rewards.to(torch.float64)
    value[:, :-1][inside] = values.to(torch.float64)
    advantage = torch.zeros_like(reward)
    for place in reversed(range(width)):
        delta = reward[:, place] + gamma * value[:, place + 1] - value[:, place]
        # positions beyond the end stay 0, since reward and value are 0 there
        advantage[:, place] = delta + gamma * gae_lambda * advantage[:, place + 1]
    return advantage[:, :-1][inside].to(torch.float32)


def returns_to_go(rewards: Tensor, lengths: Tensor) -> Tensor:
    """Return the sum of the rewards from each token on; [T] -> [T] float32::

        G_t = sum_{i >= t} r_i

    Source: Hu et al., REINFORCE++ (arXiv 2501.03262v9), section 3.1, equation 4.
    """
    zeros = torch.zeros_like(rewards)
    return gae(rewards, zeros, lengths, gamma=1.0, gae_lambda=1.0)
