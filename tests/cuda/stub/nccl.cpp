// NCCL with a single rank: each collective is a copy.
#include <cstdio>
#include <cstring>

#include "card.h"

using Result = int;
using Communicator = void*;

static size_t bytes_of(int type) {
  static const size_t BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // as ncclDataType_t counts
  return BYTES[type];
}

static Result copied(const void* from, void* to, size_t count, int type) {
  LOCKED;
  card().counters.launches++;
  if (from != to) memmove(to, from, count * bytes_of(type));
  return 0;
}

static Result created(Communicator* communicator, int ranks) {
  if (ranks != 1) return fprintf(stderr, "cuda stub: NCCL knows one rank only\n"), 5;  // ncclInvalidUsage
  *communicator = (void*)16;
  return 0;
}

EXPORTED Result ncclGetVersion(int* version) { return *version = 22907, 0; }
EXPORTED Result ncclGetUniqueId(void* id) { return memset(id, 1, 128), 0; }
struct UniqueId {
  char bytes[128];
};
EXPORTED Result ncclCommInitRank(Communicator* communicator, int ranks, UniqueId, int) {
  return created(communicator, ranks);
}
EXPORTED Result ncclCommInitRankConfig(Communicator* communicator, int ranks, UniqueId, int, void*) {
  return created(communicator, ranks);
}
EXPORTED Result ncclCommInitRankScalable(Communicator* communicator, int ranks, int, int, UniqueId*, void*) {
  return created(communicator, ranks);
}
EXPORTED Result ncclCommGetAsyncError(Communicator, Result* error) { return *error = 0, 0; }
EXPORTED Result ncclCommCount(Communicator, int* count) { return *count = 1, 0; }
EXPORTED Result ncclCommUserRank(Communicator, int* rank) { return *rank = 0, 0; }
EXPORTED Result ncclCommFinalize(Communicator) { return 0; }
EXPORTED Result ncclCommDestroy(Communicator) { return 0; }
EXPORTED Result ncclCommAbort(Communicator) { return 0; }
EXPORTED Result ncclCommRegister(Communicator, void*, size_t, void** handle) { return *handle = (void*)16, 0; }
EXPORTED Result ncclCommDeregister(Communicator, void*) { return 0; }
EXPORTED Result ncclGroupStart() { return 0; }
EXPORTED Result ncclGroupEnd() { return 0; }
EXPORTED Result ncclAllReduce(const void* from, void* to, size_t count, int type) {
  return copied(from, to, count, type);
}
EXPORTED Result ncclReduce(const void* from, void* to, size_t count, int type) { return copied(from, to, count, type); }
EXPORTED Result ncclBroadcast(const void* from, void* to, size_t count, int type) {
  return copied(from, to, count, type);
}
EXPORTED Result ncclBcast(void*, size_t, int) { return 0; }
EXPORTED Result ncclAllGather(const void* from, void* to, size_t count, int type) {
  return copied(from, to, count, type);
}
EXPORTED Result ncclReduceScatter(const void* from, void* to, size_t count, int type) {
  return copied(from, to, count, type);
}
