/* Prints the events of inotify(7) on the directory that it is given, one a line: the names of its bits and the name in the directory, `=` before
   the name of the second half of a move. "ready" comes first; a file named `end` ends it. */
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

static const struct { unsigned bit; const char *name; } names[] = {
    {IN_ACCESS, "access"}, {IN_MODIFY, "modify"}, {IN_ATTRIB, "attrib"}, {IN_CLOSE_WRITE, "close_write"},
    {IN_CLOSE_NOWRITE, "close_nowrite"}, {IN_OPEN, "open"}, {IN_MOVED_FROM, "moved_from"}, {IN_MOVED_TO, "moved_to"},
    {IN_CREATE, "create"}, {IN_DELETE, "delete"}, {IN_DELETE_SELF, "delete_self"}, {IN_MOVE_SELF, "move_self"},
    {IN_ISDIR, "isdir"}, {IN_IGNORED, "ignored"}, {IN_Q_OVERFLOW, "overflow"}, {IN_UNMOUNT, "unmount"},
};

int main(int argc, char **argv) {
    int fd = inotify_init1(IN_CLOEXEC);
    if (fd < 0 || argc < 2 || inotify_add_watch(fd, argv[1], IN_ALL_EVENTS) < 0) {
        perror("watcher");
        return 1;
    }
    puts("ready");
    fflush(stdout);
    static char buffer[1 << 16] __attribute__((aligned(8)));
    unsigned cookie = 0;
    for (;;) {
        ssize_t len = read(fd, buffer, sizeof buffer);
        if (len <= 0) return 1;
        for (char *at = buffer; at < buffer + len;) {
            struct inotify_event *event = (struct inotify_event *)at;
            const char *name = event->len ? event->name : "";
            at += sizeof *event + event->len;
            if (!strcmp(name, "end")) return 0;
            for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
                if (event->mask & names[i].bit) printf("%s ", names[i].name);
            int second = event->mask & IN_MOVED_TO && event->cookie && event->cookie == cookie;
            cookie = event->cookie;
            printf("%s%s\n", second ? "=" : "", name);
            fflush(stdout);
        }
    }
}
