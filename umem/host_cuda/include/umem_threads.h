// Threads that wait for one another: fibers, of which one runs at a time, warp by warp.
#pragma once

struct UmemBarrier {
  unsigned int arrived = 0, generation = 0, mask = 0, votes = 0, voted = 0;
  unsigned long long first = ~0ull, from = 0;  // the least far place at which one waits, or waited
};
struct UmemSteps {  // of a thread that runs in step with its warp: umem_steps.h
  bool is_free;
  unsigned long long low, last;     // places in its code
  unsigned long long limits[2];     // where reads, and where atomics, are free no more
  const void* touched;
};
struct UmemTouch { unsigned int place, thread; };
struct UmemDoubt {  // an access that is a race, or not, as the thread goes on: umem_races.h
  const char* address;
  unsigned int size;
  int kind, other_kind;
  unsigned int place;
  UmemTouch other;
  char before[16];
};
struct UmemFiber {
  ucontext_t start;
  void* place[5];
  const char* top;      // of its stack
  uint3 index;
  unsigned int number;  // in its block
  const UmemBarrier* barrier;  // which it waits at, while that is of this generation
  unsigned int generation;
  unsigned long long at;  // where it has stopped for its warp: who is least far goes on first
  UmemSteps steps;
  UmemDoubt doubt;
};
static thread_local jmp_buf umem_exit;
static void* umem_scheduler[5];
UMEM_OF_THREADS static UmemFiber* umem_fiber = nullptr;
static UmemFiber* umem_of_warp = nullptr;  // the first thread of the warp that runs
static unsigned int umem_going = 0;  // threads of it that are yet to go on to where they stop next
static unsigned int umem_group = 0;  // and all that went on together
static unsigned int umem_rounds = 0, umem_spun = 0, umem_barriers = 0;
static unsigned int umem_alive = 0;  // threads of the block that have not ended
// A warp has a barrier for all its threads, and others for whoever waits with another mask.
enum { UMEM_WARPS = UMEM_THREADS / 32, UMEM_MASKS = 33 };
static UmemBarrier umem_block_barrier, umem_warp_barriers[UMEM_WARPS][UMEM_MASKS];
static unsigned int umem_warp_alive[UMEM_WARPS];
static unsigned long long umem_slots[UMEM_WARPS][32];
UMEM_OF_THREADS static bool umem_checks = false;  // races of it are errors
UMEM_OF_THREADS static char* umem_shared_memory = nullptr;  // of a size that the launch gives
static unsigned int umem_shared_size = 0;
static const char* umem_dynamic_name = "";

// A pointer to that memory at file scope, which each launch sets.
struct UmemDynamic {
  void** place;
  const char* name;
  UmemDynamic* next;
  static UmemDynamic*& all() {
    static UmemDynamic* first = nullptr;
    return first;
  }
  template <class T> UmemDynamic(T*& pointer, const char* name) : place((void**)&pointer), name(name), next(all()) {
    all() = this;
  }
};
// And in a kernel.
static inline char* umem_dynamic(const char* name) {
  umem_dynamic_name = name;
  return umem_shared_memory;
}

// Ends a kernel whose assertion failed: <assert.h> calls it, each time that it is included.
[[noreturn]] static void umem_assert_fail(const char* text, const char*, unsigned int, const char*) {
  snprintf(umem_process->message, sizeof umem_process->message,
           "block (%u, %u, %u), thread (%u, %u, %u): the assertion %s failed", blockIdx.x, blockIdx.y,
           blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z, text);
  _longjmp(umem_exit, 1);
}
#define __assert_fail umem_assert_fail

UMEM_UNSEEN void umem_jump(void** place) { __builtin_longjmp(place, 1); }
// Through a pointer, of which the compiler does not know what it leads to and changes.
static void (*volatile umem_jump_to)(void**) = umem_jump;
UMEM_UNSEEN __attribute__((noinline)) void umem_switch(void** from, void** to) {
  if (!__builtin_setjmp(from)) umem_jump_to(to);
}
UMEM_WITHIN bool umem_waits(const UmemFiber& fiber) {
  return fiber.barrier && fiber.barrier->generation == fiber.generation;
}
enum { UMEM_SPUN = 1 << 15 };  // accesses in which nothing changes: after these, threads wait for others
// The threads of the warp that go on next: those of whom none is further back in the code.
UMEM_UNSEEN unsigned int umem_next_group(unsigned int alive) {
  const bool spin = umem_spun > UMEM_SPUN;
  if (spin && umem_rounds++) return 0;  // another warp's turn
  unsigned long long least = ~0ull;
  unsigned int found = 0;
  for (; alive; alive &= alive - 1) {
    const unsigned int lane = __builtin_ctz(alive);
    const UmemFiber& fiber = umem_of_warp[lane];
    if (umem_waits(fiber) || (fiber.at > least && !spin)) continue;
    if (fiber.at < least && !spin) found = 0, least = fiber.at;
    found |= 1u << lane;
  }
  return found;
}
#ifdef UMEM_IN_STEP
enum { UMEM_READ, UMEM_ATOMIC, UMEM_WRITE };
static void umem_settle(UmemFiber& fiber, const void* next_atomic);
#endif
// Leaves the thread, or the scheduler, that runs: the next one of the warp goes on, where one can.
UMEM_UNSEEN void umem_pass(void** from) {
#ifdef UMEM_IN_STEP
  if (umem_fiber && umem_fiber->doubt.address && (umem_fiber->doubt.kind == UMEM_WRITE || !umem_fiber->at))
    umem_settle(*umem_fiber, nullptr);
#endif
  void** to = umem_scheduler;
  umem_fiber = nullptr;
  if (!umem_going) umem_going = umem_group = umem_next_group(umem_warp_alive[umem_of_warp->number / 32]);
  if (umem_going) {
    umem_fiber = umem_of_warp + __builtin_ctz(umem_going);
    umem_going &= umem_going - 1;
    umem_thread_index = umem_fiber->index;
    to = umem_fiber->place;
  }
  if (to != from) umem_switch(from, to);
}
UMEM_UNSEEN void umem_release(UmemBarrier& barrier) {
  barrier.arrived = 0;
  barrier.generation++;
  barrier.voted = barrier.votes;
  barrier.votes = 0;
  barrier.from = barrier.first;
  barrier.first = ~0ull;
  umem_spun = 0;
  umem_barriers += &barrier == &umem_block_barrier;
}
UMEM_UNSEEN void umem_wait(UmemBarrier& barrier, unsigned int wanted) {
  if (++barrier.arrived >= wanted) return umem_release(barrier);
  umem_fiber->barrier = &barrier;
  umem_fiber->generation = barrier.generation;
  umem_fiber->at = 0;
  umem_pass(umem_fiber->place);
}
#ifdef UMEM_IN_STEP
static void umem_wait_together(UmemBarrier&, unsigned int, const void*, const void*);
#define UMEM_WAIT(barrier, wanted) \
  umem_wait_together(barrier, wanted, __builtin_return_address(0), __builtin_frame_address(0))
