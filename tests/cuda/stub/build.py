"""Build the stub of the CUDA libraries.

python tests/cuda/stub/build.py FOLDER HEADERS LIBRARY...

FOLDER gets one library under every name that the LIBRARYs (those of torch and bitsandbytes) ask for, and in FOLDER/nvml
the one that a container may lack. HEADERS is the folder with cuda.h. What the sources beside this file do not define is
generated: a function of cuBLAS and the like succeeds without doing anything, any other one says that it is not
supported.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCES = ("card", "memory", "streams", "kernels", "driver", "nccl")
SONAMES = (
    *("libcudart.so.13", "libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9", "libcufft.so.12"),
    *("libcufile.so.0", "libcupti.so.13", "libcurand.so.10", "libcusolver.so.12", "libcusparse.so.12"),
    *("libcusparseLt.so.0", "libnccl.so.2", "libnvrtc.so.13", "libnvshmem_host.so.3"),
)
OWN = "libcudart.so.13"  # the version of what nobody else asks for
OURS = re.compile(
    r"(stub_|__cuda|cuda|cublas|cudnn|cusparse|cufft|cupti|curand|cusolver|nccl|nvrtc|nvshmem|cuFile|cu[A-Z])\w*$"
)
MATHEMATICS = re.compile(r"cublas|cudnn|cusparse|cufft|curand|cusolver|cupti")
COMPUTES = re.compile(  # launches a kernel
    r"cublasLtMatmul$|cublas(?!Lt).*(mm|gemv|trsm|[dD]ot|Batched)|cusolver.*(rf|qr|vd|vj|nv)"
)
NOT_SUPPORTED = 801  # cudaErrorNotSupported, and the same of the driver

BY_HAND = {
    "cublasLtMatmulAlgoGetHeuristic": """int cublasLtMatmulAlgoGetHeuristic(void* a, void* b, void* c, void* d, void* e,
        void* f, void* g, int n, void* found, int* count) { memset(found, 0, 96); *count = 1; return 0; }""",
    "cublasGetMathMode": "int cublasGetMathMode(void* handle, int* mode) { *mode = 0; return 0; }",
    "cublasGetPointerMode_v2": "int cublasGetPointerMode_v2(void* handle, int* mode) { *mode = 0; return 0; }",
    "cublasLtGetVersion": "size_t cublasLtGetVersion(void) { return 130101; }",
    "cudnnGetVersion": "size_t cudnnGetVersion(void) { return 92000; }",
    "cudnnGetCudartVersion": "size_t cudnnGetCudartVersion(void) { return 13000; }",
    "nvrtcVersion": "int nvrtcVersion(int* major, int* minor) { *major = 13; *minor = 0; return 0; }",
}


def main() -> None:
    folder, headers, *libraries = map(Path, sys.argv[1:])
    (folder / "nvml").mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        wanted = needed(libraries)
        for source in SOURCES:
            compile_(f"{here / source}.cpp", f"-I{headers}", "-c", "-o", str(work / f"{source}.o"))
        objects = [str(work / f"{source}.o") for source in SOURCES]
        written = symbols("--defined-only", [Path(file) for file in objects])
        names = sorted(names_of(wanted) - written)
        (work / "rest.c").write_text("\n".join(generated(names)))
        own = {f"{name}@{OWN}" for name in written - names_of(wanted) if OURS.match(name)}
        (work / "versions").write_text("\n".join(version_script(wanted | own)))
        subprocess.run(["gcc", "-O1", "-w", "-fPIC", "-c", "rest.c", "-o", "rest.o"], cwd=work, check=True)
        library = folder / "libcudastub.so"
        compile_(
            *objects, str(work / "rest.o"), "-shared", f"-Wl,--version-script={work / 'versions'}", "-o", str(library)
        )
    for soname in SONAMES:
        (folder / soname).unlink(missing_ok=True)
        (folder / soname).symlink_to(library.name)
    compile_(str(here / "nvml.cpp"), "-shared", "-o", str(folder / "nvml/libnvidia-ml.so.1"))


def compile_(*arguments: str) -> None:
    subprocess.run(["g++", "-std=c++17", "-O1", "-Wall", "-fPIC", "-fvisibility=hidden", *arguments], check=True)


def symbols(kind: str, files: Iterable[Path]) -> set[str]:
    """Return the names, with versions, of the defined or the undefined symbols of libraries or objects."""
    dynamic = ["--dynamic"] if kind == "--undefined-only" else []
    answer = subprocess.run(["nm", *dynamic, kind, *map(str, files)], capture_output=True, text=True, check=True)
    return {line.split()[-1] for line in answer.stdout.splitlines() if len(line.split()) > 1}


def needed(libraries: Iterable[Path]) -> set[str]:
    """Return the symbols that only libraries of NVIDIA define."""
    return {symbol for symbol in symbols("--undefined-only", libraries) if OURS.match(symbol.partition("@")[0])}


def names_of(symbols_: Iterable[str]) -> set[str]:
    return {symbol.partition("@")[0] for symbol in symbols_}


def generated(names: Iterable[str]) -> Iterator[str]:
    """Yield the functions that are not worth writing down, in C."""
    yield "#include <stddef.h>\n#include <string.h>\nint stub_library_call(const char*);"
    for name in names:
        if name in BY_HAND:
            yield BY_HAND[name]
        elif "Error" in name and not name.startswith("cuda"):
            yield f'const char* {name}(void) {{ return "an error of the stub"; }}'
        elif MATHEMATICS.match(name) and re.search(r"Create(_v2)?$", name):
            yield f"int {name}(void** handle) {{ *handle = (void*)16; return 0; }}"
        elif COMPUTES.match(name):
            yield f'int {name}(void) {{ return stub_library_call("{name}"); }}'
        else:
            yield f"int {name}(void) {{ return {0 if MATHEMATICS.match(name) else NOT_SUPPORTED}; }}"


def version_script(wanted: Iterable[str]) -> Iterator[str]:
    """Yield a linker script that gives each symbol the version with which it is asked for."""
    by_version = defaultdict(list)
    for symbol in sorted(wanted):
        name, _, version = symbol.partition("@")
        by_version[version or "WITHOUT_VERSION"].append(name)
    for version, names in by_version.items():
        hidden = " local: *;" if version == OWN else ""
        yield f"{version} {{ global: {' '.join(f'{name};' for name in names)}{hidden} }};"


if __name__ == "__main__":
    main()
