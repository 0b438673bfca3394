/* Runs a kernel, and comes back from a fault in it, or when it has taken too long; one at a time,
 * under the software GPU's lock. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#ifndef sigev_notify_thread_id
#define sigev_notify_thread_id _sigev_un._tid
#endif
typedef void (*Run)(void **, const unsigned *, const unsigned *, unsigned);
struct fault { uint64_t address; int signal; int access; }; /* access: 1 read, 2 write, 0 unknown */
enum { FAULT = 1, TOO_LONG = 2, NO_TIMER = 3 };
static __thread sigjmp_buf place;
static __thread volatile int is_inside;
static struct fault found;
static struct sigaction before_segv, before_bus, before_alarm;
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
  siglongjmp(place, FAULT);
}
static void ring(int number, siginfo_t *info, void *context) {
  if (is_inside) siglongjmp(place, TOO_LONG);
}
/* A timer of this thread's processor time, by system calls: older C libraries have it elsewhere. */
static int set_timer(double seconds, int *timer) {
  struct sigevent event = {0};
  struct itimerspec when = {0};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = SIGRTMAX;
  event.sigev_notify_thread_id = syscall(SYS_gettid);
  when.it_value.tv_sec = (time_t)seconds;
  when.it_value.tv_nsec = (long)((seconds - (time_t)seconds) * 1e9) + 1;
  return !syscall(SYS_timer_create, CLOCK_THREAD_CPUTIME_ID, &event, timer) &&
         !syscall(SYS_timer_settime, *timer, 0, &when, 0);
}
/* Returns 0, or why the kernel has not ended. Faults are caught if asked; seconds of 0: no limit. */
int umem_guarded(Run run, void **given, const unsigned *grid, const unsigned *block, unsigned shared,
                 int is_caught, double seconds, struct fault *out) {
  static char *memory;
  const size_t size = 1 << 16;
  stack_t ours = {0}, theirs;
  struct sigaction action = {0}, alarm = {0};
  volatile int end;
  static int timer;
  timer = -1;
  if (!memory) memory = malloc(size);
  ours.ss_sp = memory;
  ours.ss_size = size;
  action.sa_sigaction = handle;
  alarm.sa_sigaction = ring;
  alarm.sa_flags = action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigemptyset(&alarm.sa_mask);
  sigaltstack(&ours, &theirs);
  if (is_caught) {
    sigaction(SIGSEGV, &action, &before_segv);
    sigaction(SIGBUS, &action, &before_bus);
  }
  if (seconds > 0) sigaction(SIGRTMAX, &alarm, &before_alarm);
  end = sigsetjmp(place, 1);
  if (!end) {
    is_inside = 1;
    if (seconds > 0 && !set_timer(seconds, &timer))
      end = NO_TIMER;
    else
      run(given, grid, block, shared);
  }
  is_inside = 0;
  if (seconds > 0) {
    if (timer >= 0) syscall(SYS_timer_delete, timer);
    sigaction(SIGRTMAX, &before_alarm, 0);
  }
  if (is_caught) {
    sigaction(SIGSEGV, &before_segv, 0);
    sigaction(SIGBUS, &before_bus, 0);
  }
  sigaltstack(&theirs, 0);
  *out = found;
  return end;
}
