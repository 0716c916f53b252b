/* libFuzzer target: any bytes as a safetensors file, and as an index of shards. What is accepted must keep its promises:
 * every range lies inside the file, and together they cover the data once. */
#include "safetensors.h"
#include "st_index.h"

#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_file(const st_file *file, size_t size) {
    uint64_t at = file->n_entry ? file->entry[0].begin : size;
    for (int64_t i = 0; i < file->n_entry; i++) {
        const st_entry *e = &file->entry[i];
        int ok;
        BR_ASSERT(e->begin == at && e->n_byte <= size - at);
        BR_ASSERT(st_tensor_bytes(e->dtype, e->dim, e->n_dim, &ok) == e->n_byte && ok);
        BR_ASSERT(strlen(e->name) <= size && strcmp(e->name, "__metadata__") != 0);
        at += e->n_byte;
    }
    BR_ASSERT(at == size);
}

static void check_index(const st_index *index) {
    for (int64_t i = 0; i < index->n_entry; i++) {
        BR_ASSERT(index->entry[i].file >= 0 && index->entry[i].file < index->n_file);
        BR_ASSERT(st_index_find(index, index->entry[i].name) == &index->entry[i]);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    st_file file;
    st_index index;
    if (st_parse("fuzz", data, size, &file) == BR_OK) {
        check_file(&file, size);
        st_close(&file);
    }
    if (st_index_parse("fuzz", (const char *)data, size, &index) == BR_OK) {
        check_index(&index);
        st_index_close(&index);
    }
    return 0;
}
