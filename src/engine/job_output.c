/* What stands at an output path is looked at before it is replaced; see job_output.h. */
#include "job_output.h"

#include "br_file.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

static const char hdf5_signature[8] = "\211HDF\r\n\032\n";

static br_status check_folder(const char *path) {
    char folder[BR_PATH_BYTES] = ".";
    const char *slash = strrchr(path, '/');
    const size_t n = slash ? (size_t)(slash - path) + 1 : 0;
    if (n >= sizeof folder)
        return br_fail(BR_E_LIMIT, "%.200s: path longer than %d bytes", path, BR_PATH_BYTES);
    if (n > 0) {
        memcpy(folder, path, n);
        folder[n] = 0;
    }
    if (access(folder, W_OK | X_OK) != 0)
        return br_fail(BR_E_IO, "%s: cannot write into its folder: %s", path, strerror(errno));
    return BR_OK;
}

br_status job_output_check(const char *path, const char *input) {
    br_map map;
    BR_TRY(check_folder(path));
    if (!br_file_exists(path))
        return BR_OK;
    if (br_file_is_same(path, input))
        return br_fail(BR_E_ARG, "%s is the file that is read: expected another one to write", path);
    BR_TRY(br_file_map(path, &map));
    const size_t n = sizeof hdf5_signature;
    const int ours = map.n == 0 || (map.n >= n && memcmp(map.bytes, hdf5_signature, n) == 0);
    br_file_unmap(&map);
    if (ours)
        return BR_OK;
    return br_fail(BR_E_ARG, "%s exists and is no rollout file: expected a new file, or a rollout file to replace", path);
}

int job_output_is_worth(const br_report *report) {
    return report->n_error == 0 || report->n_error < report->n_seq;
}

br_status job_output_close(rollout_writer *file, const br_report *report) {
    if (job_output_is_worth(report))
        return rollout_close(file);
    rollout_abandon(file);
    return BR_OK;
}
