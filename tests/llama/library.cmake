# Included behind `project(llama_cpp)`: builds what the Python package loads, and compiles it in half the time. llama.cpp's
# `common`, which its own programs use, is left out; ggml-cpu computes, so it alone is optimised.
set(LLAMA_BUILD_COMMON OFF)
cmake_language(DEFER CALL target_compile_options ggml-cpu PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O1>)
