/* The bytes of the bridge: headers, CRC, the table of messages, greetings. Everything that can be wrong with a frame is refused by name. */
#include "tb_rig.h"
#include "test_support.h"

#include <stdio.h>
#include <string.h>

#define CHECK_CODE(call, wanted)                                                                                         \
    do {                                                                                                                 \
        const tb_code check_code_ = (call);                                                                              \
        ck_assert_msg(check_code_ == (wanted), "%s: '%s' (%s), wanted '%s'", #call, tb_code_name(check_code_),           \
                      br_last_error(), tb_code_name(wanted));                                                            \
    } while (0)

/* ---- headers ------------------------------------------------------------------------------------------------------------- */

START_TEST(test_crc_is_castagnoli) {
    unsigned char bytes[300];
    ck_assert_uint_eq(tb_crc32c("123456789", 9), 0xe3069283u); /* the check value of the polynomial's catalogue entry */
    ck_assert_uint_eq(tb_crc32c_table("123456789", 9), 0xe3069283u);
    memset(bytes, 0, sizeof bytes);
    ck_assert_uint_eq(tb_crc32c(bytes, 32), 0x8a9136aau); /* RFC 3720, B.4 */
    memset(bytes, 0xff, sizeof bytes);
    ck_assert_uint_eq(tb_crc32c(bytes, 32), 0x62a8ab43u);
    for (size_t n = 0; n < sizeof bytes; n++) {
        bytes[n] = (unsigned char)test_mix(n);
        ck_assert_uint_eq(tb_crc32c(bytes, n), tb_crc32c_table(bytes, n));
    }
}
END_TEST

static tb_header some_header(void) {
    return (tb_header){.major = TB_MAJOR, .minor = 7, .type = TB_W_CHUNK, .flags = 0x8001, .sequence = 0x1122334455667788ull, .session = 5,
                       .version = 6, .subject = 0x8000000000000001ull};
}

START_TEST(test_header_comes_back) {
    unsigned char head[TB_HEADER_BYTES];
    tb_header h = some_header(), back;
    tb_header_seal(&h, "payload", 7, head);
    CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_OK);
    ck_assert_mem_eq(&h, &back, sizeof h);
    ck_assert_mem_eq(head, "BRTB\2\0\7\0\x21\0\1\x80", 12);
    ck_assert_uint_eq(head[16], 0x88);
    ck_assert_uint_eq(head[40], 7);
    CHECK_CODE(tb_payload_check(&back, "payload", 7), TB_OK);
}
END_TEST

