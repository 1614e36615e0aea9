/* LD_PRELOAD: numbers the calls of a process that change files below a folder, and disturbs one of them.

   disturb(folder, number, how, log): how is
     kill      SIGKILL before the call            behind    SIGKILL behind it
     torn      SIGKILL in the middle of a write, half of which is done
     EIO       the call fails                     ENOSPC    the same, half of a write is done
     SIGTERM, SIGINT   the signal is sent, and the call made
     count     nothing
   log: a line for each call, "number name path", or "".
   Before it is called nothing is numbered. What a thread of the process does is numbered too. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { GO, KILL, BEHIND, TORN, FAIL, FAIL_TORN };

static char below[PATH_MAX], kind[16];
static long chosen, count;
static int log_to = -1;
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

void disturb(const char *folder, long number, const char *how, const char *log) {
    chosen = number;
    count = 0;
    snprintf(kind, sizeof kind, "%s", how);
    if (log[0]) log_to = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    snprintf(below, sizeof below, "%s/", folder);
}

static void path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void path_in(int folder, const char *name, char *path) {
    char from[PATH_MAX] = "";
    if (!name) path_of(folder, path);
    else if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else {
        if (folder != AT_FDCWD) path_of(folder, from);
        else if (!getcwd(from, sizeof from)) from[0] = 0;
        if (snprintf(path, PATH_MAX, "%s/%s", from, name) >= PATH_MAX) path[0] = 0;
    }
}

static void die(void) {
    raise(SIGKILL);
    pause();
}

/* What is to be done with a call; errno is set where it fails. */
static int met(const char *name, const char *path) {
    if (!below[0] || strncmp(path, below, strlen(below))) return GO;
    pthread_mutex_lock(&counting);
    long number = ++count;
    pthread_mutex_unlock(&counting);
    if (log_to >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%ld %s %s\n", number, name, path + strlen(below));
        if (length < (int)sizeof line) syscall(SYS_write, log_to, line, length);
    }
    if (number != chosen) return GO;
    if (!strcmp(kind, "kill")) die();
    if (!strcmp(kind, "behind")) return BEHIND;
    if (!strcmp(kind, "torn")) return TORN;
    if (!strcmp(kind, "SIGTERM")) raise(SIGTERM);
    if (!strcmp(kind, "SIGINT")) raise(SIGINT);
    if (!strcmp(kind, "EIO")) return errno = EIO, FAIL;
    if (!strcmp(kind, "ENOSPC")) return errno = ENOSPC, FAIL_TORN;
    return GO;
}

#define NEXT(name) static __typeof__(&name) next; if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define CALL(type, call) do { type done = call; if (todo == BEHIND) die(); return done; } while (0)
/* A call that is made or not. */
#define WHOLE(label, call) do { int todo = met(label, path); if (todo == TORN) die(); if (todo >= FAIL) return -1; \
    CALL(int, call); } while (0)
/* One that moves bytes. */
#define PARTLY(label, call, half) do { int todo = met(label, path); \
    if (todo == TORN) { half; die(); } \
    if (todo == FAIL_TORN) { half; errno = ENOSPC; } \
    if (todo >= FAIL) return -1; \
    CALL(ssize_t, call); } while (0)
#define AT(folder, name) char path[PATH_MAX]; path_in(folder, name, path)
#define OF(file) char path[PATH_MAX] = ""; if (below[0]) path_of(file, path)
#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE va_list rest; va_start(rest, flags); mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; va_end(rest)

