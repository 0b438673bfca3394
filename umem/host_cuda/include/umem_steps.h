// Threads of a warp in step, for kernels with shared memory or volatile accesses. g++ is told to
// look for races: it then calls a function before each access to memory, and another where code
// branches to. They are here, and not those of its own library.
//
// A place in a kernel is the address of a call, behind how much of the stack is in use. A thread
// stops at a place, and of a warp's threads those go on that are at the least place: in the
// innermost function and furthest back in it. So they meet again behind a branch, and whoever has
// gone round a loop waits at its end for those that are still inside.
//
// Behind a barrier, reads and atomics go on without a stop ("freely") as long as no access between
// the barrier and them can change what they find: reads and reads have any order, and so have
// atomics and atomics.
#pragma once
#include <link.h>

typedef unsigned long long UmemPlace;

// -- what the linker tells ---------------------------------------------------------------------

#define UMEM_HIDDEN __attribute__((visibility("hidden")))
extern "C" {
extern UMEM_HIDDEN char __ehdr_start[], __bss_start[], _end[];
extern UMEM_HIDDEN char __start_umem_reading[], __stop_umem_reading[], __start_umem_writing[],
    __stop_umem_writing[], __start_umem_changing[] __attribute__((weak)), __stop_umem_changing[] __attribute__((weak));
}
UMEM_WITHIN bool umem_is_shared(const void* p) {
  return (size_t)((const char*)p - __bss_start) < (size_t)(_end - __bss_start) ||
         (size_t)((const char*)p - umem_shared_memory) < umem_shared_size;
}
// Whether memory that is not shared is in step, too: all that is not on the thread's own stack.
UMEM_WITHIN bool umem_is_in_step(const UmemFiber& fiber, const void* p) {
#ifdef UMEM_STEPS_IN_ALL_MEMORY
  return (size_t)(fiber.top - (const char*)p) > UMEM_STACK;
#else
  return false;
#endif
}

// -- where a kernel accesses memory ------------------------------------------------------------

struct UmemSite { unsigned int place; int kind; };
static UmemSite* umem_sites = nullptr;  // by place
static size_t umem_site_count = 0;
enum { UMEM_ELSEWHERE = 1, UMEM_IN_STEPS = 2 };
static unsigned char* umem_seen = nullptr;  // for each place, whether it was seen to access which memory

UMEM_UNSEEN void umem_add_site(const char* call, const char* target) {
  int kind = -1;
  if (target >= __start_umem_reading && target < __stop_umem_reading) kind = UMEM_READ;
  if (target >= __start_umem_writing && target < __stop_umem_writing) kind = UMEM_WRITE;
  if (target >= __start_umem_changing && target < __stop_umem_changing) kind = UMEM_ATOMIC;
  if (kind < 0) return;
  if (!(umem_site_count & (umem_site_count - 1)))  // full, at a power of two
    umem_sites = (UmemSite*)realloc(umem_sites, (umem_site_count ? 2 * umem_site_count : 1) * sizeof(UmemSite));
  umem_sites[umem_site_count++] = {(unsigned int)(call - __ehdr_start), kind};
}
// Reads the calls in machine code. What only looks like one costs a stop more.
UMEM_UNSEEN void umem_find_sites(const char* code, const char* stop) {
#if defined(__x86_64__)
  for (; code + 5 <= stop; code++) {
    int offset;
    memcpy(&offset, code + 1, 4);
    if (*(const unsigned char*)code == 0xe8) umem_add_site(code + 5, code + 5 + offset);
  }
#elif defined(__aarch64__)
  for (; code + 4 <= stop; code += 4) {
    unsigned int word;
    memcpy(&word, code, 4);
    if (word >> 26 == 0x25) umem_add_site(code + 4, code + (long long)((int)(word << 6) >> 6) * 4);
  }
#else
#error "on this processor the threads of a warp cannot run in step"
#endif
}
UMEM_UNSEEN int umem_find_code(dl_phdr_info* found, size_t, void*) {
  for (int i = 0; i < found->dlpi_phnum; i++) {
    const auto& part = found->dlpi_phdr[i];
    const char* start = (const char*)found->dlpi_addr + part.p_vaddr;
    const bool is_ours = (char*)found->dlpi_addr == __ehdr_start;
    if (is_ours && part.p_type == PT_LOAD && (part.p_flags & PF_X)) {
      umem_find_sites(start, start + part.p_memsz);
      umem_seen = (unsigned char*)calloc(part.p_vaddr + part.p_memsz + 1, 1);
    }
  }
  return 0;
}
// The number of the first site at a place or behind it.
UMEM_UNSEEN size_t umem_site(unsigned int place) {
  size_t low = 0, high = umem_site_count;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    (umem_sites[middle].place < place ? low : high) = umem_sites[middle].place < place ? middle + 1 : middle;
  }
  return low;
}
// The first place from here at which an access may be one to shared memory that has to keep its
// order with this kind.
UMEM_UNSEEN UmemPlace umem_limit(UmemPlace from, int kind) {
  for (size_t i = umem_site((unsigned int)from); i < umem_site_count; i++)
    if (umem_sites[i].kind != kind && umem_seen[umem_sites[i].place] != UMEM_ELSEWHERE) return (from >> 32 << 32) + umem_sites[i].place;
  return from | 0xffffffffu;
}
// Whether a part of the code writes to shared memory, or both reads and has atomics.
UMEM_UNSEEN bool umem_is_mixed(UmemPlace from, UmemPlace last) {
  unsigned int kinds = 0;
  for (size_t i = umem_site((unsigned int)from); i < umem_site_count && umem_sites[i].place <= (unsigned int)last; i++)
    if (umem_seen[umem_sites[i].place] != UMEM_ELSEWHERE) kinds |= 1u << umem_sites[i].kind;
  return kinds & 1u << UMEM_WRITE || kinds == (1u << UMEM_READ | 1u << UMEM_ATOMIC);
}

