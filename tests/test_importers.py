"""The importers of JSON dumps on tiny dumps in each stack's form, whole, cut off and without a field; then `bitroll parity --foreign` on
what they wrote. BITROLL names the command."""
import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import h5py
import numpy as np

TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
BITROLL = os.environ.get("BITROLL", os.path.join(TREE, "build", "bitroll"))
GIVEN = ("--logprob-kind", "full_softmax_over_T", "--temperature", "0.7")


def f32(x):
    """What a stack writes of a binary32 number: the decimal of its binary64 value."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


PROMPT, ANSWER = [11, 12, 13], [[21, 22], [31, 32, 33]]
LOGPROB = [[f32(-0.1), f32(-1.7)], [f32(-2e-9), f32(-30.3), f32(-0.62)]]
UNSCORED = 0x7FC00000


def nemo(rows=(0, 1), **changed):
    """One line of train_data_step*.jsonl: padded to 7, masks 0 on prompt and padding, prev_logprobs also of the prompt."""
    record = {"token_ids": [], "input_lengths": [], "token_loss_mask": [], "sample_loss_mask": [], "generation_logprobs": [], "prev_logprobs": []}
    for i in rows:
        n = 3 + len(ANSWER[i])
        record["token_ids"].append(PROMPT + ANSWER[i] + [0] * (7 - n))
        record["input_lengths"].append(n)
        record["token_loss_mask"].append([0.0] * 3 + [1.0] * len(ANSWER[i]) + [0.0] * (7 - n))
        record["sample_loss_mask"].append(1.0)
        record["generation_logprobs"].append([0.0] * 3 + LOGPROB[i] + [0.0] * (7 - n))
        record["prev_logprobs"].append([0.0, -5.0, -6.0] + [f32(x * 1.01) for x in LOGPROB[i]] + [0.0] * (7 - n))
    record.update(changed)
    return json.dumps({k: v for k, v in record.items() if v is not None})


def vllm(i, **changed):
    rows = [{str(t): {"logprob": x, "rank": 1, "decoded_token": "a"}, "7": {"logprob": x - 2, "rank": 2, "decoded_token": "b"}}
            for t, x in zip(ANSWER[i], LOGPROB[i])]
    output = {"index": i, "text": "", "token_ids": ANSWER[i], "cumulative_logprob": sum(LOGPROB[i]), "logprobs": rows}
    record = {"request_id": "r-0", "prompt": None, "prompt_token_ids": PROMPT, "prompt_logprobs": None, "outputs": [output], "finished": True}
    record.update(changed)
    return record


def sglang(i, meta=(), **changed):
    record = {"text": "", "output_ids": ANSWER[i],
              "meta_info": {"id": f"id-{i}", "prompt_tokens": 3, "completion_tokens": len(ANSWER[i]), "finish_reason": {"type": "length"},
                            "input_token_logprobs": [[None, 11, None], [-3.5, 12, None], [-4.5, 13, None]],
                            "output_token_logprobs": [[x, t, None] for x, t in zip(LOGPROB[i], ANSWER[i])]}}
    record["meta_info"].update(dict(meta))
    record.update(changed)
    return record


class Rig(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="bitroll-importers-")
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, text):
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)
        return self.path(name)

    def run_module(self, module, *arguments, stdout=subprocess.PIPE):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([os.path.join(TREE, "trainer_bridge"), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run([sys.executable, "-B", "-m", f"bitroll.{module}", *arguments], stdout=stdout, stderr=subprocess.PIPE, text=True,
                              env=environment, timeout=120)

    def run_importer(self, name, dump, *options, out="f.h5"):
        return self.run_module(f"importers.{name}", dump, "--out", self.path(out), *options)

    def imported(self, name, dump, *options, out="f.h5"):
        done = self.run_importer(name, dump, *options, out=out)
        self.assertEqual(done.returncode, 0, done.stderr)
        with h5py.File(self.path(out)) as file:
            return {key: file[key][:] for group in ("seq", "tokens") for key in map(f"{group}/{{}}".format, file[group])} | {
                key: value.decode() for key, value in file.attrs.items()}

    def refused(self, name, dump, *options, said):
        done = self.run_importer(name, dump, *options, out="refused.h5")
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        self.assertIn(said, done.stderr)
        self.assertEqual([f for f in os.listdir(self.folder.name) if f.startswith("refused")], [])

    def parity(self, a, b):
        return subprocess.run([BITROLL, "parity", "--foreign", self.path(a), self.path(b)], capture_output=True, text=True)

    def expect_columns(self, found, logprob=LOGPROB, prompt=(UNSCORED,) * 3, alike=bits):
        self.assertEqual(found["format"], "foreign-logprobs")
        self.assertEqual(found["seq/offset"].tolist(), [0, 5, 11])
        self.assertEqual(found["seq/prompt_len"].tolist(), [3, 3])
        self.assertEqual(found["seq/temperature"].tolist(), [np.float32(0.7)] * 2)
        self.assertEqual(found["tokens/id"].tolist(), PROMPT + ANSWER[0] + PROMPT + ANSWER[1])
        self.assertEqual(found["tokens/mask"].tolist(), [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1])
        wanted = [b for row in logprob for b in [*prompt, *map(alike, row)]]
        self.assertEqual([hex(b) for b in found["tokens/logprob"].view(np.uint32).tolist()], [hex(b) for b in wanted])


class Nemo(Rig):
    def test_both_sides(self):
        for text in (nemo(), nemo([0]) + "\n" + nemo([1]) + "\n"):  # a batch a line, or a sequence a line
            dump, options = self.write("d.jsonl", text), (*GIVEN, "--alignment", "same", "--side")
            self.expect_columns(self.imported("nemo_jsonl", dump, *options, "rollout", out="r.h5"))
            train = self.imported("nemo_jsonl", dump, *options, "train", out="t.h5")
            self.expect_columns(train, [[f32(x * 1.01) for x in row] for row in LOGPROB])
            self.assertEqual([train["producer"], train["source"], train["logprob_kind"]], ["trainer", "nemo_jsonl", "full_softmax_over_T"])
            done = self.parity("r.h5", "t.h5")
            self.assertEqual(done.returncode, 1, done.stderr)
            self.assertIn("2 joined", done.stdout)
            self.assertTrue(done.stdout.splitlines()[-1].startswith("parity: 5 of 5 log-probs differ, KL "))
            self.assertEqual(self.parity("r.h5", "r.h5").returncode, 0)

    def test_values_that_belong_to_the_token_after(self):
        moved = [row[1:] + [0.0] for row in json.loads(nemo())["generation_logprobs"]]
        dump = self.write("d.jsonl", nemo(generation_logprobs=moved))
        self.expect_columns(self.imported("nemo_jsonl", dump, *GIVEN, "--alignment", "next", "--side", "rollout"))

    def test_a_wrong_alignment_is_hinted_at(self):
        rows = [[f32(-0.3 - 0.37 * ((7 * t) % 10)) for t in range(20)]]
        text = nemo(rows=(), token_ids=[list(range(20))], input_lengths=[20], token_loss_mask=[[0] * 4 + [1] * 16], sample_loss_mask=[1],
                    generation_logprobs=rows, prev_logprobs=[rows[0][1:] + [0.0]])
        dump, options = self.write("d.jsonl", text), (*GIVEN, "--alignment", "same", "--side")
        self.imported("nemo_jsonl", dump, *options, "rollout", out="r.h5")
        self.imported("nemo_jsonl", dump, *options, "train", out="t.h5")
        self.assertIn("hint        shift: the second file's log-probs stand one token too early", self.parity("r.h5", "t.h5").stdout)

    def test_nothing_is_guessed(self):
        dump = self.write("d.jsonl", nemo())
        self.refused("nemo_jsonl", dump, "--side", "train", *GIVEN, said="give --alignment same|next")
        self.refused("nemo_jsonl", dump, "--side", "train", *GIVEN[:2], "--alignment", "same", said="give --temperature T")
        self.refused("nemo_jsonl", dump, "--side", "train", *GIVEN[2:], "--alignment", "same", said="give --logprob-kind full_softmax_over_T|raw|")

    def test_malformed(self):
        options = ("--side", "train", *GIVEN, "--alignment", "same")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo([0]) + "\n" + nemo([1])[:-40]), *options, said="d.jsonl: line 2: not whole JSON")
        self.refused("nemo_jsonl", self.write("d.jsonl", ""), *options, said="the file is empty")
        self.refused("nemo_jsonl", self.path("none.jsonl"), *options, said="No such file")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(token_ids=None)), *options, said="record 0: field 'token_ids' is missing")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(input_lengths=[5, 9])), *options, said="sequence 1 is shorter than input_lengths, 9")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(input_lengths=[5])), *options, said="'token_ids' has 2 values: expected a list of 1")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(token_loss_mask=[[1] * 7] * 2)), *options, said="at least one, outside the mask")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(token_loss_mask=[[2] * 7] * 2)), *options, said="mask values of 0 or 1")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(prev_logprobs=[["x"] * 7] * 2)), *options, said="a log-prob is not a number")
        self.refused("nemo_jsonl", self.write("d.jsonl", "[" * 100000), *options, said="line 1: not whole JSON")
        self.refused("nemo_jsonl", self.write("d.jsonl", nemo(prev_logprobs=[[10**400] * 7] * 2)), *options, said="does not fit its column")
        self.refused("nemo_jsonl", self.write("d.jsonl", "[1, 2]"), *options, said="record 0: expected an object, found int")

    def test_nan_stays_a_nan_and_infinity_infinite(self):
        rows = json.loads(nemo())["generation_logprobs"]
        rows[0][3], rows[1][4] = float("nan"), float("-inf")
        found = self.imported("nemo_jsonl", self.write("d.jsonl", nemo(generation_logprobs=rows)), *GIVEN, "--alignment", "same", "--side", "rollout")
        words = found["tokens/logprob"].view(np.uint32).tolist()
        self.assertEqual([hex(words[3]), hex(words[9])], ["0xffc00000", "0xff800000"])
        self.imported("nemo_jsonl", self.write("d.jsonl", nemo()), *GIVEN, "--alignment", "same", "--side", "rollout", out="g.h5")
        self.assertIn("1 NaN, 0 in one file only", self.parity("f.h5", "g.h5").stdout)


class Vllm(Rig):
    def test_every_form(self):
        flat = {"start_indices": [0, 2], "end_indices": [2, 4], "token_ids": [21, 7, 22, 7],
                "logprobs": [LOGPROB[0][0], LOGPROB[0][0] - 2, LOGPROB[0][1], LOGPROB[0][1] - 2], "ranks": [1, 2, 1, 2], "decoded_tokens": [""] * 4}
        as_flat = vllm(0)
        as_flat["outputs"][0]["logprobs"] = flat
        one = vllm(0)
        one["outputs"].append(vllm(1)["outputs"][0])
        for text in (json.dumps([vllm(0), vllm(1)], indent=1), json.dumps(vllm(0)) + "\n" + json.dumps(vllm(1)), json.dumps(one),
                     json.dumps([as_flat, vllm(1)])):
            found = self.imported("vllm_json", self.write("d.json", text), *GIVEN)
            self.expect_columns(found)
            self.assertEqual(found["seq/uid"].tolist(), [b"r-0"] * 2)
            self.assertEqual(found["seq/sample"].tolist(), [0, 1])
            self.assertEqual(found["tokens/top_id"].tolist()[2:5], [[-1, -1], [21, 7], [22, 7]])
            self.assertEqual(found["tokens/top_logprob"].view(np.uint32)[2].tolist(), [UNSCORED] * 2)

    def test_prompt_logprobs_and_settings_of_the_dump(self):
        before = [None, {"12": {"logprob": -3.5}}, {"13": [-4.5, 1, "c"]}]
        records = [vllm(i, prompt_logprobs=before, sampling_params={"temperature": 0.7}) for i in range(2)]
        dump = self.write("d.json", json.dumps(records))
        self.expect_columns(self.imported("vllm_json", dump, *GIVEN[:2]), prompt=(UNSCORED, bits(-3.5), bits(-4.5)))
        self.refused("vllm_json", dump, *GIVEN[:3], "1", said="the dump says 0.7, --temperature says 1.0")

    def test_malformed(self):
        whole = json.dumps([vllm(0), vllm(1)], indent=1)
        self.refused("vllm_json", self.write("d.json", whole[:-30]), *GIVEN, said="d.json: line 1: not whole JSON")
        for changed, said in (({"prompt_token_ids": None}, "field 'prompt_token_ids' is missing"), ({"outputs": {}}, "of type dict: expected list"),
                              ({"prompt_logprobs": [None]}, "'prompt_logprobs' has 1 values: expected a list of 3")):
            self.refused("vllm_json", self.write("d.json", json.dumps(vllm(0, **changed))), *GIVEN, said=said)
        for logprobs, said in ((None, "field 'logprobs' is missing"), ([{"9": {"logprob": -1}}] * 2, "logprobs of position 0 lacks its own token 21"),
                               ([[1]] * 2, "expected {token id: log-prob} at each position")):
            record = vllm(0)
            record["outputs"][0]["logprobs"] = logprobs
            self.refused("vllm_json", self.write("d.json", json.dumps(record)), *GIVEN, said=said)
        self.refused("vllm_json", self.write("d.json", json.dumps([vllm(0), vllm(0)])), *GIVEN, said="'r-0' sample 0 comes twice")
        self.refused("vllm_json", self.write("d.json", whole), *GIVEN[:2], said="give --temperature T")


class Sglang(Rig):
    def test_both_ways_to_the_prompt(self):
        dump = self.write("d.jsonl", "\n".join(json.dumps(sglang(i)) for i in range(2)))
        found = self.imported("sglang_json", dump, *GIVEN)
        self.expect_columns(found, prompt=(UNSCORED, bits(-3.5), bits(-4.5)))
        self.assertEqual(found["seq/uid"].tolist(), [b"id-0", b"id-1"])
        self.assertNotIn("tokens/top_id", found)
        records = [sglang(i, {"input_token_logprobs": [], "output_top_logprobs": [[[-1.0, 5, None], [-0.5, 6, None]]] * len(ANSWER[i])},
                          input_ids=PROMPT, sampling_params={"temperature": 0.7}) for i in range(2)]
        found = self.imported("sglang_json", self.write("d.json", json.dumps(records)), *GIVEN[:2])
        self.expect_columns(found)
        self.assertEqual(found["tokens/top_id"].tolist()[3], [6, 5])

    def test_malformed(self):
        self.refused("sglang_json", self.write("d.json", json.dumps(sglang(0))[:-9]), *GIVEN, said="not whole JSON")
        for record, said in ((sglang(0, meta_info=None), "field 'meta_info' is missing"), (sglang(0, output_ids=[1, 2]), "name different tokens"),
                             (sglang(0, input_ids=[1, 2, 3]), "input_ids and input_token_logprobs name different tokens"),
                             (sglang(0, {"input_token_logprobs": []}), "(logprob_start_len 0)' has 0 values: expected a list of 3"),
                             (sglang(0, {"output_token_logprobs": [-0.1, -0.2]}), "expected [log-prob, token id, text]"),
                             (sglang(0, {"output_token_logprobs": None}), "field 'output_token_logprobs' is missing"),
                             (sglang(0, {"output_top_logprobs": [[]]}), "'output_top_logprobs' has 1 values")):
            self.refused("sglang_json", self.write("d.json", json.dumps(record)), *GIVEN, said=said)


class Ours(Rig):
    def test_an_importer_loads_neither_libbitroll_nor_torch(self):
        code = ("import sys; import bitroll.importers.nemo_jsonl, bitroll.importers.slime_pt, bitroll.importers.verl_dataproto; "
                "print(sorted({'torch', 'ctypes', 'bitroll.abi'} & set(sys.modules)))")
        done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True,
                              env=dict(os.environ, PYTHONPATH=os.path.join(TREE, "trainer_bridge")))
        self.assertNotIn("torch", done.stdout, done.stderr)
        self.assertNotIn("bitroll.abi", done.stdout)
        self.assertEqual(done.returncode, 0)

    def test_a_python_without_h5py_or_numpy(self):
        dump = self.write("d.json", json.dumps(vllm(0)))
        for name in ("h5py", "numpy"):
            os.makedirs(self.path(name))
            self.write(f"{name}/{name}.py", f"raise ModuleNotFoundError(name={name!r})")
            done = subprocess.run([sys.executable, "-m", "bitroll.importers.vllm_json", dump, "--out", self.path("f.h5"), *GIVEN],
                                  capture_output=True, text=True,
                                  env=dict(os.environ, PYTHONPATH=os.pathsep.join((self.path(name), os.path.join(TREE, "trainer_bridge")))))
            self.assertEqual((done.returncode, done.stderr),
                             (2, f"vllm_json: this Python has no {name}, which is needed here: {sys.executable} -m pip install h5py numpy\n"))

    def test_a_python_whose_h5py_or_numpy_is_broken(self):
        """What they raise: another numpy than h5py was built for; a library that numpy is linked with is not there, and its page of advice."""
        dump, advice = self.write("d.json", json.dumps(vllm(0))), "try: raise ImportError('libblas.so.3: cannot open')\n" \
            "except ImportError as error: raise ImportError('\\n\\nIMPORTANT: PLEASE READ THIS\\n') from error\n"
        for name, code, why in (("h5py", "raise ValueError('numpy.dtype size changed')", "numpy.dtype size changed"),
                                ("numpy", advice, "libblas.so.3: cannot open"), ("numpy", "raise AttributeError", "AttributeError")):
            os.makedirs(self.path(name), exist_ok=True)
            self.write(f"{name}/{name}.py", code)
            done = subprocess.run([sys.executable, "-m", "bitroll.importers.vllm_json", dump, "--out", self.path("f.h5"), *GIVEN],
                                  capture_output=True, text=True,
                                  env=dict(os.environ, PYTHONDONTWRITEBYTECODE="1",
                                           PYTHONPATH=os.pathsep.join((self.path(name), os.path.join(TREE, "trainer_bridge")))))
            self.assertEqual((done.returncode, done.stderr), (2, f"vllm_json: a library of this Python cannot be loaded ({why}): "
                                                                 f"{sys.executable} -m pip install --force-reinstall h5py numpy\n"))

    def test_a_dump_against_a_file_of_ours(self):
        """Another stack that computed what bitroll did: its JSON of the same tokens equals bitroll's file bit for bit."""
        self.write("prompts.jsonl", '{"prompt": [5, 17, 201], "uid": "a", "n": 2}\n{"prompt": [44, 8], "uid": "b"}\n')
        for command in (["init", "--preset", "pico", "--out", self.path("m")],
                        ["generate", "--model", self.path("m"), "--prompts", self.path("prompts.jsonl"), "--out", self.path("ours.h5"),
                         "--temperature", "0.7", "--max-new", "12", "--ignore-eos", "--threads", "1"]):
            done = subprocess.run([BITROLL, *command], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
        with h5py.File(self.path("ours.h5")) as file:
            begin, prompt_len, ids = file["seq/offset"][:], file["seq/prompt_len"][:], file["tokens/id"][:].tolist()
            values, raw = file["tokens/logprob"][:].tolist(), file["tokens/logprob_raw"][:].tolist()
            name = [(u.rstrip(b"\0").decode(), int(s)) for u, s in zip(file["seq/uid"][:], file["seq/sample"][:])]

        def record(i, of):
            at, end = begin[i] + prompt_len[i], begin[i + 1]
            rows = [{str(t): {"logprob": x}} for t, x in zip(ids[at:end], of[at:end])]
            return {"request_id": name[i][0], "prompt_token_ids": ids[begin[i] : at],
                    "outputs": [{"index": name[i][1], "token_ids": ids[at:end], "logprobs": rows}]}
        for of, kind, code, said in ((values, "full_softmax_over_T", 0, "parity: 0 of 36 log-probs differ, KL 0"),
                                     (raw, "raw", 0, "parity: 0 of 36 log-probs differ, KL 0"),
                                     (raw, "full_softmax_over_T", 1, "agrees with the first's log-probs at temperature 1")):
            dump = self.write("d.json", json.dumps([record(i, of) for i in range(len(name))]))
            self.imported("vllm_json", dump, "--logprob-kind", kind, "--temperature", "0.7")
            done = self.parity("ours.h5", "f.h5")
            self.assertEqual(done.returncode, code, done.stdout + done.stderr)
            self.assertIn(said, done.stdout)
        self.imported("vllm_json", dump, "--logprob-kind", "full_softmax_over_T", "--temperature", "1.5")
        done = self.parity("ours.h5", "f.h5")
        self.assertEqual(done.returncode, 2)
        self.assertIn("temperature 0.699999988 in the first file, 1.5 in the second", done.stderr)


class Programs(Rig):
    def test_without_a_name_they_are_listed(self):
        known = sorted(name[:-3] for name in os.listdir(os.path.join(TREE, "trainer_bridge", "bitroll", "importers"))
                       if name[0] != "_" and name not in ("dump_file.py", "__pycache__"))
        self.assertEqual(len(known), 5)
        done, asked = self.run_module("importers"), self.run_module("importers", "--help")
        self.assertEqual((done.returncode, done.stdout, asked.returncode, asked.stderr), (2, "", 0, ""))
        self.assertEqual(done.stderr, asked.stdout)
        self.assertEqual(sorted(line.split()[0] for line in done.stderr.splitlines() if line.startswith("  ")), known)
        for name, said in (("slime_pt", "slime_pt is a program of its own: python -m bitroll.importers.slime_pt\n"),
                           ("slime", "there is no importer 'slime'\nusage: ")):
            done = self.run_module("importers", name, "d.pt")
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertTrue(done.stderr.startswith(f"importers: {said}"), done.stderr)

    def test_what_is_no_file(self):
        """A pipe that nobody writes to held an importer up for ever; of a folder torch only said that it is not a whole file."""
        os.mkfifo(self.path("pipe"))
        for path, said in ((self.path("pipe"), "expected a regular file"), (self.path("."), "expected a regular file"),
                           ("/dev/zero", "expected a regular file"), (self.path("none"), os.strerror(errno.ENOENT))):
            for name in ("nemo_jsonl", "slime_pt", "verl_dataproto", "vllm_json", "sglang_json"):
                side = ("--side", "rollout", "--alignment", "same") if name in ("nemo_jsonl", "slime_pt", "verl_dataproto") else ()
                with self.subTest(name, path=path):
                    done = self.run_module(f"importers.{name}", path, *side, *GIVEN, "--out", self.path("f.h5"))
                    self.assertEqual((done.returncode, done.stdout, done.stderr), (2, "", f"{name}: {path}: {said}\n"))

    def test_a_stdout_that_is_full(self):
        dump = self.write("d.jsonl", nemo())
        for name, *arguments in (("importers", "--help"), ("nemo_jsonl", "--help"), ("slime_pt", "--help"), ("verl_dataproto", "--help"),
                                 ("vllm_json", "--help"), ("sglang_json", "--help"),
                                 ("nemo_jsonl", dump, "--side", "train", *GIVEN, "--alignment", "same", "--out", self.path("f.h5"))):
            with self.subTest(name, arguments=arguments), open("/dev/full", "wb") as full:
                done = self.run_module(name if name == "importers" else f"importers.{name}", *arguments, stdout=full)
                self.assertEqual((done.returncode, done.stderr), (2, f"{name}: standard output: {os.strerror(errno.ENOSPC)}\n"))


if __name__ == "__main__":
    unittest.main()
