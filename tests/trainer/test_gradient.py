"""The backward against float64 autograd over the same forward (bitroll.float64)."""
import unittest

import torch

import rig
from bitroll import float64 as twin
from bitroll import functions, mcore, names
from bitroll.rows import Rows

LENGTHS = (9, 14, 5)
PRESETS = ("pico", "nano", "kimi-linear-nano")


def expert_weights(r):
    def weights(name):
        path, every = names.checkpoint_module(name), range(r.config.n_expert)
        if not r.config.experts_fp4:
            return torch.stack([r.checkpoint[path.format(e=e) + ".weight"] for e in every]).double().to(rig.DEVICE)
        return torch.stack([twin.decode_fp4(*(r.checkpoint[path.format(e=e) + ".weight_" + kind] for kind in ("packed", "scale"))) for e in every]).to(rig.DEVICE)
    return weights


def gradients(model):
    found = {name: p.grad.clone().double() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return found


class Case:
    """A model, rows, a loss, and the float64 gradients of it."""

    def __init__(self, preset):
        self.r = rig.Rig(preset, True, gradients=True)
        texts = rig.sequences(self.r.config, [n + 1 for n in LENGTHS])
        self.lengths, self.token, self.target = rig.rows_of(texts)
        generator = torch.Generator().manual_seed(7)
        self.weight = torch.randn(len(self.token), generator=generator).to(rig.DEVICE)
        self.temperature = rig.ones(len(self.token), 0.75)
        recording = twin.Recording(functions)
        self.found = self.backward(recording)
        walk = twin.TwinRows(self.lengths, recording.outputs, expert_weights(self.r))
        logprob = self.r.model.log_probs(walk, self.token, self.target, self.temperature)[0]
        (logprob * self.weight).sum().backward()
        self.wanted, self.worst = gradients(self.r.model), walk.fn.worst

    def backward(self, fn=functions):
        rows = Rows(self.r.ops, [sum(self.lengths[:i]) for i in range(len(self.lengths) + 1)], fn=fn)
        logprob = self.r.model.log_probs(rows, self.token, self.target, self.temperature)[0]
        (logprob * self.weight).sum().backward()
        return gradients(self.r.model)

    def errors(self, found):
        """(largest relative error of a tensor, smallest cosine)."""
        off = {name: float((found[name] - g).norm() / g.norm()) for name, g in self.wanted.items()}
        cosine = min(float((found[n] * g).sum() / (found[n].norm() * g.norm() + 1e-300)) for n, g in self.wanted.items())
        return max(off.values()), cosine


CASES = {}


def case(preset):
    if preset not in CASES:
        CASES[preset] = Case(preset)
    return CASES[preset]


class Gradient(unittest.TestCase):
    def test_every_adapter_of_the_model(self):
        for preset in PRESETS:
            with self.subTest(preset=preset):
                c = case(preset)
                self.assertTrue(all(float(g.norm()) > 0 for g in c.wanted.values()))
                off, cosine = c.errors(c.found)
                print(f"{preset}: {len(c.wanted)} tensors, largest relative error {off:.2e}, smallest cosine {cosine:.6f}; forward of each op "
                      f"against float64 within {max(c.worst.values()):.1e}")
                self.assertLessEqual(off, 1e-2)
                self.assertGreaterEqual(cosine, 0.998)
                self.assertLess(max(c.worst.values()), 2.0**-7)  # one unit of bf16

    def test_two_runs_are_equal(self):
        c = case("pico")
        again = c.backward()
        self.assertTrue(all(torch.equal(c.found[name], again[name]) for name in again))

    def test_threads_move_no_bit(self):
        c, one = case("pico"), rig.Rig("pico", True, gradients=True, n_thread=1)
        kept, c.r = c.r, one
        try:
            alone = c.backward()
        finally:
            c.r = kept
        self.assertTrue(all(torch.equal(c.found[name], alone[name]) for name in alone))
        one.close()

    def test_recomputing_activations_moves_no_bit(self):
        mcore.initialize(rig.BACKEND)
        found = []
        for recompute in (False, True):
            r = rig.Rig("pico", True, mcore.BitrollModel, gradients=True, recompute=recompute)
            lengths, token, target = rig.rows_of(rig.sequences(r.config, [n + 1 for n in LENGTHS]))
            for half in (0.25, 1.0):  # two micro-batches add up
                (r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)))[0] * half).sum().backward()
            found.append(gradients(r.model))
            r.close()
        self.assertTrue(all(torch.equal(found[0][name], found[1][name]) for name in found[0]))


# Where a gradient must pass: (gradient op, its output).
MUST_CARRY = (("grad_combine", "dp"), ("grad_route", "dx"), ("grad_rmsnorm", "dx"), ("grad_kda", "da"), ("grad_kda", "dbeta"), ("grad_kda", "dq"),
              ("grad_kda", "dk"), ("grad_kda", "dv"), ("grad_conv", "dx"), ("grad_kda_norm", "dgate"), ("grad_kda_norm", "d_o"),
              ("grad_attnres", "dp"), ("grad_attn_gate", "dgate"), ("grad_attn", "dlatent"), ("grad_attn", "dq"), ("grad_attn", "dq_r"),
              ("grad_kda_gate", "df"), ("grad_kda_gate", "db"), ("grad_experts", "dx"), ("grad_glu", "dg"), ("grad_glu", "du"))


class Missing(unittest.TestCase):
    """A gradient that is zeroed on its way makes the comparison fail."""

    def error_without(self, op, output, is_meant=lambda values: True):
        """The largest error when an op's gradient is zeroed at those of its calls that are meant, and how many these were."""
        c, n = case("pico"), 0
        plain = getattr(c.r.ops, op)

        def call(**values):
            nonlocal n
            plain(**values)
            if is_meant(values):
                values[output].zero_()
                n += 1
        setattr(c.r.ops, op, call)
        try:
            return c.errors(c.backward())[0], n
        finally:
            setattr(c.r.ops, op, plain)

    def test_each_path_is_needed(self):
        for op, output in MUST_CARRY:
            with self.subTest(op=op, output=output):
                self.assertGreater(self.error_without(op, output)[0], 1e-2)

    def test_the_norm_of_the_routed_experts_is_needed(self):
        """Of all norms only this one, which the shared experts' branch goes around."""
        weights = [p.data_ptr() for name, p in case("pico").r.model.named_parameters() if name.endswith("routed_expert_norm.weight")]
        off, n = self.error_without("grad_rmsnorm", "dx", lambda values: values["w"].data_ptr() in weights)
        self.assertEqual(n, len(weights))
        self.assertGreater(n, 0)
        self.assertGreater(off, 1e-2)


if __name__ == "__main__":
    unittest.main()
