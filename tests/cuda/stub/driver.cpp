// The driver's functions that torch asks for by name, most of all the virtual memory behind expandable segments.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "card.h"
#undef cuDeviceGetUuid  // the header gives it the name of its second version

static bool has_virtual_memory() { return !card().wsl; }

static CUresult address_reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  LOCKED;
  if (!has_virtual_memory()) return CUDA_ERROR_NOT_SUPPORTED;
  *address = (CUdeviceptr)map_memory(whole_pages(bytes), PROT_NONE);
  if (!*address) return CUDA_ERROR_OUT_OF_MEMORY;
  card().reserved[*address] = whole_pages(bytes);
  return CUDA_SUCCESS;
}

static CUresult address_free(CUdeviceptr address, size_t bytes) {
  LOCKED;
  munmap((void*)address, whole_pages(bytes));
  card().reserved.erase(address);
  return CUDA_SUCCESS;
}

static CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*,
                       unsigned long long) {
  LOCKED;
  if (take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = (CUmemGenericAllocationHandle) new size_t(bytes);
  return CUDA_SUCCESS;
}

static CUresult release_handle(CUmemGenericAllocationHandle handle) {
  LOCKED;
  release(*(size_t*)handle);
  delete (size_t*)handle;
  return CUDA_SUCCESS;
}

static CUresult remap(CUdeviceptr address, size_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const void* mapped = mmap((void*)address, bytes, protection, flags, -1, 0);
  return mapped == MAP_FAILED ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle, unsigned long long) {
  return remap(address, bytes, PROT_READ | PROT_WRITE);
}

static CUresult unmap(CUdeviceptr address, size_t bytes) { return remap(address, bytes, PROT_NONE); }
static CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

static CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = PAGE;
  return CUDA_SUCCESS;
}

static CUresult address_range(CUdeviceptr* begin, size_t* bytes, CUdeviceptr address) {
  LOCKED;
  auto next = card().allocated.upper_bound(address);
  if (next == card().allocated.begin()) return CUDA_ERROR_NOT_FOUND;
  auto range = std::prev(next);
  if (begin) *begin = range->first;
  if (bytes) *bytes = range->second;
  return CUDA_SUCCESS;
}

EXPORTED CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  const bool virtual_memory = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  *value = virtual_memory ? has_virtual_memory() : attribute_of(attribute);
  return CUDA_SUCCESS;
}

// what trainer/machine/driver.py asks
EXPORTED CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGetCount(int* count) { return *count = 1, CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  snprintf(name, length, "CUDA stub");
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuDeviceTotalMem(size_t* bytes, CUdevice) { return *bytes = card().memory, CUDA_SUCCESS; }
EXPORTED CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice) { return memset(uuid, 7, sizeof *uuid), CUDA_SUCCESS; }

EXPORTED CUresult cuDeviceGet(CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; }
EXPORTED CUresult cuCtxGetCurrent(CUcontext* context) { return *context = (CUcontext)16, CUDA_SUCCESS; }
EXPORTED CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORTED CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0, *active = 1;
  return CUDA_SUCCESS;
}
EXPORTED CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString((cudaError_t)error);  // the codes that occur here are the same
  return CUDA_SUCCESS;
}

struct Function {
  const char* name;
  void* address;
};
static const Function FUNCTIONS[] = {
    {"cuMemAddressReserve", (void*)address_reserve},
    {"cuMemAddressFree", (void*)address_free},
    {"cuMemCreate", (void*)create},
    {"cuMemRelease", (void*)release_handle},
    {"cuMemMap", (void*)map},
    {"cuMemUnmap", (void*)unmap},
    {"cuMemSetAccess", (void*)set_access},
    {"cuMemGetAllocationGranularity", (void*)granularity},
    {"cuMemGetAddressRange", (void*)address_range},
    {"cuDeviceGet", (void*)cuDeviceGet},
    {"cuDeviceGetAttribute", (void*)cuDeviceGetAttribute},
    {"cuCtxGetCurrent", (void*)cuCtxGetCurrent},
    {"cuCtxSetCurrent", (void*)cuCtxSetCurrent},
    {"cuGetErrorString", (void*)cuGetErrorString},
};

static CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult* result) {
  *function = (void*)not_supported;
  for (const Function& known : FUNCTIONS)
    if (!strcmp(known.name, name)) *function = known.address;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
