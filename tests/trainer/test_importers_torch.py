"""The importers of torch files on tiny dumps in each stack's form: whole, cut off, without a field, and with a payload that must not run."""
import contextlib
import importlib
import io
import os
import pickle
import subprocess
import sys
import unittest
import unittest.mock

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [TESTS, os.path.join(os.path.dirname(TESTS), "trainer_bridge")]

import numpy as np
import torch

from bitroll.importers import dump_file
from test_importers import ANSWER, GIVEN, LOGPROB, PROMPT, UNSCORED, Rig, bits

SIDE = (*GIVEN, "--alignment", "same", "--side")


class Payload:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TorchRig(Rig):
    def run_importer(self, name, dump, *options, out="f.h5"):
        """In this process, into which torch takes seconds to load."""
        module, said = importlib.import_module(f"bitroll.importers.{name}"), io.StringIO()
        command, code = [name, dump, "--out", self.path(out), *options], 0
        with unittest.mock.patch.object(sys, "argv", command), contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                dump_file.run(name, module.__doc__, module.read)
            except SystemExit as end:
                code = end.code
        return subprocess.CompletedProcess(command, code, "", said.getvalue())

    def save(self, value, name="d.pt"):
        torch.save(value, self.path(name))
        return self.path(name)

    def cut(self, path, n):
        with open(path, "rb") as file:
            whole = file.read()
        with open(path, "wb") as file:
            file.write(whole[: n if n > 0 else len(whole) + n])
        return path

    def refuse_payloads(self, importer, value_with):
        """value_with(x): a whole dump that carries x somewhere."""
        trap = self.path("trap")
        self.refused(importer, self.save(value_with(Payload(trap))), *SIDE, "rollout",
                     said=": expected plain tensors, lists, numbers and texts, saved as such; nothing in it was run")  # no advice to run it
        with open(self.path("d.pt"), "wb") as file:
            pickle.dump(Payload(trap), file)
        self.refused(importer, self.path("d.pt"), *SIDE, "rollout", said="not a whole torch file")
        self.assertFalse(os.path.exists(trap))
        torch.load(self.save(value_with(Payload(trap))), weights_only=False)
        self.assertTrue(os.path.exists(trap))  # the trap works


def slime(i, **changed):
    """Sample.to_dict() of the rollout."""
    sample = {"group_index": 0, "index": i, "prompt": "text", "tokens": PROMPT + ANSWER[i], "response": "text", "response_length": len(ANSWER[i]),
              "label": None, "reward": 1.0, "loss_mask": [1] * len(ANSWER[i]), "weight_versions": ["3"], "rollout_log_probs": LOGPROB[i],
              "rollout_routed_experts": np.zeros((4, 2, 2), np.int32), "status": "completed", "metadata": {}, "spec_info": {}}
    sample.update(changed)
    return sample


class CommandLine(Rig):
    def test_the_command(self):
        torch.save({"samples": [slime(0), slime(1)]}, self.path("d.pt"))
        self.expect_columns(self.imported("slime_pt", self.path("d.pt"), *SIDE, "rollout"))


class Slime(TorchRig):
    def test_rollout_and_both_forms_of_the_trainer(self):
        self.expect_columns(self.imported("slime_pt", self.save({"rollout_id": 3, "samples": [slime(0), slime(1, loss_mask=None)]}), *SIDE,
                                          "rollout", out="r.h5"))
        values = [torch.tensor(row) for row in LOGPROB]
        second = {"format_version": 2, "rollout_id": 3, "dp_shards": [[0], [1]],
                  "samples": [{"sample_index": i, "tokens": torch.tensor(PROMPT + ANSWER[i]), "response_length": len(ANSWER[i]),
                               "loss_mask": torch.ones(len(ANSWER[i]), dtype=torch.int32), "log_probs": values[i],
                               "rollout_log_probs": values[i] - 1, "advantages": values[i]} for i in (1, 0)]}
        first = {"rollout_id": 3, "rank": 0, "rollout_data": {
            "tokens": [torch.tensor(PROMPT + ANSWER[i]) for i in range(2)], "response_lengths": [2, 3], "total_lengths": [5, 6],
            "loss_masks": [torch.ones(len(a), dtype=torch.int32) for a in ANSWER], "log_probs": values, "rollout_log_probs": values,
            "sample_indices": [0, 1]}}
        for dump in (second, first):
            self.imported("slime_pt", self.save(dump), *SIDE, "train", out="t.h5")
            done = self.parity("r.h5", "t.h5")
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("parity: 0 of 5 log-probs differ, KL 0", done.stdout)

    def test_tool_text_is_not_compared(self):
        found = self.imported("slime_pt", self.save({"samples": [slime(1, loss_mask=[1, 0, 1])]}), *SIDE, "rollout")
        self.assertEqual(found["tokens/mask"].tolist(), [0, 0, 0, 1, 0, 1])
        self.assertEqual(found["tokens/logprob"].view(np.uint32)[4], UNSCORED)

    def test_payloads_do_not_run(self):
        self.refuse_payloads("slime_pt", lambda x: {"samples": [slime(0, metadata={"x": x})]})

    def test_malformed(self):
        whole = {"samples": [slime(0), slime(1)]}
        self.refused("slime_pt", self.cut(self.save(whole), 200), *SIDE, "rollout", said="not a whole torch file")
        self.refused("slime_pt", self.cut(self.save(whole), -40), *SIDE, "rollout", said="not a whole torch file")
        self.refused("slime_pt", self.path("none.pt"), *SIDE, "rollout", said="none.pt")
        self.refused("slime_pt", self.save(whole), *SIDE, "train", said="sample 0: field 'log_probs' is missing")
        self.refused("slime_pt", self.save(whole), *GIVEN, "--side", "rollout", said="give --alignment same|next")
        for changed, said in ((dict(tokens=None), "field 'tokens' is missing"), (dict(response_length=3), "'rollout_log_probs' has 2 values"),
                              (dict(index=None), "field 'index' is missing"), (dict(loss_mask=[1]), "'loss_mask' has 1 values"),
                              (dict(response_length=5, rollout_log_probs=[0.0] * 5, loss_mask=None), "a prompt of 0 of 5 tokens")):
            self.refused("slime_pt", self.save({"samples": [slime(0, **changed)]}), *SIDE, "rollout", said=said)
        self.refused("slime_pt", self.save([1, 2]), *SIDE, "rollout", said="expected an object, found list")


