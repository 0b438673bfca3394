// What the kernels of a process share: one runs at a time. Stacks for threads that wait for one another.
#pragma once
#include <algorithm>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

using std::ptrdiff_t;

struct UmemProcess {
  char message[512];  // why the last kernel ended early
  void (*handle)(UmemProcess*);  // of umem_divisions.h, which kernels.py sets
  int threads;        // that may run parts of a kernel side by side, which kernels.py sets
  void (*share)(UmemProcess*, void (*)(void*, int), void*, int);  // of umem_shared.h
  void (*gather)(char*, const char*, ptrdiff_t, size_t, ptrdiff_t);
  bool is_checked;    // races of shared memory are errors: kernels.py sets it, too
  char* memory;       // of the fibers: what is known of each, then the stacks
  size_t stacks;      // where in it
  volatile int is_running;
  bool is_handled;
  pthread_t thread;
  struct sigaction before;
};
static_assert(sizeof(UmemProcess) <= 1024, "as large as kernels.py has it");
static_assert(offsetof(UmemProcess, threads) == 520 && offsetof(UmemProcess, is_checked) == 544, "where kernels.py has them");
extern "C" {
UmemProcess* umem_process = nullptr;  // which kernels.py sets
}

// Which part of a kernel, of how many, this thread of the process does.
struct UmemShare {
  int index, count;
  // Of so many things, the first and the last but one of the part; the bounds are multiples of a unit.
  ptrdiff_t begin(ptrdiff_t size, ptrdiff_t unit) const { return index * size / count / unit * unit; }
  ptrdiff_t end(ptrdiff_t size, ptrdiff_t unit) const {
    return index + 1 == count ? size : (index + 1) * size / count / unit * unit;
  }
};
enum { UMEM_PARTS = 64 };
static thread_local UmemShare umem_share = {0, 1};

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

// While a kernel runs.
struct UmemRunning {
  UmemRunning() {
    if (!umem_process->is_handled) umem_process->handle(umem_process);
    umem_process->thread = pthread_self();
    umem_process->is_running = 1;
  }
  ~UmemRunning() { umem_process->is_running = 0; }
};
