"""List the cards as CUDA's driver knows them: `python -m trainer.machine.driver`.

It prints the lines of `nvidia-smi --query-gpu=index,uuid,name,memory.total`, for machines with a card and without
nvidia-smi: containers that bring CUDA but no tools, WSL, NixOS.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL, byref, c_int, c_size_t, c_ubyte, create_string_buffer
from uuid import UUID


def cards() -> Iterator[str]:
    cuda, count = CDLL("libcuda.so.1"), c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(byref(count)):
        return
    for index in range(count.value):
        device, name, memory, identifier = c_int(), create_string_buffer(100), c_size_t(), (c_ubyte * 16)()
        cuda.cuDeviceGet(byref(device), index)
        cuda.cuDeviceGetName(name, len(name), device)
        cuda.cuDeviceTotalMem_v2(byref(memory), device)
        cuda.cuDeviceGetUuid(identifier, device)
        yield f"{index}, GPU-{UUID(bytes=bytes(identifier))}, {name.value.decode()}, {memory.value >> 20}"


if __name__ == "__main__":
    for card in cards():
        print(card)
