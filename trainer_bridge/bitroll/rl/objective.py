"""Advantages, the clipped objective, and the statistics of a step's log-probs. Torch arithmetic: none of it reaches a logit of its step."""
import torch


def advantages(rewards, eps=1e-6):
    """(reward - mean) / (std + eps) within each group, rows of rewards; a group without spread gives 0."""
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, unbiased=False, keepdim=True) + eps)


def zero_spread(rewards):
    """Share of groups whose rewards are all the same."""
    return float((rewards == rewards[:, :1]).all(1).double().mean())


def clipped(logprob, old, weight, clip):
    """(loss of each token, ratios): -min(ratio * weight, clip(ratio) * weight), ratio = exp(logprob - old)."""
    ratio = (logprob - old).clamp(-20, 20).exp()
    return -torch.minimum(ratio * weight, ratio.clamp(*clip) * weight), ratio.detach()


def kl(rollout, train):
    """(k1, k3) in float64 over sampled tokens, d = train - rollout: mean of -d, and of exp(d) - 1 - d."""
    d = train.double() - rollout.double()
    return float((-d).mean()), float((d.exp() - 1 - d).mean())


def differing(one, *others):
    """Which entries of lists of bit patterns are not the same in all of them, in order. A NaN is a difference, whatever its bits."""
    a = torch.tensor(one, dtype=torch.int64)
    differs = (a & 0x7FFFFFFF) > 0x7F800000
    for other in others:
        b = torch.tensor(other, dtype=torch.int64)
        if a.shape != b.shape:
            raise ValueError(f"{a.numel()} log-probs against {b.numel()}")
        differs |= a != b
    return differs.nonzero().view(-1).tolist()


def floats(bits):
    """Bit patterns of binary32 numbers as a tensor."""
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def bits(values):
    """A tensor of binary32 numbers as a list of bit patterns."""
    return [b & 0xFFFFFFFF for b in values.detach().contiguous().view(torch.int32).cpu().tolist()]


def ratio_statistics(rollout, train, clip):
    """What verl's names ask of one step: differences of log-probs and of probabilities, ratios and how many of them are clipped."""
    d = (train.double() - rollout.double())
    apart, ratio = (train.double().exp() - rollout.double().exp()).abs(), d.clamp(-20, 20).exp()
    return dict(max_abs_d=float(d.abs().max()), rollout_probs_diff_max=float(apart.max()), rollout_probs_diff_mean=float(apart.mean()),
                rollout_probs_diff_std=float(apart.std(unbiased=False)), ratio_min=float(ratio.min()), ratio_max=float(ratio.max()),
                clip_share=float(((ratio < clip[0]) | (ratio > clip[1])).double().mean()))
