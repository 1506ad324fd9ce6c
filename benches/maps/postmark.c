/* Postmark's load: files of 4 to 40 KB in directories; each transaction reads a file or appends to one, and makes a file or removes one. Prints
 * transactions a second, and the seconds of the parts. See ranges.sh. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { DIRS = 100, LEAST = 4000, MOST = 40000, CHUNK = 512 * 8 };

static unsigned long state = 88172645463325252ul;
static char buffer[MOST];
static long *names, files, next_name;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static unsigned long any(unsigned long below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

static const char *path_of(long name) {
  static char path[64];
  snprintf(path, sizeof path, "d%ld/f%ld", name % DIRS, name);
  return path;
}

static void create(void) {
  long name = next_name++;
  int fd = open(path_of(name), O_WRONLY | O_CREAT | O_EXCL, 0644);
  if (fd < 0) err(1, "create");
  for (size_t left = LEAST + any(MOST - LEAST); left > 0;) {
    size_t now = left < CHUNK ? left : CHUNK;
    if (write(fd, buffer, now) != (ssize_t)now) err(1, "write");
    left -= now;
  }
  close(fd);
  names[files++] = name;
}

static void drop(long at) {
  if (unlink(path_of(names[at])) != 0) err(1, "unlink");
  names[at] = names[--files];
}

int main(int count, char **words) {
  if (count != 4) errx(2, "postmark DIR FILES TRANSACTIONS");
  long first = atol(words[2]), transactions = atol(words[3]);
  if (mkdir(words[1], 0755) != 0 || chdir(words[1]) != 0) err(1, "%s", words[1]);
  names = calloc(first + transactions + 1, sizeof *names);
  for (int k = 0; k < DIRS; k++) {
    char name[16];
    snprintf(name, sizeof name, "d%d", k);
    if (mkdir(name, 0755) != 0) err(1, "mkdir");
  }
  double from = now_s();
  while (files < first) create();
  double made = now_s();
  for (long k = 0; k < transactions; k++) {
    long at = any(files);
    if (any(2)) {
      int fd = open(path_of(names[at]), O_RDONLY);
      if (fd < 0) err(1, "open");
      while (read(fd, buffer, CHUNK) > 0) {
      }
      close(fd);
    } else {
      int fd = open(path_of(names[at]), O_WRONLY | O_APPEND);
      size_t more = 1 + any(CHUNK);
      if (fd < 0 || write(fd, buffer, more) != (ssize_t)more) err(1, "append");
      close(fd);
    }
    if (any(2) || files < 2) create();
    else drop(any(files));
  }
  double done = now_s();
  while (files > 0) drop(files - 1);
  double gone = now_s();
  printf("%.0f %.2f %.2f %.2f\n", transactions / (done - made), made - from, done - made, gone - done);
  return 0;
}
