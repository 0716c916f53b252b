"""SGLang's /generate responses, one a line or in a list, asked for with return_logprob. meta_info: id, prompt_tokens,
output_token_logprobs and input_token_logprobs, lists of [log-prob, token id, text], the first of the prompt null. The prompt's ids are
those of input_token_logprobs (ask with logprob_start_len 0), or the request's input_ids, kept in the record. The token of each log-prob
is in the dump. Which kind the log-probs are depends on the server: SGLang's own documentation or start-up flags say it."""
from .dump_file import Refused, Text, field, records, run, same_length


def entries(meta, name, where):
    """[(log-prob, token id), ...]"""
    found = field(meta, name, where)
    if any(not isinstance(e, list) or len(e) < 2 or type(e[1]) is not int for e in found):
        raise Refused(f"{where}: field '{name}': expected [log-prob, token id, text] at each position")
    return [(e[0], e[1]) for e in found]


def prompt_of(record, meta, where):
    """(ids, log-probs) of the prompt; those of a prefix may be missing."""
    n, scored = field(meta, "prompt_tokens", where, int), entries(meta, "input_token_logprobs", where) if meta.get("input_token_logprobs") else []
    ids = record.get("input_ids") or [token for _, token in scored]
    same_length(ids, n, "input_ids or input_token_logprobs (logprob_start_len 0)", where)
    if scored and ids[n - len(scored) :] != [token for _, token in scored]:
        raise Refused(f"{where}: input_ids and input_token_logprobs name different tokens")
    return ids, [None] * (n - len(scored)) + [value for value, _ in scored]


def read(options):
    for where, record in records(options.args.dump):
        meta = field(record, "meta_info", where, dict)
        uid, temperature = field(meta, "id", where, str), options.temperature(where, (record.get("sampling_params") or {}).get("temperature"))
        prompt, before = prompt_of(record, meta, where)
        after = entries(meta, "output_token_logprobs", where)
        tokens = [token for _, token in after]
        if record.get("output_ids") not in (None, tokens):
            raise Refused(f"{where}: output_ids and output_token_logprobs name different tokens")
        top = [None] * len(prompt) + (same_length(meta["output_top_logprobs"], len(tokens), "output_top_logprobs", where)
                                      if meta.get("output_top_logprobs") else [None] * len(tokens))
        top = [row and {e[1]: e[0] for e in row} for row in top]
        yield where, Text(uid, 0, temperature, len(prompt), prompt + tokens, [0] * len(prompt) + [1] * len(tokens),
                          [None] + before[1:] + [value for value, _ in after], top)


if __name__ == "__main__":
    run("sglang_json", __doc__, read, sides=False, alignment=False)