// -- steps -------------------------------------------------------------------------------------

UMEM_WITHIN UmemPlace umem_place(const UmemFiber& fiber, const void* code, const void* frame) {
  const size_t used = fiber.top - (const char*)frame;
  return (UmemPlace)(UMEM_STACK - used) << 32 | (unsigned int)((const char*)code - __ehdr_start);
}
// Whether a thread is free, in the function in which it was at the barrier.
UMEM_WITHIN bool umem_is_free(const UmemSteps& steps, UmemPlace place) {
  return steps.is_free && steps.low >> 32 == place >> 32;
}
UMEM_UNSEEN void umem_free_from(UmemSteps& steps, UmemPlace place) {
  steps.is_free = true;
  steps.low = steps.last = place;
  steps.limits[UMEM_READ] = umem_limit(place, UMEM_READ);
  steps.limits[UMEM_ATOMIC] = umem_limit(place, UMEM_ATOMIC);
}
UMEM_UNSEEN void umem_stop(UmemFiber& fiber, UmemPlace place) {
  UmemSteps& steps = fiber.steps;
  steps.is_free = false;
  fiber.at = steps.last = place;
  umem_pass(fiber.place);
}
// Goes back in the code, to the head of a loop: freely, if others can be in nothing behind it that
// keeps its order with what is before it.
UMEM_UNSEEN void umem_turn(UmemFiber& fiber, UmemPlace place) {
  UmemSteps& steps = fiber.steps;
  const bool is_clean[] = {steps.last < steps.limits[UMEM_READ], steps.last < steps.limits[UMEM_ATOMIC]};
  if (!is_clean[UMEM_READ] && !is_clean[UMEM_ATOMIC] && (place < steps.low || umem_is_mixed(place, steps.last)))
    return umem_stop(fiber, steps.last + 1);
  if (place >= steps.low) return;
  umem_free_from(steps, place);
  for (int kind = UMEM_READ; kind <= UMEM_ATOMIC; kind++)
    if (!is_clean[kind]) steps.limits[kind] = 0;
}
UMEM_UNSEEN void umem_wait_together(UmemBarrier& barrier, unsigned int wanted, const void* code, const void* frame) {
  UmemFiber& fiber = *umem_fiber;
  const UmemPlace place = umem_place(fiber, code, frame);
  if (place < barrier.first) barrier.first = place;
  umem_wait(barrier, wanted);
  umem_free_from(fiber.steps, barrier.from);
}
// Before an access to shared memory, a volatile one or an atomic that is not free.
UMEM_UNSEEN void umem_step(UmemFiber& fiber, const void* p, int kind, UmemPlace place) {
  UmemSteps& steps = fiber.steps;
  const bool is_free = umem_is_free(steps, place);
  umem_spun = kind != UMEM_WRITE && p == steps.touched ? umem_spun + 1 : 0;
  steps.touched = p;
  if (is_free && kind != UMEM_WRITE && place < steps.limits[kind] && umem_spun <= UMEM_SPUN) {
    steps.last = place;
    return;
  }
  umem_stop(fiber, place);
}
// The first access to other memory at a place: it is no limit any more.
UMEM_UNSEEN void umem_elsewhere(UmemSteps& steps, UmemPlace place) {
  umem_seen[(unsigned int)place] = UMEM_ELSEWHERE;
  for (int kind = UMEM_READ; kind <= UMEM_ATOMIC; kind++)
    if (steps.limits[kind] == place) steps.limits[kind] = umem_limit(place, kind);
}
#include "umem_races.h"

