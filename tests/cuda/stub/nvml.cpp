// A library of its own, because a container may lack it: what torch asks the management library before it allocates.
#include <cstddef>
#include <cstring>
#include <ctime>
#define EXPORTED extern "C" __attribute__((visibility("default")))

static const int NOT_SUPPORTED = 3, NOT_FOUND = 6;

EXPORTED int nvmlInit_v2() { return 0; }
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = (void*)16, 0; }
EXPORTED int nvmlDeviceGetHandleByUUID(const char* name, void** device) {
    return *device = (void*)16, strncmp(name, "GPU-", 4) ? NOT_FOUND : 0;
}
// The card draws 100 W.
EXPORTED int nvmlDeviceGetTotalEnergyConsumption(void*, unsigned long long* millijoules) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return *millijoules = 100000ull * now.tv_sec + now.tv_nsec / 10000, 0;
}
EXPORTED int nvmlDeviceGetGpuFabricInfoV(void*, void*) { return 0; }
EXPORTED int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) { return *count = 0, 0; }
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, 0; }
EXPORTED const char* nvmlErrorString(int) { return "an error of the stub"; }
