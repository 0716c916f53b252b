"""The forward in torch against the engine: every stage of every row, bit by bit."""
import itertools
import unittest

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rig
from bitroll import abi, mcore, peft
from bitroll.model import Model
from bitroll.rows import Rows
from bitroll.stage_hash import StageHash

PRESETS = ("nano", "k3-nano", "kimi-linear-nano")
LENGTHS = (71, 2, 130, 18)


def plain_lines(r, texts):
    lengths, token, target = rig.rows_of(texts)
    rows = Rows(r.ops, [sum(lengths[:i]) for i in range(len(lengths) + 1)])
    rows.trace = StageHash(rows, [f"s{i}#0" for i in range(len(texts))])
    with torch.no_grad():
        out = r.model.log_probs(rows, token, target, rig.ones(len(token)))[0]
    rows.show("logprob", out)
    rows.check_faults()
    return list(rows.trace.lines())


def megatron_lines(r, texts):
    lengths, token, target = rig.rows_of(texts)
    traces = []

    def trace(rows):
        traces.append(StageHash(rows, [f"s{i}#0" for i in range(len(texts))]))
        return traces[0]
    with torch.no_grad():
        r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)), trace=trace)
    return list(traces[0].lines())


def first_difference(ours, engine):
    return next(((a, b) for a, b in zip(ours, engine) if a != b), None)


class Forward(unittest.TestCase):
    def compare(self, r, lines):
        texts = rig.sequences(r.config, LENGTHS)
        engine = rig.engine_lines(r.folder, texts, r.adapter_folder if r.settings.rank else None)
        ours = lines(r, texts)
        self.assertIsNone(first_difference(ours, engine))
        self.assertEqual(len(ours), len(engine))

    def test_every_stage_of_every_preset(self):
        for preset in PRESETS:
            for adapter in (False, True):
                with self.subTest(preset=preset, adapter=adapter):
                    r = rig.Rig(preset, adapter)
                    self.compare(r, plain_lines)
                    r.close()

    def test_megatron_every_stage(self):
        mcore.initialize(rig.BACKEND)
        for preset in ("nano", "kimi-linear-nano"):
            for recompute in (False, True):
                with self.subTest(preset=preset, recompute=recompute):
                    r = rig.Rig(preset, True, mcore.BitrollModel, recompute=recompute)
                    self.compare(r, megatron_lines)
                    r.close()

    def test_a_wrong_forward_is_named(self):
        """Two ops swapped, a sequence that begins one row late, a shifted label: the first different line says where."""
        mcore.initialize(rig.BACKEND)
        r = rig.Rig("nano", True, mcore.BitrollModel)
        texts = rig.sequences(r.config, LENGTHS)
        engine = rig.engine_lines(r.folder, texts, r.adapter_folder)
        lengths, token, target = rig.rows_of(texts)

        def first(lengths=lengths, target=target, change=lambda rows: None):
            traces = []

            def trace(rows):
                change(rows)
                traces.append(StageHash(rows, [f"s{i}#0" for i in range(len(texts))]))
                return traces[0]
            with torch.no_grad():
                r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token)), trace=trace)
            return first_difference(list(traces[0].lines()), engine)

        def swap():
            layer = r.model.decoder.layers[2]
            layer.input_layernorm, layer.pre_mlp_layernorm = layer.pre_mlp_layernorm, layer.input_layernorm

        def late(rows):
            """The third sequence begins one row late, for ops and not for the trace."""
            rows.seg[9] += 1  # row and length of the segment before and of this one
            rows.seg[6] += 1
            rows.seg[10] -= 1
            rows.row_seg[rows.lengths[0] + rows.lengths[1]] = 1
        self.assertIsNone(first())
        swap()
        self.assertIn("s0#0 0 2 norm_attn ", first()[1])
        swap()
        self.assertIn("s0#0 0 8 logprob ".replace("8", str(r.config.n_layer)), first(target=target.roll(1))[1])
        self.assertIn("s2#0 0 0 conv ", first(change=late)[1])
        at_pack = [lengths[0], lengths[1] + 1, lengths[2] - 1, lengths[3]]
        self.assertIn("s2#0 0 -1 embed ", first(lengths=at_pack)[1])
        self.assertIsNone(first())
        r.close()


