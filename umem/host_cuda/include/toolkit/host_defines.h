// What a kernel may use of CUDA's header of this name is there without it.