#else
#define UMEM_WAIT(barrier, wanted) umem_wait(barrier, wanted)
#endif
UMEM_UNSEEN void __syncthreads() {
  if (umem_fiber) UMEM_WAIT(umem_block_barrier, umem_alive);
}
#ifdef UMEM_CHECKED
static struct { UmemSource at; uint3 thread; } umem_first_there;  // of the threads at the block's barrier
UMEM_UNSEEN void umem_come_to(UmemSource at) {
  if (!umem_fiber) return;
  if (!umem_block_barrier.arrived) umem_first_there = {at, umem_fiber->index};
  if (umem_first_there.at.number == at.number) return;
  const uint3 me = umem_fiber->index, other = umem_first_there.thread;
  snprintf(umem_process->message, sizeof umem_process->message,
           "block (%u, %u, %u): thread (%u, %u, %u) waits at the barrier in line %u, and thread (%u, %u, %u) at another "
           "one, in line %u<hint>",
           blockIdx.x, blockIdx.y, blockIdx.z, other.x, other.y, other.z, umem_first_there.at.line, me.x, me.y, me.z, at.line);
  _longjmp(umem_exit, 1);
}
UMEM_UNSEEN void __syncthreads(UmemSource at) {
  umem_come_to(at);
  if (umem_fiber) UMEM_WAIT(umem_block_barrier, umem_alive);
}
#endif
UMEM_UNSEEN int __syncthreads_count(int predicate) {
  if (!umem_fiber) return predicate != 0;
  umem_block_barrier.votes += predicate != 0;
  __syncthreads();
  return umem_block_barrier.voted;  // the next release waits for this thread
}
static inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) != 0; }
static inline int __syncthreads_and(int predicate) { return __syncthreads_count(!predicate) == 0; }
#ifdef UMEM_CHECKED  // each with its number and line, which a macro alone knows
#define UMEM_VOTE(name) \
  static inline int name(int predicate, UmemSource at) { return umem_come_to(at), name(predicate); }
UMEM_VOTE(__syncthreads_count) UMEM_VOTE(__syncthreads_or) UMEM_VOTE(__syncthreads_and)
#undef UMEM_VOTE
#define __syncthreads() __syncthreads(UmemSource{__COUNTER__, __LINE__})
#define __syncthreads_count(...) __syncthreads_count((__VA_ARGS__), UmemSource{__COUNTER__, __LINE__})
#define __syncthreads_or(...) __syncthreads_or((__VA_ARGS__), UmemSource{__COUNTER__, __LINE__})
#define __syncthreads_and(...) __syncthreads_and((__VA_ARGS__), UmemSource{__COUNTER__, __LINE__})
#endif

UMEM_WITHIN unsigned int umem_lane() { return umem_fiber ? umem_fiber->number % 32 : 0; }
UMEM_WITHIN unsigned int umem_warp() { return umem_fiber ? umem_fiber->number / 32 : 0; }
UMEM_UNSEEN UmemBarrier& umem_warp_barrier(unsigned int warp, unsigned int mask) {
  UmemBarrier *all = umem_warp_barriers[warp], *free = nullptr;
  if (mask == 0xffffffffu) {
    all->mask = mask;
    return *all;
  }
  for (UmemBarrier* barrier = all + 1; barrier < all + UMEM_MASKS; barrier++) {
    if (barrier->arrived && barrier->mask == mask) return *barrier;
    if (!barrier->arrived && !free) free = barrier;
  }
  free->mask = mask;  // fewer than 32 other threads wait
  return *free;
}
UMEM_UNSEEN void __syncwarp(unsigned int mask = 0xffffffffu) {
  if (!umem_fiber) return;
  const unsigned int warp = umem_warp();
  UmemBarrier& barrier = umem_warp_barrier(warp, mask);
  const unsigned int wanted = __builtin_popcount(mask & umem_warp_alive[warp]);
  mask == 0xffffffffu ? UMEM_WAIT(barrier, wanted) : umem_wait(barrier, wanted);
}
// The threads of a warp that have come to this place once none of them can go on without it.
UMEM_UNSEEN unsigned int umem_active_mask(const char* site) {
  if (!umem_fiber) return 1;
#ifdef UMEM_IN_STEP
  site = (const char*)__builtin_return_address(0);
#endif
  umem_fiber->at = (unsigned long long)site;
  umem_pass(umem_fiber->place);
  return umem_group;
}
#define __activemask() umem_active_mask([] { static const char site = 0; return &site; }())