class Packings(unittest.TestCase):
    def test_no_packing_moves_a_bit(self):
        mcore.initialize(rig.BACKEND)
        r = rig.Rig("nano", True, mcore.BitrollModel)
        texts = rig.sequences(r.config, (40, 7, 65, 64, 1 + 1, 129))
        lengths, token, target = rig.rows_of(texts)
        t = rig.ones(len(token), 0.7)
        with torch.no_grad():
            whole = r.model.log_probs(token, mcore.pack(lengths), target, t)[0]
            at = [sum(lengths[:i]) for i in range(len(lengths))]
            for a, n in zip(at, lengths):
                alone = r.model.log_probs(token[a : a + n], mcore.pack([n]), target[a : a + n], t[a : a + n])[0]
                self.assertTrue(torch.equal(rig.bits(alone), rig.bits(whole[a : a + n])))
            room = [n + 3 * i + 1 for i, n in enumerate(lengths)]
            spread, aim = (torch.full((sum(room),), v, dtype=torch.int32, device=rig.DEVICE) for v in (0, 3))
            place = [sum(room[:i]) for i in range(len(room))]
            for a, b, n in zip(at, place, lengths):
                spread[b : b + n], aim[b : b + n] = token[a : a + n], target[a : a + n]
            padded = r.model.log_probs(spread, mcore.pack(lengths, room), aim, rig.ones(sum(room), 0.7))[0]
            for a, b, n in zip(at, place, lengths):
                self.assertTrue(torch.equal(rig.bits(padded[b : b + n]), rig.bits(whole[a : a + n])))
        r.close()

    def test_train_is_eval_with_and_without_gradients(self):
        """And with activations that are to be computed again."""
        mcore.initialize(rig.BACKEND)
        found = []
        for recompute in (False, True):
            r = rig.Rig("nano", True, mcore.BitrollModel, recompute=recompute)
            lengths, token, target = rig.rows_of(rig.sequences(r.config, (33, 50)))
            for training in (True, False):
                for grad in (True, False):
                    with torch.set_grad_enabled(grad):
                        out = r.model.train(training).log_probs(token, mcore.pack(lengths), target, rig.ones(len(token), 0.7))
                    self.assertEqual(out[0].requires_grad, grad)
                    found.append([rig.bits(one) for one in out])
            bare = r.model.log_probs(token, mcore.pack(lengths), target, rig.ones(len(token), 0.7), entropy=False)
            self.assertIsNone(bare[2])
            found.append([*(rig.bits(one) for one in bare[:2]), found[0][2]])
            r.close()
        self.assertEqual(len(found), 10)
        self.assertTrue(all(torch.equal(a, b) for one in found for a, b in zip(one, found[0], strict=True)))

    def test_train_is_eval_and_base_rows_are_base(self):
        r, base = rig.Rig("nano", True), rig.Rig("nano", False)
        lengths, token, target = rig.rows_of(rig.sequences(r.config, (33, 50)))
        cu, t = [0, lengths[0], sum(lengths)], rig.ones(sum(lengths))
        slot = torch.tensor([-1] * lengths[0] + [0] * lengths[1], dtype=torch.int32, device=rig.DEVICE)
        with torch.no_grad():
            mixed = r.model.train().log_probs(Rows(r.ops, cu, slot=slot), token, target, t)[0]
            again = r.model.eval().log_probs(Rows(r.ops, cu, slot=slot), token, target, t)[0]
            off = base.model.log_probs(Rows(base.ops, cu), token, target, t)[0]
        self.assertTrue(torch.equal(rig.bits(mixed), rig.bits(again)))
        self.assertTrue(torch.equal(rig.bits(mixed[: lengths[0]]), rig.bits(off[: lengths[0]])))
        self.assertFalse(torch.equal(rig.bits(mixed[lengths[0] :]), rig.bits(off[lengths[0] :])))
        r.close()
        base.close()


    def test_slots_of_every_kind_one_after_the_other(self):
        """On one model, each as on a model that has seen no other."""
        of = {"adapter": lambda: 0, "base": lambda: -1, "first base": lambda: slots(-1, 0), "last base": lambda: slots(0, -1)}

        def slots(first, last):
            return torch.tensor([first] * lengths[0] + [last] * lengths[1], dtype=torch.int32, device=rig.DEVICE)

        def found(r, kind):
            with torch.no_grad():
                return rig.bits(r.model.log_probs(Rows(r.ops, [0, lengths[0], sum(lengths)], slot=of[kind]()), token, target, rig.ones(len(token)))[0])
        r, wanted = rig.Rig("nano", True), {}
        lengths, token, target = rig.rows_of(rig.sequences(r.config, (33, 50)))
        for kind in of:
            fresh = rig.Rig("nano", True)
            wanted[kind] = found(fresh, kind)
            fresh.close()
        self.assertEqual(len({tuple(bits.tolist()) for bits in wanted.values()}), len(of))
        kinds = list(of)
        for i in (0, 1, 2, 3, 2, 0, 3, 1, 2, 2, 0):
            self.assertTrue(torch.equal(found(r, kinds[i]), wanted[kinds[i]]), kinds[i])
        r.close()


