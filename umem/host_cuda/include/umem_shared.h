// Threads that do parts of a kernel side by side, each the next one until none is left; between
// kernels they sleep. Compiled once, and not into every kernel.
#pragma once
#include <initializer_list>
#include "umem_process.h"

// In static memory of a thread: the handler of signals may look at it.
static __attribute__((tls_model("initial-exec"))) thread_local bool umem_is_worker = false;
static struct {
  pthread_mutex_t lock;
  pthread_cond_t begun, ended;
  void (*run)(void*, int);
  void* of;
  int threads, next, parts, busy;  // of other threads, how many there are, and how many do something
} umem_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

static void umem_do_parts() {  // under the lock
  while (umem_pool.next < umem_pool.parts) {
    const int part = umem_pool.next++;
    pthread_mutex_unlock(&umem_pool.lock);
    umem_pool.run(umem_pool.of, part);
    pthread_mutex_lock(&umem_pool.lock);
  }
}
static void* umem_work(void*) {
  umem_is_worker = true;
  pthread_mutex_lock(&umem_pool.lock);
  for (;;) {
    while (umem_pool.next >= umem_pool.parts) pthread_cond_wait(&umem_pool.begun, &umem_pool.lock);
    umem_pool.busy++;
    umem_do_parts();
    if (!--umem_pool.busy) pthread_cond_signal(&umem_pool.ended);
  }
}
// A child has no thread but the one that forked.
static void umem_forget_threads() {
  umem_pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};
}
// Starts threads that are not there yet, as many as the system gives. They leave signals to those
// of the program, but for what a thread itself has done.
static void umem_start_threads(int wanted) {
  static const bool is_told [[maybe_unused]] = !pthread_atfork(nullptr, nullptr, umem_forget_threads);
  if (umem_pool.threads >= wanted) return;
  sigset_t others, before;
  sigfillset(&others);
  for (int number : {SIGFPE, SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&others, number);
  pthread_sigmask(SIG_BLOCK, &others, &before);
  for (pthread_t thread; umem_pool.threads < wanted; umem_pool.threads++) {
    if (pthread_create(&thread, nullptr, umem_work, nullptr)) break;
    pthread_detach(thread);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

static void umem_share_parts(UmemProcess* process, void (*run)(void*, int), void* of, int parts) {
  const int others = std::min(process->threads, parts) - 1;
  pthread_mutex_lock(&umem_pool.lock);
  umem_start_threads(others);
  umem_pool.run = run;
  umem_pool.of = of;
  umem_pool.next = 0;
  umem_pool.parts = parts;
  for (int i = 0; i < others; i++) pthread_cond_signal(&umem_pool.begun);
  umem_do_parts();
  while (umem_pool.busy) pthread_cond_wait(&umem_pool.ended, &umem_pool.lock);
  pthread_mutex_unlock(&umem_pool.lock);
}

// Copies elements of a size that lie a step apart, in bytes, side by side.
template <class T> static void umem_gather_as(char* __restrict to, const char* __restrict from, ptrdiff_t step, ptrdiff_t count) {
  T* const all = (T*)to;
  if (step == 0) std::fill(all, all + count, *(const T*)from);
  else for (ptrdiff_t i = 0; i < count; i++) all[i] = *(const T*)(from + i * step);
}
struct UmemSixteen { char bytes[16]; };
static void umem_gather(char* to, const char* from, ptrdiff_t step, size_t size, ptrdiff_t count) {
  switch (size) {
    case 1: return umem_gather_as<uint8_t>(to, from, step, count);
    case 2: return umem_gather_as<uint16_t>(to, from, step, count);
    case 4: return umem_gather_as<uint32_t>(to, from, step, count);
    case 8: return umem_gather_as<uint64_t>(to, from, step, count);
    case 16: return umem_gather_as<UmemSixteen>(to, from, step, count);
  }
  for (ptrdiff_t i = 0; i < count; i++) memcpy(to + i * size, from + i * step, size);
}
