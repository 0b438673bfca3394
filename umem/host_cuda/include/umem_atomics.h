// The atomics of C++, which <cuda/std/atomic> uses: g++ calls these where it looks for races.
#pragma once

#define UMEM_CPP_ATOMIC(T, name, result, parameters, ...)                                                 \
  UMEM_HOOK("umem_changing") result __tsan_atomic##name parameters {                                      \
    UMEM_CHANGES((const void*)p, sizeof(T));                                                              \
    const T old = *p;                                                                                     \
    __VA_ARGS__;                                                                                          \
  }
#define UMEM_CPP_FETCH(T, bits, name, op) \
  UMEM_CPP_ATOMIC(T, bits##_fetch_##name, T, (volatile T* p, T value, int), *p = old op value; umem_spun = 0; return old)
#define UMEM_CPP_SWAP_IF(T, bits, name)                                                                   \
  UMEM_CPP_ATOMIC(T, bits##_compare_exchange_##name, int, (volatile T* p, T* wanted, T value, int, int),  \
                  if (old == *wanted) return *p = value, umem_spun = 0, 1; *wanted = old; return 0)
#define UMEM_CPP_ATOMICS(T, bits)                                                                         \
  UMEM_CPP_ATOMIC(T, bits##_load, T, (const volatile T* p, int), return old)                              \
  UMEM_CPP_ATOMIC(T, bits##_store, void, (volatile T* p, T value, int), (void)old; *p = value; umem_spun = 0)  \
  UMEM_CPP_ATOMIC(T, bits##_exchange, T, (volatile T* p, T value, int), *p = value; umem_spun = 0; return old) \
  UMEM_CPP_FETCH(T, bits, add, +) UMEM_CPP_FETCH(T, bits, sub, -) UMEM_CPP_FETCH(T, bits, and, &)         \
  UMEM_CPP_FETCH(T, bits, or, |) UMEM_CPP_FETCH(T, bits, xor, ^)                                          \
  UMEM_CPP_SWAP_IF(T, bits, strong) UMEM_CPP_SWAP_IF(T, bits, weak)
UMEM_CPP_ATOMICS(unsigned char, 8) UMEM_CPP_ATOMICS(unsigned short, 16)
UMEM_CPP_ATOMICS(unsigned int, 32) UMEM_CPP_ATOMICS(unsigned long long, 64)
UMEM_HOOK("umem_turns") void __tsan_atomic_thread_fence(int) {}
UMEM_HOOK("umem_turns") void __tsan_atomic_signal_fence(int) {}
