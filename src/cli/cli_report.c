/* The summary line, the JSON object, the progress bar, the exit code. */
#include "cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { DIGEST_TEXT = 33, BAR_CELLS = 30 };

/* What the bar on the terminal shows; a run that ends early leaves it open. */
static struct bar {
    int open;
    const char *what;
    int64_t done, total;
} bar;

static int draw_bar(void *context, const char *what, int64_t done, int64_t total) {
    char cell[BAR_CELLS + 1];
    const int64_t n_full = total > 0 ? done * BAR_CELLS / total : BAR_CELLS;
    (void)context;
    if (what == bar.what && done == bar.done && total == bar.total)
        return 0; /* steps that finish nothing */
    for (int64_t i = 0; i < BAR_CELLS; i++)
        cell[i] = i < n_full ? '#' : '.';
    cell[BAR_CELLS] = 0;
    fprintf(stderr, "\r[%s] %lld of %lld %s\033[K", cell, (long long)done, (long long)total, what);
    bar = (struct bar){.open = 1, .what = what, .done = done, .total = total};
    return 0;
}

static void end_bar(void) {
    if (bar.open)
        fputc('\n', stderr);
    bar.open = 0;
}

br_watch cli_watch(void) {
    return (br_watch){.call = isatty(STDERR_FILENO) ? draw_bar : NULL};
}

static void digest_text(br_digest d, char text[DIGEST_TEXT]) {
    snprintf(text, DIGEST_TEXT, "%016llx%016llx", (unsigned long long)d.hi, (unsigned long long)d.lo);
}

/* A verb that has none leaves it zero. */
static int has_digest(br_digest d) {
    return d.lo != 0 || d.hi != 0;
}

static double rate(const br_report *r) {
    return r->seconds > 0 ? (double)r->n_tok / r->seconds : 0;
}

static void print_json_text(const char *text) {
    putchar('"');
    for (const unsigned char *at = (const unsigned char *)text; *at; at++) {
        if (*at == '"' || *at == '\\')
            printf("\\%c", *at);
        else if (*at < 32)
            printf("\\u%04x", *at);
        else
            putchar(*at);
    }
    putchar('"');
}

static void print_json_digest(const char *key, br_digest d) {
    char text[DIGEST_TEXT];
    digest_text(d, text);
    if (has_digest(d))
        printf(", \"%s\": \"%s\"", key, text);
    else
        printf(", \"%s\": null", key);
}

/* JSON has no infinity: a log-prob of -inf against a finite one leaves null. */
static void print_json_real(const char *key, double x) {
    if (isfinite(x))
        printf(", \"%s\": %.17g", key, x);
    else
        printf(", \"%s\": null", key);
}

static void print_json_comparison(const br_report *r) {
    printf(", \"n_compared\": %lld, \"n_differ\": %lld", (long long)r->n_compared, (long long)r->n_differ);
    if (r->first_seq < 0)
        printf(", \"first\": null");
    else
        printf(", \"first\": {\"seq\": %lld, \"pos\": %lld}", (long long)r->first_seq, (long long)r->first_pos);
    printf(", \"max_ulp\": %lld", (long long)r->max_ulp);
    print_json_real("k1", r->k1);
    print_json_real("k3", r->k3);
}

static void print_json(const char *verb, br_status status, const br_report *r) {
    const char *status_text = status == BR_OK && r->n_error ? "some requests ended in error" : br_status_name(status);
    printf("{\"verb\": \"%s\", \"status\": \"%s\", \"n_seq\": %lld, \"n_tok\": %lld, \"n_error\": %lld", verb,
           status_text, (long long)r->n_seq, (long long)r->n_tok, (long long)r->n_error);
    printf(", \"seconds\": %.6f, \"tok_per_s\": %.3f", r->seconds, rate(r));
    if (strcmp(verb, "score") == 0)
        printf(", \"forward_seconds\": %.6f", r->forward_seconds);
    if (strcmp(verb, "generate") == 0)
        printf(", \"peak_seqs\": %d", r->peak_seqs);
    print_json_digest("weights_digest", r->weights_digest);
    printf(", \"adapter_digests\": {");
    for (int32_t i = 0; i < r->n_adapter; i++) {
        char text[DIGEST_TEXT];
        digest_text(r->adapter_digest[i], text);
        printf("%s", i ? ", " : "");
        print_json_text(r->adapter_name[i]);
        printf(": \"%s\"", text);
    }
    printf("}");
    print_json_digest("contract_digest", r->contract_digest);
    print_json_digest("logprob_digest", r->logprob_digest);
    if (strcmp(verb, "parity") == 0 || strcmp(verb, "verify") == 0)
        print_json_comparison(r);
    if (r->summary) {
        printf(", \"summary\": ");
        print_json_text(r->summary);
    }
    printf("}\n");
}

