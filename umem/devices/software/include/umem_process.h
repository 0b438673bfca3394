// What the kernels of a process share: one runs at a time. Stacks for threads that wait for one another,
// and a handler of what x86 traps and a GPU does not: a division of integers by zero, and of the least by -1.
#pragma once
#include <csignal>
#include <cstdio>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

struct UmemProcess {
  char message[512];  // why the last kernel ended early
  char* memory;       // of the fibers: what is known of each, then the stacks
  size_t stacks;      // where in it
  volatile int is_running;
  bool is_handled;
  pthread_t thread;
  struct sigaction before;
};
static_assert(sizeof(UmemProcess) <= 1024, "as large as kernels.py has it");
extern "C" {
UmemProcess* umem_process = nullptr;  // which kernels.py sets
}

// -- stacks, each above a page that nothing may touch ------------------------------------------

enum { UMEM_THREADS = 1024, UMEM_STACK = 256 << 10 };
struct UmemStack { char* start; size_t size; };

static UmemStack umem_stack(unsigned int number) {
  static const size_t page = sysconf(_SC_PAGESIZE);
  char* start = umem_process->memory + umem_process->stacks + number * (page + UMEM_STACK) + page;
  return {start, (size_t)UMEM_STACK - number % 64 * 64};  // their tops are in different lines of a cache
}
// Whether there are stacks for so many threads, each with something of this size known of it.
static bool umem_has_stacks(unsigned int count, size_t size) {
  UmemProcess& process = *umem_process;
  if (count > UMEM_THREADS) {
    snprintf(process.message, sizeof process.message, "a block has %u threads, more than %d", count, (int)UMEM_THREADS);
    return false;
  }
  if (process.memory) return true;
  const size_t page = sysconf(_SC_PAGESIZE), stacks = (UMEM_THREADS * size + page - 1) / page * page;
  void* memory = mmap(nullptr, stacks + UMEM_THREADS * (page + UMEM_STACK), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    snprintf(process.message, sizeof process.message, "there is no memory for the stacks of its threads");
    return false;
  }
  process.memory = (char*)memory;
  process.stacks = stacks;
  for (unsigned int i = 0; i < UMEM_THREADS; i++) mprotect(umem_stack(i).start - page, page, PROT_NONE);
  return true;
}

// -- divisions ---------------------------------------------------------------------------------

#if defined(__x86_64__)
// Goes on behind a division that trapped, with what a GPU gives: the least number divided by -1 is
// itself, and x / 0 has all bits set and x as its rest.
static void umem_divided(int number, siginfo_t* info, void* context) {
  greg_t* at = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)at[REG_RIP];
  const bool is_ours = umem_process->is_running && pthread_equal(umem_process->thread, pthread_self()) && info->si_code == FPE_INTDIV;
  int bits = 32;
  if (is_ours && *code == 0x66) bits = 16, code++;
  if (is_ours && (*code & 0xf0) == 0x40) bits = *code++ & 8 ? 64 : bits;
  if (!is_ours || (code[0] | 1) != 0xf7 || (code[1] >> 4 & 3) != 3) {
    sigaction(number, &umem_process->before, nullptr);  // it happens again, and meets whoever was there
    return;
  }
  if (*code == 0xf6) bits = 8;
  const bool is_signed = code[1] & 8;
  const int mode = code[1] >> 6, operand = code[1] & 7;
  const bool has_scale = mode != 3 && operand == 4;
  const bool is_far = mode == 2 || (mode == 0 && (operand == 5 || (has_scale && (code[2] & 7) == 5)));
  at[REG_RIP] = (greg_t)(code + 2 + has_scale + (mode == 1) + 4 * is_far);
  const unsigned long long all = ~0ull >> (64 - bits), x = at[REG_RAX] & all;
  const bool is_least = is_signed && x == 1ull << (bits - 1);
  const unsigned long long quotient = is_least ? x : all, rest = is_least ? 0 : x;
  const unsigned long long kept = bits == 32 ? 0 : ~(bits == 8 ? 0xffffull : all);
  at[REG_RAX] = (at[REG_RAX] & kept) | quotient | (bits == 8 ? rest << 8 : 0);
  if (bits > 8) at[REG_RDX] = (at[REG_RDX] & kept) | rest;
}
#endif

// While a kernel runs.
struct UmemRunning {
  UmemRunning() {
#if defined(__x86_64__)
    if (!umem_process->is_handled) {
      struct sigaction action = {};
      action.sa_sigaction = umem_divided;
      action.sa_flags = SA_SIGINFO;
      sigaction(SIGFPE, &action, &umem_process->before);
      umem_process->is_handled = true;
    }
#endif
    umem_process->thread = pthread_self();
    umem_process->is_running = 1;
  }
  ~UmemRunning() { umem_process->is_running = 0; }
};
