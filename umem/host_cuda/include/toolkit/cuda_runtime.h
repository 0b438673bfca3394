// What a kernel may use of CUDA's header of this name beside what is there without it.
#include "driver_types.h"