/* Verbs that run no model, or only to look into it, have no speed. */
static int has_speed(const char *verb) {
    static const char *const none[] = {"init", "dump", "inspect", "digest"};
    for (size_t i = 0; i < sizeof none / sizeof none[0]; i++)
        if (strcmp(verb, none[i]) == 0)
            return 0;
    return 1;
}

static void print_digest(FILE *to, const char **before, const char *what, br_digest d) {
    char text[DIGEST_TEXT];
    digest_text(d, text);
    if (!has_digest(d))
        return;
    fprintf(to, "%s%s %s", *before, what, text);
    *before = ", ";
}

/* Of a dump stdout has hashes alone, which compare with plain diff. */
static FILE *words_of(const char *verb) {
    return strcmp(verb, "dump") == 0 ? stderr : stdout;
}

static void print_run(const char *verb, const br_report *r) {
    FILE *to = words_of(verb);
    const char *before = ": ";
    char name[128];
    fputs(verb, to);
    if (has_speed(verb)) {
        fprintf(to, ": %lld tokens, %.1f tok/s", (long long)r->n_tok, rate(r));
        before = ", ";
    }
    print_digest(to, &before, "weights", r->weights_digest);
    for (int32_t i = 0; i < r->n_adapter; i++) {
        snprintf(name, sizeof name, "adapter %s", r->adapter_name[i]);
        print_digest(to, &before, name, r->adapter_digest[i]);
    }
    print_digest(to, &before, "contract", r->contract_digest);
    print_digest(to, &before, "log-probs", r->logprob_digest);
    fputc('\n', to);
}

static void print_summary(const char *verb, const br_report *r, cli_exit code) {
    if (r->summary) {
        puts(r->summary);
        return;
    }
    if (strcmp(verb, "parity") == 0 && r->n_compared == 0) {
        puts("parity: nothing was compared");
        return;
    }
    if (strcmp(verb, "parity") == 0) {
        /* k3 is the estimate that never goes below 0; where it underflows, k1 still shows that something differs. */
        printf("parity: %lld of %lld log-probs differ, KL %.9g", (long long)r->n_differ, (long long)r->n_compared, r->k3 != 0 ? r->k3 : r->k1);
        if (code != CLI_DONE && r->n_differ == 0)
            printf(", but the files do not pass: %s", br_last_error());
        putchar('\n');
        return;
    }
    if (strcmp(verb, "bench") == 0) {
        printf("bench: %lld rows, %lld failed, %.1f s\n", (long long)r->n_seq, (long long)r->n_error, r->seconds);
        return;
    }
    print_run(verb, r);
}

static cli_exit exit_of(br_status status, const br_report *r) {
    if (status == BR_OK)
        return r->n_error > 0 ? CLI_CHECK_FAILED : CLI_DONE;
    return status == BR_E_MISMATCH ? CLI_CHECK_FAILED : CLI_USAGE;
}

cli_exit cli_finish(const cli *c, const char *verb, br_status status, br_report *r) {
    const cli_exit code = exit_of(status, r);
    end_bar();
    if (r->text)
        fputs(r->text, words_of(verb));
    fflush(stdout);
    if (code != CLI_DONE)
        fprintf(stderr, "bitroll: %s: %s\n", verb, br_last_error());
    if (code != CLI_USAGE && c->json)
        print_json(verb, status, r);
    else if (code != CLI_USAGE)
        print_summary(verb, r, code);
    br_report_free(r);
    return code;
}

void cli_print_line(void *context, const char *line) {
    (void)context;
    puts(line);
}
