# prompts.awk: n prompts of low to high tokens, the first of low and the second of high, of the adapters in `names` in turn ("-" is the base), every
# fourth with top-p and top-k where `top` is 1. Its own generator: what srand does differs from one awk to the next.
#   awk -v n=9 -v low=1 -v high=180 -v vocab=2000 -v names="- red blue" -v top=1 -f tests/prompts.awk
function check(name, value, least) {
    if (value ~ /^[0-9]+$/ && value + 0 >= least)
        return
    printf "prompts.awk: %s is \047%s\047: expected a whole number from %d\n", name, value, least >"/dev/stderr"
    exit 2
}
function below(limit) {
    state = state * 48271 % 2147483647
    return int(state / 2147483647 * limit)
}
BEGIN {
    state = 11
    check("n", n, 0)
    check("low", low, 1)
    check("high", high, low)
    check("vocab", vocab, 4)
    n_name = split(names, name, " ")
    check("number of names", n_name, 1)
    for (i = 0; i < n; i++) {
        len = i == 0 ? low : i == 1 ? high : low + below(high - low + 1)
        printf "{\"prompt\": ["
        for (t = 0; t < len; t++)
            printf "%s%d", t ? ", " : "", 3 + below(vocab - 3)
        which = name[i % n_name + 1]
        printf "], \"uid\": \"p%d\"", i
        if (which != "-")
            printf ", \"adapter\": \"%s\"", which
        print (top && i % 4 == 3 ? ", \"top_p\": 0.9, \"top_k\": 40}" : "}")
    }
}
