"""NeMo-RL's train_data_step*.jsonl: a line holds lists with one entry a sequence, padded to one length; input_lengths says how much is
text. generation_logprobs are the rollout's, prev_logprobs the trainer's. A sequence that sample_loss_mask leaves out of the loss is
compared all the same: it may have been left out because its log-probs were far apart."""
from .dump_file import Refused, Text, field, place, records, run, same_length

FIELD = {"rollout": "generation_logprobs", "train": "prev_logprobs"}


def row(columns, b, shift, temperature, name, where):
    n = columns["input_lengths"][b]
    for key in ("token_ids", "token_loss_mask", FIELD[name]):
        values = columns[key][b]
        if type(n) is not int or not isinstance(values, list) or len(values) < n - (shift and key == FIELD[name]):
            raise Refused(f"{where}: {key} of sequence {b} is shorter than input_lengths, {n}")
    mask = columns["token_loss_mask"][b][:n]
    values = place(columns[FIELD[name]][b][:n], 0, n, shift)
    prompt_len = mask.index(1) if 1 in mask else n
    return prompt_len, columns["token_ids"][b][:n], mask, [x if m else None for x, m in zip(values, mask)], temperature


def read(options):
    count = 0
    for where, record in records(options.args.dump):
        shift, temperature = options.shift(where), options.temperature(where)
        lengths = field(record, "input_lengths", where)
        columns = {"input_lengths": lengths}
        for key in ("token_ids", "token_loss_mask", FIELD[options.args.side]):
            columns[key] = same_length(field(record, key, where), len(lengths), key, where)
        for b in range(len(lengths)):
            prompt_len, tokens, mask, logprob, t = row(columns, b, shift, temperature, options.args.side, where)
            yield where, Text(count, 0, t, prompt_len, tokens, mask, logprob)
            count += 1


if __name__ == "__main__":
    run("nemo_jsonl", __doc__, read)