MOVES = {"empty", "empty_like", "zeros", "full", "ones", "view", "_unsafe_view", "reshape", "slice", "select", "unsqueeze", "squeeze", "unbind",
         "cat", "detach", "alias", "t", "transpose", "as_strided", "clone", "copy_", "_to_copy", "expand", "permute", "split", "fill_",
         "zero_", "tensor", "lift_fresh", "_reshape_alias", "index", "stack", "new_empty", "_local_scalar_dense", "ones_like",
         "scalar_tensor", "zeros_like", "set_"}


class NoArithmetic(TorchDispatchMode):
    """Notes every torch op that could change a floating-point value."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        made = out if isinstance(out, (tuple, list)) else (out,)
        if name not in MOVES and any(isinstance(o, torch.Tensor) and o.is_floating_point() for o in made):
            self.found.append(name)
        if name == "_to_copy" and any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
            self.found.append("_to_copy of a floating-point tensor")
        return out


class Arithmetic(unittest.TestCase):
    def test_torch_computes_nothing_between_embedding_and_logprob(self):
        mcore.initialize(rig.BACKEND)
        for preset, model in itertools.product(PRESETS, (Model, mcore.BitrollModel)):
            r = rig.Rig(preset, True, model)
            lengths, token, target = rig.rows_of(rig.sequences(r.config, (20, 31)))
            t, packed, rows = rig.ones(len(token)), mcore.pack(lengths), Rows(r.ops, [0, lengths[0], sum(lengths)])
            watch = NoArithmetic()
            with watch:
                if model is Model:
                    r.model.log_probs(rows, token, target, t)
                else:
                    r.model.log_probs(token, packed, target, t)
            self.assertEqual(watch.found, [])
            r.close()

    def test_the_watch_sees_arithmetic(self):
        watch = NoArithmetic()
        with watch:
            torch.ones(3) * 2
        self.assertEqual(watch.found, ["mul"])


class Adapters(unittest.TestCase):
    def test_saved_adapter_is_the_loaded_one_to_the_engine(self):
        r = rig.Rig("nano", True)
        peft.save(r.model, r.settings, r.folder + "-saved", r.checkpoint.prefix)
        texts = rig.sequences(r.config, (30,))
        self.assertEqual(rig.engine_lines(r.folder, texts, r.folder + "-saved"), rig.engine_lines(r.folder, texts, r.adapter_folder))
        r.close()

    def test_what_is_exported_is_what_forwards_read(self):
        """One place of memory: the address that ops are given is the exported copy's, and a bit flipped there shows on both sides."""
        r = rig.Rig("nano", True)
        lengths, token, target = rig.rows_of(rig.sequences(r.config, (60, 70)))

        def log_probs():
            with torch.no_grad():
                return rig.bits(r.model.log_probs(Rows(r.ops, [0, lengths[0], sum(lengths)]), token, target, rig.ones(len(token)))[0])
        attention = next(layer.self_attention for layer in r.model.layers if hasattr(layer.self_attention, "kv_b_proj"))
        absorbed, moe = attention.kv_b_proj, r.model.layers[1].mlp
        adapters = (attention.o_proj.map.adapter, moe.shared_experts.linear_fc1.maps["up"].adapter, moe.experts.linear_fc2.map.adapter,
                    absorbed.uk.adapter, absorbed.uv.adapter)
        before, bits = dict(peft.exported(r.model)), log_probs()
        sign = 3 if rig.BACKEND == "oracle" else 1  # byte of the first entry's sign: the oracle packs bf16 values as f32
        for adapter in adapters:
            given = abi.STRUCTS["bi_adapter"].from_buffer_copy(adapter.slot.buffer)
            for part, stack in (("a", adapter.a), ("b", adapter.b)):
                self.assertEqual(getattr(given, part).data, stack.data.data_ptr())
                with self.subTest(adapter=adapter, part=part):
                    stack.data[sign] ^= 0x80
                    self.assertFalse(torch.equal(log_probs(), bits))
                    if stack in (absorbed.uk.adapter.b, absorbed.uv.adapter.a):  # A of kv_b is read in two forms
                        with self.assertRaisesRegex(RuntimeError, "kv_b_proj: the two packed forms of A differ"):
                            peft.exported(r.model)
                    else:
                        after = dict(peft.exported(r.model))
                        moved = [n for n in before if not torch.equal(before[n].view(torch.int16), after[n].view(torch.int16))]
                        self.assertEqual(len(moved), 1)
                        self.assertEqual(int((before[moved[0]] != after[moved[0]]).sum()), 1)
                    stack.data[sign] ^= 0x80
        self.assertTrue(torch.equal(log_probs(), bits))
        r.close()

    def test_masters_are_rounded_as_the_contract_says(self):
        """Ties, subnormals, signed zeros, numbers that round to Inf, NaN: to nearest, ties to even, NaN to 0x7fff."""
        r = rig.Rig("pico", True)
        low = next(m for m in r.model.modules() if hasattr(m, "adapter")).adapter
        patterns = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x00000001, 0x00008000, 0x00018000, 0x80000000, 0x7F7FFFFF,
                                 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x33D58000, 0xBF808000], dtype=torch.int64)
        wanted = [0x3F80, 0x3F82, 0x3F80, 0x3F81, 0, 0, 2, 0x8000, 0x7F80, 0x7F80, 0xFF80, 0x7FFF, 0x7FFF, 0x7FFF, 0x33D6, 0xBF80]
        values = (patterns - ((patterns >> 31) << 32)).to(torch.int32).view(torch.float32).to(rig.DEVICE)
        with torch.no_grad():
            low.linear_in.weight.view(-1)[: len(values)] = values
        module = next(m for m in r.model.modules() if hasattr(m, "adapter"))
        module.publish()
        found = module.map.adapter.a.unpack().view(-1)[: len(values)].view(torch.int16).to(torch.int64) & 0xFFFF
        self.assertEqual([hex(v) for v in found.tolist()], [hex(v) for v in wanted])
        r.close()


if __name__ == "__main__":
    unittest.main()
