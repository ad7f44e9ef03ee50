// Memory of the card is memory of the host that nobody has touched yet: a page costs RAM once something is written.
#include "card.h"

#include <sys/mman.h>

#include <cstring>

static const int FLAGS = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

cudaError_t take(size_t bytes) {
  Counters& counters = card().counters;
  // Windows lends memory of the host where that of the card is used up
  const size_t limit = card().wsl ? 2 * card().memory : card().memory;
  if (counters.used + card().context + bytes > limit) return cudaErrorMemoryAllocation;
  counters.used += bytes;
  counters.allocations++;
  if (counters.used > counters.peak) counters.peak = counters.used;
  return cudaSuccess;
}

void release(size_t bytes) { card().counters.used -= bytes; }

void* map_memory(size_t bytes, int protection) {
  char* mapped = (char*)mmap(nullptr, bytes + PAGE, protection, FLAGS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  char* aligned = (char*)whole_pages((size_t)mapped);
  if (aligned > mapped) munmap(mapped, aligned - mapped);
  munmap(aligned + bytes, mapped + PAGE - aligned);
  return aligned;
}

static Ranges::iterator range_with(Ranges& ranges, const void* address) {
  auto next = ranges.upper_bound((Address)address);
  if (next == ranges.begin()) return ranges.end();
  auto range = std::prev(next);
  return (Address)address < range->first + range->second ? range : ranges.end();
}

static bool contains(Ranges& ranges, const void* address) { return range_with(ranges, address) != ranges.end(); }

bool is_on_card(const void* address) {
  return contains(card().allocated, address) || contains(card().reserved, address);
}

bool is_pinned(const void* address) { return contains(card().pinned, address); }

// --- allocation

EXPORTED cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  LOCKED;
  const size_t used = card().counters.used + card().context;
  *total = card().memory;
  *free = used < *total ? *total - used : 0;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMalloc(void** address, size_t bytes) {
  LOCKED;
  if (breaks_a_capture("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
  bytes = whole_pages(bytes);
  if (take(bytes)) return fail(cudaErrorMemoryAllocation, "cudaMalloc");
  *address = map_memory(bytes, PROT_READ | PROT_WRITE);
  if (!*address) return release(bytes), fail(cudaErrorMemoryAllocation, "mmap");
  card().allocated[(Address)*address] = bytes;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFree(void* address) {
  LOCKED;
  if (!address) return cudaSuccess;
  if (breaks_a_capture("cudaFree")) return cudaErrorStreamCaptureUnsupported;
  auto range = card().allocated.find((Address)address);
  if (range == card().allocated.end()) return fail(cudaErrorInvalidValue, "cudaFree");
  munmap(address, range->second);
  release(range->second);
  card().allocated.erase(range);
  return cudaSuccess;
}

static cudaError_t allocate_on_host(void** address, size_t bytes, const char* call) {
  LOCKED;
  if (breaks_a_capture(call)) return cudaErrorStreamCaptureUnsupported;
  *address = map_memory(whole_pages(bytes), PROT_READ | PROT_WRITE);
  if (!*address) return fail(cudaErrorMemoryAllocation, call);
  card().pinned[(Address)*address] = whole_pages(bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned) {
  return allocate_on_host(address, bytes, "cudaHostAlloc");
}

EXPORTED cudaError_t cudaMallocManaged(void** address, size_t bytes, unsigned) {
  return allocate_on_host(address, bytes, "cudaMallocManaged");
}

EXPORTED cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) {
  return cudaSuccess;
}

EXPORTED cudaError_t cudaFreeHost(void* address) {
  LOCKED;
  auto range = card().pinned.find((Address)address);
  if (range == card().pinned.end()) return fail(cudaErrorInvalidValue, "cudaFreeHost");
  munmap(address, range->second);
  card().pinned.erase(range);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned) {
  LOCKED;
  card().pinned[(Address)address] = bytes;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaHostUnregister(void* address) {
  LOCKED;
  return card().pinned.erase((Address)address) ? cudaSuccess : fail(cudaErrorInvalidValue, "cudaHostUnregister");
}

EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  LOCKED;
  memset(attributes, 0, sizeof *attributes);
  const bool on_card = is_on_card(address), pinned = is_pinned(address);
  attributes->type = on_card ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  attributes->device = on_card || pinned ? 0 : -2;
  if (on_card || pinned) attributes->devicePointer = (void*)address;
  if (!on_card) attributes->hostPointer = (void*)address;
  return cudaSuccess;
}

// --- copies

static cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream, bool waits, const char* call) {
  LOCKED;
  const bool to_card = is_on_card(to), from_card = is_on_card(from);
  const bool pageable = (!to_card && !is_pinned(to)) || (!from_card && !is_pinned(from));
  if (Capture* capture = stream_of(stream)->capture)
    return waits || pageable ? break_capture(capture, call) : cudaSuccess;
  if (waits && breaks_a_capture(call)) return cudaErrorStreamCaptureUnsupported;
  Counters& counters = card().counters;
  counters.copies++;
  if (waits || pageable) counters.synchronisations++;
  (to_card && from_card ? counters.bytes_within : to_card ? counters.bytes_to_card : counters.bytes_to_host) += bytes;
  if (bytes <= card().copied) memmove(to, from, bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true, "cudaMemcpy");
}

EXPORTED cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false, "cudaMemcpyAsync");
}

EXPORTED cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    char *target = (char*)to + row * to_pitch, *source = (char*)from + row * from_pitch;
    if (cudaError_t error = copy(target, source, width, stream, false, "cudaMemcpy2DAsync")) return error;
  }
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream) {
  LOCKED;
  if (!stream_of(stream)->capture && bytes <= card().copied) memset(address, value, bytes);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  return cudaMemsetAsync(address, value, bytes, nullptr);
}
