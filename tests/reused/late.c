// A listing that is on its way into the kernel until it is told to go on: late DIR NAMES NUMBER
//
// Lists DIR/NAMES into a page that is not there, which userfaultfd holds back: the kernel has the answer of the mount and has taken in none of it.
// Says "held" (or "skip REASON"). At a line of input it makes files in DIR until one has the inode number NUMBER (its lower 40 bits), keeps that open,
// lets the listing go on, and says "reused ERRNO", where ERRNO is what then becomes of a write to the file; or "fresh", if there was none.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, FILES = 20000 };
static const uint64_t INO_MASK = (1ull << 40) - 1;
static char *page;
static int dir;

static void say(const char *what, int error) {
  printf("%s %d\n", what, error);
  fflush(stdout);
}

static void *list(void *unused) {
  (void)unused;
  return (void *)syscall(SYS_getdents64, dir, page, PAGE);
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  uint64_t wanted = strtoull(argv[3], 0, 10) & INO_MASK;
  int faults = syscall(SYS_userfaultfd, O_CLOEXEC);
  struct uffdio_api api = {.api = UFFD_API};
  if (faults < 0 || ioctl(faults, UFFDIO_API, &api) != 0) {
    say("skip", errno);
    return 0;
  }
  page = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct uffdio_register area = {.range = {.start = (uintptr_t)page, .len = PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
  if (page == MAP_FAILED || ioctl(faults, UFFDIO_REGISTER, &area) != 0) return 3;
  if (chdir(argv[1]) != 0 || (dir = open(argv[2], O_RDONLY | O_DIRECTORY)) < 0) return 4;
  pthread_t lister;
  struct uffd_msg event;
  if (pthread_create(&lister, 0, list, 0) != 0) return 5;
  if (read(faults, &event, sizeof event) != sizeof event || event.event != UFFD_EVENT_PAGEFAULT) return 6;
  say("held", 0);
  getchar();
  int file = -1;
  for (int n = 0; n < FILES && file < 0; n++) {
    char name[32];
    struct stat about;
    snprintf(name, sizeof name, "new-%d", n);
    int fd = open(name, O_CREAT | O_EXCL | O_WRONLY, 0600);
    if (fd < 0 || fstat(fd, &about) != 0) return 7;
    if ((about.st_ino & INO_MASK) == wanted)
      file = fd;
    else
      close(fd);
  }
  struct uffdio_zeropage zero = {.range = {.start = (uintptr_t)page, .len = PAGE}};
  if (ioctl(faults, UFFDIO_ZEROPAGE, &zero) != 0) return 8;
  void *listed;
  pthread_join(lister, &listed);
  if ((long)listed <= 0) return 9;
  if (file < 0) {
    say("fresh", 0);
    return 0;
  }
  say("reused", write(file, "x", 1) == 1 && close(file) == 0 ? 0 : errno);
  return 0;
}
