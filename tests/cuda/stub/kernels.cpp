// Kernels do nothing. While the emulation runs, it says of which launches it computes the result; any other one fails.
#include <cstdio>
#include <cstring>
#include <vector>

#include "card.h"

static bool strict = false;
static thread_local int covered = 0;

EXPORTED void stub_be_strict() { strict = true; }
EXPORTED void stub_cover(int change) { covered += change; }

static cudaError_t launched(const char* name, Capture* capture) {
  if (strict && covered <= 0) {
    fprintf(stderr, "cuda stub: nothing computes what this launch would have: %s\n", name);
    return fail(cudaErrorNotSupported, name);
  }
  if (capture && capture->broken) return fail(cudaErrorStreamCaptureInvalidated, name);
  (capture ? card().counters.captured : card().counters.launches)++;
  return cudaSuccess;
}

// Called by the generated functions of cuBLAS and the like. Their stream is not known, so any capture counts as theirs.
EXPORTED int stub_library_call(const char* name) {
  LOCKED;
  return launched(name, card().captures.empty() ? nullptr : card().captures.begin()->second);
}

static cudaError_t launch(const void* kernel, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  LOCKED;
  auto known = card().kernels.find(kernel);
  const char* name = known == card().kernels.end() ? "an unknown kernel" : known->second;
  const bool empty = !grid.x || !grid.y || !grid.z || !block.x || !block.y || !block.z;
  const bool large = size_t(block.x) * block.y * block.z > 1024 || grid.y > 65535 || grid.z > 65535;
  if (empty || large || shared > (size_t)attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin))
    return fail(cudaErrorInvalidConfiguration, name);
  return launched(name, stream_of(stream)->capture);
}

EXPORTED cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared,
                                      cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}

EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t shared,
                                                 cudaStream_t stream) {
  return launch(kernel, grid, block, shared, stream);
}

EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch(kernel, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t shared,
                                        cudaStream_t stream) {
  return launch((const void*)kernel, grid, block, shared, stream);
}

EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = (cudaKernel_t)function;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = card().capability;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t,
                                                                            unsigned) {
  *blocks = 2;
  return cudaSuccess;
}

// --- what the compiler puts into every library with kernels

EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[8];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
EXPORTED void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  card().kernels[host] = name;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
static thread_local std::vector<Configuration> configurations;

EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

EXPORTED cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *(void**)stream = last.stream;
  return cudaSuccess;
}
