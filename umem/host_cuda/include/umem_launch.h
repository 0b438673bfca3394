// Runs a kernel over its grid, and says what memory its arguments lead to: included after it.
#pragma once

struct UmemRange { unsigned long long low, high; };  // of bytes; high 0: a whole allocation

template <class T> struct UmemReach {
  static UmemRange of(const T&) { return {0, 0}; }
};
template <class T> struct UmemReach<T*> {
  static UmemRange of(T* p) { return {(unsigned long long)p, 0}; }
};
#ifdef CUPY_FOR
template <class T, int n, bool c, bool i> struct UmemReach<CArray<T, n, c, i>> {
  static UmemRange of(const CArray<T, n, c, i>& a) {
    CArray<T, n, c, i>& array = const_cast<CArray<T, n, c, i>&>(a);
    long long low = (long long)&array[0], high = low + (long long)sizeof(T);
    if (!array.size()) return {0, 0};
    for (int d = 0; d < n; d++) {
      long long far = (array.shape()[d] - 1) * (long long)array.strides()[d];
      (far < 0 ? low : high) += far;
    }
    return {(unsigned long long)low, (unsigned long long)high};
  }
};
template <class T, bool i> struct UmemReach<CArray<T, 0, true, i>> {
  static UmemRange of(const CArray<T, 0, true, i>& a) {
    unsigned long long low = (unsigned long long)&const_cast<CArray<T, 0, true, i>&>(a)[0];
    return {low, low + sizeof(T)};
  }
};
#endif

template <class... A, size_t... I>
UMEM_UNSEEN void umem_call(void (*kernel)(A...), void** given, std::index_sequence<I...>) {
  kernel(*reinterpret_cast<std::remove_reference_t<A>*>(given[I])...);
}
template <class... A> UMEM_UNSEEN void umem_call(void (*kernel)(A...), void** given) {
  umem_call(kernel, given, std::index_sequence_for<A...>{});
}
template <class... A, size_t... I>
static int umem_reach(void (*)(A...), void** given, UmemRange* found, std::index_sequence<I...>) {
  UmemRange all[] = {UmemReach<std::decay_t<A>>::of(*reinterpret_cast<std::decay_t<A>*>(given[I]))..., UmemRange{0, 0}};
  for (size_t i = 0; i < sizeof...(A); i++) found[i] = all[i];
  return (int)sizeof...(A);
}
template <class... A> static int umem_reach(void (*kernel)(A...), void** given, UmemRange* found) {
  return umem_reach(kernel, given, found, std::index_sequence_for<A...>{});
}
// How many bytes of elements its arrays have in all, those that are repeated included.
template <class T> static size_t umem_bytes_of(const T&) { return 0; }
#ifdef CUPY_FOR
template <class T, int n, bool c, bool i> static size_t umem_bytes_of(const CArray<T, n, c, i>& array) {
  return array.size() * sizeof(T);
}
#endif
template <class... A, size_t... I>
static size_t umem_bytes(void (*)(A...), void** given, std::index_sequence<I...>) {
  return (umem_bytes_of(*reinterpret_cast<std::decay_t<A>*>(given[I])) + ... + 0);
}
template <class... A> static size_t umem_bytes(void (*kernel)(A...), void** given) {
  return umem_bytes(kernel, given, std::index_sequence_for<A...>{});
}
template <class... A> static int umem_sizes(void (*)(A...), unsigned int* found) {
  const unsigned int all[] = {(unsigned int)sizeof(std::decay_t<A>)..., 0};
  for (size_t i = 0; i < sizeof...(A); i++) found[i] = all[i];
  return (int)sizeof...(A);
}

static void (*umem_body)(void**);
static void** umem_given;
// Templates: a kernel whose threads do not wait for one another has no code of theirs.
template <class = void> UMEM_UNSEEN void umem_end() {
  umem_alive--;
  umem_fiber->at = 0;
  const unsigned int warp = umem_warp();
  umem_warp_alive[warp] &= ~(1u << umem_lane());
  if (umem_block_barrier.arrived && umem_block_barrier.arrived >= umem_alive)
    umem_release(umem_block_barrier);
  for (UmemBarrier& barrier : umem_warp_barriers[warp])
    if (barrier.arrived && barrier.arrived >= (unsigned int)__builtin_popcount(barrier.mask & umem_warp_alive[warp]))
      umem_release(barrier);
}
// A thread, in one block after another.
template <class = void> UMEM_UNSEEN void umem_begin() {
  for (umem_switch(umem_fiber->place, umem_scheduler);; umem_pass(umem_fiber->place)) {
    umem_body(umem_given);
    umem_end();
  }
}
// Has a thread begin, and stop at once: a call of its own, for all registers may have changed when it returns.
template <class = void> UMEM_UNSEEN __attribute__((noinline)) void umem_first(UmemFiber& fiber) {
  umem_fiber = &fiber;
  if (!__builtin_setjmp(umem_scheduler)) setcontext(&fiber.start);
  umem_fiber = nullptr;
}
template <class = void> UMEM_UNSEEN void umem_start(unsigned int count) {
  unsigned int t = 0;
  for (unsigned int z = 0; z < umem_block_size.z; z++)
    for (unsigned int y = 0; y < umem_block_size.y; y++)
      for (unsigned int x = 0; x < umem_block_size.x; x++, t++) {
        UmemFiber& fiber = reinterpret_cast<UmemFiber*>(umem_process->memory)[t];
        const UmemStack stack = umem_stack(t);
        fiber.index = {x, y, z};
        fiber.number = t;
        fiber.top = stack.start + stack.size;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = stack.start;
        fiber.start.uc_stack.ss_size = stack.size;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, umem_begin<>, 0);
        umem_first(fiber);
      }
}

