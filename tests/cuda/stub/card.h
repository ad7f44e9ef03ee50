// A card that does not exist: its parameters, what of its memory is taken, what is captured, and what was counted.
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define LOCKED std::lock_guard<std::recursive_mutex> lock(card().mutex)

using Address = uintptr_t;
using Ranges = std::map<Address, size_t>;  // sizes by first address

const size_t PAGE = 2 << 20;  // memory is handed out in pieces of this size

inline size_t whole_pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

// Read by ctypes in tests/cuda/stub/library.py, in this order.
struct Counters {
  uint64_t launches = 0;         // kernels and library calls such as a matrix product, outside of graphs
  uint64_t graph_launches = 0;   // replays
  uint64_t captured = 0;         // kernels and library calls that went into a graph
  uint64_t copies = 0;           // between host and card, or within the card
  uint64_t bytes_to_card = 0;
  uint64_t bytes_to_host = 0;
  uint64_t bytes_within = 0;
  uint64_t synchronisations = 0; // of a stream, an event or the device
  uint64_t allocations = 0;      // of card memory from the driver
  uint64_t used = 0;             // bytes of card memory
  uint64_t peak = 0;
};

struct Stream;

struct Graph {
  uint64_t id;
};

struct Capture {
  uint64_t id;
  cudaStreamCaptureMode mode;
  pthread_t thread;
  Graph* graph;
  bool broken = false;
  std::set<Stream*> streams;
};

struct Stream {
  int priority = 0;
  Capture* capture = nullptr;
};

struct Event {
  uint64_t capture = 0;  // the id of the capture in which it was recorded
};

struct Card {
  Card();
  int capability;  // 86 for 8.6
  size_t memory;   // bytes, of which the context takes `context`
  size_t context;
  bool wsl;  // memory spills into that of the host, and there is no virtual memory management
  const size_t copied;  // bytes of the largest copy that is made
  std::recursive_mutex mutex;
  Counters counters;
  Ranges allocated;  // by cudaMalloc
  Ranges reserved;   // addresses of the virtual memory management
  Ranges pinned;
  std::map<uint64_t, Capture*> captures;
  std::unordered_map<const void*, const char*> kernels;  // names by the function that launches it
};

Card& card();
int attribute_of(int attribute);

cudaError_t take(size_t bytes);
void release(size_t bytes);
void* map_memory(size_t bytes, int protection);
bool is_on_card(const void* address);
bool is_pinned(const void* address);

cudaError_t fail(cudaError_t error, const char* call);
Stream* stream_of(cudaStream_t stream);
cudaError_t break_capture(Capture* capture, const char* call);
bool breaks_a_capture(const char* call);  // a call that may not happen while a stream is captured
