"""A debug mode: what is computed twice must be the same bytes. Stands for functions.py: mcore.BitrollModel(.., recompute=True,
fn=Rehash(functions)). The first time an op runs on given rows its outputs are hashed; when its layer is computed again, in the backward,
they are hashed again and compared."""
import weakref

import torch

from .functions import Stream

OUTSIDE = ("enter", "leave")  # no ops


class Differs(RuntimeError):
    """An op whose recomputed output is not what it was."""


class Place:
    """Where a forward over some rows is, and the hashes so far: {(layer, number in the layer, op): of each output}."""

    def __init__(self):
        self.layer, self.number, self.seen = None, 0, {}

    def next(self, layer, op):
        self.layer, self.number = layer, self.number + 1 if layer == self.layer else 0
        return layer, self.number, op


def _outputs(op, out):
    """The tensors of an op that are defined throughout."""
    if op == "index_select":  # positions behind a row's count are not written
        select, count = out
        return select.masked_fill(torch.arange(select.shape[1], device=select.device) >= count.unsqueeze(1), -1), count
    return out if isinstance(out, (tuple, list)) else (out,)


def _hashes(library, outputs):
    for one in outputs:
        data = one.data if isinstance(one, Stream) else one
        yield library.hash(data.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes()).lo


class Rehash:
    def __init__(self, functions):
        self.functions, self.places = functions, weakref.WeakKeyDictionary()

    def __getattr__(self, op):
        function = getattr(self.functions, op)
        if op in OUTSIDE:
            return function

        def call(rows, *args, **kw):
            place = self.places.setdefault(rows, Place())
            out = function(rows, *args, **kw)
            self.compare(place, place.next(rows.layer, op), list(_hashes(rows.ops.library, _outputs(op, out))))
            return out
        return call

    @staticmethod
    def compare(place, where, found):
        wanted = place.seen.setdefault(where, found)
        if wanted != found:
            layer, number, op = where
            output = next(i for i, (a, b) in enumerate(zip(wanted, found)) if a != b)
            raise Differs(f"layer {layer}, op {number} ({op}), output {output}: computed again, its bytes hash to {found[output]:016x}: "
                          f"expected {wanted[output]:016x}, as in the forward")