#define UMEM_HOOK(section_) \
  extern "C" UMEM_QUIET UMEM_HIDDEN __attribute__((used, noinline, section(section_)))

// An access, in the order in which it is likely to be done with.
UMEM_WITHIN void umem_touch(const void* p, size_t size, int kind, bool is_volatile, const void* code, const void* frame) {
#ifdef UMEM_CHECKED
  umem_see_address(p, size, kind == UMEM_WRITE, code);
#endif
  UmemFiber* const fiber = umem_fiber;
  if (!fiber) return;
  UmemSteps& steps = fiber->steps;
  const UmemPlace place = umem_place(*fiber, code, frame);
  const bool is_shared = umem_is_shared(p);
  if (!is_shared && !is_volatile && !umem_is_in_step(*fiber, p)) {
    if (!umem_seen[(unsigned int)place]) umem_elsewhere(steps, place);
    return;
  }
  umem_seen[(unsigned int)place] = UMEM_IN_STEPS;
  if (!umem_checks && kind == UMEM_READ && p != steps.touched && place < steps.limits[kind] && umem_is_free(steps, place)) {
    steps.touched = p;
    steps.last = place;
    return;
  }
  if (umem_checks && is_shared && fiber->doubt.address) umem_settle(*fiber, nullptr);
  umem_step(*fiber, p, kind, place);
  if (umem_checks && is_shared) umem_see(*fiber, p, size, kind, place);
}
UMEM_HOOK("umem_turns") void __sanitizer_cov_trace_pc() {
  UmemFiber* const fiber = umem_fiber;
  if (!fiber) return;
  UmemSteps& steps = fiber->steps;
  const UmemPlace place = umem_place(*fiber, __builtin_return_address(0), __builtin_frame_address(0));
  if (steps.low == ~0ull)
    umem_free_from(steps, place);
  else if (place <= steps.last)
    umem_is_free(steps, place) ? umem_turn(*fiber, place) : umem_stop(*fiber, steps.last + 1);
  steps.last = place;
}
#define UMEM_ACCESS(name, section, size, kind, is_volatile)                                               \
  UMEM_HOOK(section) void __tsan_##name(void* p) {                                                         \
    umem_touch(p, size, kind, is_volatile, __builtin_return_address(0), __builtin_frame_address(0));       \
  }
#define UMEM_ACCESSES(n)                                                                                  \
  UMEM_ACCESS(read##n, "umem_reading", n, UMEM_READ, false)                                                \
  UMEM_ACCESS(write##n, "umem_writing", n, UMEM_WRITE, false)                                              \
  UMEM_ACCESS(volatile_read##n, "umem_reading", n, UMEM_READ, true)                                        \
  UMEM_ACCESS(volatile_write##n, "umem_writing", n, UMEM_WRITE, true)
UMEM_ACCESSES(1) UMEM_ACCESSES(2) UMEM_ACCESSES(4) UMEM_ACCESSES(8) UMEM_ACCESSES(16)
#undef UMEM_ACCESSES
#undef UMEM_ACCESS
UMEM_HOOK("umem_reading") void __tsan_read_range(void* p, size_t size) {
  umem_touch(p, size, UMEM_READ, false, __builtin_return_address(0), __builtin_frame_address(0));
}
UMEM_HOOK("umem_writing") void __tsan_write_range(void* p, size_t size) {
  umem_touch(p, size, UMEM_WRITE, false, __builtin_return_address(0), __builtin_frame_address(0));
}
UMEM_HOOK("umem_turns") void __tsan_init() {}

// An atomic stops wherever it leads to: a lock may be in any memory.
UMEM_UNSEEN void umem_change(const void* p, size_t size, const void* code, const void* frame) {
  UmemFiber* const fiber = umem_fiber;
  if (!fiber) return;
  const UmemPlace place = umem_place(*fiber, code, frame);
  if (umem_checks && fiber->doubt.address) umem_settle(*fiber, p);
  umem_step(*fiber, p, UMEM_ATOMIC, place);
  if (umem_checks && umem_is_shared(p)) umem_see(*fiber, p, size, UMEM_ATOMIC, place);
}
#define UMEM_CHANGES(p, size) umem_change(p, size, __builtin_return_address(0), __builtin_frame_address(0))
#define UMEM_CHANGED(is_changed) \
  if (is_changed) umem_spun = 0

#include "umem_atomics.h"
