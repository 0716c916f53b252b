"""vLLM's RequestOutput as JSON, one a line or in a list: request_id, prompt_token_ids, outputs[] with index, token_ids and logprobs, and
prompt_logprobs where they were asked for (the first is null). A position is {token id: {"logprob", ...}}, or all positions together are
flat lists (start_indices, end_indices, token_ids, logprobs). The token of each log-prob is in the dump. Kind is vLLM's logprobs_mode:
raw_logprobs are raw; processed_logprobs are processed, and with top-k, top-p, min-p and penalties off full_softmax_over_T."""
from .dump_file import Refused, Text, field, records, run, same_length


def number(entry):
    """Of {"logprob": x}, [x, rank, text] or x."""
    return entry.get("logprob") if isinstance(entry, dict) else entry[0] if isinstance(entry, list) and entry else entry


def positions(logprobs, n, name, where):
    """{token id: log-prob} or None a position."""
    if isinstance(logprobs, dict):
        flat = [field(logprobs, key, where) for key in ("start_indices", "end_indices", "token_ids", "logprobs")]
        logprobs = [dict(zip(flat[2][begin:end], flat[3][begin:end])) or None for begin, end in zip(*flat[:2])]
    try:
        return [row and {int(i): number(x) for i, x in row.items()} for row in same_length(logprobs, n, name, where)]
    except (AttributeError, TypeError, ValueError):
        raise Refused(f"{where}: field '{name}': expected {{token id: log-prob}} at each position") from None


def chosen(rows, tokens, name, where):
    for i, (row, token) in enumerate(zip(rows, tokens)):
        if row is not None and token not in row:
            raise Refused(f"{where}: {name} of position {i} lacks its own token {token}")
    return [row and row[token] for row, token in zip(rows, tokens)]


def read(options):
    for where, record in records(options.args.dump):
        uid, prompt = field(record, "request_id", where, str), field(record, "prompt_token_ids", where)
        temperature = options.temperature(where, (record.get("sampling_params") or {}).get("temperature"))
        before = record.get("prompt_logprobs") or [None] * len(prompt)
        before = chosen(positions(before, len(prompt), "prompt_logprobs", where), prompt, "prompt_logprobs", where)
        for output in field(record, "outputs", where):
            tokens = field(output, "token_ids", where)
            rows = positions(field(output, "logprobs", where, object), len(tokens), "logprobs", where)
            logprob = [None] + before[1:] + chosen(rows, tokens, "logprobs", where)
            yield where, Text(uid, field(output, "index", where, int), temperature, len(prompt), prompt + tokens,
                              [0] * len(prompt) + [1] * len(tokens), logprob, [None] * len(prompt) + rows)


if __name__ == "__main__":
    run("vllm_json", __doc__, read, sides=False, alignment=False)
