/* Kill points of a run: calls of the C library below one folder that write, sync, rename, make, empty or remove files.

   It is preloaded (LD_PRELOAD), so that Arrow's C++ and the Rust of safetensors pass here as Python does. All calls go
   through until kill_points_arm is called, and in processes that an armed one starts. write and pwrite have two points:
   before the call, and after half of its bytes; so has writev, after half of its pieces where there are several. sendfile
   and copy_file_range have the first one. A process that dies at a point first writes the point's number, kind and path to the witness.

   Not seen are writes to mapped memory, by io_uring, by system calls that do not go through the C library, and those
   that the C library makes within itself (fwrite, mkstemp). What a killed process wrote stays in the page cache: kills
   do not show what a power cut would lose, and a missing fsync goes unnoticed here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[4096];
static size_t folder_length;
static long number, kill_at = -1;
static int tally = -1, witness = -1;
static pid_t armed;

/* tally and witness are descriptors; -1: none. */
void kill_points_arm(const char *within, long at, int tally_to, int witness_to) {
    strncpy(folder, within, sizeof folder - 1);
    folder_length = strlen(folder);
    number = 0, kill_at = at, tally = tally_to, witness = witness_to, armed = getpid();
}

static void tell(int to, long n, const char *kind, const char *path) {
    char line[4600];
    int length = snprintf(line, sizeof line, "%ld\t%s\t%s\n", n, kind, path);
    syscall(SYS_write, to, line, (size_t)length);
}

static void die(long n, const char *kind, const char *path) {
    if (witness >= 0) tell(witness, n, kind, path);
    for (;;) kill(getpid(), SIGKILL);
}

/* A point of an armed process: it dies here if this is the one. */
void kill_points_pass(const char *kind, const char *path) {
    if (!armed || getpid() != armed) return;
    int before = errno;
    long n = __atomic_fetch_add(&number, 1, __ATOMIC_SEQ_CST);
    if (n == kill_at) die(n, kind, path);
    if (tally >= 0) tell(tally, n, kind, path);
    errno = before;
}

static int below(const char *path) {
    return strncmp(path, folder, folder_length) == 0 && (path[folder_length] == '/' || !path[folder_length]);
}

/* The file of a descriptor, if it lies below the folder. */
static int is_ours(int fd, char *path) {
    if (!armed || getpid() != armed) return 0;
    int before = errno;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, 4095);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

/* Likewise of a path as the *at calls take it. */
static int is_ours_at(int at, const char *given, char *path) {
    if (!armed || getpid() != armed || !given) return 0;
    if (given[0] == '/') return strncpy(path, given, 4095), path[4095] = 0, below(path);
    char base[4096];
    int before = errno, found;
    if (at == AT_FDCWD) found = getcwd(base, sizeof base) != NULL;
    else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if ((found = length >= 0)) base[length] = 0;
    }
    errno = before;
    if (!found) return 0;
    snprintf(path, 4096, "%.2000s/%.2000s", base, given);
    return below(path);
}

#define NEXT(name) \
    static typeof(name) *next; \
    if (!next) next = (typeof(name) *)dlsym(RTLD_NEXT, #name)

/* A write of so many bytes or pieces, with its two points; half is the same write of half as much. */
#define ON_WRITE(name, parameters, size, half, arguments) \
    ssize_t name parameters { \
        NEXT(name); \
        char path[4096]; \
        if (is_ours(fd, path)) { \
            kill_points_pass("write", path); \
            if (size > 1) { \
                long n = __atomic_fetch_add(&number, 1, __ATOMIC_SEQ_CST); \
                if (n == kill_at) (void)!next half, die(n, "torn write", path); \
                if (tally >= 0) tell(tally, n, "torn write", path); \
            } \
        } \
        return next arguments; \
    }

ON_WRITE(write, (int fd, const void *b, size_t n_bytes), n_bytes, (fd, b, n_bytes / 2), (fd, b, n_bytes))
ON_WRITE(pwrite, (int fd, const void *b, size_t n_bytes, off_t o), n_bytes, (fd, b, n_bytes / 2, o), (fd, b, n_bytes, o))
ON_WRITE(pwrite64, (int fd, const void *b, size_t n_bytes, off64_t o), n_bytes, (fd, b, n_bytes / 2, o),
         (fd, b, n_bytes, o))
ON_WRITE(writev, (int fd, const struct iovec *pieces, int count), count, (fd, pieces, count / 2), (fd, pieces, count))

#define ON_DESCRIPTOR(kind, result, name, parameters, arguments) \
    result name parameters { \
        NEXT(name); \
        char path[4096]; \
        if (is_ours(fd, path)) kill_points_pass(kind, path); \
        return next arguments; \
    }

ON_DESCRIPTOR("write", ssize_t, sendfile, (int fd, int from, off_t *o, size_t n), (fd, from, o, n))
ON_DESCRIPTOR("write", ssize_t, sendfile64, (int fd, int from, off64_t *o, size_t n), (fd, from, o, n))
ON_DESCRIPTOR("write", ssize_t, copy_file_range, (int from, off64_t *a, int fd, off64_t *b, size_t n, unsigned f),
              (from, a, fd, b, n, f))
ON_DESCRIPTOR("truncate", int, ftruncate, (int fd, off_t n), (fd, n))
ON_DESCRIPTOR("truncate", int, ftruncate64, (int fd, off64_t n), (fd, n))
ON_DESCRIPTOR("fsync", int, fsync, (int fd), (fd))
ON_DESCRIPTOR("fsync", int, fdatasync, (int fd), (fd))

#define ON_PATH(kind, name, at, parameters, arguments) \
    int name parameters { \
        NEXT(name); \
        char path[4096]; \
        if (is_ours_at(at, to, path)) kill_points_pass(kind, path); \
        return next arguments; \
    }

ON_PATH("rename", rename, AT_FDCWD, (const char *from, const char *to), (from, to))
ON_PATH("rename", renameat, b, (int a, const char *from, int b, const char *to), (a, from, b, to))
ON_PATH("rename", renameat2, b, (int a, const char *from, int b, const char *to, unsigned f), (a, from, b, to, f))
ON_PATH("remove", unlink, AT_FDCWD, (const char *to), (to))
ON_PATH("remove", rmdir, AT_FDCWD, (const char *to), (to))
ON_PATH("remove", unlinkat, at, (int at, const char *to, int flags), (at, to, flags))
ON_PATH("mkdir", mkdir, AT_FDCWD, (const char *to, mode_t mode), (to, mode))
ON_PATH("mkdir", mkdirat, at, (int at, const char *to, mode_t mode), (at, to, mode))

/* Opening is a point where it makes or empties a file. */
#define ON_OPEN(name, at, parameters, arguments) \
    int name parameters { \
        NEXT(name); \
        mode_t mode = 0; \
        if (flags & (O_CREAT | __O_TMPFILE)) { \
            va_list rest; \
            va_start(rest, flags); \
            mode = va_arg(rest, mode_t); \
            va_end(rest); \
        } \
        char path[4096]; \
        if (flags & (O_CREAT | O_TRUNC) && is_ours_at(at, to, path)) kill_points_pass("open", path); \
        return next arguments; \
    }

ON_OPEN(open, AT_FDCWD, (const char *to, int flags, ...), (to, flags, mode))
ON_OPEN(open64, AT_FDCWD, (const char *to, int flags, ...), (to, flags, mode))
ON_OPEN(openat, at, (int at, const char *to, int flags, ...), (at, to, flags, mode))
ON_OPEN(openat64, at, (int at, const char *to, int flags, ...), (at, to, flags, mode))
