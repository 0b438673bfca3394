// Looks at all addresses of a kernel whose threads are not in step: what -fsanitize=thread calls.
#pragma once

#define UMEM_HOOK(section) extern "C" UMEM_QUIET __attribute__((used, noinline, visibility("hidden")))
#define UMEM_ACCESS(n)                                                                                     \
  UMEM_HOOK() void __tsan_read##n(void* p) { umem_see_address(p, n, false, __builtin_return_address(0)); } \
  UMEM_HOOK() void __tsan_write##n(void* p) { umem_see_address(p, n, true, __builtin_return_address(0)); }
UMEM_ACCESS(1) UMEM_ACCESS(2) UMEM_ACCESS(4) UMEM_ACCESS(8) UMEM_ACCESS(16)
#undef UMEM_ACCESS
UMEM_HOOK() void __tsan_read_range(void*, size_t) {}
UMEM_HOOK() void __tsan_write_range(void*, size_t) {}
UMEM_HOOK() void __tsan_init() {}
#include "umem_atomics.h"
