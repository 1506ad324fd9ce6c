/* What the programs of this folder share: a check that says which line found something else, and what a child ended with. */
#ifndef VARVE_CHECK_H
#define VARVE_CHECK_H
#include <errno.h>
#include <stdio.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

/* Said at once: a child may end without writing its streams out. */
#define CHECK(what)                                                                   \
    do {                                                                              \
        if (!(what)) {                                                                \
            printf("line %d: %s (errno %d)\n", __LINE__, #what, errno);               \
            fflush(stdout);                                                           \
            if (++failures > 20) _exit(1);                                            \
        }                                                                             \
    } while (0)

static inline int status_of(pid_t child) {
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return status;
}

#endif
