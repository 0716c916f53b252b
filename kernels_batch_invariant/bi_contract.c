/* The digest over every constant that can move a bit, and their text; see bi_contract.h. Layer: kernels_batch_invariant. */
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

/* |value| as 0x1.HEXp+E, which printf's %a would spell with the locale's decimal point. Every constant is normal. */
static void fraction_text(double value, char *text, size_t n) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    char digits[14];
    int length = snprintf(digits, sizeof digits, "%013llx", (unsigned long long)(bits & 0xfffffffffffffull));
    while (length > 0 && digits[length - 1] == '0')
        digits[--length] = 0;
    snprintf(text, n, "%s0x1%s%sp%+d", value < 0 ? "-" : "", length ? "." : "", digits, (int)(bits >> 52 & 2047) - 1023);
}

int bi_contract_line(int i, char *line, int n) {
    if (i < 0 || i >= N_CONSTANT)
        return 0;
    const constant *c = &constants[i];
    char value[40];
    /* Beyond 2^53 every binary64 is an integer, and a decimal of it hides the power of two that it is. */
    if (fabs(c->value) < 0x1p53 && c->value == (double)(int64_t)c->value)
        snprintf(value, sizeof value, "%lld", (long long)c->value);
    else
        fraction_text(c->value, value, sizeof value);
    snprintf(line, (size_t)n, "%s %s", c->name, value);
    return 1;
}

br_digest bi_contract_digest(void) {
    br_hash_stream stream;
    br_hash_begin(&stream);
    for (int i = 0; i < N_CONSTANT; i++) {
        uint64_t bits;
        unsigned char value[8];
        memcpy(&bits, &constants[i].value, sizeof bits);
        for (int b = 0; b < 8; b++)
            value[b] = (unsigned char)(bits >> 8 * b);
        br_hash_add(&stream, constants[i].name, strlen(constants[i].name) + 1);
        br_hash_add(&stream, value, sizeof value);
    }
    return br_hash_end(&stream);
}
