/* A library that changes the code of `getppid` when it is loaded (with -DHOOK), and a program that calls it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef HOOK
__attribute__((constructor)) static void change(void) {
    static const unsigned char code[] = {0xb8, 0x92, 0x10, 0, 0, 0xc3}; /* mov eax, 4242; ret */
    char *at = (char *)dlsym(RTLD_DEFAULT, "getppid");
    char *page = (char *)((uintptr_t)at & ~(uintptr_t)4095);
    if (mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC))
        return;
    memcpy(at, code, sizeof code);
    mprotect(page, 8192, PROT_READ | PROT_EXEC);
}
#else
int main(void) {
    printf("%d\n", (int)getppid());
    return 0;
}
#endif
