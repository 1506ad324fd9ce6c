/* Reads and writes of records, as IoZone makes them, in a file of a few hundred MiB: by system calls, through a map, and, with the path "-", in one
 * range of memory, where a record is an address plus an offset: the most that a file laid out as one range can be (seed: SCMFS). Prints
 * a line "access record-KiB threads us GB/s" for each. See ranges.sh. */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static const char *path;
static char *base;
static int file;
static size_t len, record;
static int threads, writes, at_random, by_map;
static double seconds;
static pthread_barrier_t start;

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

struct job {
  size_t first, count;
  double took;
  unsigned long done;
};

/* Each thread has its own part of the file. */
static void *work(void *arg) {
  struct job *job = arg;
  char *buffer;
  if (posix_memalign((void **)&buffer, 4096, record)) errx(1, "memory");
  memset(buffer, 7, record);
  unsigned long state = 88172645463325252ul + job->first, at = 0;
  pthread_barrier_wait(&start);
  double from = now_s(), until = from + seconds;
  /* The clock is looked at for each MiB. */
  unsigned long looks = record >= (1 << 20) ? 1 : (1 << 20) / record;
  for (;;) {
    for (unsigned long k = 0; k < looks; k++) {
      if (at_random) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        at = state % job->count;
      } else if (++at >= job->count) {
        at = 0;
      }
      size_t offset = (job->first + at) * record;
      if (by_map) {
        if (writes) memcpy(base + offset, buffer, record);
        else memcpy(buffer, base + offset, record);
        __asm__ volatile("" ::"r"(buffer) : "memory");
      } else {
        ssize_t moved = writes ? pwrite(file, buffer, record, offset) : pread(file, buffer, record, offset);
        if (moved != (ssize_t)record) err(1, "%s", path);
      }
    }
    job->done += looks;
    job->took = now_s() - from;
    if (from + job->took >= until) break;
  }
  free(buffer);
  return NULL;
}

static void measure(void) {
  struct job jobs[8] = {0};
  pthread_t ids[8];
  size_t records = len / record;
  pthread_barrier_init(&start, NULL, threads);
  for (int k = 0; k < threads; k++) {
    jobs[k].count = records / threads;
    jobs[k].first = jobs[k].count * k;
    if (pthread_create(&ids[k], NULL, work, &jobs[k])) errx(1, "thread");
  }
  double rate = 0;
  for (int k = 0; k < threads; k++) {
    pthread_join(ids[k], NULL);
    rate += jobs[k].done / jobs[k].took;
  }
  pthread_barrier_destroy(&start);
  printf("%.3f %.2f ", 1e6 * threads / rate, rate * record / 1e9);
}

int main(int count, char **words) {
  if (count < 3) errx(2, "ranges PATH|-[huge] SECONDS [map]");
  path = words[1];
  seconds = atof(words[2]);
  int with_map = count > 3;
  int is_range = path[0] == '-';
  if (is_range) {
    len = 256ul << 20;
    base = mmap(NULL, len + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) err(1, "mmap");
    base = (char *)(((size_t)base + (2 << 20) - 1) & ~((2ul << 20) - 1));
    madvise(base, len, path[1] ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(base, 1, len);
  } else {
    struct stat stat;
    file = open(path, O_RDWR);
    if (file < 0 || fstat(file, &stat) != 0) err(1, "%s", path);
    len = stat.st_size;
    if (with_map) {
      base = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      if (base == MAP_FAILED) err(1, "map of %s", path);
    }
  }
  static const size_t sizes[] = {4, 64, 1024, 16384};
  static const int numbers[] = {1, 2, 4};
  for (writes = 0; writes < 2; writes++)
    for (at_random = 0; at_random < 2; at_random++)
      for (int s = 0; s < 4; s++)
        for (int t = 0; t < 3; t++) {
          record = sizes[s] << 10;
          threads = numbers[t];
          printf("%s-%s %zu %d ", at_random ? "random" : "sequential", writes ? "write" : "read", sizes[s], threads);
          by_map = is_range || with_map;
          measure();
          printf("\n");
          fflush(stdout);
        }
  return 0;
}
