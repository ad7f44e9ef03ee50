// Parameters and properties of the card, and errors.
#include "card.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

static double setting(const char* name, double otherwise) {
  const char* value = getenv(name);
  return value && *value ? atof(value) : otherwise;
}

Card::Card()
    : capability(int(setting("CUDA_STUB_CAPABILITY", 8.6) * 10 + 0.5)),
      memory(size_t(setting("CUDA_STUB_MEMORY_GIB", 8) * (1 << 30))),
      context(size_t(setting("CUDA_STUB_CONTEXT_GIB", 0.45) * (1 << 30))),
      wsl(setting("CUDA_STUB_WSL", 0) != 0),
      copied(getenv("CUDA_STUB_COMPUTE_BYTES") ? size_t(16) << 20 : SIZE_MAX) {}

Card& card() {
  static Card* const the_card = new Card;  // never destroyed, because libraries free memory when the process ends
  return *the_card;
}

EXPORTED Counters* stub_counters() { return &card().counters; }

// --- errors

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error, const char* call) {
  if (getenv("CUDA_STUB_VERBOSE")) fprintf(stderr, "cuda stub: %s: %s\n", call, cudaGetErrorString(error));
  return last_error = error;
}

EXPORTED cudaError_t cudaPeekAtLastError() { return last_error; }
EXPORTED cudaError_t cudaGetLastError() {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

struct NamedError {
  int code;
  const char *name, *text;
};
static const NamedError ERRORS[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

static NamedError described(int code) {
  for (const NamedError& error : ERRORS)
    if (error.code == code) return error;
  return {code, "cudaErrorUnknown", "unknown error"};
}

EXPORTED const char* cudaGetErrorString(cudaError_t error) { return described(error).text; }
EXPORTED const char* cudaGetErrorName(cudaError_t error) { return described(error).name; }

// --- properties

int attribute_of(int attribute) {
  const int capability = card().capability;
  const bool turing = capability < 80;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMultiProcessorCount: return 28;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return turing ? 1024 : 1536;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return 16;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return turing ? 65536 : 101376;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return turing ? 65536 : 102400;
    case cudaDevAttrL2CacheSize: return 3 << 20;
    case cudaDevAttrTextureAlignment: return 512;
    case cudaDevAttrAsyncEngineCount: return 2;
    case cudaDevAttrComputeCapabilityMajor: return capability / 10;
    case cudaDevAttrComputeCapabilityMinor: return capability % 10;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported: return 1;
    case cudaDevAttrConcurrentManagedAccess:
    case cudaDevAttrPageableMemoryAccess: return card().wsl ? 0 : 1;
  }
  return 0;
}

EXPORTED cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute_of(attribute);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  const int major = card().capability / 10, minor = card().capability % 10;
  snprintf(properties->name, sizeof properties->name, "CUDA stub %d.%d", major, minor);
  memset(&properties->uuid, 7, sizeof properties->uuid);
  properties->totalGlobalMem = card().memory;
  properties->major = major;
  properties->minor = minor;
  properties->multiProcessorCount = attribute_of(cudaDevAttrMultiProcessorCount);
  properties->warpSize = attribute_of(cudaDevAttrWarpSize);
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = attribute_of(cudaDevAttrMaxBlocksPerMultiprocessor);
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = attribute_of(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->sharedMemPerMultiprocessor = attribute_of(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->totalConstMem = 65536;
  properties->memPitch = 2147483647;
  properties->textureAlignment = 512;
  properties->l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
  properties->asyncEngineCount = 2;
  properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
  properties->streamPrioritiesSupported = 1;
  properties->concurrentManagedAccess = attribute_of(cudaDevAttrConcurrentManagedAccess);
  properties->pciBusID = 1;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
EXPORTED cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
EXPORTED cudaError_t cudaSetDevice(int) { return cudaSuccess; }
EXPORTED cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORTED cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORTED cudaError_t cudaProfilerStop() { return cudaSuccess; }
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int) {
  snprintf(text, length, "0000:01:00.0");
  return cudaSuccess;
}
