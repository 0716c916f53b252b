/* What the command does about HDF5 when it exits: nothing. Layer: io; linked into the command alone.
 *
 * HDF5 1.10 loses a block of its own when the header of an object is damaged. All that was opened is closed by then, but its exit handler waits
 * for that block and says so on stderr, behind our sentence. The command closes its files itself. A library may not decide this: its caller
 * may count on the handler. */
#include <hdf5.h>

/* Before HDF5 is first called: later it has no effect. */
__attribute__((constructor)) static void leave_nothing_to_the_handler(void) {
    (void)H5dont_atexit();
}
