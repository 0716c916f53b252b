/* The library in one screen: open a checkpoint, submit two requests, abort one, print tokens with the bits of their log-probs.
 *
 *   cc rollout.c $(pkg-config --cflags --libs bitroll) -o rollout && ./rollout CHECKPOINT */
#include <bitroll.h>
#include <inttypes.h>
#include <stdio.h>

static int fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, br_last_error());
    return 1;
}

int main(int argc, char **argv) {
    const int32_t prompt[] = {17, 4, 99, 23};
    br_engine_options options = {0};
    br_request request = {.uid = "example", .prompt = prompt, .n_prompt = 4, .seed = 7, .sampling = br_sampling_default()};
    br_engine *engine;
    br_token token[64];
    uint64_t id[2];
    int32_t n, done = 0;
    options.model_dir = argc == 2 ? argv[1] : ".";
    if (br_engine_open(&options, &engine) != BR_OK)
        return fail("open");
    request.sampling.max_new = 8;
    request.sampling.ignore_eos = 1;
    for (request.sample = 0; request.sample < 2; request.sample++)
        if (br_submit(engine, &request, &id[request.sample]) != BR_OK)
            return fail("submit");
    if (br_abort(engine, id[1]) != BR_OK)
        return fail("abort");
    while (!done) {
        if (br_poll(engine, token, 64, &n, &done) != BR_OK)
            return fail("poll");
        for (int32_t i = 0; i < n; i++)
            printf("sample %d position %d token %d logprob %08" PRIx32 "%s\n", token[i].request == id[1], (int)token[i].position,
                   (int)token[i].token, token[i].logprob, !token[i].last ? "" : token[i].stop == BR_STOP_ABORT ? " aborted" : " end");
    }
    br_engine_close(engine);
    return 0;
}
