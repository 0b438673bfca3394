// Constants on the host, by the names of CUDA's header of this name.
#pragma once
#include <cupy/math_constants.h>

#define CUDART_PI 3.14159265358979323846
#define CUDART_PIO2 (CUDART_PI / 2)
#define CUDART_PIO4 (CUDART_PI / 4)
#define CUDART_SQRT_TWO 1.41421356237309504880
#define CUDART_LN2 0.69314718055994530942
#define CUDART_L2E 1.44269504088896340736
#define CUDART_PI_F float(CUDART_PI)
#define CUDART_PIO2_F float(CUDART_PIO2)
#define CUDART_PIO4_F float(CUDART_PIO4)
#define CUDART_SQRT_TWO_F float(CUDART_SQRT_TWO)
#define CUDART_LN2_F float(CUDART_LN2)
#define CUDART_L2E_F float(CUDART_L2E)
