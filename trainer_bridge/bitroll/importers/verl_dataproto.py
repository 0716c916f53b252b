"""A verl DataProto, saved as plain tensors: torch.save({"batch": dict(data.batch.items()), "non_tensor_batch": {"uid":
data.non_tensor_batch["uid"].tolist()}, "meta_info": {"temperature": T}}, IN). DataProto.save_to_disk pickles an object of verl, which would
have to be run to be read: it is refused. Prompts are padded on the left, responses on the right, as attention_mask says; jagged tensors
have no padding. rollout_log_probs are the rollout's, old_log_probs the trainer's; both stand beside the responses, value i of token i, as verl lays
them out: --alignment same."""
import importlib

from .dump_file import Names, Refused, Text, field, place, plain, run, same_length, torch_file

FIELD = {"rollout": "rollout_log_probs", "train": "old_log_probs"}


def rows(batch, name, where):
    """A list a sequence."""
    tensor = field(batch, name, where, object)
    if not hasattr(tensor, "unbind") or tensor.dim() != 2:
        raise Refused(f"{where}: '{name}': expected a tensor of two dimensions")
    return [row.tolist() for row in tensor.unbind()]


def unpadded(batch, logprobs, where):
    """(prompt, response, mask of the response, log-probs of the response) a sequence. logprobs: the name of their field."""
    columns = [rows(batch, name, where) for name in ("prompts", "responses", "response_mask", logprobs)]
    if len({len(column) for column in columns}) != 1:
        raise Refused(f"{where}: prompts, responses, response_mask and {logprobs} are of different batches")
    if batch["prompts"].is_nested:
        return list(zip(*columns))
    kept = same_length(rows(batch, "attention_mask", where), len(columns[0]), "attention_mask", where)
    out = []
    for i, (prompt, *response) in enumerate(zip(*columns)):
        same_length(kept[i], len(prompt) + len(response[0]), "attention_mask", where)
        for values in response[1:]:
            same_length(values, len(response[0]), f"response_mask or {logprobs}", where)
        n = sum(kept[i][len(prompt) :])
        out.append(([t for t, k in zip(prompt, kept[i]) if k], *(values[:n] for values in response)))
    return out


def read(options):
    importlib.import_module("torch._dynamo")  # without it weights-only mode knows no jagged tensors
    path, names = options.args.dump, Names()
    data = torch_file(path)
    found, shift = (data.get("meta_info") or {}).get("temperature") if isinstance(data, dict) else None, options.shift(path)
    texts = unpadded(field(data, "batch", path, dict), FIELD[options.args.side], path)
    uids = same_length(plain(field(field(data, "non_tensor_batch", path, dict), "uid", path, object)), len(texts), "uid", path)
    for i, (prompt, response, response_mask, values) in enumerate(texts):
        tokens, mask = prompt + response, [0] * len(prompt) + response_mask
        slots = place(values, len(prompt), len(tokens), shift)
        yield f"{path}: row {i}", Text(uids[i], names.next(uids[i]), options.temperature(path, found), len(prompt), tokens, mask,
                                       [x if m else None for x, m in zip(slots, mask)])


if __name__ == "__main__":
    run("verl_dataproto", __doc__, read)