int open(const char *name, int flags, ...) {
    NEXT(open); MODE;
    if (!CHANGES(flags)) return next(name, flags, mode);
    AT(AT_FDCWD, name); WHOLE("open", next(name, flags, mode));
}
int open64(const char *name, int flags, ...) {
    NEXT(open64); MODE;
    if (!CHANGES(flags)) return next(name, flags, mode);
    AT(AT_FDCWD, name); WHOLE("open", next(name, flags, mode));
}
int openat(int folder, const char *name, int flags, ...) {
    NEXT(openat); MODE;
    if (!CHANGES(flags)) return next(folder, name, flags, mode);
    AT(folder, name); WHOLE("open", next(folder, name, flags, mode));
}
int openat64(int folder, const char *name, int flags, ...) {
    NEXT(openat64); MODE;
    if (!CHANGES(flags)) return next(folder, name, flags, mode);
    AT(folder, name); WHOLE("open", next(folder, name, flags, mode));
}
ssize_t write(int file, const void *data, size_t size) {
    NEXT(write); OF(file); PARTLY("write", next(file, data, size), next(file, data, size / 2));
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    NEXT(pwrite64); OF(file); PARTLY("write", next(file, data, size, at), next(file, data, size / 2, at));
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    NEXT(writev); OF(file); PARTLY("write", next(file, parts, number), next(file, parts, number / 2));
}
ssize_t sendfile64(int to, int from, off64_t *at, size_t size) {
    NEXT(sendfile64); OF(to); PARTLY("write", next(to, from, at, size), next(to, from, at, size / 2));
}
ssize_t sendfile(int to, int from, off_t *at, size_t size) {
    NEXT(sendfile); OF(to); PARTLY("write", next(to, from, at, size), next(to, from, at, size / 2));
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags) {
    NEXT(copy_file_range); OF(to);
    PARTLY("write", next(from, at, to, there, size, flags), next(from, at, to, there, size / 2, flags));
}
int rename(const char *name, const char *new) { NEXT(rename); AT(AT_FDCWD, new); WHOLE("rename", next(name, new)); }
int renameat(int folder, const char *name, int there, const char *new) {
    NEXT(renameat); AT(there, new); WHOLE("rename", next(folder, name, there, new));
}
int renameat2(int folder, const char *name, int there, const char *new, unsigned flags) {
    NEXT(renameat2); AT(there, new); WHOLE("rename", next(folder, name, there, new, flags));
}
int link(const char *name, const char *new) { NEXT(link); AT(AT_FDCWD, new); WHOLE("link", next(name, new)); }
int linkat(int folder, const char *name, int there, const char *new, int flags) {
    NEXT(linkat); AT(there, new); WHOLE("link", next(folder, name, there, new, flags));
}
int symlink(const char *to, const char *new) { NEXT(symlink); AT(AT_FDCWD, new); WHOLE("link", next(to, new)); }
int symlinkat(const char *to, int folder, const char *new) {
    NEXT(symlinkat); AT(folder, new); WHOLE("link", next(to, folder, new));
}
int unlink(const char *name) { NEXT(unlink); AT(AT_FDCWD, name); WHOLE("unlink", next(name)); }
int unlinkat(int folder, const char *name, int flags) {
    NEXT(unlinkat); AT(folder, name); WHOLE(flags & AT_REMOVEDIR ? "rmdir" : "unlink", next(folder, name, flags));
}
int remove(const char *name) { NEXT(remove); AT(AT_FDCWD, name); WHOLE("unlink", next(name)); }
int rmdir(const char *name) { NEXT(rmdir); AT(AT_FDCWD, name); WHOLE("rmdir", next(name)); }
int mkdir(const char *name, mode_t mode) { NEXT(mkdir); AT(AT_FDCWD, name); WHOLE("mkdir", next(name, mode)); }
int mkdirat(int folder, const char *name, mode_t mode) {
    NEXT(mkdirat); AT(folder, name); WHOLE("mkdir", next(folder, name, mode));
}
int chmod(const char *name, mode_t mode) { NEXT(chmod); AT(AT_FDCWD, name); WHOLE("chmod", next(name, mode)); }
int fchmod(int file, mode_t mode) { NEXT(fchmod); OF(file); WHOLE("chmod", next(file, mode)); }
int fchmodat(int folder, const char *name, mode_t mode, int flags) {
    NEXT(fchmodat); AT(folder, name); WHOLE("chmod", next(folder, name, mode, flags));
}
int utimensat(int folder, const char *name, const struct timespec times[2], int flags) {
    NEXT(utimensat); AT(folder, name); WHOLE("utime", next(folder, name, times, flags));
}
int futimens(int file, const struct timespec times[2]) { NEXT(futimens); OF(file); WHOLE("utime", next(file, times)); }
int truncate64(const char *name, off64_t size) {
    NEXT(truncate64); AT(AT_FDCWD, name); WHOLE("truncate", next(name, size));
}
int ftruncate64(int file, off64_t size) { NEXT(ftruncate64); OF(file); WHOLE("truncate", next(file, size)); }
int ftruncate(int file, off_t size) { NEXT(ftruncate); OF(file); WHOLE("truncate", next(file, size)); }
int fsync(int file) { NEXT(fsync); OF(file); WHOLE("fsync", next(file)); }
int fdatasync(int file) { NEXT(fdatasync); OF(file); WHOLE("fsync", next(file)); }