template <class = void> UMEM_UNSEEN void umem_run_block(unsigned int count) {
  UmemFiber* const fibers = reinterpret_cast<UmemFiber*>(umem_process->memory);
  const unsigned int warps = (count + 31) / 32;
  umem_alive = count;
  umem_barriers++;
  umem_spun = 0;
  umem_block_barrier = UmemBarrier();
  for (unsigned int warp = 0; warp < warps; warp++) {
    for (UmemBarrier& barrier : umem_warp_barriers[warp]) barrier = UmemBarrier();
    umem_warp_alive[warp] = count - 32 * warp >= 32 ? ~0u : (1u << count % 32) - 1;
  }
  for (unsigned int t = 0; t < count; t++) {
    fibers[t].barrier = nullptr;
    fibers[t].at = 0;
    fibers[t].doubt.address = nullptr;
    fibers[t].steps = UmemSteps();
    fibers[t].steps.is_free = true;
    fibers[t].steps.low = ~0ull;
  }
  while (umem_alive)
    for (unsigned int warp = 0; warp < warps; warp++)
      if (umem_warp_alive[warp]) {
        umem_of_warp = fibers + 32 * warp;
        umem_going = umem_rounds = 0;  // a kernel that ended early has left some
        umem_pass(umem_scheduler);
      }
}

enum { UMEM_ONCE = 0, UMEM_APART = 1, UMEM_TOGETHER = 2, UMEM_SHARED = 3 };
enum { UMEM_PART_BYTES = 1 << 20 };  // of arrays, at least: waking a thread takes as long as a quarter of it

struct UmemJob { void (*body)(void**); void** given; int parts; };
template <class = void> static void umem_run_part(void* of, int part) {
  const UmemJob& job = *(const UmemJob*)of;
  umem_share = {part, job.parts};
  if (!_setjmp(umem_exit)) job.body(job.given);
  umem_share = {0, 1};
}
// Runs a kernel once, or parts of it on several cores where its arrays are large.
template <class = void> static void umem_run_shared(void (*body)(void**), void** given, size_t nbytes) {
  const size_t most = umem_process->threads > 1 ? std::min(4 * umem_process->threads, (int)UMEM_PARTS) : 1;
  UmemJob job = {body, given, (int)std::min(most, nbytes / UMEM_PART_BYTES)};
  if (job.parts < 2) return body(given);
  umem_process->share(umem_process, umem_run_part<>, &job, job.parts);
}

template <int how>
static void umem_launch(void (*body)(void**), size_t (*nbytes)(void**), void** given, const unsigned int* grid, const unsigned int* block, unsigned int shared) {
  static size_t room = 0;
  if (shared >= room) {
    free(umem_shared_memory);
    umem_shared_memory = static_cast<char*>(calloc(room = shared + 1, 1));
  }
  umem_shared_size = shared;
  umem_checks = umem_process->is_checked;
#ifdef UMEM_IN_STEP
  if (!umem_sites) dl_iterate_phdr(umem_find_code, nullptr);
#endif
  for (UmemDynamic* pointer = UmemDynamic::all(); pointer; pointer = pointer->next)
    *pointer->place = umem_dynamic(pointer->name);
  umem_block_index = umem_thread_index = {0, 0, 0};
  umem_grid_size = umem_block_size = {1, 1, 1};
  const UmemRunning running;
  if (_setjmp(umem_exit)) {
    umem_fiber = nullptr;
    return;
  }
  if constexpr (how == UMEM_ONCE) return body(given);
  if constexpr (how == UMEM_SHARED) return umem_run_shared(body, given, nbytes(given));
  umem_grid_size = {grid[0], grid[1], grid[2]};
  umem_block_size = {block[0], block[1], block[2]};
  const unsigned int count = block[0] * block[1] * block[2];
  if constexpr (how == UMEM_TOGETHER) {
    if (!umem_has_stacks(count, sizeof(UmemFiber))) return;
    umem_body = body;
    umem_given = given;
    umem_start(count);
  }
  for (unsigned int z = 0; z < grid[2]; z++)
    for (unsigned int y = 0; y < grid[1]; y++)
      for (unsigned int x = 0; x < grid[0]; x++) {
        umem_block_index = {x, y, z};
        if constexpr (how == UMEM_TOGETHER) {
          umem_run_block(count);
        } else {
          for (unsigned int k = 0; k < block[2]; k++)
            for (unsigned int j = 0; j < block[1]; j++)
              for (unsigned int i = 0; i < block[0]; i++) {
                umem_thread_index = {i, j, k};
                body(given);
              }
        }
      }
}

// The kernel comes last: a template's arguments have commas. One before it may have left a thread in
// the middle.
#define UMEM_KERNEL(label, how, ...)                                                              \
  UMEM_UNSEEN void umem_body_##label(void** given) { umem_call(__VA_ARGS__, given); }             \
  UMEM_UNSEEN size_t umem_bytes_##label(void** given) { return umem_bytes(__VA_ARGS__, given); }  \
  extern "C" UMEM_QUIET void umem_run_##label(void** given, const unsigned int* grid, const unsigned int* block, unsigned int shared) { \
    umem_fiber = nullptr;                                                                         \
    umem_launch<how>(umem_body_##label, umem_bytes_##label, given, grid, block, shared);                              \
  }                                                                                               \
  extern "C" UMEM_QUIET int umem_reach_##label(void** given, UmemRange* found) {                  \
    umem_fiber = nullptr;                                                                         \
    return umem_reach(__VA_ARGS__, given, found);                                                 \
  }                                                                                               \
  extern "C" UMEM_QUIET int umem_sizes_##label(unsigned int* found) {                             \
    umem_fiber = nullptr;                                                                         \
    return umem_sizes(__VA_ARGS__, found);                                                        \
  }
