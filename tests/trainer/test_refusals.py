"""What the trainer refuses: each by its name, in one sentence."""
import json
import os
import shutil
import subprocess
import sys
import unittest

import torch

import rig
from bitroll import lora, mcore, peft, refusals
from bitroll.rows import Rows

PLAIN = dict(peft_type="LORA", r=rig.RANK, lora_alpha=rig.ALPHA, lora_dropout=0.0, bias="none", use_dora=False, init_lora_weights=True,
             modules_to_save=None, rank_pattern={}, alpha_pattern={}, target_modules=["q_proj"])
REFUSED = (("lora_dropout", 0.1, "lora_dropout is 0.1"), ("dropout", 0.1, "dropout is 0.1"), ("use_dora", True, "DoRA"),
           ("use_rslora", True, "rsLoRA"), ("init_lora_weights", "pissa", "init_lora_weights 'pissa'"),
           ("init_lora_weights", "pissa_niter_4", "init_lora_weights 'pissa_niter_4'"), ("init_lora_weights", "olora", "'olora'"),
           ("modules_to_save", ["lm_head"], "modules_to_save"), ("rank_pattern", {"q_proj": 8}, "rank_pattern"),
           ("alpha_pattern", {"q_proj": 8}, "alpha_pattern"), ("bias", "lora_only", "bias 'lora_only'"),
           ("share_expert_adapters", True, "shared by the experts of a rank"), ("experts_shared_outer_loras", True, "adapter of its own"),
           ("normalize_moe_lora", True, "one rank"), ("peft_type", "VERA", "type VERA"), ("target_parameters", ["experts.w1"], "target_parameters"),
           ("a_feature_to_come", True, "a_feature_to_come"))

# A world of 16 ranks that exist only in name: Megatron's own groups, one kind of parallelism at a time.
GROUPS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from bitroll import mcore, refusals
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
for kind in sys.argv[2:]:
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **({kind: 2} if kind != "none" else {}))
    try:
        mcore.initialize("oracle")
        print(kind, "taken")
    except refusals.Refused as refused:
        print(kind, refused)
    parallel_state.destroy_model_parallel()
"""


class Adapter(unittest.TestCase):
    def test_plain_settings_are_taken(self):
        refusals.adapter(PLAIN)
        refusals.adapter({})
        with open(os.path.join(rig.checkpoint("pico")[1], "adapter_config.json"), encoding="utf-8") as file:
            refusals.adapter(json.load(file))

    def test_each_is_refused_by_name(self):
        for key, value, sentence in REFUSED:
            with self.subTest(key=key, value=value), self.assertRaisesRegex(refusals.Refused, sentence):
                refusals.adapter({**PLAIN, key: value})

    def test_a_folder_of_other_settings_is_not_loaded(self):
        r = rig.Rig("pico", True)
        for key, value, sentence in (("use_rslora", True, "rsLoRA"), ("r", 16, "rank 16"), ("lora_alpha", 32, "alpha 32")):
            folder = os.path.join(rig.PLACE, f"with-{key}")
            shutil.copytree(r.adapter_folder, folder)
            path = os.path.join(folder, "adapter_config.json")
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**config, key: value}, file)
            with self.subTest(key=key), self.assertRaisesRegex(ValueError, sentence):
                peft.load(r.model, folder, r.checkpoint.prefix)
        r.close()

    def test_masters_that_are_not_finite_are_not_published(self):
        r = rig.Rig("pico", True)
        name, p = next((n, p) for n, p in r.model.named_parameters() if p.requires_grad)
        before = dict(peft.exported(r.model))
        for value in (float("nan"), float("inf"), -3.4e38):
            with torch.no_grad():
                kept = p.view(-1)[3].clone()
                p.view(-1)[3] = value
                with self.subTest(value=value), self.assertRaisesRegex(FloatingPointError, name):
                    lora.publish(r.model)
                p.view(-1)[3] = kept
        self.assertTrue(all(torch.equal(before[n].view(torch.int16), t.view(torch.int16)) for n, t in peft.exported(r.model)))
        r.close()


class Parallel(unittest.TestCase):
    def test_sizes(self):
        refusals.parallel(dict(tensor=1, pipeline=1))
        for kind in refusals.PARALLEL:
            with self.subTest(kind=kind), self.assertRaisesRegex(refusals.Refused, f"^{kind.replace('_', ' ')} parallel size 2: expected 1"):
                refusals.parallel({kind: 2})

    def test_a_config_of_megatron(self):
        config = mcore.transformer_config(rig.LIBRARY.config(rig.checkpoint("pico")[0]), rig.BACKEND, False)
        refusals.megatron(config)
        for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size", "context_parallel_size"):
            kept = getattr(config, field)
            setattr(config, field, 2)
            with self.subTest(field=field), self.assertRaisesRegex(refusals.Refused, field.split("_")[0]):
                refusals.megatron(config)
            setattr(config, field, kept)

    def test_groups_of_megatron(self):
        kinds = {"none": "taken", "tensor_model_parallel_size": "tensor parallel size 2", "pipeline_model_parallel_size": "pipeline parallel size 2",
                 "expert_model_parallel_size": "expert parallel size 2", "context_parallel_size": "context parallel size 2"}
        done = subprocess.run([sys.executable, "-c", GROUPS, os.path.join(rig.TREE, "trainer_bridge"), *kinds], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        for line, (kind, sentence) in zip([x for x in done.stdout.splitlines() if x.split()[0] in kinds], kinds.items(), strict=True):
            self.assertTrue(line.startswith(kind) and sentence in line, line)


class State(unittest.TestCase):
    """What stands around a forward."""

    @classmethod
    def setUpClass(cls):
        cls.r = rig.Rig("pico", True)
        cls.lengths, cls.token, cls.target = rig.rows_of(rig.sequences(cls.r.config, (6,)))

    @classmethod
    def tearDownClass(cls):
        cls.r.close()

    def log_probs(self, model):
        return model(Rows(self.r.ops, [0, *self.lengths]), self.token)

    def test_plain(self):
        self.log_probs(self.r.model)

    def test_autocast(self):
        with self.assertRaisesRegex(refusals.Refused, "autocast is on"), torch.autocast(rig.DEVICE, torch.bfloat16):
            self.log_probs(self.r.model)

    def test_flushed_denormals(self):
        if not torch.set_flush_denormal(True):
            self.skipTest("this processor cannot flush denormals")
        try:
            with self.assertRaisesRegex(refusals.Refused, "set_flush_denormal"):
                self.log_probs(self.r.model)
        finally:
            torch.set_flush_denormal(False)
        self.log_probs(self.r.model)

    def test_compiled(self):
        for compiled in (torch.compile(self.r.model, backend="eager"), torch.compile(self.r.model.forward, backend="eager")):
            with self.assertRaisesRegex(refusals.Refused, "torch.compile"):
                self.log_probs(compiled)
        self.log_probs(self.r.model)


if __name__ == "__main__":
    unittest.main()