/* One flipped bit anywhere in header or payload, and every length that is too short. */
START_TEST(test_every_flipped_bit_is_caught) {
    unsigned char head[TB_HEADER_BYTES], payload[40];
    tb_header h = some_header(), back;
    for (size_t i = 0; i < sizeof payload; i++)
        payload[i] = (unsigned char)i;
    tb_header_seal(&h, payload, sizeof payload, head);
    for (int bit = 0; bit < 8 * TB_HEADER_BYTES; bit++) {
        head[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK_CODE(tb_header_read(head, sizeof head, &back), bit < 32 ? TB_BAD_MAGIC : TB_BAD_CRC);
        head[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_OK);
    for (int bit = 0; bit < 8 * (int)sizeof payload; bit++) {
        payload[bit / 8] ^= (unsigned char)(1 << bit % 8);
        CHECK_CODE(tb_payload_check(&back, payload, sizeof payload), TB_BAD_HASH);
        payload[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    for (size_t n = 0; n < TB_HEADER_BYTES; n++)
        CHECK_CODE(tb_header_read(head, n, &back), TB_TRUNCATED);
    for (size_t n = 0; n < sizeof payload; n++)
        CHECK_CODE(tb_payload_check(&h, payload, n), TB_TRUNCATED);
}
END_TEST

START_TEST(test_majors_and_lengths) {
    static const uint16_t major[] = {0, TB_MAJOR - 1, TB_MAJOR + 1, 256, 0xffff};
    unsigned char head[TB_HEADER_BYTES];
    tb_header h = some_header(), back;
    for (size_t i = 0; i < sizeof major / sizeof *major; i++) {
        h.major = major[i];
        tb_header_write(&h, head);
        CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_BAD_MAJOR);
        ck_assert_msg(strstr(br_last_error(), "majors must be equal") != NULL, "%s", br_last_error());
    }
    h = some_header();
    h.minor = 0xffff; /* a newer peer of this major */
    h.flags = 0xffff;
    h.n_payload = TB_PAYLOAD_MAX;
    tb_header_write(&h, head);
    CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_OK);
    h.n_payload = TB_PAYLOAD_MAX + 1;
    tb_header_write(&h, head);
    CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_BAD_LENGTH);
    h.n_payload = UINT64_MAX;
    tb_header_write(&h, head);
    CHECK_CODE(tb_header_read(head, sizeof head, &back), TB_BAD_LENGTH);
}
END_TEST

START_TEST(test_codes_have_names) {
    for (uint32_t i = 0; i < TB_CODE_COUNT; i++)
        for (uint32_t j = 0; j < i; j++)
            ck_assert_str_ne(tb_code_name(i), tb_code_name(j));
    ck_assert_str_eq(tb_code_name(TB_CODE_COUNT), "unknown code");
    ck_assert_int_eq(tb_code_of(BR_OK), TB_OK);
    ck_assert_int_eq(tb_code_of(BR_E_LIMIT), TB_BUSY);
    ck_assert_int_eq(tb_code_of(BR_E_MISMATCH), TB_BAD_DIGEST);
    ck_assert_int_eq(tb_code_of(BR_E_NAN), TB_BAD_TENSOR);
    ck_assert_int_eq(tb_code_of(BR_E_DEVICE), TB_FAILED);
}
END_TEST

/* ---- the table ----------------------------------------------------------------------------------------------------------- */

static int same_field(const tb_field *f, const void *a, const void *b) {
    const tb_words *wa = a, *wb = b;
    const tb_bytes *ba = a, *bb = b;
    const tb_tensors *ta = a, *tb = b;
    switch (f->kind) {
    case TB_U32: return memcmp(a, b, 4) == 0;
    case TB_U64: return memcmp(a, b, 8) == 0;
    case TB_DIGEST: return memcmp(a, b, 16) == 0;
    case TB_TEXT: return tb_text_equal(*(const tb_text *)a, *(const tb_text *)b);
    case TB_WORDS: return wa->n == wb->n && (wa->n == 0 || memcmp(wa->p, wb->p, 4 * (size_t)wa->n) == 0);
    case TB_REST: return ba->n == bb->n && (ba->n == 0 || memcmp(ba->p, bb->p, ba->n) == 0);
    case TB_TENSORS: return ta->n == tb->n && ta->raw.n == tb->raw.n && memcmp(ta->raw.p, tb->raw.p, ta->raw.n) == 0;
    case TB_END: break;
    }
    return 0;
}

START_TEST(test_messages_come_back) {
    const tb_spec *spec = &tb_specs[_i];
    tb_buffer out = {0};
    tb_message m, back;
    uint64_t min, max;
    tb_spec_bounds(spec, &min, &max);
    ck_assert_uint_le(max, TB_PAYLOAD_MAX);
    for (uint64_t seed = 0; seed < 40; seed++) {
        rig_message(spec, seed, &m);
        out.n = 0;
        tb_message_encode(spec->type, &m, &out);
        ck_assert_uint_ge(out.n, min);
        ck_assert_uint_le(out.n, max);
        CHECK_CODE(tb_message_decode(spec->type, out.bytes, out.n, &back), TB_OK);
        for (const tb_field *f = spec->field; f && f->kind != TB_END; f++)
            ck_assert_msg(same_field(f, (char *)&m + f->at, (char *)&back + f->at), "%s, %s", spec->name, f->name);
        for (size_t n = 0; n < out.n; n++) /* a payload that is cut; W_CHUNK may have any length behind its offset */
            if (spec->type != TB_W_CHUNK || n < 8)
                CHECK_CODE(tb_message_decode(spec->type, out.bytes, n, &back), TB_BAD_PAYLOAD);
        const size_t whole = out.n;
        (void)tb_buffer_take(&out, 4);
        if (spec->type != TB_W_CHUNK)
            CHECK_CODE(tb_message_decode(spec->type, out.bytes, whole + 4, &back), TB_BAD_PAYLOAD);
    }
    tb_buffer_close(&out);
}
END_TEST

/* Each number of each message one below and one above its range: where the encoder put it, the decoder refuses it by name. */
START_TEST(test_numbers_have_ranges) {
    const tb_spec *spec = &tb_specs[_i];
    tb_buffer out = {0};
    tb_message m, back;
    size_t at = 0;
    rig_message(spec, 1, &m);
    tb_message_encode(spec->type, &m, &out);
    for (const tb_field *f = spec->field; f && f->kind != TB_END && f->kind != TB_TENSORS && f->kind != TB_REST; f++) {
        uint32_t good; /* the number; of a text or words their count */
        memcpy(&good, out.bytes + at, 4);
        for (int high = 0; high < 2 && f->kind != TB_U64 && f->kind != TB_DIGEST; high++) {
            const uint64_t bad = high ? f->max + 1 : f->min - 1;
            if (bad > UINT32_MAX)
                continue;
            memcpy(out.bytes + at, &bad, 4);
            CHECK_CODE(tb_message_decode(spec->type, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
            ck_assert_msg(strstr(br_last_error(), f->name) != NULL, "%s", br_last_error());
            memcpy(out.bytes + at, &good, 4);
        }
        at += f->kind == TB_U64 ? 8 : f->kind == TB_DIGEST ? 16 : 4;
        at += f->kind == TB_TEXT ? (good + 3) / 4 * 4 : f->kind == TB_WORDS ? 4 * (size_t)good : 0;
    }
    tb_buffer_close(&out);
}
END_TEST

START_TEST(test_table_is_sound) {
    char line[512];
    for (int32_t i = 0; i < tb_spec_count; i++) {
        const tb_spec *spec = &tb_specs[i];
        ck_assert_ptr_eq(tb_spec_of(spec->type), spec); /* numbers are unique */
        ck_assert_uint_ge(spec->from, 1);
        ck_assert_uint_le(spec->from, 3);
        tb_spec_line(spec, line, sizeof line);
        ck_assert_msg(strstr(line, spec->name) != NULL, "%s", line);
        ck_assert_uint_lt(strlen(line), sizeof line - 1);
        for (const tb_field *f = spec->field; f && f->kind != TB_END; f++)
            ck_assert_msg(f->kind != TB_REST || f[1].kind == TB_END, "%s: bytes behind the rest", spec->name);
    }
    ck_assert_ptr_null(tb_spec_of(0));
    ck_assert_str_eq(tb_type_name(9999), "type?");
    tb_message m;
    CHECK_CODE(tb_message_decode(9999, NULL, 0, &m), TB_BAD_TYPE);
}
END_TEST

START_TEST(test_texts_are_texts) {
    tb_buffer out = {0};
    tb_message m = {.bye = {.text = tb_text_of("abcde")}}, back;
    tb_message_encode(TB_BYE, &m, &out);
    ck_assert_uint_eq(out.n, 12);
    out.bytes[6] = 0;
    CHECK_CODE(tb_message_decode(TB_BYE, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
    out.bytes[6] = 'c';
    out.bytes[11] = 1; /* padding */
    CHECK_CODE(tb_message_decode(TB_BYE, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
    out.bytes[11] = 0;
    CHECK_CODE(tb_message_decode(TB_BYE, out.bytes, out.n, &back), TB_OK);
    memset(out.bytes, 0xff, 4); /* a length that would wrap when it is rounded up */
    CHECK_CODE(tb_message_decode(TB_BYE, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
    tb_buffer_close(&out);
}
END_TEST

START_TEST(test_parts_and_runs_must_fit) {
    uint32_t word[6] = {1, 0, 3, 2, 0, 4};
    tb_buffer out = {0};
    tb_message back, m = {.gen_part = {.token = {word, 3}, .logprob = {word, 2}}};
    tb_message_encode(TB_GEN_PART, &m, &out);
    CHECK_CODE(tb_message_decode(TB_GEN_PART, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
    for (uint32_t n_tok = 6; n_tok < 9; n_tok++) {
        out.n = 0;
        m = (tb_message){.gen_done = {.n_tok = n_tok, .runs = {word, 6}}};
        tb_message_encode(TB_GEN_DONE, &m, &out);
        CHECK_CODE(tb_message_decode(TB_GEN_DONE, out.bytes, out.n, &back), n_tok == 7 ? TB_OK : TB_BAD_PAYLOAD);
    }
    out.n = 0;
    m = (tb_message){.gen_done = {.n_tok = 3, .runs = {word, 4}}};
    tb_message_encode(TB_GEN_DONE, &m, &out);
    CHECK_CODE(tb_message_decode(TB_GEN_DONE, out.bytes, out.n, &back), TB_BAD_PAYLOAD);
    tb_buffer_close(&out);
}
END_TEST

/* Sizes around 2^31 and 2^32 bytes survive, sizes that would wrap are refused, a size of 0 is a size. */
START_TEST(test_manifest_sizes) {
    static const struct {
        uint64_t dim[2], n_bytes; /* n_bytes UINT64_MAX: refused */
    } want[] = {
        {{0, 8}, 0}, {{(1ull << 30), 1}, 1ull << 31}, {{(1ull << 30) + 1, 1}, (1ull << 31) + 2}, {{1ull << 16, 1ull << 16}, 1ull << 33},
        {{1ull << 39, 1}, 1ull << 40}, {{1ull << 40, 1}, UINT64_MAX}, {{1ull << 32, 1ull << 32}, UINT64_MAX}, {{UINT64_MAX, 0}, UINT64_MAX},
        {{0, UINT64_MAX}, UINT64_MAX},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        tb_buffer raw = {0}, out = {0};
        tb_tensor t = {.name = tb_text_of("w"), .dtype = TB_BF16, .kind = TB_BASE, .n_dim = 2, .dim = {want[i].dim[0], want[i].dim[1]}};
        tb_message back, m;
        tb_tensor_add(&raw, &t);
        m.manifest.tensors = (tb_tensors){{raw.bytes, raw.n}, 1};
        tb_message_encode(TB_MANIFEST, &m, &out);
        CHECK_CODE(tb_message_decode(TB_MANIFEST, out.bytes, out.n, &back), want[i].n_bytes == UINT64_MAX ? TB_BAD_PAYLOAD : TB_OK);
        uint64_t at = 0;
        if (want[i].n_bytes != UINT64_MAX) {
            ck_assert_int_eq(tb_tensor_next(&back.manifest.tensors, &at, &t), 1);
            ck_assert_uint_eq(t.n_bytes, want[i].n_bytes);
            ck_assert_int_eq(tb_tensor_next(&back.manifest.tensors, &at, &t), 0);
        }
        tb_buffer_close(&raw);
        tb_buffer_close(&out);
    }
}
END_TEST

START_TEST(test_tensors_out_of_bounds) {
    const tb_tensor wrong[] = {{.name = tb_text_of("w"), .n_dim = TB_DIM_MAX + 1}, {.name = tb_text_of("")}, {.name = {"w", TB_TEXT_MAX + 1}}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        tb_buffer raw = {0};
        tb_tensor_add(&raw, &wrong[i]);
        ck_assert_int_eq(raw.failed, BR_E_ARG);
        ck_assert_uint_eq(raw.n, 0);
        tb_buffer_close(&raw);
    }
}
END_TEST

/* Any bytes at all: a decoder says no or yes, and what it says yes to encodes to the same bytes. */
START_TEST(test_random_bytes) {
    for (uint64_t seed = test_seed() * 100000, end = seed + 20000; seed < end; seed++) {
        _Alignas(8) unsigned char bytes[64];
        const tb_spec *spec = &tb_specs[test_mix(seed) % (uint64_t)tb_spec_count];
        const size_t n = test_mix(seed + 1) % 17 * 4;
        tb_message m;
        tb_buffer out = {0};
        for (size_t i = 0; i < n; i++)
            bytes[i] = (unsigned char)(test_mix(seed * 64 + i) % 4 == 0 ? test_mix(seed * 99 + i) : i % 4 == 0);
        if (tb_message_decode(spec->type, bytes, n, &m) == TB_OK) {
            tb_message_encode(spec->type, &m, &out);
            ck_assert_msg(out.n == n && (n == 0 || memcmp(out.bytes, bytes, n) == 0), "%s, seed %llu", spec->name, (unsigned long long)seed);
        }
        tb_buffer_close(&out);
    }
}
END_TEST

START_TEST(test_buffer_fails_for_good) {
    tb_buffer b = {0};
    br_mem_fail_nth(1);
    tb_buffer_add(&b, "abc", 3);
    br_mem_fail_nth(0);
    ck_assert_int_eq(b.failed, BR_E_NOMEM);
    tb_buffer_add(&b, "abc", 3);
    ck_assert_uint_eq(b.n, 0);
    tb_buffer_close(&b);
}
END_TEST

/* ---- greetings ------------------------------------------------------------------------------------------------------------- */

/* Both sides say it: here is no worker, only the channel of either. */
START_TEST(test_hello_names_adapters_that_differ) {
    static const struct { uint32_t sent; const char *sent_alpha; uint32_t can, taken; const char *taken_alpha, *said; } want[] = {
        {0, "", 0, 0, "", NULL},
        {0, "", TB_CAN_SWAP, 32, "64", NULL},
        {32, "64", TB_CAN_SWAP, 32, "64", NULL},
        {16, "8", TB_CAN_SWAP, 0, "", NULL}, /* an adapter of a folder: the manifest tells */
        {16, "0.1", 0, 0, "", "no adapter that can be swapped: start bitroll-worker with such as --adapter policy= --swap-rank 16 --swap-alpha 0.1"},
        {16, "64", TB_CAN_SWAP, 32, "64", "the trainer's adapters have rank 16 and alpha 64, the worker's rank 32 and alpha 64: start bitroll-worker "
         "with --swap-rank 16 --swap-alpha 64, or set r: 32 and lora_alpha: 64 in the trainer's settings"},
        {32, "16", TB_CAN_SWAP, 32, "64", "rank 32 and alpha 16, the worker's rank 32 and alpha 64"},
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        for (tb_role me = TB_TRAINER; me <= TB_WORKER; me++) {
            tb_hello side[TB_WORKER + 1] = {[TB_TRAINER] = rig_hello(TB_TRAINER), [TB_WORKER] = rig_hello(TB_WORKER)};
            tb_buffer out = {0};
            side[TB_TRAINER].rank = want[i].sent;
            side[TB_WORKER].rank = want[i].taken;
            side[TB_WORKER].can = want[i].can;
            side[TB_TRAINER].alpha = tb_text_of(want[i].sent_alpha);
            side[TB_WORKER].alpha = tb_text_of(want[i].taken_alpha);
            tb_channel c = {.opt = {.me = side[me], .session = 7, .dead_ms = 1000}};
            tb_header h = {.major = TB_MAJOR, .type = me == TB_TRAINER ? TB_HELLO_ACK : TB_HELLO, .session = 7};
            unsigned char head[TB_HEADER_BYTES];
            tb_message m = {.hello = side[TB_TRAINER + TB_WORKER - me]};
            tb_message_encode((tb_type)h.type, &m, &out);
            tb_header_seal(&h, out.bytes, out.n, head);
            tb_channel_open(&c, 0);
            (void)tb_channel_receive(&c, 0, &h, out.bytes, out.n, &m);
            ck_assert_msg(c.phase == (want[i].said ? TB_CLOSED : TB_OPEN), "%zu: %s", i, c.sentence);
            ck_assert_msg(!want[i].said || (c.end == TB_DIFFERS && strstr(c.sentence, want[i].said)), "%zu: %s", i, c.sentence);
            tb_buffer_close(&out);
            tb_channel_free(&c);
        }
}
END_TEST

/* A trainer that waits for the greeting takes a worker's BYE for what it says. */
START_TEST(test_a_worker_may_end_before_it_greets) {
    tb_channel c = {.opt = {.me = rig_hello(TB_TRAINER), .session = 77, .dead_ms = RIG_DEAD_MS, .grant_bytes = RIG_GRANT_BYTES}};
    tb_buffer out = {0};
    tb_header h = {.type = TB_BYE, .session = 77};
    tb_message m = {.bye = {.text = tb_text_of("")}};
    unsigned char head[TB_HEADER_BYTES];
    tb_channel_open(&c, 0);
    tb_message_encode(TB_BYE, &m, &out);
    tb_header_seal(&h, out.bytes, out.n, head);
    ck_assert_int_eq(tb_channel_receive(&c, 0, &h, out.bytes, out.n, &m), 0);
    ck_assert_int_eq(c.phase, TB_CLOSED);
    ck_assert_int_eq(c.end, TB_OK);
    ck_assert_str_eq(c.sentence, "the peer said BYE");
    tb_buffer_close(&out);
    tb_channel_free(&c);
}
END_TEST

Suite *test_tb_frame_suite(void) {
    Suite *s = suite_create("tb_frame");
    TCase *t = tcase_create("frames");
    tcase_add_test(t, test_crc_is_castagnoli);
    tcase_add_test(t, test_header_comes_back);
    tcase_add_test(t, test_every_flipped_bit_is_caught);
    tcase_add_test(t, test_majors_and_lengths);
    tcase_add_test(t, test_codes_have_names);
    tcase_add_loop_test(t, test_messages_come_back, 0, tb_spec_count);
    tcase_add_loop_test(t, test_numbers_have_ranges, 0, tb_spec_count);
    tcase_add_test(t, test_table_is_sound);
    tcase_add_test(t, test_texts_are_texts);
    tcase_add_test(t, test_parts_and_runs_must_fit);
    tcase_add_test(t, test_manifest_sizes);
    tcase_add_test(t, test_tensors_out_of_bounds);
    tcase_add_test(t, test_random_bytes);
    tcase_add_test(t, test_buffer_fails_for_good);
    tcase_add_test(t, test_hello_names_adapters_that_differ);
    tcase_add_test(t, test_a_worker_may_end_before_it_greets);
    suite_add_tcase(s, t);
    return s;
}
