"""slime's debug dumps, torch files: of the rollout {"samples": [...]}; of the trainer the same with log_probs, or in its earlier form
{"rollout_data": {field: [one a sample]}}. Log-probs are of the response, the last response_length of tokens."""
from .dump_file import Names, Refused, Text, field, place, plain, run, same_length, torch_file

FIELD = {"rollout": "rollout_log_probs", "train": "log_probs"}
COLUMNS = {"tokens": "tokens", "response_lengths": "response_length", "loss_masks": "loss_mask", "sample_indices": "index",
           "log_probs": "log_probs", "rollout_log_probs": "rollout_log_probs"}


def samples(path):
    data = torch_file(path)
    if isinstance(data, dict) and isinstance(data.get("rollout_data"), dict):
        columns = {one: plain(data["rollout_data"][many]) for many, one in COLUMNS.items() if data["rollout_data"].get(many) is not None}
        n = len(field(columns, "tokens", path))
        for name, column in columns.items():
            same_length(column, n, name, path)
        return [{name: column[i] for name, column in columns.items()} for i in range(n)]
    return field(data, "samples", path)


def read(options):
    names, path = Names(), options.args.dump
    for i, sample in enumerate(samples(path)):
        where = f"{path}: sample {i}"
        shift, temperature = options.shift(where), options.temperature(where)
        sample = {name: plain(value) for name, value in sample.items()} if isinstance(sample, dict) else sample
        tokens, n_new = field(sample, "tokens", where), field(sample, "response_length", where, int)
        uid = sample.get("index", sample.get("sample_index"))
        if uid is None:
            raise Refused(f"{where}: field 'index' is missing: the two sides could not be joined")
        begin = len(tokens) - n_new
        values = same_length(field(sample, FIELD[options.args.side], where), n_new, FIELD[options.args.side], where)
        loss_mask = sample.get("loss_mask")
        mask = [0] * begin + ([1] * n_new if loss_mask is None else same_length(loss_mask, n_new, "loss_mask", where))
        slots = place(values, begin, len(tokens), shift)
        yield where, Text(uid, names.next(uid), temperature, begin, tokens, mask, [x if m else None for x, m in zip(slots, mask)])


if __name__ == "__main__":
    run("slime_pt", __doc__, read)
