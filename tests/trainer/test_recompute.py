"""Activations computed again, gradients added up over micro-batches, and the control that computes with torch."""
import unittest

import torch

import rig
from bitroll import functions, lora, mcore
from bitroll.rehash import Differs, Rehash
from bitroll.torch_ops import TorchLinear

LENGTHS = (9, 14, 5)


def masters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class Trainer:
    """A model over Megatron with its micro-batches: each sequence's rows, targets, weights of the loss."""

    def __init__(self, preset="pico", **kw):
        mcore.initialize(rig.BACKEND)
        self.r = rig.Rig(preset, True, mcore.BitrollModel, gradients=True, **kw)
        self.texts = rig.sequences(self.r.config, [n + 1 for n in LENGTHS])
        generator = torch.Generator().manual_seed(7)
        self.weight = [torch.randn(n, generator=generator).to(rig.DEVICE) for n in LENGTHS]

    def loss(self, which):
        lengths, token, target = rig.rows_of([self.texts[i] for i in which])
        logprob = self.r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token), 0.75))[0]
        return (logprob * torch.cat([self.weight[i] for i in which])).sum()

    def gradients(self, batches):
        """Of the sum over micro-batches, each a list of sequences."""
        self.r.model.zero_grad()
        for which in batches:
            self.loss(which).backward()
        return {name: p.grad.clone() for name, p in masters(self.r.model).items()}


class Recompute(unittest.TestCase):
    def test_every_output_is_the_same_again(self):
        t = Trainer(recompute=True, fn=Rehash(functions))
        seen = t.r.model.fn.places
        loss = t.loss([0, 1, 2])
        (place,) = seen.values()
        first = len(place.seen)
        loss.backward()
        self.assertEqual(len(place.seen), first)  # nothing new in the backward: all was compared
        self.assertEqual({layer for layer, _, _ in place.seen}, set(range(-1, t.r.config.n_layer + 1)))
        t.r.close()

    def test_what_changed_in_between_is_named(self):
        """An adapter published between a forward and its backward: the first op that reads it says so."""
        t = Trainer(recompute=True, fn=Rehash(functions))
        layer = t.r.model.decoder.layers[t.r.config.n_layer - 1]
        loss = t.loss([0, 1])
        with torch.no_grad():
            layer.mlp.shared_experts.linear_fc2.adapter.linear_out.weight[3] += 0.25
        lora.publish(t.r.model)
        with self.assertRaisesRegex(Differs, rf"layer {t.r.config.n_layer - 1}, op \d+ \(linear\), output 0: computed again"):
            loss.backward()
        t.r.close()

    def test_two_forwards_under_way(self):
        t = Trainer(recompute=True, fn=Rehash(functions))
        a, b = t.loss([0]), t.loss([1, 2])
        a.backward()
        b.backward()
        t.r.close()


class Accumulation(unittest.TestCase):
    def test_micro_batches_add_up(self):
        """To the same bytes in every run; to the whole batch's gradient but for rounding."""
        t = Trainer()
        parts, again, whole = t.gradients([[0, 1], [2]]), t.gradients([[0, 1], [2]]), t.gradients([[0, 1, 2]])
        self.assertTrue(all(torch.equal(parts[name], again[name]) for name in parts))
        for name, g in whole.items():
            self.assertLessEqual(float((parts[name] - g).norm()), 1e-2 * float(g.norm()), name)
        lone = t.gradients([[0, 1]])
        self.assertTrue(any(float((lone[name] - g).norm()) > 0.1 * float(g.norm()) for name, g in whole.items()))
        t.r.close()


class Padding(unittest.TestCase):
    def test_room_between_sequences_moves_no_gradient(self):
        t = Trainer()
        wanted, room = t.gradients([[0, 1, 2]]), [n + 3 * i + 1 for i, n in enumerate(LENGTHS)]
        lengths, token, target = rig.rows_of(t.texts)
        place = torch.tensor([sum(room[:i]) + k for i, n in enumerate(lengths) for k in range(n)], device=rig.DEVICE)
        spread, aim = (torch.full((sum(room),), v, dtype=torch.int32, device=rig.DEVICE).index_copy(0, place, values)
                       for v, values in ((0, token), (3, target)))
        t.r.model.zero_grad()
        logprob = t.r.model.log_probs(spread, mcore.pack(lengths, room), aim, rig.ones(sum(room), 0.75))[0]
        (logprob[place] * torch.cat(t.weight)).sum().backward()
        self.assertTrue(all(torch.equal(p.grad, wanted[name]) for name, p in masters(t.r.model).items()))
        t.r.close()


class Control(unittest.TestCase):
    def test_torch_in_place_of_the_linear_maps(self):
        """Near the engine's log-probs, not the same bytes; gradients reach every adapter."""
        ours, theirs = Trainer("nano"), Trainer("nano", fn=TorchLinear())
        lengths, token, target = rig.rows_of(ours.texts)
        with torch.no_grad():
            a, b = (t.r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)))[0] for t in (ours, theirs))
        self.assertGreater(int((rig.bits(a) != rig.bits(b)).sum()), len(token) // 4)
        self.assertLess(float((a - b).abs().median()), 0.1)  # not the largest: a token may choose another expert
        wanted, found = ours.gradients([[0, 1, 2]]), theirs.gradients([[0, 1, 2]])
        for name, g in wanted.items():
            cosine = float((g * found[name]).sum() / (g.norm() * found[name].norm() + 1e-30))
            self.assertTrue(cosine > 0.8 or float(g.norm()) == 0, (name, cosine))
        ours.r.close()
        theirs.r.close()

    def test_base_rows_have_no_adapter(self):
        t, base = Trainer(fn=TorchLinear()), rig.Rig("pico", False, mcore.BitrollModel, fn=TorchLinear())
        lengths, token, target = rig.rows_of(t.texts)
        with torch.no_grad():
            off, without = (m.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)), slot=-1)[0] for m in (t.r.model, base.model))
            on = t.r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)))[0]
        self.assertTrue(torch.equal(rig.bits(off), rig.bits(without)))
        self.assertFalse(torch.equal(rig.bits(off), rig.bits(on)))
        t.r.close()
        base.close()


if __name__ == "__main__":
    unittest.main()