def padded(rows, n, left=False):
    return torch.tensor([[0] * (n - len(r)) + r if left else r + [0] * (n - len(r)) for r in rows])


def verl(jagged=False, **changed):
    """The tensors of a DataProto: prompts of 4 with left padding, responses of 6 with right padding; old_log_probs = rollout_log_probs."""
    batch = {"prompts": padded([PROMPT, PROMPT], 4, True), "responses": padded(ANSWER, 6), "response_mask": padded([[1] * 2, [1] * 3], 6),
             "attention_mask": torch.cat([padded([[1] * 3] * 2, 4, True), padded([[1] * 2, [1] * 3], 6)], 1),
             "rollout_log_probs": padded(LOGPROB, 6).float(), "old_log_probs": padded(LOGPROB, 6).float()}
    if jagged:
        def nested(rows):
            return torch.nested.nested_tensor([torch.tensor(r) for r in rows], layout=torch.jagged)
        batch = {"prompts": nested([PROMPT] * 2), "responses": nested(ANSWER), "response_mask": nested([[1] * 2, [1] * 3]),
                 "rollout_log_probs": nested(LOGPROB), "old_log_probs": nested(LOGPROB)}
    batch.update(changed)
    return {"batch": {k: v for k, v in batch.items() if v is not None}, "non_tensor_batch": {"uid": ["u", "u"]}, "meta_info": {"temperature": 0.7}}


class DataProto:
    """What verl pickles whole: an object that its own package has to rebuild."""

    def __init__(self, batch):
        self.batch = batch


class Verl(TorchRig):
    def test_padded_and_jagged(self):
        options = (*GIVEN[:2], "--alignment", "same", "--side")
        help_ = importlib.import_module("bitroll.importers.verl_dataproto").__doc__
        self.assertIn(" ".join(options[2:4]), help_)  # which of the two verl's own layout is
        for jagged in (False, True):
            dump = self.save(verl(jagged))
            found = self.imported("verl_dataproto", dump, *options, "rollout", out="r.h5")
            self.expect_columns(found)
            self.assertEqual([found["seq/uid"].tolist(), found["seq/sample"].tolist()], [[b"u", b"u"], [0, 1]])
            self.imported("verl_dataproto", dump, *options, "train", out="t.h5")
            self.assertEqual(self.parity("r.h5", "t.h5").returncode, 0)

    def test_a_response_that_is_cut_short_by_its_mask(self):
        mask = padded([[1] * 2, [1, 0, 1]], 6)  # a token of a tool inside: in the text, not in the mask
        found = self.imported("verl_dataproto", self.save(verl(response_mask=mask)), *SIDE, "rollout")
        self.assertEqual(found["tokens/mask"].tolist(), [0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 1])
        self.assertEqual(found["tokens/logprob"].view(np.uint32)[8:].tolist(), [bits(LOGPROB[1][0]), UNSCORED, bits(LOGPROB[1][2])])

    def test_payloads_do_not_run(self):
        self.refuse_payloads("verl_dataproto", lambda x: {**verl(), "extra": x})
        with open(self.path("d.pt"), "wb") as file:
            pickle.dump(DataProto(verl()["batch"]), file)  # DataProto.save_to_disk
        self.refused("verl_dataproto", self.path("d.pt"), *SIDE, "rollout", said="not a whole torch file")

    def test_malformed(self):
        self.refused("verl_dataproto", self.cut(self.save(verl()), 300), *SIDE, "rollout", said="not a whole torch file")
        self.refused("verl_dataproto", self.save(verl()), *GIVEN[:2], "--temperature", "1", "--alignment", "same", "--side", "rollout",
                     said="the dump says 0.7, --temperature says 1.0")
        for changed, said in ((dict(prompts=None), "field 'prompts' is missing"), (dict(rollout_log_probs=None), "'rollout_log_probs' is missing"),
                              (dict(attention_mask=None), "field 'attention_mask' is missing"),
                              (dict(attention_mask=torch.ones(2, 9)), "'attention_mask' has 9 values: expected a list of 10"),
                              (dict(responses=torch.ones(3, 6)), "are of different batches"),
                              (dict(rollout_log_probs=torch.ones(2, 5)), "has 5 values: expected a list of 6"),
                              (dict(responses=torch.ones(6)), "expected a tensor of two dimensions"),
                              (dict(responses=torch.ones(2, 6)), "whole numbers from 0")):
            self.refused("verl_dataproto", self.save(verl(**changed)), *SIDE, "rollout", said=said)
        nameless = verl()
        nameless["non_tensor_batch"] = {}
        self.refused("verl_dataproto", self.save(nameless), *SIDE, "rollout", said="field 'uid' is missing")


if __name__ == "__main__":
    unittest.main()
