/* A library for LD_PRELOAD: file operations fail or stall as on a broken disk, and the clock of the day jumps.
 *
 *     inject("/run", "/engine/", "wf", EIO, 3, 2, -60)
 *
 * From the fourth on, each write or fsync of a path with both texts in it takes two seconds, sets the clock of the day
 * back by a minute (the monotonic one goes on), and fails with EIO. Without an error (0) it then succeeds.
 * Operations: o open for writing, w write, f fsync, r rename, l flock. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static char folder[512], part[512], operations[16];
static int error, seconds;
static long left, jump;
static time_t offset;

void inject(const char *a_folder, const char *a_part, const char *some, int an_error, long after, int some_seconds,
            long a_jump) {
    snprintf(folder, sizeof folder, "%s", a_folder);
    snprintf(part, sizeof part, "%s", a_part);
    snprintf(operations, sizeof operations, "%s", some);
    error = an_error, left = after, seconds = some_seconds, jump = a_jump;
}

/* Return 1 if this operation has to fail, with errno set. */
static int fails(char operation, const char *path) {
    if (!*operations || !strchr(operations, operation) || !strstr(path, folder) || !strstr(path, part) || left-- > 0)
        return 0;
    sleep(seconds);
    offset += jump;
    errno = error;
    return error != 0;
}

static int fails_at(char operation, int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = *operations ? readlink(link, path, sizeof path - 1) : -1;
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(operation, path);
}

#define REAL(name) ((__typeof__(name) *)dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = va_arg(more, mode_t);                         \
        va_end(more);                                               \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails('o', path)) return -1; \
        return REAL(name)(path, flags, mode);                       \
    }
#define OPENAT(name)                                                \
    int name(int folder, const char *path, int flags, ...) {        \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = va_arg(more, mode_t);                         \
        va_end(more);                                               \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT) && fails('o', path)) return -1; \
        return REAL(name)(folder, path, flags, mode);               \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)

ssize_t write(int file, const void *bytes, size_t count) {
    return fails_at('w', file) ? -1 : REAL(write)(file, bytes, count);
}
ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) {
    return fails_at('w', file) ? -1 : REAL(pwrite64)(file, bytes, count, at);
}
ssize_t writev(int file, const struct iovec *parts, int count) {
    return fails_at('w', file) ? -1 : REAL(writev)(file, parts, count);
}
int fsync(int file) { return fails_at('f', file) ? -1 : REAL(fsync)(file); }
int fdatasync(int file) { return fails_at('f', file) ? -1 : REAL(fdatasync)(file); }
int rename(const char *from, const char *to) { return fails('r', to) ? -1 : REAL(rename)(from, to); }
int flock(int file, int how) { return fails_at('l', file) ? -1 : REAL(flock)(file, how); }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int status = REAL(clock_gettime)(clock, now);
    if (clock == CLOCK_REALTIME)
        now->tv_sec += offset;
    return status;
}
