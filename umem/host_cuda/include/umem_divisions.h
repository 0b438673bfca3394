// A handler of what x86 traps and a GPU does not: a division of integers by zero, and of the least
// by -1. Compiled once, and not into every kernel.
#pragma once
#include "umem_shared.h"

#if defined(__x86_64__)
// Goes on behind a division that trapped, with what a GPU gives: the least number divided by -1 is
// itself, and x / 0 has all bits set and x as its rest. NVIDIA's compiler divides numbers of 64 bits as
// ones of 32 where the high words of both are zero (PTX of NVRTC 12.9), so that x / 0 has 32 bits set then.
static void umem_divided(int number, siginfo_t* info, void* context) {
  greg_t* at = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)at[REG_RIP];
  const bool is_ours = umem_process->is_running && (umem_is_worker || pthread_equal(umem_process->thread, pthread_self())) && info->si_code == FPE_INTDIV;
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
  const unsigned long long quotient = is_least ? x : x >> 32 ? all : (unsigned int)all, rest = is_least ? 0 : x;
  const unsigned long long kept = bits == 32 ? 0 : ~(bits == 8 ? 0xffffull : all);
  at[REG_RAX] = (at[REG_RAX] & kept) | quotient | (bits == 8 ? rest << 8 : 0);
  if (bits > 8) at[REG_RDX] = (at[REG_RDX] & kept) | rest;
}
#endif

extern "C" void umem_handle(UmemProcess* process) {
  umem_process = process;
  process->share = umem_share_parts;
  process->gather = umem_gather;
#if defined(__x86_64__)
  struct sigaction action = {};
  action.sa_sigaction = umem_divided;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGFPE, &action, &process->before);
#endif
  process->is_handled = true;
}
