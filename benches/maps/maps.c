/* What a read-only map of a file costs: the first touch of each page in order, of a page at random, of pages that the kernel has, and loads
 * from touched pages; pread beside it. One line of Markdown for each file. See maps.sh. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, TOUCHED = 200000, UNTOUCHED = 20000 };

static volatile unsigned long sink;
static unsigned long state = 88172645463325252ul;

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e6 + t.tv_nsec * 1e-3;
}

static size_t any(size_t below) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % below;
}

static const char *map(int fd, size_t len) {
  const char *at = mmap(NULL, len, PROT_READ, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) err(1, "mmap");
  return at;
}

static double touch_all(const char *at, size_t pages) {
  unsigned long sum = 0;
  double from = now_us();
  for (size_t page = 0; page < pages; page++) sum += (unsigned char)at[page * PAGE];
  sink = sum;
  return (now_us() - from) / pages;
}

int main(int count, char **paths) {
  for (int i = 1; i < count; i++) {
    int fd = open(paths[i], O_RDONLY);
    struct stat stat;
    if (fd < 0 || fstat(fd, &stat) != 0) err(1, "%s", paths[i]);
    size_t len = stat.st_size, pages = len / PAGE;
    if (pages == 0) errx(1, "%s is empty", paths[i]);
    const char *at = map(fd, len);
    double first = touch_all(at, pages);
    unsigned long sum = 0;
    double from = now_us();
    for (int k = 0; k < TOUCHED; k++) {
      const char *page = at + any(pages) * PAGE;
      for (int word = 0; word < PAGE; word += 64) sum += (unsigned char)page[word];
    }
    double loads = (now_us() - from) / TOUCHED;
    munmap((void *)at, len);
    at = map(fd, len);
    double cached = touch_all(at, pages);
    munmap((void *)at, len);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    at = map(fd, len);
    from = now_us();
    for (int k = 0; k < UNTOUCHED; k++) sum += (unsigned char)at[any(pages) * PAGE];
    double random = (now_us() - from) / UNTOUCHED;
    munmap((void *)at, len);
    static char buffer[PAGE];
    from = now_us();
    for (int k = 0; k < TOUCHED; k++)
      if (pread(fd, buffer, PAGE, any(pages) * PAGE) != PAGE) err(1, "pread");
    double calls = (now_us() - from) / TOUCHED;
    sink = sum;
    close(fd);
    const char *name = getenv("NAME");
    printf("| %s | %.2f | %.2f | %.2f | %.2f | %.2f |\n", name ? name : paths[i], first, random, cached, loads, calls);
  }
}
