// Races of shared memory, which checked mode reports: accesses of two warps to one byte, of which
// one writes and not both are atomic, with no barrier of the block between them. Threads of a warp
// are in step. Writes of what is there already, and the read before an atomic of the same thread to
// the same place, as in loops of atomicCAS, are none.
#pragma once

struct UmemTouched {  // by whom a byte was, since a barrier: for each kind of access threads of two warps
  unsigned int barriers;
  UmemTouch by[3][2];
};
static UmemTouched* umem_touched = nullptr;
static size_t umem_touched_size = 0;

UMEM_WITHIN UmemFiber& umem_fiber_of(unsigned int number) {
  return reinterpret_cast<UmemFiber*>(umem_process->memory)[number];
}
// Where a byte of shared memory is among all: those of variables, then those of the launch.
UMEM_WITHIN size_t umem_number_of(const char* p) {
  const size_t variables = _end - __bss_start, number = p - __bss_start;
  return number < variables ? number : variables + (p - umem_shared_memory);
}
// kernels.py writes names for what is in <>.
[[noreturn]] UMEM_UNSEEN void umem_report(const UmemFiber& fiber, const UmemDoubt& doubt) {
  static const char* const verbs[] = {"reads", "changes", "writes"};
  const uint3 me = fiber.index, other = umem_fiber_of(doubt.other.thread).index;
  const size_t number = umem_number_of(doubt.address), variables = _end - __bss_start;
  char name[64];
  if (number < variables)
    snprintf(name, sizeof name, "<variable %zx>", (size_t)(doubt.address - __ehdr_start));
  else
    snprintf(name, sizeof name, "byte %zu of %s", number - variables, umem_dynamic_name);
  snprintf(umem_process->message, sizeof umem_process->message,
           "block (%u, %u, %u): thread (%u, %u, %u) %s %s in <line %x>, which thread (%u, %u, %u) %s in <line %x>, "
           "and no barrier is between them",
           blockIdx.x, blockIdx.y, blockIdx.z, me.x, me.y, me.z, verbs[doubt.kind], name, doubt.place - 1,
           other.x, other.y, other.z, verbs[doubt.other_kind], doubt.other.place - 1);
  _longjmp(umem_exit, 1);
}
// Tells what became of an access in doubt, before the thread's next one.
UMEM_UNSEEN void umem_settle(UmemFiber& fiber, const void* next_atomic) {
  const UmemDoubt doubt = fiber.doubt;
  fiber.doubt.address = nullptr;
  const bool is_of_swap = doubt.kind == UMEM_READ && next_atomic == doubt.address;
  const bool is_same = doubt.kind == UMEM_WRITE && !memcmp(doubt.address, doubt.before, doubt.size);
  if (!is_of_swap && !is_same) umem_report(fiber, doubt);
}
UMEM_UNSEEN void umem_see_byte(UmemFiber& fiber, const char* p, unsigned int size, int kind, unsigned int place) {
  UmemTouched& byte = umem_touched[umem_number_of(p)];
  const unsigned int warp = fiber.number / 32;
  if (byte.barriers != umem_barriers) byte = UmemTouched{umem_barriers, {}};
  for (int other = UMEM_READ; other <= UMEM_WRITE; other++)
    for (UmemTouch& touch : byte.by[other]) {
      if (kind == UMEM_ATOMIC && other == UMEM_READ && touch.thread == fiber.number) touch.place = 0;
      if (!touch.place || touch.thread / 32 == warp || (kind == other && kind != UMEM_WRITE)) continue;
      UmemDoubt doubt{p, size, kind, other, place, touch, {}};
      const bool may_be_same = kind == UMEM_WRITE && other == UMEM_WRITE && size <= sizeof doubt.before;
      if (!may_be_same && !(kind == UMEM_READ && other == UMEM_ATOMIC)) umem_report(fiber, doubt);
      if (may_be_same) memcpy(doubt.before, p, size);
      fiber.doubt = doubt;
    }
  UmemTouch* const mine = byte.by[kind];
  mine[mine->place && mine->thread / 32 != warp] = {place, fiber.number};
}
UMEM_UNSEEN void umem_see(UmemFiber& fiber, const void* p, size_t size, int kind, UmemPlace place) {
  const size_t wanted = (size_t)(_end - __bss_start) + umem_shared_size;
  if (wanted > umem_touched_size) {
    free(umem_touched);
    umem_touched = (UmemTouched*)calloc(umem_touched_size = wanted, sizeof(UmemTouched));
  }
  for (size_t i = 0; i < size && !fiber.doubt.address; i++)
    umem_see_byte(fiber, (const char*)p + i, size - i, kind, (unsigned int)place);
}
