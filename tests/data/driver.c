/* A driver that has one card. */
#include <stddef.h>
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA GeForce RTX 4060", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8ull << 30; return 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 0xab, 16); return 0; }
