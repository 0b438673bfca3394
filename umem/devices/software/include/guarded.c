/* Runs a kernel, and comes back from a fault in it; one at a time, under the software GPU's lock. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <ucontext.h>
typedef void (*Run)(void **, const unsigned *, const unsigned *, unsigned);
struct fault { uint64_t address; int signal; int access; }; /* access: 1 read, 2 write, 0 unknown */
static __thread sigjmp_buf place;
static __thread volatile int is_inside;
static struct fault found;
static struct sigaction before_segv, before_bus;
static void handle(int number, siginfo_t *info, void *context) {
  if (!is_inside) { /* another thread's: it happens again, and meets whoever was there before */
    sigaction(number, number == SIGSEGV ? &before_segv : &before_bus, 0);
    return;
  }
  found.address = (uint64_t)info->si_addr;
  found.signal = number;
  found.access = 0;
#if defined(__x86_64__) && defined(REG_ERR)
  found.access = ((ucontext_t *)context)->uc_mcontext.gregs[REG_ERR] & 2 ? 2 : 1;
  if (info->si_code == SI_KERNEL) found.access = 0;
#endif
  siglongjmp(place, 1);
}
int umem_guarded(Run run, void **given, const unsigned *grid, const unsigned *block, unsigned shared, struct fault *out) {
  static char *memory;
  const size_t size = 1 << 16;
  stack_t ours = {0}, theirs;
  struct sigaction action = {0};
  volatile int has_failed = 0;
  if (!memory) memory = malloc(size);
  ours.ss_sp = memory;
  ours.ss_size = size;
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaltstack(&ours, &theirs);
  sigaction(SIGSEGV, &action, &before_segv);
  sigaction(SIGBUS, &action, &before_bus);
  if (!sigsetjmp(place, 1)) {
    is_inside = 1;
    run(given, grid, block, shared);
  } else {
    has_failed = 1;
  }
  is_inside = 0;
  sigaction(SIGSEGV, &before_segv, 0);
  sigaction(SIGBUS, &before_bus, 0);
  sigaltstack(&theirs, 0);
  *out = found;
  return has_failed;
}
