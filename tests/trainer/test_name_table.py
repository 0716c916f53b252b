"""The table of names against checkpoints and models, and what has an adapter against what trains."""
import os
import re
import unittest

import rig
from bitroll import mcore, names, peft

PRESETS = ("nano", "k3-nano", "kimi-linear-nano")


def general(name):
    """A name with {i} and {e} in place of numbers."""
    name = re.sub(r"(decoder\.layers|model\.layers)\.(\d+)\.", r"\1.{i}.", name)
    return re.sub(r"\.experts\.\d+\.", ".experts.{e}.", name)


def spelled(name):
    """The names that {norm,proj} or {A,B} stands for."""
    found = re.search(r"\{(\w+),(\w+)\}", name)
    return [name] if not found else [name[: found.start()] + part + name[found.end() :] for part in found.groups()]


class Table(unittest.TestCase):
    def test_the_file_is_what_the_table_prints(self):
        with open(os.path.join(rig.TREE, "trainer_bridge", "bitroll", "name_table.txt"), encoding="ascii") as file:
            self.assertEqual(file.read(), names.text())

    def test_every_tensor_of_a_checkpoint_has_one_row(self):
        rows, used = {}, set()
        for megatron, checkpoint, adapter in names.rows():
            for name in spelled(checkpoint):
                self.assertNotIn(name, rows)
                rows[name] = megatron
        for preset in PRESETS:
            folder = rig.checkpoint(preset)[0]
            found = rig.Checkpoint(folder)
            for name in {general(n[len(found.prefix) :]) for n in found.tensors}:
                row = next((r for r in (name, re.sub(r"\.weight(_packed|_scale)?$", "", name)) if r in rows), None)
                self.assertIsNotNone(row, name)
                used.add(row)
        self.assertEqual(used, set(rows))

    def test_every_parameter_of_a_model_has_one_row(self):
        mcore.initialize(rig.BACKEND)
        maps = {megatron for megatron, _, adapter in names.rows() if adapter}
        frozen = {megatron for megatron, _, adapter in names.rows() if not adapter}
        part = re.compile(r"\.(?:to_wrap\.weight|adapter)(?:_(gate|up))?(?:\.linear_(?:in|out)\.weight)?$")
        for preset in PRESETS:
            r, last = rig.Rig(preset, True, mcore.BitrollModel), None
            for name, p in r.model.named_parameters():
                wrapped = part.search(name)
                key = part.sub(lambda m: f":{m.group(1)}" if m.group(1) else "", general(name))
                if key.endswith(".output_attn_res"):
                    last, key = name, key.replace("{i}", "{last}")
                self.assertIn(key, maps if wrapped else frozen, name)
                self.assertEqual(p.requires_grad, ".adapter" in name, name)
            self.assertEqual(last is None, preset == "kimi-linear-nano")
            r.close()


class Trains(unittest.TestCase):
    def test_every_map_of_the_table_has_a_and_b_and_gradients(self):
        """In each of its modules: A's and B's; of experts, of those that rows reach."""
        mcore.initialize(rig.BACKEND)
        used = set()
        for preset in ("nano", "kimi-linear-nano"):
            r = rig.Rig(preset, True, mcore.BitrollModel, gradients=True)
            lengths, token, target = rig.rows_of(rig.sequences(r.config, (60, 70)))
            r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)))[0].sum().backward()
            seen, wanted, moves = set(), set(), {}
            for name, low, e in peft.adapters(r.model):
                seen.add(name)
                used.add(general(name))
                grads = (low.linear_in.weight.grad, low.linear_out.weight.grad)
                moves.setdefault(name if e is None else re.sub(r"experts\.\d+", "experts", name), []).append(
                    all(bool((g if e is None else g[e]).any()) for g in grads))
            for name, each in moves.items():
                self.assertGreaterEqual(sum(each), 0.9 * len(each), name)
            for name in r.checkpoint.tensors:
                key = re.sub(r"\.weight(_packed)?$", "", name[len(r.checkpoint.prefix) :])
                if any(general(key) == checkpoint for _, checkpoint, adapter in names.rows() if adapter):
                    wanted.add(key)
            self.assertEqual(seen, wanted)
            r.close()
        self.assertEqual(used, {checkpoint for _, checkpoint, adapter in names.rows() if adapter})


if __name__ == "__main__":
    unittest.main()
