// Streams, events, and the rules of captures. Nothing runs in the background: a stream has always finished.
#include <algorithm>

#include "card.h"

static Stream default_stream;
static thread_local cudaStreamCaptureMode mode_of_thread = cudaStreamCaptureModeGlobal;

Stream* stream_of(cudaStream_t stream) { return (size_t)stream <= 2 ? &default_stream : (Stream*)stream; }

cudaError_t break_capture(Capture* capture, const char* call) {
  capture->broken = true;
  return fail(cudaErrorStreamCaptureUnsupported, call);
}

bool breaks_a_capture(const char* call) {
  if (mode_of_thread == cudaStreamCaptureModeRelaxed) return false;
  for (auto& [id, capture] : card().captures) {
    const bool own = pthread_equal(capture->thread, pthread_self());
    const bool global =
        capture->mode == cudaStreamCaptureModeGlobal && mode_of_thread == cudaStreamCaptureModeGlobal;
    if (global || (own && capture->mode != cudaStreamCaptureModeRelaxed)) return break_capture(capture, call);
  }
  return false;
}

// --- streams

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int priority) {
  Stream* created = new Stream;
  created->priority = priority;
  *stream = (cudaStream_t)created;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORTED cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }

EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete (Stream*)stream;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  LOCKED;
  card().counters.synchronisations++;
  Capture* capture = stream_of(stream)->capture;
  return capture ? break_capture(capture, "cudaStreamSynchronize") : cudaSuccess;
}

EXPORTED cudaError_t cudaStreamQuery(cudaStream_t stream) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  return capture ? break_capture(capture, "cudaStreamQuery") : cudaSuccess;
}

EXPORTED cudaError_t cudaDeviceSynchronize() {
  LOCKED;
  card().counters.synchronisations++;
  return breaks_a_capture("cudaDeviceSynchronize") ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  if (stream_of(stream)->capture) return fail(cudaErrorNotSupported, "cudaLaunchHostFunc in a capture");
  function(argument);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument,
                                           unsigned) {
  function(stream, cudaSuccess, argument);
  return cudaSuccess;
}

// --- events

static Capture* capture_of(cudaEvent_t event) {
  auto found = card().captures.find(((Event*)event)->capture);
  return found == card().captures.end() ? nullptr : found->second;
}

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = (cudaEvent_t) new Event;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete (Event*)event;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  ((Event*)event)->capture = capture ? capture->id : 0;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
  LOCKED;
  if (Capture* capture = capture_of(event)) return break_capture(capture, "cudaEventQuery");
  return breaks_a_capture("cudaEventQuery") ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  LOCKED;
  card().counters.synchronisations++;
  if (Capture* capture = capture_of(event)) return break_capture(capture, "cudaEventSynchronize");
  return cudaSuccess;
}

EXPORTED cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;  // nothing takes time
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  LOCKED;
  Capture* capture = capture_of(event);
  if (capture && !stream_of(stream)->capture) {
    stream_of(stream)->capture = capture;
    capture->streams.insert(stream_of(stream));
  }
  return cudaSuccess;
}

// --- captures and graphs

static int (*replay_graph)(uint64_t id) = nullptr;  // in Python: 0 if all was computed
static void (*forget_graph)(uint64_t id) = nullptr;

EXPORTED void stub_on_graphs(int (*replay)(uint64_t), void (*forget)(uint64_t)) {
  replay_graph = replay;
  forget_graph = forget;
}

// Return the id of the capture of a stream, or 0 if it is not captured.
EXPORTED uint64_t stub_capture_of(cudaStream_t stream) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  return capture ? capture->id : 0;
}

EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, mode_of_thread);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  LOCKED;
  static uint64_t captures = 0;
  if (stream_of(stream) == &default_stream) return fail(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture");
  const uint64_t id = ++captures;
  Capture* capture = new Capture{id, mode, pthread_self(), new Graph{id}};
  capture->streams.insert(stream_of(stream));
  stream_of(stream)->capture = card().captures[id] = capture;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  if (!capture) return fail(cudaErrorIllegalState, "cudaStreamEndCapture");
  for (Stream* captured : capture->streams) captured->capture = nullptr;
  card().captures.erase(capture->id);
  *graph = capture->broken ? nullptr : (cudaGraph_t)capture->graph;
  const bool broken = capture->broken;
  delete capture;
  return broken ? fail(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture") : cudaSuccess;
}

EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  *status = !capture          ? cudaStreamCaptureStatusNone
            : capture->broken ? cudaStreamCaptureStatusInvalidated
                              : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                              unsigned long long* id, cudaGraph_t* graph,
                                              const cudaGraphNode_t** dependencies, const cudaGraphEdgeData** edges,
                                              size_t* count) {
  LOCKED;
  Capture* capture = stream_of(stream)->capture;
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = capture ? (cudaGraph_t)capture->graph : nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}

EXPORTED cudaError_t cudaGraphGetNodes(cudaGraph_t, cudaGraphNode_t*, size_t* count) {
  *count = 1;  // torch asks only whether a graph is empty
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  *exec = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
  card().counters.graph_launches++;
  if (!replay_graph) return fail(cudaErrorNotSupported, "cudaGraphLaunch without the emulation");
  return replay_graph(((Graph*)exec)->id) ? fail(cudaErrorUnknown, "cudaGraphLaunch") : cudaSuccess;
}

EXPORTED cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete (Graph*)graph;
  return cudaSuccess;
}

EXPORTED cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  if (forget_graph) forget_graph(((Graph*)exec)->id);
  delete (Graph*)exec;
  return cudaSuccess;
}
