// Shared by every file of the native library.
#pragma once

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define AUTOPIPE_X86 1
#else
#define AUTOPIPE_X86 0  // the library builds, and reports that it has no kernels
#endif

#if defined(_WIN32)
#define AUTOPIPE_API extern "C" __declspec(dllexport)
#else
#define AUTOPIPE_API extern "C" __attribute__((visibility("default")))
#endif

#define AUTOPIPE_ABI_VERSION 6  // equal to ABI_VERSION in loader.py

// Numbers of the instruction sets, as in loader.py.
enum AutopipeIsa { kIsaAvx512Bf16 = 1, kIsaAvx512 = 2, kIsaAvx2 = 3 };

// Formats of packed weights, as in formats.py.
enum AutopipeFormat { kFormatFp32 = 0, kFormatBf16 = 1, kFormatInt8 = 2, kFormatInt4 = 3 };

namespace autopipe {
bool has_vnni();  // AVX-512 with VNNI
}
