/* The digest over every constant that can move a bit: names and values of bi_contract.h's and bi_fn.h's lists, as the text
 * lines that `inspect` prints. A value is printed as a hexadecimal binary64, in which each of them is exact. */
#include "bi_contract.h"
#include "bi_fn.h"
#include "br_hash.h"

#include <stdio.h>

typedef struct constant {
    const char *name;
    double value;
} constant;

#define BI_CONTRACT_ENTRY(name) {#name, (double)(name)},

static const constant constants[] = {BI_CONTRACT_CONSTANTS(BI_CONTRACT_ENTRY) BI_FN_COEFFICIENTS(BI_CONTRACT_ENTRY)};

enum { N_CONSTANT = sizeof constants / sizeof constants[0] };

int bi_contract_line(int i, char *line, int n) {
    if (i < 0 || i >= N_CONSTANT)
        return 0;
    const constant *c = &constants[i];
    if (c->value == (double)(int64_t)c->value)
        snprintf(line, (size_t)n, "%s %lld", c->name, (long long)c->value);
    else
        snprintf(line, (size_t)n, "%s %a", c->name, c->value);
    return 1;
}

br_digest bi_contract_digest(void) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    char line[128];
    for (int i = 0; bi_contract_line(i, line, (int)sizeof line); i++) {
        br_hash_add(&stream, line, strlen(line));
        br_hash_add(&stream, "\n", 1);
    }
    return br_hash_end(&stream);
}
