"""peft's own loader reads the adapters that this trainer writes: every tensor finds its module, with its values, without a network."""
import os
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"

import peft as huggingface
import torch
from torch import nn

import rig
from bitroll import peft
from bitroll.names import PEFT_PREFIX
from bitroll.tensors import read_safetensors


def tree_of(names):
    """A module tree with a Linear of the right shape under each adapter's name, as the checkpoint's own model class would have."""
    root = nn.Module()
    root.config = dict(model_type="custom")
    root.prepare_inputs_for_generation = None  # peft asks a CAUSAL_LM for it
    for name, (a, b) in names.items():
        at = root
        *folders, last = name.split(".")
        for part in folders:
            if not hasattr(at, part):
                setattr(at, part, nn.Module())
            at = getattr(at, part)
        setattr(at, last, nn.Linear(a.shape[1], b.shape[0], bias=False, dtype=torch.bfloat16))
    return root


class Loader(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig, cls.folder = rig.Rig("pico"), os.path.join(rig.PLACE, "written")
        peft.save(cls.rig.model, cls.rig.settings, cls.folder, cls.rig.checkpoint.prefix)
        tensors = read_safetensors(os.path.join(cls.rig.adapter_folder, "adapter_model.safetensors"))  # which the model was filled from
        cls.wanted = {}
        for name in tensors:
            module = name[len(PEFT_PREFIX) :].rsplit(".lora_", 1)[0]
            cls.wanted[module] = tuple(tensors[f"{PEFT_PREFIX}{module}.lora_{part}.weight"] for part in "AB")

    @classmethod
    def tearDownClass(cls):
        cls.rig.close()

    def test_config(self):
        config = huggingface.PeftConfig.from_pretrained(self.folder)
        self.assertEqual((config.peft_type, config.r, config.lora_alpha, config.use_rslora), ("LORA", rig.RANK, rig.ALPHA, False))

    def test_every_tensor_finds_its_module(self):
        model = huggingface.PeftModel.from_pretrained(tree_of(self.wanted), self.folder, autocast_adapter_dtype=False)
        modules = dict(model.get_base_model().named_modules())
        self.assertGreater(len(self.wanted), 100)
        for name, (a, b) in self.wanted.items():
            layer = modules[name]
            self.assertEqual(layer.scaling["default"], rig.ALPHA / rig.RANK)
            for found, value in ((layer.lora_A["default"].weight, a), (layer.lora_B["default"].weight, b)):
                self.assertTrue(torch.equal(found.detach().view(torch.int16), value.view(torch.int16)), name)
        self.assertTrue(any(b.abs().max() > 0 for _, b in self.wanted.values()))  # peft's own start would be B = 0


if __name__ == "__main__":
    unittest.main()
