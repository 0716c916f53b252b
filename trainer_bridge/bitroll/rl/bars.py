"""What a finished run must show: that it learned, and that the adapter which was certified has an effect. From the rows of its metrics and
the model as it ended."""
from .. import peft
from . import metrics


LONG = 100  # steps of a run that must have learned


def moved(model):
    """({kind of map: is some B not zero}, share of the routed experts whose three B are all not zero)."""
    live, kinds, experts = peft.live(model), {}, {}
    for name, low, e in peft.adapters(model):
        has = bool(live[low][1][e or 0].any())
        kind = name.split(".")[-1]
        kinds[kind] = kinds.get(kind, False) or has
        if e is not None:
            expert = name.rsplit(".", 1)[0]
            experts[expert] = experts.get(expert, True) and has
    return kinds, sum(experts.values()) / max(1, len(experts))


def line(text, is_met):
    mark = {True: "ok", False: "MISS", None: "not judged"}
    return f"{mark[is_met]:10} {text}"


def met(found):
    """Of what `lines` gave: is none missed?"""
    return all(is_met is not False for _, is_met in found)


def of_steps(n_step, rows, text, is_met):
    """A bar that only a run of so many steps can meet or miss."""
    return (text, is_met) if len(rows) >= n_step else (f"{text}: needs {n_step} steps, the run has {len(rows)}", None)


def of_sampling(sampling, text, is_met):
    """A bar that only a run of temperature 1 without a filter can meet or miss. A lower temperature and a filter leave more tokens certain, whose
    log-prob is 0 or next to it under any adapter, and more groups all right."""
    if (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0):
        return text, is_met
    return (f"{text}: expected of temperature 1 without a filter, the run samples at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, "
            f"top-k {sampling.top_k}", None)


def lines(rows, kinds, expert_share, sampling):
    """(text, is met) of each bar; is met: None where the run's length or its sampling cannot tell. rows: of metrics.csv, as text. sampling: the
    section of the run's settings."""
    def share(values):
        return sum(values) / max(1, len(values))
    based = [float(r["differ_from_base_share"]) for r in rows if r["differ_from_base_share"]]
    digests = [r["digest_trainer"] for r in rows]
    still = [r["step"] for r, before in zip(rows[1:], digests) if r["digest_trainer"] == before]
    first, last = metrics.ends([float(r["reward_mean"]) for r in rows])
    gain = min(0.3, (1 - first) / 2)  # all of it, or half of what was left to gain
    dead, spread = sorted(k for k, has in kinds.items() if not has), share([float(r["zero_spread_share"]) for r in rows])
    found = [  # the first update shows in the second step
        of_steps(2, rows, f"the adapter's digest changed at each step after the first{': not at ' + ', '.join(still) if still else ''}", not still),
        (f"B is not zero in {len(kinds) - len(dead)} of {len(kinds)} kinds of maps{': not in ' + ', '.join(dead) if dead else ''}", not dead),
        (f"B is not zero in {100 * expert_share:.1f} % of the routed experts, expected 90", expert_share >= 0.9),
        of_sampling(sampling, f"groups without spread: {100 * spread:.1f} %, expected at most 60", spread <= 0.6),
        of_steps(LONG, rows, f"reward {first:.3f} -> {last:.3f}: a gain of {last - first:.3f}, expected {gain:.3f}", last - first >= gain)]
    if based:
        found = [(f"at step 0, where B is zero, {100 * based[0]:.2f} % of the log-probs differ from the base's, expected 0", based[0] == 0.0),
                 of_sampling(sampling, *of_steps(2, rows, f"at the last step {100 * based[-1]:.2f} % differ from the base's, expected 99",
                                                 based[-1] >= 0.99))] + found
    return found
