/* The functions of libcuda.so.1 that cuda.core calls; umem/host_cuda/libcuda.py answers. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <dlfcn.h>
typedef struct { int type; int id; } Location;
int (*umem_advise)(uint64_t, size_t, int, int, int);
int (*umem_prefetch)(uint64_t, size_t, int, int, uint64_t);
int (*umem_batch)(uint64_t *, size_t *, Location *, size_t, uint64_t, int);
int (*umem_range)(void *, size_t, int, uint64_t, size_t);
int (*umem_pointer)(void *, int, uint64_t);
int (*umem_device)(void *, int, int);
int (*umem_wait)(void *);
int (*umem_context)(int, uint64_t);
int umem_count;
/* Each device has one context: its number and 16, which is no null pointer. */
static void *context(int device) { return (void *)(uint64_t)(16 + device); }
static Location place(int device) { Location l = {device == -1 ? 2 : 1, device == -1 ? 0 : device}; return l; }
int umem_version = VERSION;
int umem_not_supported(void) { return 801; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = umem_version; return 0; }
int cuDeviceGetCount(int *n) { *n = umem_count; return 0; }
int cuDeviceGet(int *d, int ordinal) { if (ordinal < 0 || ordinal >= umem_count) return 101; *d = ordinal; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "simulated", n); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { return umem_device(v, a, d); }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = context(d); return 0; }
int cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
int cuCtxGetCurrent(void **c) { *c = context(umem_context(0, 0)); return 0; }
int cuCtxSetCurrent(void *c) { if (c) umem_context(1, (uint64_t)c - 16); return 0; }
int cuCtxGetDevice(int *d) { *d = umem_context(0, 0); return 0; }
int cuStreamGetCtx(void *s, void **c) { *c = context(umem_context(2, (uint64_t)s)); return 0; }
int cuStreamSynchronize(void *s) { return umem_wait(s); }
static const struct { int status; const char *name, *text; } errors[] = {
  {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
  {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
  {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
  {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
  {301, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
  {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
  {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
  {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
  {801, "CUDA_ERROR_NOT_SUPPORTED", "the software GPU has no such function"},
  {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
  {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
  {906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would make the legacy stream depend on a capturing blocking stream"},
};
static int about(int status) {
  int i = sizeof errors / sizeof *errors;
  while (i-- > 0 && errors[i].status != status) ;
  return i;
}
int cuGetErrorName(int r, const char **s) { int i = about(r); *s = i < 0 ? "CUDA_ERROR_UNKNOWN" : errors[i].name; return 0; }
int cuGetErrorString(int r, const char **s) { int i = about(r); *s = i < 0 ? "unknown error" : errors[i].text; return 0; }
int cuPointerGetAttribute(void *out, int a, uint64_t p) { return umem_pointer(out, a, p); }
int cuPointerGetAttributes(unsigned n, int *a, void **out, uint64_t p) {
  for (unsigned i = 0; i < n; i++) umem_pointer(out[i], a[i], p);
  return 0;
}
int cuMemAdvise_v2(uint64_t p, size_t n, int a, Location l) { return umem_advise(p, n, a, l.type, l.id); }
int cuMemAdvise(uint64_t p, size_t n, int a, int d) { return cuMemAdvise_v2(p, n, a, place(d)); }
int cuMemPrefetchAsync_v2(uint64_t p, size_t n, Location l, unsigned f, void *s) { return umem_prefetch(p, n, l.type, l.id, (uint64_t)s); }
int cuMemPrefetchAsync(uint64_t p, size_t n, int d, void *s) { return cuMemPrefetchAsync_v2(p, n, place(d), 0, s); }
int cuMemDiscardBatchAsync(uint64_t *p, size_t *sizes, size_t n, unsigned long long flags, void *s) {
  return flags ? 1 : umem_batch(p, sizes, 0, n, (uint64_t)s, 1);
}
static int batch(uint64_t *p, size_t *sizes, size_t n, Location *places, size_t *first, size_t count,
                 unsigned long long flags, void *s, int discards) {
  size_t i, at = 0;
  if (flags || !n || !count || count > n || first[0]) return 1;
  for (i = 1; i < count; i++) if (first[i] <= first[i - 1] || first[i] >= n) return 1;
  Location *each = malloc(n * sizeof *each);
  if (!each) return 2;
  for (i = 0; i < n; i++) {
    if (at + 1 < count && i == first[at + 1]) at++;
    each[i] = places[at];
  }
  int status = umem_batch(p, sizes, each, n, (uint64_t)s, discards);
  free(each);
  return status;
}
int cuMemPrefetchBatchAsync(uint64_t *p, size_t *sizes, size_t n, Location *places, size_t *first, size_t count, unsigned long long flags, void *s) {
  return batch(p, sizes, n, places, first, count, flags, s, 0);
}
int cuMemDiscardAndPrefetchBatchAsync(uint64_t *p, size_t *sizes, size_t n, Location *places, size_t *first, size_t count, unsigned long long flags, void *s) {
  return batch(p, sizes, n, places, first, count, flags, s, 1);
}
int cuMemRangeGetAttribute(void *out, size_t size, int a, uint64_t p, size_t n) { return umem_range(out, size, a, p, n); }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status) {
  static void *self;
  char text[256];
  if (!self) { Dl_info info; dladdr((void *)cuInit, &info); self = dlopen(info.dli_fname, RTLD_NOW); }
  /* What came with CUDA 13: a driver has it from then on, for who asks for that CUDA or a newer one. */
  if (version > umem_version) return 1;
  if (strstr(name, "Batch") && version < 13000) { *found = 0; if (status) *status = 2; return 0; }
  strncpy(text, name, 250);
  strcat(text, "_v2");
  /* CUDA 11's runtime gives four arguments, and expects a function of four. */
  *found = version >= (strcmp(name, "cuGetProcAddress") ? 12020 : 12000) ? dlsym(self, text) : 0;
  if (!*found) *found = dlsym(self, name);
  if (!*found) *found = (void *)umem_not_supported;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **found, int version, uint64_t flags) { return cuGetProcAddress_v2(name, found, version, flags, 0); }
