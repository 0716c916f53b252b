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


def written(folder):
    """{module: (A, B)} as the file has them."""
    tensors = read_safetensors(os.path.join(folder, "adapter_model.safetensors"))
    modules = [name[len(PEFT_PREFIX) :].rsplit(".lora_", 1)[0] for name in tensors]
    return {module: tuple(tensors[f"{PEFT_PREFIX}{module}.lora_{part}.weight"] for part in "AB") for module in modules}


def loaded(folder):
    """{module: peft's layer}, read by peft from a folder that this trainer wrote."""
    model = huggingface.PeftModel.from_pretrained(tree_of(written(folder)), folder, autocast_adapter_dtype=False)
    return dict(model.get_base_model().named_modules())


def check_values(test, layers, wanted):
    """Every tensor has found its module, with its bits."""
    for name, (a, b) in wanted.items():
        layer = layers[name]
        test.assertEqual(layer.scaling["default"], rig.ALPHA / rig.RANK)
        for found, value in ((layer.lora_A["default"].weight, a), (layer.lora_B["default"].weight, b)):
            test.assertTrue(torch.equal(found.detach().view(torch.int16), value.view(torch.int16)), name)


class Loader(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.rig, cls.folder = rig.Rig("pico"), os.path.join(rig.PLACE, "written")
        peft.save(cls.rig.model, cls.rig.settings, cls.folder, cls.rig.checkpoint.prefix)
        cls.wanted = written(cls.rig.adapter_folder)  # which the model was filled from

    @classmethod
    def tearDownClass(cls):
        cls.rig.close()

    def test_config(self):
        config = huggingface.PeftConfig.from_pretrained(self.folder)
        self.assertEqual((config.peft_type, config.r, config.lora_alpha, config.use_rslora), ("LORA", rig.RANK, rig.ALPHA, False))

    def test_every_tensor_finds_its_module(self):
        self.assertGreater(len(self.wanted), 100)
        check_values(self, loaded(self.folder), self.wanted)
        self.assertTrue(any(b.abs().max() > 0 for _, b in self.wanted.values()))  # peft's own start would be B = 0


if __name__ == "__main__":
    unittest.main()
