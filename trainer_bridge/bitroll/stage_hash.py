"""The lines of `bitroll dump --stage-hash` from a forward of this package: one hash a (sequence, position, layer, stage), so that `diff`
of the two names the first op whose bits differ."""
import torch

# The order of computation inside a layer (src/model/br_stage.c).
ORDER = ("embed", "res_attn", "norm_attn", "qkv", "conv", "gate", "kda", "index_topk", "mla", "attn_out", "res_mlp", "norm_mlp", "route",
         "experts", "ffn_out", "final", "logprob")


class StageHash:
    """Watches the rows of a forward: `rows.trace = StageHash(rows, names)`. names: of the sequences."""

    def __init__(self, rows, names):
        self.rows, self.names, self.found = rows, names, []

    def __call__(self, stage, layer, pieces, count=None):
        library = self.rows.ops.library
        shown = [p.detach().reshape(self.rows.n_row, -1).contiguous().view(torch.uint8).cpu().numpy() for p in pieces]
        limit = None if count is None else count.tolist()
        row = 0
        for seq, n in enumerate(self.rows.lengths):
            for pos in range(n):
                data = b"".join(s[row].tobytes() if limit is None else s[row][: 4 * limit[row]].tobytes() for s in shown)
                self.found.append((seq, pos, layer, ORDER.index(stage), library.hash(data).lo))
                row += 1

    def lines(self):
        for seq, pos, layer, stage, value in sorted(self.found):
            yield f"{self.names[seq]} {pos} {layer} {ORDER[stage]} {value:016x}"
