// What checked mode sees of a kernel's own code: included before the threads' functions.
#pragma once

// -- misaligned addresses ------------------------------------------------------------------------
// By -fsanitize=alignment, which knows each type's alignment, but no constant that is added to a
// pointer; and by the calls of -fsanitize=thread, which know the whole address, and the size.

enum { UMEM_MISALIGNED = 16 };
struct UmemMisaligned { size_t place, address; unsigned int alignment, is_write; };
extern "C" {
extern __attribute__((visibility("hidden"))) char __ehdr_start[];
unsigned int umem_misaligned_count = 0;  // which kernels.py reads, and sets to zero
UmemMisaligned umem_misaligned[UMEM_MISALIGNED];
}
// Keeps the first address of each place: checked_mode.py knows where arrays begin, which is what counts on a GPU.
UMEM_QUIET __attribute__((noinline, no_sanitize("alignment")))
static void umem_keep_misaligned(const void* code, size_t address, unsigned int alignment, bool is_write) {
  const size_t place = (const char*)code - __ehdr_start;
  for (unsigned int i = 0; i < umem_misaligned_count; i++)
    if (umem_misaligned[i].place == place) return;
  if (umem_misaligned_count < UMEM_MISALIGNED) umem_misaligned[umem_misaligned_count++] = {place, address, alignment, is_write};
}
// Before an access of so many bytes.
UMEM_QUIET __attribute__((no_sanitize("alignment")))
static inline void umem_see_address(const void* p, size_t size, bool is_write, const void* code) {
  const size_t alignment = size < 8 ? size : 8;  // a larger type may need no more
  if ((size_t)p & (alignment - 1)) umem_keep_misaligned(code, (size_t)p, alignment, is_write);
}
struct UmemAccess {  // of g++'s and clang's, one for each place in the code
  const char* file;
  unsigned int line, column;
  const void* type;
  unsigned char alignment, kind;  // a power of two; 0 reads and 1 writes: all others access nothing
};
extern "C" UMEM_QUIET __attribute__((used, noinline, visibility("hidden"), no_sanitize("alignment")))
void __ubsan_handle_type_mismatch_v1(const UmemAccess* access, size_t address) {
  if (access->kind < 2) umem_keep_misaligned(__builtin_return_address(0), address, 1u << access->alignment, access->kind);
}

// -- barriers of a block -------------------------------------------------------------------------

struct UmemSource { unsigned int number, line; };  // of a barrier, as it is written
